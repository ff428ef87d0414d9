"""Dispatch by a plan inside of a training framework, with experts that ranks lend each other for one batch.

The framework's dispatcher keeps its own experts as Parameters and calls :class:`LendingDispatcher`. A replica, resident
in the placement or borrowed by the policy, is a copy of the weights that every forward transfers again; backward
returns its gradient to the home Parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.balancing.balancer import Balancer
from isoload.balancing.known_routes import KnownPlan
from isoload.balancing.planning import Gathered
from isoload.layer.blocks import check_spare, spare_count
from isoload.ops import group_copies
from isoload.ops.counting import gather_copies, weighted_sum
from isoload.ops.results import Grouping
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.policies import Policy
from isoload.policies.plan import in_backward
from isoload.topology import Topology
from isoload.transport import Call, CollectiveTransport, Group, Received
from isoload.weights.layout import Address, Move, add_back, move_rows


@dataclass(frozen=True)
class Loans:
    """The loans of one batch."""

    moves: list[
        Move
    ]  # of all ranks; a rank's rows: the experts that it lends, ascending, then those it borrows
    lent: list[int]  # the experts that this rank lends
    places: dict[int, int]  # this rank's row of every local slot that is borrowed


def loans(placement: Placement, slots: Sequence[int], rank: int) -> Loans:
    """Return the loans for all slots that are not home slots of the placement's first layer. `slots`: [P] expert of
    every slot that has copies; -1 = none."""
    size, ranks = placement.slots_per_rank, placement.topology.num_ranks
    homes = placement.arrays[1][0].tolist()
    copies = [(p, e) for p, e in enumerate(slots) if e >= 0 and p != homes[e]]
    lent: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted({e for _, e in copies}):
        lent[homes[expert] // size].append(expert)
    row = {expert: i for of_rank in lent for i, expert in enumerate(of_rank)}
    places: list[dict[int, int]] = [{} for _ in range(ranks)]
    moves = []
    for p, e in copies:
        borrowed = places[p // size]
        moves.append(Move(Address(homes[e] // size, row[e]), Address(p // size, len(borrowed))))
        borrowed[p % size] = len(borrowed)
    return Loans(moves, lent[rank], places[rank])


class Lend(torch.autograd.Function):
    """Rows [N, H] and the lent experts' Parameters in; the rows and the borrowed stacks [n, ...] out. Rows pass through
    so that every rank enters the exchange of the gradients, also one that neither lends nor borrows."""

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        moves: list[Move],
        num_borrowed: int,
        like: Sequence[Tensor],
        rows: Tensor,
        *lent: Tensor,
    ) -> tuple[Tensor, ...]:
        width = len(like)
        stacks = [torch.stack(lent[w::width]) for w in range(width)] if lent else []
        stacks = stacks or [weight.new_empty(0, *weight.shape) for weight in like]
        pools = [weight.new_empty(num_borrowed, *weight.shape) for weight in like]
        move_rows(group, "borrow", moves, [stacks], [pools])
        ctx.group, ctx.moves, ctx.shapes = group, moves, [stack.shape for stack in stacks]
        return rows.view_as(rows), *pools

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        totals = [grad.new_zeros(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        add_back(ctx.group, "borrowed gradients", ctx.moves, [[g.contiguous() for g in grads]], [totals])
        of_experts = (weight for expert in zip(*totals, strict=True) for weight in expert)
        return None, None, None, None, rows, *of_experts


class Experts(Protocol):
    """Access to the weights of a rank's own experts, and computation with other weights."""

    def weights(self, row: int) -> list[Tensor]:
        """Return an expert's weights in a fixed order."""

    def run(self, copies: Tensor, ends: Sequence[int], stacks: Sequence[Tensor]) -> Tensor:
        """Return the results [C, H] of copies ordered by expert, with ends [n], for stacks [n, ...] of weights."""


class Sent(NamedTuple):
    """What combine needs of a dispatch."""

    received: Received
    borrowed: list[Tensor]  # stacks [n, ...] in the order of an expert's Parameters
    homes: Grouping  # places of the copies of own experts
    away: Grouping  # places of the copies of borrowed experts


