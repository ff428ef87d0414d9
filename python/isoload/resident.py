"""Resident weights: home rows are Parameters, replica rows are buffers that are kept equal to them.

A rank's weight rows are its home slots by ascending slot, then its replicas by ascending slot; empty slots, and second
slots of one expert on one rank, have none. Replica gradients return to the home row, so an optimizer sees each
expert once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from isoload.expert_weights import ExpertWeights
from isoload.placement import PlacedLayers
from isoload.transport.rows import pack, unpack

if TYPE_CHECKING:
    from isoload.transport import Transport

NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")


@dataclass(frozen=True)
class Residence:
    """What one rank holds of a layer, and the weight rows that travel between homes and replicas.

    homes, replicas  experts of the rank's home rows and replica rows
    row_of_slot      [S] weight row of every local slot, -1 = none
    outgoing         home rows that are sent when replicas are refreshed, by receiving rank, then its replica row
    incoming         replica rows that arrive then, by sending rank, then replica row
    sent, got        [R] how many of them go to, and come from, every rank
    """

    homes: tuple[int, ...]
    replicas: tuple[int, ...]
    row_of_slot: tuple[int, ...]
    outgoing: tuple[int, ...]
    incoming: tuple[int, ...]
    sent: list[int]
    got: list[int]


def residences(placed: PlacedLayers) -> list[Residence]:
    """[R] what every rank holds of one layer; the same on every rank, from the host's placement alone."""
    host, num_ranks = placed.host, placed.topology.num_ranks
    assert placed.layer is not None
    slots = host.arrays[0][placed.layer].reshape(num_ranks, -1)
    home_slot = host.arrays[1][placed.layer]
    size = host.slots_per_rank
    homes: list[list[int]] = [[] for _ in range(num_ranks)]
    replicas: list[list[int]] = [[] for _ in range(num_ranks)]
    for rank, experts in enumerate(slots.tolist()):
        for place, expert in enumerate(experts):
            if expert < 0 or expert in experts[:place]:
                continue
            at_home = home_slot[expert] == rank * size + place
            (homes if at_home else replicas)[rank].append(expert)
    home_rank = {e: rank for rank, experts in enumerate(homes) for e in experts}
    result = []
    for rank, experts in enumerate(slots.tolist()):
        row = {e: i for i, e in enumerate(homes[rank] + replicas[rank])}
        row_of_slot = [row[e] if e >= 0 and e not in experts[:i] else -1 for i, e in enumerate(experts)]
        wanted = [[e for e in replicas[r] if home_rank[e] == rank] for r in range(num_ranks)]
        offered = [[e for e in replicas[rank] if home_rank[e] == r] for r in range(num_ranks)]
        result.append(
            Residence(
                homes=tuple(homes[rank]),
                replicas=tuple(replicas[rank]),
                row_of_slot=tuple(row_of_slot),
                outgoing=tuple(homes[rank].index(e) for experts in wanted for e in experts),
                incoming=tuple(replicas[rank].index(e) for experts in offered for e in experts),
                sent=[len(experts) for experts in wanted],
                got=[len(experts) for experts in offered],
            )
        )
    return result


class RankWeights(nn.Module):
    """One rank's weight rows of a layer.

    Args:
        residence: what the rank holds.
        dense: the stacks of all E experts, from which the rank takes its own.
    """

    def __init__(self, residence: Residence, dense: ExpertWeights) -> None:
        super().__init__()
        self.residence = residence
        for name in NAMES:
            stack: Tensor | None = getattr(dense, name)
            homes = None if stack is None else nn.Parameter(stack.detach()[list(residence.homes)].clone())
            replicas = None if stack is None else stack.detach()[list(residence.replicas)].clone()
            self.register_parameter(name, homes)
            self.register_buffer(f"replica_{name}", replicas, persistent=False)
        self.row_of_slot: Tensor
        self.register_buffer("row_of_slot", torch.tensor(residence.row_of_slot), persistent=False)

    def home_rows(self) -> list[Tensor]:
        """The Parameters, each [homes, ...]."""
        return [p for name in NAMES if (p := getattr(self, name)) is not None]

    def replica_rows(self) -> list[Tensor]:
        """The buffers, each [replicas, ...]."""
        return [b for name in NAMES if (b := getattr(self, f"replica_{name}")) is not None]

    def as_weights(self, stacks: Sequence[Tensor]) -> ExpertWeights:
        """Stacks in the order of home_rows or replica_rows, by name again."""
        names = [name for name in NAMES if getattr(self, name) is not None]
        return ExpertWeights(**dict(zip(names, stacks, strict=True)))

    def weight_rows(self, slots: Tensor) -> Tensor:
        """Local slots [N, K] as weight rows; -1 stays."""
        if not len(self.row_of_slot):
            return slots
        return torch.where(slots < 0, -1, self.row_of_slot[slots.clamp(min=0)])


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


class WithReplicas(torch.autograd.Function):
    """Rows and home rows pass through; replica rows join them, and their gradients return to the home rows.

    Inputs and outputs, for all owned ranks: received rows, then every rank's home stacks; the outputs also end with
    every rank's replica stacks. Rows pass through so that every rank, also one that holds no weights, enters the
    exchange of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, transport: Transport, ranks: Sequence[RankWeights], *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.transport, ctx.ranks = transport, ranks
        replicas = [stack.detach() for rank in ranks for stack in rank.replica_rows()]
        return *(value.view_as(value) for value in values), *replicas

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks: Sequence[RankWeights] = ctx.ranks
        width = len(ranks[0].home_rows())
        rows, stacks = grads[: len(ranks)], grads[len(ranks) :]
        homes, replicas = stacks[: len(stacks) // 2], stacks[len(stacks) // 2 :]
        exact = torch.promote_types(stacks[0].dtype, torch.float32)
        buffers = [
            pack(flatten_rows(replicas[i * width : (i + 1) * width], rank.residence.incoming, exact))
            for i, rank in enumerate(ranks)
        ]
        returned = ctx.transport.send_back("replica gradients", buffers, [rank.residence for rank in ranks])
        totals = [
            total
            for i, rank in enumerate(ranks)
            for total in add_returned(homes[i * width : (i + 1) * width], rank.residence, returned[i], exact)
        ]
        return None, None, *rows, *totals


def join_replicas(
    transport: Transport, ranks: Sequence[RankWeights], rows: Sequence[Tensor]
) -> tuple[list[Tensor], list[list[ExpertWeights]]]:
    """Received rows and, for every owned rank, its weight rows in two groups (homes, replicas), joined to autograd."""
    homes = [stack for rank in ranks for stack in rank.home_rows()]
    out: tuple[Tensor, ...] = WithReplicas.apply(transport, ranks, *rows, *homes)
    stacks, width = out[len(ranks) :], len(homes) // len(ranks)
    of_rank = [
        stacks[i : i + width] for i in range(0, len(stacks), width)
    ]  # homes of all ranks, then replicas
    groups = [
        [rank.as_weights(of_rank[i]), rank.as_weights(of_rank[len(ranks) + i])]
        for i, rank in enumerate(ranks)
    ]
    return list(out[: len(ranks)]), groups


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
