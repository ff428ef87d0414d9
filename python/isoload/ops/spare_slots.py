"""Ops that fill spare slots with borrowed experts, copy their weights by address and return their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from isoload.ops.library import call, ints, like, op
from isoload.ops.results import SlotFill

Within = Literal["all", "node"]


def is_within_node(within: Within) -> bool:
    if within not in ("all", "node"):
        raise ValueError(f"within must be all or node, got {within!r}")
    return within == "node"


def fake_fill(slots: Tensor) -> tuple[Tensor, Tensor]:
    return like(slots), ints(slots, *slots.shape[:-1], 5)


_top_up = op("top_up")(lambda a: fake_fill(a.slot_to_expert))


def top_up(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
    within: Within = "all",
) -> SlotFill:
    """Fill the spare slots that are still empty with replicas of hot experts, against errors of a forecast.

    One slot after another: the expert with most copies per replica goes to the least loaded live rank that lacks it and
    has an empty spare slot. Experts without copies are not placed.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as slot_to_expert), summed over sources.
        slot_to_expert: [P] or [L, P] int32, with empty or filled spare slots.
        home_slot, num_ranks, fixed, alive: as in :func:`plan_fill`.
        spare_slots: how many slots of every rank may be filled if they are -1, the last ones.
        ranks_per_node: divides R; None = R. Used in the telemetry, which covers all spare slots.
        within: "node": an expert goes only to ranks in the node of its home slot. "all": anywhere.
    """
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    placement = (slot_to_expert, home_slot, num_ranks, per_node, spare_slots)
    return SlotFill(*call(_top_up, loads, *placement, fixed, alive, is_within_node(within)))


_borrow, _borrow_backward = op("borrow")(lambda a: None), op("borrow_backward")(lambda a: None)


def addresses(stacks_per_rank: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the table [R, W] int64 by which :func:`borrow` reaches the stacks of ranks in this process; 0 = no rows.

    Args:
        stacks_per_rank: ``[R][W]`` contiguous tensors [rows, ...] to be kept alive; rows of stack w have one shape and
            dtype on all ranks.
    """
    first = stacks_per_rank[0] if stacks_per_rank else []
    if not first:
        raise ValueError("stacks_per_rank must hold at least one rank with one stack, got none")
    for rank, stacks in enumerate(stacks_per_rank):
        if len(stacks) != len(first):
            raise ValueError(
                f"stacks_per_rank must be {len(first)} of every rank, got {len(stacks)} of rank {rank}"
            )
        for w, (stack, other) in enumerate(zip(stacks, first, strict=True)):
            if not stack.is_contiguous():
                raise ValueError(
                    f"stacks_per_rank must be contiguous, got other strides in stack {w} of rank {rank}"
                )
            if (stack.dtype, stack.shape[1:]) != (other.dtype, other.shape[1:]):
                raise ValueError(
                    f"stacks_per_rank must have equal rows on every rank, {other.dtype} {list(other.shape[1:])} in "
                    f"stack {w}, got {stack.dtype} {list(stack.shape[1:])} of rank {rank}"
                )
    table = [[stack.data_ptr() for stack in stacks] for stacks in stacks_per_rank]
    return torch.tensor(table, dtype=torch.int64, device=first[0].device)


def borrow(
    slot_to_expert: Tensor,
    home: Tensor,
    peers: Tensor,
    spare: Sequence[Tensor],
    num_ranks: int,
    rank: int,
    *,
    blocks: int = 32,
) -> None:
    """Copy the weights of the experts in a rank's spare slots from their home slots, byte for byte.

    Home weights must be complete on every rank before and must not change meanwhile; the op does not synchronise ranks.
    CUDA does not write the row of an expert or home out of range, or of an address 0.

    Args:
        slot_to_expert: [P] int32, of a plan; the last spare_slots of every rank hold borrowed experts, -1 = empty.
        home: [E, 2] int32 rank and weight row of every expert's home slot; (-1, -1) = none.
        peers: [R, W] int64 address of row 0 of stack w on rank r, as this rank reaches it (:func:`addresses`); 0 =
            none. Its rows must be as long as those of spare[w], which is not checked.
        spare: W stacks [spare_slots, ...] of any dtype, contiguous; only rows of filled slots are written.
        num_ranks: R, divides P.
        rank: this rank.
        blocks: limit of thread blocks on CUDA; the rest of the device stays free for kernels that run concurrently.
    """
    call(_borrow, slot_to_expert, home, peers, list(spare), num_ranks, rank, blocks)
    # Autograd must detect that saved rows are overwritten; the op alone does not report it.
    increment_version(spare)


