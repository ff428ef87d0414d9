"""Result types of isoload.ops, shared with the plain versions in tests/reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ONE_OFFSET = 2**20  # of plan_own: the number of all copies of the source
RECENT_LOSS = 5439  # decay per batch in 2^-16: kRecentLoss in plan_own.h
PART_ROWS = 128  # tokens of a part: kPartRows in csrc/cpu/cpu.h


class Counted(NamedTuple):
    """Result of :func:`isoload.ops.count`. A part is a run of PART_ROWS tokens, C = ceil(T / PART_ROWS)."""

    ids: Tensor  # [T, K] that were counted, with the shared experts' columns if they were added
    counts: Tensor  # [E] int32 copies of every expert
    # [T, K] int32, how many copies of the expert precede this one in its part; -1 where masked
    numbers: Tensor
    parts: Tensor  # [C, E] int32 copies of every expert in each part

    def routed(self, num_shared: int) -> Counted:
        """Return views without the shared experts, which are in the last columns."""
        columns, experts = self.ids.shape[1] - num_shared, len(self.counts) - num_shared
        ids, numbers = self.ids.narrow(1, 0, columns), self.numbers.narrow(1, 0, columns)
        return Counted(ids, self.counts.narrow(0, 0, experts), numbers, self.parts.narrow(1, 0, experts))


class SharedColumns(NamedTuple):
    """The shared experts in the last columns of topk_ids, and the ranks of one source rank's copies."""

    num_shared: int  # columns
    first_shared: int  # position of the first one among a rank's slots
    home: int  # the rank that computes them unless row is given
    row: Tensor | None = None  # [R] int32, the rank's row of plan_waterfill


class ExactSplit(NamedTuple):
    """Result of :func:`isoload.ops.plan_exact`, leading L as the tables. Costs are copies, or ticks if given."""

    quota: Tensor  # [P] int32 copies per slot
    peak: Tensor  # [] int64 largest rank cost
    bound: Tensor  # [] int64 proved lower bound over all integer quotas
    telemetry: Tensor  # [4] int32: sweeps, augmentations, Newton steps, 1 if the budget ended the solve
    # [P] int32, the requested rank's row of share() in the order "locality"; [0] without a rank
    send_counts: Tensor


class JointSplit(NamedTuple):
    """Result of :func:`isoload.ops.plan_joint`, leading L as the tables."""

    quota: Tensor  # [P] int32 copies per slot, shared ones included
    peak: Tensor  # [] int64 largest rank cost
    bound: Tensor  # [] int64 proved lower bound over all integer quotas and all places of the shared copies
    telemetry: Tensor  # [4] int32 as in ExactSplit
    send_counts: Tensor  # [P] int32 routed copies that the requested rank sends to each slot
    share: Tensor  # [R, R] int32 shared copies that source s sends to rank d


class ActiveSplit(NamedTuple):
    """Result of :func:`isoload.ops.plan_active`, leading L as the tables."""

    quota: Tensor  # [P] int32 copies per slot: an expert's load in one of its slots, 0 elsewhere
    active_peak: Tensor  # [] int64 largest number of active slots of a rank
    active_bound: Tensor  # [] int64 proved lower bound of it, always equal
    # [4] int32: sweeps, augmentations, Newton steps, moves that lowered the peak cost of copies
    telemetry: Tensor


class LpSplit(NamedTuple):
    """Result of :func:`isoload.ops.plan_lp`, leading L as the tables. primal and dual are valid for every status."""

    split: Tensor  # [P] copies per slot, every expert's adding up to its load
    primal: Tensor  # [] the largest rank cost of this split, up to the dtype's rounding
    dual: Tensor  # [] a lower bound over all real-valued splits, up to the dtype's rounding
    iterations: Tensor  # [] int32
    # [] int32: 0 = converged, ``primal - dual <= tolerance * primal``; 1 = the limit of iterations was reached; 2 = a
    # value exceeded the dtype's range, and the split is the start.
    status: Tensor


class SlotFill(NamedTuple):
    """Result of :func:`isoload.ops.plan_fill` and :func:`isoload.ops.top_up`, leading L as slot_to_expert."""

    slot_to_expert: Tensor  # [P] int32, spare slots filled from the first on
    # [5] int32 of all borrowed experts: imports, most imports of a rank, most exports of a rank, imports from another
    # node, flags of plan_fill: 1 = the loads are below the threshold, so nothing moved; 2 = a rank stays above the
    # capacity after the fill, which the exact split over the filled slots may still level.
    telemetry: Tensor


class WaterfillSplit(NamedTuple):
    """Result of :func:`isoload.ops.plan_waterfill`, leading L as the copies. Costs are copies, or ticks if given."""

    share: Tensor  # [R, R] int32 shared copies that source s sends to rank d
    peak: Tensor  # [] int64 largest rank cost
    bound: Tensor  # [] int64 proved lower bound over all shares


class RowNumbers(NamedTuple):
    """Result of :func:`isoload.ops.number_rows`, for R ranks and D = min(K, R)."""

    ranks: Tensor  # [T, D] int32 the distinct ranks of a token's slots, ascending, then R
    numbers: Tensor  # [T, D] int32 the token's row among those to each rank, by token, then -1
    counts: Tensor  # [2, R] int64 rows and copies to every rank


class RowLayout(NamedTuple):
    """Byte offsets of a packed row's parts: the token's values at 0, int32 slots, weights; multiples of 64 bytes."""

    slots_at: int
    weights_at: int
    bytes: int

    @classmethod
    def of(cls, x: Tensor, weights: Tensor) -> RowLayout:
        top_k, weight_bytes = weights.shape[1], weights.element_size()
        slots_at = -(-x.shape[1] * x.element_size() // 4) * 4
        weights_at = -(-(slots_at + 4 * top_k) // weight_bytes) * weight_bytes
        # At least 64 bytes: rows of no bytes could not be viewed as any dtype.
        return cls(slots_at, weights_at, max(-(-(weights_at + weight_bytes * top_k) // 64) * 64, 64))

    def parts(self, buffer: Tensor, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views of a buffer [n, bytes]: rows [n, H], slots [n, K] int32 and weights [n, K]."""
        top_k = weights.shape[1]
        rows = buffer.narrow(1, 0, x.shape[1] * x.itemsize).view(x.dtype)
        slots = buffer.narrow(1, self.slots_at, 4 * top_k).view(torch.int32)
        gates = buffer.narrow(1, self.weights_at, top_k * weights.itemsize).view(weights.dtype)
        return rows, slots, gates


class PackedRows(NamedTuple):
    """Result of :func:`isoload.ops.pack_rows`: n rows by destination, then token."""

    payload: Tensor  # [n, bytes] uint8, see RowLayout
    row_to_token: Tensor  # [n] int64, T where the row is padding
    row_to_rank: Tensor  # [n] int64 destination, R where the row is padding
    token_to_rows: Tensor  # [T, D] int64 the token's rows by ascending destination, then n


class Grouping(NamedTuple):
    """Result of :func:`isoload.ops.group_copies`: C places, copies [N, K] sorted by slot, then row, then k."""

    copy: Tensor  # [C] int64 the copy ``n * K + k`` at each place, 0 after the present copies
    slot: Tensor  # [C] int64 its slot within the group, S-1 after the present copies
    ends: Tensor  # [S] int32: slot s's copies end before place ``ends[s]``, the offsets of a grouped GEMM
    position: Tensor  # [N, K] int64 the place of copy (n, k), C if it is absent from this group
