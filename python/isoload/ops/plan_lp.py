"""plan_lp: the real-valued split with the least largest rank load; wrapper and fake."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.ops.library import call, ints, op
from isoload.ops.results import LpSplit
from isoload.ops.tables import ReplicaTables

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
    base: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tolerance: float | None = None,
    iterations: int | None = None,
) -> LpSplit:
    """Splits every replicated expert's copies, in real numbers, so that the largest rank load is least.

    The linear program of LPLB (papers/001), by Mehrotra's predictor-corrector method with a dense Cholesky
    factorisation of the normal equations. Every rank and device computes the same bits. All ranks have the
    same speed; :func:`plan_exact` accepts ticks per rank.

    Args:
        loads: [E] or [R, E] int32 copies (with a leading L if the tables have one); sources are summed.
        tables: of the same layers.
        base: [R] of dtype, not negative: copies that each rank carries besides (leading L as above).
        dtype: float32 or float64, of everything real.
        tolerance: relative, 0..1; None = 1e-4 for float32, 1e-8 for float64.
        iterations: most, 0..1000; None = 12 for float32, 20 for float64. 0 gives the start:
            every expert evenly over its replicas.
    """
    if dtype not in LIMITS:
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}")
    usual_tolerance, usual_iterations = LIMITS[dtype]
    tolerance = usual_tolerance if tolerance is None else tolerance
    iterations = usual_iterations if iterations is None else iterations
    where = (tables.data, tables.num_ranks, tables.num_slots)
    return LpSplit(*call(_plan_lp, loads, *where, base, dtype == torch.float64, tolerance, iterations))