class LendingDispatcher:
    """Dispatch and combine of one layer by the plan of a Balancer. `local_experts` are this rank's, in the order of
    `experts`; `options` are the Balancer's."""

    def __init__(
        self,
        placement: Placement,
        transport: CollectiveTransport,
        experts: Experts,
        local_experts: Sequence[int],
        **options: Any,
    ) -> None:
        self.group, self.dispatcher = transport.group, transport.dispatcher
        self.balancer = Balancer(placement, 0, group=self.group, **options)
        self.row_of_expert = {expert: row for row, expert in enumerate(local_experts)}
        self.experts = experts
        # Plan of the next forwards, made ahead for the experts that a replay gives the router; None: planned here
        self.plan: KnownPlan | None = None

    def begin(self, device: torch.device) -> Call:
        return Call(self.group, device=device, later=self.dispatcher.carry_failure)

    def send(self, tokens: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Sent:
        """Balance the batch, transfer the weights it borrows, and send the rows. `tokens` [T, H]; `ids` [T, K] int64
        logical experts, -1 = none; `weights` [T, K] float32."""
        balancer = self.balancer
        slots = balancer.route(self._balance(ids, call))
        per_rank = balancer.placement.slots_per_rank
        (received,) = self.dispatcher.dispatch([tokens], slots, [weights], per_rank, call)
        loan = loans(balancer.placement, self._slots(), self.group.ranks[0])
        rows, borrowed = received.rows, []
        if loan.moves:
            like = self.experts.weights(0)
            lent = [
                weight for expert in loan.lent for weight in self.experts.weights(self.row_of_expert[expert])
            ]
            rows, *borrowed = Lend.apply(self.group, loan.moves, len(loan.places), like, rows, *lent)
        received = Received(rows, received.slots, received.weights, received.handle)
        local, num_own, lent_to = self._local(received.slots, loan), len(self.row_of_expert), len(loan.places)
        home_copies = int(((local >= 0) & (local < num_own)).sum())
        borrowed_copies = int((local >= num_own).sum())
        if home_copies + borrowed_copies != (num_copies := int((received.slots >= 0).sum())):
            raise RuntimeError(
                f"all {num_copies} copies must be for experts of this rank, {home_copies + borrowed_copies} are"
            )
        # At least one place, as in run_experts: no product of zero rows.
        places = [min(max(number, 1), local.numel()) for number in (home_copies, borrowed_copies)]
        homes = group_copies(local, 0, num_own, places[0])
        return Sent(received, borrowed, homes, group_copies(local, num_own, lent_to, places[1]))

    def own_copies(self, sent: Sent) -> tuple[Tensor, Tensor]:
        """Return [C, H] copies of the own experts, ordered by expert, and [experts] int64 their counts."""
        ends = sent.homes.ends.long()
        copies = gather_copies(sent.received.rows, sent.homes)[: int(ends[-1])]
        return copies, ends.diff(prepend=ends.new_zeros(1))

    def sums(self, results: Tensor, sent: Sent) -> Tensor:
        """Return [N, H] weighted sums of the results [C, H] of own experts and of the borrowed ones."""
        received, away = sent.received, sent.away
        parts = [(padded(results, sent.homes), sent.homes)]
        if sent.borrowed:
            ends = away.ends.tolist()
            copies = gather_copies(received.rows, away)[: ends[-1] if ends else 0]
            parts.append((padded(self.experts.run(copies, ends, sent.borrowed), away), away))
        return weighted_sum(parts, received.weights, results.dtype)

    def give_back(self, sums: Tensor, sent: Sent) -> Tensor:
        """Return [T, H] the sums of this rank's tokens over all ranks."""
        (combined,) = self.dispatcher.combine([sums], [sent.received])
        return combined

    def _balance(self, ids: Tensor, call: Call) -> Gathered:
        if self.plan is None:
            return self.balancer.balance([ids], None, call)
        with call:
            if in_backward():  # by then plan is another micro-batch's
                raise ValueError("plan must be None for layers that a checkpoint recomputes, got a plan")
        return self.balancer.follow([ids], self.plan, call)

    def _slots(self) -> list[int]:
        plan = self.balancer.last_plan
        if plan is None:
            return self.balancer.placement.arrays[0][0].tolist()  # type: ignore[no-any-return]
        slots = plan.slot_to_expert
        if plan.quota is not None and plan.realisation == "quota":
            slots = torch.where(plan.quota > 0, slots, -1)
        return slots.tolist()  # type: ignore[no-any-return]

    def _local(self, slots: Tensor, loan: Loans) -> Tensor:
        """Return local slots [N, K] as experts: the own ones, then the borrowed ones; -1 stays -1."""
        placement = self.balancer.placement
        size = placement.slots_per_rank
        table = [-1] * size
        for expert, row in self.row_of_expert.items():
            table[int(placement.arrays[1][0][expert]) % size] = row
        for slot, row in loan.places.items():
            table[slot] = len(self.row_of_expert) + row
        at = torch.tensor(table, device=slots.device)
        return torch.where(slots < 0, -1, at[slots.clamp(min=0)])


def padded(copies: Tensor, grouping: Grouping) -> Tensor:
    """Return [C, H]: copies, and zeros in the places of a grouping that has more places than copies."""
    return torch.cat([copies, copies.new_zeros(len(grouping.copy) - len(copies), copies.shape[1])])


def check_homes(placement: Placement, num_experts: int, local_experts: Sequence[int], rank: int) -> None:
    if placement.num_experts != num_experts or placement.num_shared:
        raise ValueError(
            f"placement must be of the layer's {num_experts} experts and no shared experts, got "
            f"{placement.num_experts} and {placement.num_shared}"
        )
    home = placement.home_experts(0, rank)
    if home != list(local_experts):
        raise ValueError(
            f"placement must have the layer's experts {list(local_experts)} as home experts of rank {rank}, got {home}"
        )


def transport_of(
    group: dist.ProcessGroup, transports: dict[Any, CollectiveTransport], ranks_per_node: int
) -> CollectiveTransport:
    if group not in transports:
        transports[group] = CollectiveTransport(Topology(group.size(), ranks_per_node), group)
    return transports[group]


def placement_of(
    placement: Placement | None,
    num_experts: int,
    transport: CollectiveTransport,
    policy: str | Policy,
    spare_slots: int | None,
) -> Placement:
    """Return the placement of a layer: the given one, or the experts in order with spare slots."""
    if placement is not None:
        check_spare(placement, spare_slots)
        return placement
    spare = spare_count(policy, spare_slots)
    return place(torch.ones(1, num_experts), transport.group.topology, placer="trivial", spare_slots=spare)
