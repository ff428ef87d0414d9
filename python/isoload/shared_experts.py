"""Shared experts in a plan: every token needs them, every live rank holds them, so only the rank is decided.

They are the last logical experts, and lie in the last resident slots of every rank (SGLang's layout). Planners of
routed experts leave them out: a policy splits the routed experts first and then says where shared copies go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isoload.placement.placed_layers import pick_layer
from isoload.value_checks import values_readable

TOO_MANY = 2**31  # copies of a batch

Rule = Literal["home", "by_rank", "limit", "sample"]


@dataclass(frozen=True, eq=False)
class SharedPlan:
    """Where the shared copies of one batch go. Fields may have a leading L.

    rule                  "home": to the source's own rank; "by_rank": as that says; "limit": not more than it
                          says, what a token cannot use stays home; "sample": every token draws a rank
    tokens  [R] int32     tokens of source rank s that need the shared experts: n copies each
    by_rank [R, R] int32  shared copies, all n experts together, that source s sends to rank d; rules by_rank and limit
    copies  [R, R] int32  routed copies that source s sends to rank d, where the rule uses them
    in_quota              whether the quota of the policy's plan has these copies already
    """

    rule: Rule
    tokens: Tensor
    by_rank: Tensor | None = None
    copies: Tensor | None = None
    in_quota: bool = False

    @property
    def is_met(self) -> bool:
        """Whether routed slots receive exactly their quotas; else their copies are counted after routing."""
        return self.rule in ("home", "by_rank")

    def __getitem__(self, layer: int) -> SharedPlan:
        """One layer of a batch of layers."""
        by_rank, copies = pick_layer(self.by_rank, layer), pick_layer(self.copies, layer)
        return SharedPlan(self.rule, self.tokens.select(0, layer), by_rank, copies, self.in_quota)


def keep_home(copies: Tensor, home: Tensor) -> Tensor:
    """[..., R, R] what sends all shared copies [..., R] of source s to rank home[s]."""
    nothing = copies.new_zeros((*copies.shape, copies.shape[-1]))
    index = home.expand(copies.shape).unsqueeze(-1)
    return nothing.scatter_(-1, index, copies.unsqueeze(-1))


def without_shared_slots(slots: Tensor, slots_per_rank: int, num_shared: int) -> Tensor:
    """Slots [...] of routed experts, numbered as if every rank had num_shared slots less; -1 stays.

    SGLang's physical ids count so; its Waterfill adds the shared slots again (``id + id // slots``).
    """
    return slots - slots.div(slots_per_rank, rounding_mode="floor").clamp(min=0) * num_shared


def check_tokens(tokens: Tensor, first: int, num_shared: int) -> None:
    """Raises ValueError for numbers of tokens [..., R] that are negative, or whose shared copies are too many."""
    if tokens.numel() and (least := int(tokens.min())) < 0:
        raise ValueError(f"loads must not be negative, got {least} for expert {first}")
    copies = tokens.sum(-1, dtype=torch.int64) * num_shared
    if copies.numel() and (most := int(copies.max())) >= TOO_MANY:
        raise ValueError(f"loads must sum to less than 2^31 copies, got {most} of shared experts")


def widened(tokens: Tensor) -> Tensor:
    """int64 numbers of tokens, to be added up; a negative one becomes too many."""
    return tokens.long() & (2 * TOO_MANY - 1)


def shared_copies(tokens: Tensor, num_shared: int) -> Tensor:
    """int32 copies of int64 tokens; too many become negative, which planners refuse, on a device in its error word."""
    return (tokens * num_shared).clamp(max=TOO_MANY).to(torch.int32)


def check_shared_columns(topk_ids: Tensor, num_routed: int, num_shared: int) -> None:
    """Raises ValueError unless the last columns of topk_ids [T, K + n] are the shared experts' own.

    Every token with a routed choice needs all of them, and no other does: so their copies are counted.
    """
    if topk_ids.dim() != 2 or topk_ids.shape[1] <= num_shared:
        raise ValueError(
            f"topk_ids must be [T, K + {num_shared}] with the shared experts in the last columns, "
            f"got {list(topk_ids.shape)}"
        )
    if not values_readable(topk_ids):
        return
    routed, shared = topk_ids.tensor_split([topk_ids.shape[1] - num_shared], dim=1)
    wanted = torch.arange(num_routed, num_routed + num_shared, device=shared.device)
    wrong = (shared != torch.where((routed >= 0).any(1, keepdim=True), wanted, -1)).any(1).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"topk_ids must end in the shared experts {wanted.tolist()}, or in -1 where all routed choices are, "
            f"got {routed[row].tolist()} and {shared[row].tolist()} in row {row}"
        )


def per_expert(by_rank: Tensor, num_shared: int) -> Tensor:
    """Cuts copies [..., R, R] into those per shared expert [..., R, R, n], each source's alike but for remainders.

    Shared expert j takes ``(c + j) // n`` of a source's first c copies in rank order: over j that is c again, and
    over a source's whole row, n copies per token, every shared expert gets one. :func:`isoload.ops.route_shared`
    deals by the same rule.
    """
    if num_shared == 1:
        return by_rank.unsqueeze(-1)
    upto = by_rank.cumsum(-1).unsqueeze(-1)
    turn = torch.arange(num_shared, device=by_rank.device)
    before = upto - by_rank.unsqueeze(-1)
    return ((upto + turn) // num_shared - (before + turn) // num_shared).to(torch.int32)
