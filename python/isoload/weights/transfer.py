"""Carries out a schedule of moves: rows of weights, and of optimizer state, from rank to rank and within one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from isoload.placed_layers import PlacedLayers
from isoload.placement import Placement
from isoload.transport.group import Group
from isoload.transport.packing import pack, unpack
from isoload.weights.layout import Residence
from isoload.weights.migrate import Move, plan_moves
from isoload.weights.storage import NAMES, RankWeights

# What every rank must give load_placement alike, in the order of move_facts
FACTS = (
    "layer",
    "rows_per_chunk",
    "checksum of slot_to_expert",
    "checksum of home_slot",
    "checksum of the rows held before",
    "checksum of the optimizer's state names and dtypes",
)


def count_rows(placed: PlacedLayers, weight_rows: int | None) -> list[int]:
    """[R] weight rows of every rank: as many as its slots hold experts, or weight_rows."""
    assert placed.layer is not None
    held = placed.host.arrays[0][placed.layer].reshape(placed.topology.num_ranks, -1) >= 0
    counts: list[int] = held.sum(1).tolist()
    if weight_rows is None:
        return counts
    if weight_rows < max(counts):
        raise ValueError(
            f"weight_rows must be at least {max(counts)}, as rank {counts.index(max(counts))} holds, got {weight_rows}"
        )
    return [weight_rows] * len(counts)


def check_move(now: Placement, new: Placement, rows_per_chunk: int, ranks: Sequence[RankWeights]) -> None:
    """Raises ValueError if a layer cannot go from one placement to another, or cannot be moved now."""
    for name in ("topology", "num_layers", "num_experts", "num_shared", "slots_per_rank", "spare_slots"):
        if getattr(new, name) != getattr(now, name):
            raise ValueError(
                f"placement must have the layer's {name}={getattr(now, name)}, got {getattr(new, name)}"
            )
    if rows_per_chunk < 2:
        raise ValueError(f"rows_per_chunk must be at least 2, got {rows_per_chunk}")
    for rank in ranks:
        for name in NAMES:
            parameter: Tensor | None = getattr(rank, name)
            if parameter is not None and parameter.grad is not None:
                raise ValueError(
                    f"expert Parameters must have no gradient (zero_grad(set_to_none=True) first), {name} has one"
                )


def move_facts(
    placed: PlacedLayers,
    before: Sequence[Residence],
    after: Sequence[Residence],
    num_rows: Sequence[int],
    rows_per_chunk: int,
    ranks: Sequence[RankWeights],
    optimizer: Optimizer | None,
) -> list[list[int]]:
    """FACTS of every owned rank.

    Raises:
        ValueError: if the new residences [R] do not fit in num_rows [R], or the optimizer's state cannot move.
    """
    for rank, (residence, rows) in enumerate(zip(after, num_rows, strict=True)):
        if len(residence.experts) > rows:
            raise ValueError(
                f"placement must fit in the {rows} weight rows of rank {rank}, got {len(residence.experts)} experts "
                "(see weight_rows)"
            )
    assert placed.layer is not None
    slots, homes = (array[placed.layer].tolist() for array in placed.host.arrays)
    shared = [placed.layer, rows_per_chunk, *map(checksum, (slots, homes, [r.experts for r in before]))]
    return [[*shared, checksum(optimizer and state_layout(optimizer, rank))] for rank in ranks]


def checksum(value: object) -> int:
    """56 bits that are the same on every machine for equal lists of numbers and strings."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


@dataclass(frozen=True)
class RankMoves:
    """One rank's part of a chunk: the rows it sends, by receiving rank, those it gets, by sending rank, and its own.

    leaving, arriving  rows that other ranks get, and rows that they fill
    copied, filled     rows that are read, and written, without leaving the rank
    sent, got          [R] how many go to, and come from, every rank
    """

    leaving: list[int]
    arriving: list[int]
    copied: list[int]
    filled: list[int]
    sent: list[int]
    got: list[int]

    @staticmethod
    def of(chunk: Sequence[Move], rank: int, num_ranks: int) -> RankMoves:
        own = [m for m in chunk if m.source.rank == m.target.rank == rank]
        to = [[m for m in chunk if m.source.rank == rank != m.target.rank == r] for r in range(num_ranks)]
        of = [[m for m in chunk if m.target.rank == rank != m.source.rank == r] for r in range(num_ranks)]
        return RankMoves(
            leaving=[m.source.row for moves in to for m in moves],
            arriving=[m.target.row for moves in of for m in moves],
            copied=[m.source.row for m in own],
            filled=[m.target.row for m in own],
            sent=[len(moves) for moves in to],
            got=[len(moves) for moves in of],
        )


