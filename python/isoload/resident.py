"""Resident weights: a rank's rows of a layer in one storage per stack, Parameters first, replicas behind them.

The storage is made once and never again. Its first rows are the home rows, which the Parameter shows, then come the
replica rows, which are kept equal to their homes, then rows that nothing uses yet. Replica gradients return to the
home row, so an optimizer sees each expert once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from isoload.expert_weights import ExpertWeights
from isoload.residence import Residence
from isoload.transport.rows import pack, unpack

if TYPE_CHECKING:
    from isoload.transport import Transport

NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")


class RankWeights(nn.Module):
    """One rank's weight rows of a layer.

    Args:
        residence: what the rank holds.
        dense: the stacks of all E experts, from which the rank takes its own.
        num_rows: weight rows to make room for; those that the residence does not use hold zeros.
    """

    row_of_slot: Tensor

    def __init__(self, residence: Residence, dense: ExpertWeights, num_rows: int) -> None:
        super().__init__()
        self.residence = residence
        experts, num_homes = list(residence.experts), len(residence.homes)
        for name in NAMES:
            stack: Tensor | None = getattr(dense, name)
            stored = None if stack is None else stack.new_zeros(num_rows, *stack.shape[1:])
            if stack is not None and stored is not None:
                stored[: len(experts)] = stack.detach()[experts]
            homes = None if stored is None else nn.Parameter(stored[:num_homes])
            self.register_parameter(name, homes)
            self.register_buffer(f"stored_{name}", stored, persistent=False)
        row_of_slot = torch.tensor(residence.row_of_slot, dtype=torch.int64, device=dense.down.device)
        self.register_buffer("row_of_slot", row_of_slot, persistent=False)

    def home_rows(self) -> list[Tensor]:
        """The Parameters, each [homes, ...]."""
        return [p for name in NAMES if (p := getattr(self, name)) is not None]

    def replica_rows(self) -> list[Tensor]:
        """Views of the storages, each [replicas, ...]."""
        first, count = len(self.residence.homes), len(self.residence.replicas)
        return [stored.narrow(0, first, count) for stored in self.stored_rows()]

    def stored_rows(self) -> list[Tensor]:
        """The storages, each [rows, ...]."""
        return [b for name in NAMES if (b := getattr(self, f"stored_{name}")) is not None]

    def as_weights(self, stacks: Sequence[Tensor]) -> ExpertWeights:
        """Stacks in the order of home_rows, by name again."""
        names = [name for name in NAMES if getattr(self, name) is not None]
        return ExpertWeights(**dict(zip(names, stacks, strict=True)))

    def weight_rows(self, slots: Tensor) -> Tensor:
        """Local slots [N, K] as weight rows; -1 stays."""
        if not len(self.row_of_slot):
            return slots
        return torch.where(slots < 0, -1, self.row_of_slot[slots.clamp(min=0)])

    def settle(self, residence: Residence) -> None:
        """Takes the storages as they are now for the rows of another residence; no pointer changes."""
        self.residence = residence
        self.row_of_slot.copy_(torch.tensor(residence.row_of_slot, device=self.row_of_slot.device))
        for home in self.home_rows():
            torch.autograd.graph.increment_version(home)  # a backward from before the move must raise
        self._show_homes()

    def _show_homes(self) -> None:
        """Makes each Parameter the first rows of its storage."""
        for home, stored in zip(self.home_rows(), self.stored_rows(), strict=True):
            rows = stored.narrow(0, 0, len(self.residence.homes))
            if home.shape != rows.shape:
                # A graph that is still around keeps the node that adds up gradients, and the node remembers the old
                # shape. Only data of another dtype makes torch forget the node.
                other = torch.float32 if home.dtype == torch.float64 else torch.float64
                home.data = home.new_empty(0, dtype=other)
            home.data = rows

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *how: Any) -> None:
        # assign=True would put Parameters with memory of their own in place of these: copy instead
        metadata = {**metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state, prefix, metadata, *how)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RankWeights:
        super()._apply(fn, recurse)
        self._show_homes()  # .to() and the like give the Parameters memory of their own
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show_homes()  # so do deepcopy and pickle


def flatten_rows(stacks: Sequence[Tensor], rows: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[len(rows), F] the picked rows of all stacks side by side."""
    index = torch.tensor(rows, dtype=torch.int64, device=stacks[0].device)
    return torch.cat([stack.index_select(0, index).flatten(1) for stack in stacks], dim=1).to(dtype)


