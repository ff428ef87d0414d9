"""The real-valued split and its rounding: plan_lp, round_split; wrappers and fakes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.replica_tables import ReplicaTables

# By dtype: default tolerance, default most iterations.
LIMITS = {torch.float32: (1e-4, 12), torch.float64: (1e-8, 20)}

_plan_lp, _round_split = library.plan_lp.default, library.round_split.default


class LpSplit(NamedTuple):
    """What :func:`plan_lp` returns, with the leading dimension of the tables.

    split [P] copies per slot, every expert's adding up to its load; primal [] the largest rank cost of this split;
    dual [] a lower bound over all real-valued splits, both true up to the dtype's rounding whatever the status;
    iterations [] int32; status [] int32: 0 = converged, ``primal - dual <= tolerance * primal``; 1 = the most
    iterations were not enough; 2 = broke down in numbers that the dtype cannot hold, and the split is the start.
    """

    split: Tensor
    primal: Tensor
    dual: Tensor
    iterations: Tensor
    status: Tensor


def plan_lp(
    loads: Tensor,
    tables: ReplicaTables,
    *,
    speeds: Tensor | None = None,
    base: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    iterations: int | None = None,
) -> LpSplit:
    """Splits every replicated expert's copies, in real numbers, so that the largest rank cost is least.

    The linear program of LPLB (papers/001), by a primal-dual interior point method that works on the network
    of ranks and experts. The same bits on every rank and device.

    Args:
        loads: [E] or [R, E] int32 copies (with a leading L if the tables have one); sources are summed.
        tables: of the same layers.
        speeds: [R] of dtype, relative (1 = nominal): a rank's cost is its copies / its speed. A rank with speed
            0 takes nothing; it must not be the only rank of an expert with copies, nor have base load. Between
            speeds more than a factor of 1000 apart, float32 may end with status 1.
        base: [R] of dtype, not negative: copies that each rank carries besides (leading L as above).
        dtype: float32 or float64, of everything real.
        tolerance: relative, 0..1; None = 1e-4 for float32, 1e-8 for float64.
        iterations: most, 0..1000; None = 12 for float32, 20 for float64. 0 gives the start:
            every expert in proportion to the speeds of its ranks, even where they are equal.
    """
    if dtype not in LIMITS:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    usual_tolerance, usual_iterations = LIMITS[dtype]
    result = call(
        _plan_lp,
        loads,
        tables.data,
        tables.num_ranks,
        tables.num_slots,
        speeds,
        base,
        dtype == torch.float64,
        usual_tolerance if tolerance is None else tolerance,
        usual_iterations if iterations is None else iterations,
    )
    return LpSplit(*result)


def round_split(split: Tensor, loads: Tensor, tables: ReplicaTables) -> Tensor:
    """Whole copies from a real-valued split, every expert's adding up to its load exactly.

    Largest remainder: the whole parts, then one copy each to the largest fractions, ties to the lowest slot. Every
    quota is less than one copy from its split, as far as the split itself adds up to the load.

    Args:
        split: [P] float32 or float64 copies per slot (leading L as the tables), as :func:`plan_lp` returns; for
            every expert its sum is the load, up to one copy and a thousandth.
        loads: [E] or [R, E] int32 copies, of which the split was made.
        tables: of the same layers.

    Returns:
        [P] int32 quota.
    """
    quota: Tensor = call(_round_split, split, loads, tables.data, tables.num_ranks, tables.num_slots)
    return quota


@torch.library.register_fake("isoload::plan_lp")
def _(
    loads: Tensor,
    tables: Tensor,
    num_ranks: int,
    num_slots: int,
    speeds: Tensor | None,
    base: Tensor | None,
    float64: bool,
    tolerance: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, dtype = tables.shape[:-1], torch.float64 if float64 else torch.float32
    return (
        loads.new_empty((*batch, num_slots), dtype=dtype),
        loads.new_empty(batch, dtype=dtype),
        loads.new_empty(batch, dtype=dtype),
        loads.new_empty(batch),
        loads.new_empty(batch),
    )


@torch.library.register_fake("isoload::round_split")
def _(split: Tensor, loads: Tensor, tables: Tensor, num_ranks: int, num_slots: int) -> Tensor:
    return torch.empty_like(split, dtype=torch.int32, memory_format=torch.contiguous_format)