@torch.no_grad()
def move_rows(
    group: Group, stage: str, stacks: Sequence[Sequence[Tensor]], chunks: Sequence[Sequence[Move]]
) -> None:
    """Moves rows in place, a chunk at a time; all ranks call it together with the same chunks.

    Args:
        group: joins the ranks.
        stage: that traffic and errors name.
        stacks: for every owned rank, [rows, ...] each; widths and dtypes are the same on all ranks.
        chunks: see :func:`isoload.weights.migrate.plan_moves`.
    """
    device = stacks[0][0].device

    def picked(stack: Tensor, rows: list[int]) -> Tensor:
        return stack.index_select(0, torch.tensor(rows, dtype=torch.int64, device=device))

    def put(stack: Tensor, rows: list[int], values: Tensor) -> None:
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        stack.index_copy_(0, index, values.view(-1, *stack.shape[1:]))

    layout = [(stack.shape[1:].numel(), stack.dtype) for stack in stacks[0]]
    for chunk in chunks:
        parts = [RankMoves.of(chunk, rank, group.topology.num_ranks) for rank in group.ranks]
        copies = [[picked(s, p.copied) for s in own] for own, p in zip(stacks, parts, strict=True)]
        if any(source.rank != target.rank for source, target in chunk):
            buffers = [
                pack(*(picked(s, p.leaving).flatten(1) for s in own))
                for own, p in zip(stacks, parts, strict=True)
            ]
            arrived = group.send(stage, buffers, parts)
            for own, part, buffer in zip(stacks, parts, arrived, strict=True):
                for stack, values in zip(own, unpack(buffer, layout), strict=True):
                    put(stack, part.arriving, values)
        for own, part, rows in zip(stacks, parts, copies, strict=True):
            for stack, values in zip(own, rows, strict=True):
                put(stack, part.filled, values)


def move_weights(
    group: Group,
    ranks: Sequence[RankWeights],
    before: Sequence[Residence],
    after: Sequence[Residence],
    rows_per_chunk: int,
) -> None:
    """Moves the storages of a layer from one residence [R] to the next; the Parameters are to be settled after it."""
    chunks = plan_moves([r.experts for r in before], [r.experts for r in after], rows_per_chunk)
    move_rows(group, "placement", [rank.stored_rows() for rank in ranks], chunks)


def move_state(
    group: Group,
    ranks: Sequence[RankWeights],
    optimizer: Optimizer,
    before: Sequence[Residence],
    after: Sequence[Residence],
    rows_per_chunk: int,
) -> None:
    """Moves the optimizer's state of home rows along, one kind of state after the other.

    A rank whose number of homes changes gets new tensors; others are written in place.
    """
    chunks = plan_moves([r.homes for r in before], [r.homes for r in after], rows_per_chunk)
    for name, key in sorted(
        {(name, key) for rank in ranks for name, key, _ in state_layout(optimizer, rank)}
    ):
        states = [optimizer.state[getattr(rank, name)] for rank in ranks]
        counts = [len(after[rank].homes) for rank in group.ranks]
        rooms = [_make_room(state[key], count) for state, count in zip(states, counts, strict=True)]
        move_rows(group, "placement state", [[room] for room in rooms], chunks)
        for state, room, count in zip(states, rooms, counts, strict=True):
            state[key] = room if len(room) == count else room[:count].clone()


def _make_room(tensor: Tensor, count: int) -> Tensor:
    missing = max(0, count - len(tensor))
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def state_layout(optimizer: Optimizer, rank: RankWeights) -> list[tuple[str, str, str]]:
    """(stack, key, dtype) of all state with a row per expert that the optimizer keeps for a rank's Parameters.

    Raises:
        ValueError: naming the Parameter or state that does not fit.
    """
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    layout = []
    for name in NAMES:
        parameter: Tensor | None = getattr(rank, name)
        if parameter is None or not parameter.requires_grad:
            continue
        if id(parameter) not in held:
            raise ValueError(f"optimizer must hold the layer's expert Parameters, {name} is missing")
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.shape == parameter.shape:
                layout.append((name, key, str(value.dtype)))
            elif value.numel() != 1:
                raise ValueError(
                    f"optimizer state {key} of {name} must have the shape {list(parameter.shape)} or one element, "
                    f"got {list(value.shape)}"
                )
    return sorted(layout)
