"""plan_exact: the split with the least largest rank cost that integers allow; wrapper and fake."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from isoload.ops.library import call, ints, longs, op
from isoload.ops.results import ExactSplit
from isoload.ops.tables import ReplicaTables
from isoload.wording import not_one_of

UNLIMITED = 2**31 - 1
Objective = Literal["spread", "local", "packed"]
OBJECTIVES = ("spread", "local", "packed")  # the op's numbers


def fake_split(a: Any, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An op's quota, peak, bound and telemetry, as shapes."""
    batch = a.tables.shape[:-1]
    return ints(like, *batch, a.num_slots), longs(like, *batch), longs(like, *batch), ints(like, *batch, 4)


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sent = 0 if a.rank is None else a.num_slots
    return *fake_split(a, a.loads), ints(a.loads, *a.tables.shape[:-1], sent)


_plan_exact = op("plan_exact", _fake)


def plan_exact(
    loads: Tensor,
    tables: ReplicaTables,
    fixed: Tensor | None = None,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    ticks: Tensor | None = None,
    pour: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
    rank: int | None = None,
) -> ExactSplit:
    """Splits every replicated expert's copies so that the busiest rank's cost is the least integers allow.

    Over-relaxed balancing sweeps, then shortest augmenting paths on ranks towards a Newton target; ends with
    ``peak == bound`` unless a tolerance or a budget ends it earlier. Generalises LPLB (papers/001) to integers.
    Of the many splits with this peak, objective chooses one.

    Args:
        loads: [E] or [R, E] int32 copies (with a leading L if the tables have one); sources are summed.
            [R, E] for objective "local" and for a rank.
        tables: of the same layers.
        fixed: [R] int32 copies that each rank carries besides (leading L as above).
        tolerance: stop at ``bound * (1 + tolerance)``; 0 = exact.
        budget: most augmentations; None = as many as it takes.
            A smaller budget may leave a higher peak; the bound stays true.
        ticks: [R] int32 cost of one copy per rank, 1..2^20 (1024 = nominal); None = 1 each.
        pour: [] int32 copies (leading L as above) that will be poured over the ranks afterwards, each on any rank:
            those of shared experts. peak and bound are then those of both together, and the split stops where
            pouring decides: at the level at which all ranks together have room for every copy.
        objective: "spread" levels the other ranks too; "local" keeps copies on their source rank, else its node;
            "packed" leaves replicas idle, so that fewer weights are read. By the start of the solve: no optimum of
            these, only near it.
        ranks_per_node: divides R; None = R. Of the nodes of "local" and of send_counts.
        sweeps: most balancing sweeps; None = 4 for "spread", 0 for the others, whose start sweeps would undo.
        rank: the source rank whose send_counts are wanted; None = nobody's.
    """
    options = split_options(tables, tolerance, budget, objective, ranks_per_node, sweeps)
    where = (tables.data, tables.num_ranks, tables.num_slots)
    return ExactSplit(*call(_plan_exact, loads, *where, fixed, ticks, pour, *options, rank))


def split_options(
    tables: ReplicaTables,
    tolerance: float,
    budget: int | None,
    objective: Objective,
    ranks_per_node: int | None,
    sweeps: int | None,
) -> tuple[int, int, int, int, int]:
    """The op's objective, ranks_per_node, tolerance_ppm, sweeps and budget."""
    if objective not in OBJECTIVES:
        raise ValueError(not_one_of("objective", OBJECTIVES, objective))
    if not 0 <= tolerance <= 1000:
        raise ValueError(f"tolerance must be in 0..1000 (relative), got {tolerance}")
    if budget is not None and budget < 0:
        raise ValueError(f"budget must be at least 0, got {budget}")
    return (
        OBJECTIVES.index(objective),
        tables.num_ranks if ranks_per_node is None else ranks_per_node,
        round(tolerance * 1_000_000),
        (4 if objective == "spread" else 0) if sweeps is None else sweeps,
        UNLIMITED if budget is None else min(budget, UNLIMITED),
    )
