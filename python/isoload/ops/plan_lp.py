"""plan_lp: the real-valued split with the least largest rank cost; wrapper and fake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.ops.library import call, ints, op
from isoload.replica_tables import ReplicaTables
from isoload.results import LpSplit

# By dtype: default tolerance, default most iterations.
LIMITS = {torch.float32: (1e-4, 12), torch.float64: (1e-8, 20)}


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, real = a.tables.shape[:-1], torch.float64 if a.float64 else torch.float32
    shapes = ((*batch, a.num_slots), batch, batch)
    split, primal, dual = (a.loads.new_empty(shape, dtype=real) for shape in shapes)
    return split, primal, dual, ints(a.loads, *batch), ints(a.loads, *batch)


_plan_lp = op("plan_lp", _fake)


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
    tolerance = usual_tolerance if tolerance is None else tolerance
    iterations = usual_iterations if iterations is None else iterations
    where = (tables.data, tables.num_ranks, tables.num_slots)
    return LpSplit(
        *call(_plan_lp, loads, *where, speeds, base, dtype == torch.float64, tolerance, iterations)
    )
