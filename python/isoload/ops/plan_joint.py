"""plan_joint: routed and shared experts decided together, and a source rank's send_counts; wrapper and fake."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload.ops.library import call, ints, op
from isoload.ops.planning import Objective, fake_split, split_options
from isoload.ops.results import JointSplit
from isoload.ops.tables import ReplicaTables


def _fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch = a.tables.shape[:-1]
    share = ints(a.loads, *batch, a.num_ranks, a.num_ranks)
    return *fake_split(a, a.loads), ints(a.loads, *batch, a.num_slots), share


_plan_joint = op("plan_joint", _fake)


def plan_joint(
    loads: Tensor,
    tables: ReplicaTables,
    rank: int,
    num_shared: int,
    first_shared: int,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    ticks: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
) -> JointSplit:
    """The exact split of the routed experts that leaves room for the shared copies, and those poured over it.

    By one kernel, with their bits: :func:`plan_exact` whose ``pour`` is all shared copies, :func:`share_by_rank`,
    :func:`plan_waterfill` with candidates "all", and :func:`share` of one source rank in the order "locality".
    Without sweeps and budget the routed copies are spread evenly, and peak is the least beside that.

    Args:
        loads: [R, E + n] or [L, R, E + n] int32 copies per source rank. The last n columns are those of the shared
            experts, each of which every token needs: the first of them is read.
        tables: of the routed experts.
        rank: the source rank whose send_counts are wanted.
        num_shared: n, 1..1024; every rank holds all of them.
        first_shared: place of the first one among a rank's slots, 0..S-n.
        ranks_per_node: divides R; None = R.
        tolerance, budget, ticks, objective, sweeps: as in :func:`plan_exact`.
    """
    options = split_options(tables, tolerance, budget, objective, ranks_per_node, sweeps)
    where = (tables.data, tables.num_ranks, tables.num_slots)
    return JointSplit(*call(_plan_joint, loads, *where, num_shared, first_shared, ticks, *options, rank))