def borrow_backward(
    slot_to_expert: Tensor,
    home: Tensor,
    peers: Tensor,
    totals: Sequence[Tensor],
    num_ranks: int,
    rank: int,
    spare_slots: int,
    dtype: torch.dtype,
    *,
    blocks: int = 32,
) -> None:
    """Add the gradients of a rank's lent experts to its home rows, by borrowing rank, then slot: always the same bits.

    CUDA adds nothing for an expert or home out of range, or an address 0.

    Args:
        slot_to_expert, home, num_ranks, rank: as in :func:`borrow`.
        peers: [R, W] int64 address of row 0 of rank r's gradient pool of stack w, [spare_slots, ...]; 0 = none.
        totals: W stacks [homes, ...], contiguous, read and written, of the pools' dtype (sums are computed in
            max(float32, dtype) and rounded once), or float32 for bfloat16 and float16 pools.
        spare_slots: rows of every pool.
        dtype: of the pools: float64, float32, bfloat16 or float16.
        blocks: limit of thread blocks on CUDA.
    """
    on = (num_ranks, rank, spare_slots, dtype, blocks)
    call(_borrow_backward, slot_to_expert, home, peers, list(totals), *on)
    increment_version(totals)


_plan_fill = op("plan_fill")(lambda a: fake_fill(a.slot_to_expert))
MILLION = 1_000_000


def plan_fill(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    start: Tensor | None = None,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
    capacity_factor: float = 1.0,
    imbalance_threshold: float = 0.0,
    per_expert: bool = False,
    min_chunk: int = 1,
    import_costs: tuple[int, int] = (0, 0),
    export_costs: tuple[int, int] = (0, 0),
    within: Within = "all",
) -> SlotFill:
    """Fill spare slots with experts of overloaded ranks, for a split over the filled slots that follows.

    For a level, the largest copies on each rank above the level go, whole if they fit, to the rank with the most free
    capacity below it that has a free spare slot or holds the expert already. The first level is the capacity. If the
    spare slots do not suffice for it, or if imports have a price, up to five higher levels are tried. The cheapest
    level is returned: its largest load plus the imports of the busiest importer plus the exports of the busiest
    exporter. Nothing is imported if no level costs less than the copies at the start.

    Args:
        loads: [E] or [R, E] int32 copies (leading L as slot_to_expert), summed over sources.
        slot_to_expert: [P] or [L, P] int32, the placement; -1 in the last spare_slots of every rank. Ids from E on are
            no routed experts.
        home_slot: [E] int32 (leading L as above) slot that owns each expert's weights.
        num_ranks: R, divides P.
        spare_slots: how many experts a rank can import.
        fixed: [R] int32 copies that ranks carry in addition and cannot give away (leading L as above).
        start: [P] int32 copies per slot before any import (leading L as above), e.g. the quota of the exact split over
            replicas; adds up to the loads. None = all in home slots (plain EP).
        alive: [R] bool; dead ranks import nothing. None = all are alive.
        ranks_per_node: divides R; None = R.
        capacity_factor: the lowest level, 1..1000 times the mean load of the live ranks, rounded up.
        imbalance_threshold: up to this max / mean load of the ranks nothing moves, 0..1000.
        per_expert: the threshold compares max / mean of the experts, not of the ranks.
        min_chunk: copies, at least 1; a rank whose excess over a level is smaller lends nothing (more).
        import_costs: copies that could be computed in the time of an import, (from the own node, from another),
            0..2^30. An expert moves only if its copies exceed this cost, and to the rank with most capacity after it.
        export_costs: the same for the rank of the home slot, (to its own node, to another).
        within: "node": an expert is borrowed only in the node of its home slot, and the capacity and the threshold
            relate to the mean load of the most loaded node. "all": anywhere.
    """
    for name, value, low in (
        ("capacity_factor", capacity_factor, 1),
        ("imbalance_threshold", imbalance_threshold, 0),
    ):
        if not low <= value <= 1000:
            raise ValueError(f"{name} must be in {low}..1000, got {value}")
    per_node = num_ranks if ranks_per_node is None else ranks_per_node
    placement = (slot_to_expert, home_slot, num_ranks, per_node, spare_slots)
    rules = (
        round(capacity_factor * MILLION),
        round(imbalance_threshold * MILLION),
        per_expert,
        min_chunk,
        *import_costs,
        *export_costs,
        is_within_node(within),
    )
    return SlotFill(*call(_plan_fill, loads, *placement, fixed, start, alive, *rules))