@torch.no_grad()
def refresh_replicas(transport: Transport, ranks: Sequence[RankWeights]) -> None:
    """Copies home rows to their replicas, as after an optimizer step. All ranks call it together."""
    dtype = ranks[0].home_rows()[0].dtype
    held = [rank.residence for rank in ranks]
    buffers = [pack(flatten_rows(r.home_rows(), r.residence.outgoing, dtype)) for r in ranks]
    for rank, buffer in zip(ranks, transport.send("refresh", buffers, held), strict=True):
        stacks = rank.replica_rows()
        sizes = [stack.shape[1:].numel() for stack in stacks]
        (rows,) = unpack(buffer, [(sum(sizes), dtype)])
        index = torch.tensor(rank.residence.incoming, dtype=torch.int64, device=rows.device)
        for stack, part in zip(stacks, rows.split(sizes, dim=1), strict=True):
            stack.index_copy_(0, index, part.view(-1, *stack.shape[1:]))


class JoinRows(torch.autograd.Function):
    """Parameters in, whole storages out; gradients of replica rows return to the home rows.

    Inputs, for all owned ranks: received rows (none where no rank has replicas), then every rank's Parameters; outputs:
    the same rows, then every rank's storages. Rows pass through so that every rank, also one that holds no weights,
    enters the exchange of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        transport: Transport,
        ranks: Sequence[RankWeights],
        noted: dict[str, Tensor],
        num_passed: int,
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.transport, ctx.held = transport, [rank.residence for rank in ranks]
        ctx.noted, ctx.num_passed = noted, num_passed
        # Saved to be found changed: after .to() or a copy, a step on a Parameter shows in no storage's version.
        ctx.save_for_backward(*noted.values(), *values[num_passed:])
        stored = [stack.detach() for rank in ranks for stack in rank.stored_rows()]
        return *(rows.view_as(rows) for rows in values[:num_passed]), *stored

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        check_recomputed(ctx.noted, ctx.saved_tensors)
        held: list[Residence] = ctx.held
        rows, stacks = grads[: ctx.num_passed], grads[ctx.num_passed :]
        width = len(stacks) // len(held)
        of_rank = [stacks[i : i + width] for i in range(0, len(stacks), width)]
        homes = [[g.narrow(0, 0, len(r.homes)) for g in own] for r, own in zip(held, of_rank, strict=True)]
        if rows:
            exact = torch.promote_types(stacks[0].dtype, torch.float32)
            buffers = [
                pack(flatten_rows(own, [len(r.homes) + i for i in r.incoming], exact))
                for r, own in zip(held, of_rank, strict=True)
            ]
            returned = ctx.transport.send_back("replica gradients", buffers, held)
            homes = [add_returned(*args, exact) for args in zip(homes, held, returned, strict=True)]
        return None, None, None, None, *rows, *(total for totals in homes for total in totals)


def check_recomputed(noted: dict[str, Tensor], saved: Sequence[Tensor]) -> None:
    """Raises if a checkpoint (use_reentrant=False) recomputed the layer with other choices than the first time.

    The node keeps what the first forward noted; saved tensors are the recompute's. Without one they are the same
    tensors, which costs no comparison. The reentrant checkpoint keeps no node of the first forward to compare with.
    """
    for (name, first), again in zip(noted.items(), saved, strict=False):
        if not torch.equal(first, again):
            raise RuntimeError(
                f"{name} must be the same when a checkpoint recomputes the layer, got others: "
                "the gate must choose alike for the same rows"
            )


def join_rows(
    transport: Transport,
    ranks: Sequence[RankWeights],
    rows: Sequence[Tensor],
    has_replicas: bool,
    noted: dict[str, Tensor],
) -> tuple[list[Tensor], list[ExpertWeights]]:
    """Received rows and, for every owned rank, its storages, joined to autograd.

    Args:
        transport: joins the ranks.
        ranks: the owned ones.
        rows: [N, H] each.
        has_replicas: whether any rank has: then backward exchanges gradients, on every rank.
        noted: what a recompute must find again, see :func:`check_recomputed`.
    """
    passed = list(rows) if has_replicas else []
    homes = [stack for rank in ranks for stack in rank.home_rows()]
    out: tuple[Tensor, ...] = JoinRows.apply(transport, ranks, noted, len(passed), *passed, *homes)
    stacks, width = out[len(passed) :], len(homes) // len(ranks)
    stored = [rank.as_weights(stacks[i * width : (i + 1) * width]) for i, rank in enumerate(ranks)]
    return (list(out[: len(passed)]) if has_replicas else list(rows)), stored


def add_returned(
    homes: Sequence[Tensor], residence: Residence, buffer: Tensor, exact: torch.dtype
) -> list[Tensor]:
    """Home gradients plus those that came back, one after the other in the order of ranks: the same sum every time."""
    sizes = [stack.shape[1:].numel() for stack in homes]
    (rows,) = unpack(buffer, [(sum(sizes), exact)])
    totals = [stack.to(exact, copy=True) for stack in homes]
    for i, home in enumerate(residence.outgoing):
        for total, part in zip(totals, rows[i].split(sizes), strict=True):
            total[home] += part.view(total.shape[1:])
    return [total.to(stack.dtype) for total, stack in zip(totals, homes, strict=True)]
