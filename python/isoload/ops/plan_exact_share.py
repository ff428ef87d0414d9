"""plan_exact_share: the exact split and one source rank's row of its share, together; wrapper and fake."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.ops.plan_exact import Objective, arguments, fake_split
from isoload.ops.share import check_share
from isoload.replica_tables import ReplicaTables
from isoload.results import ExactSplit

_plan_exact_share = library.plan_exact_share.default


def plan_exact_share(
    loads: Tensor,
    tables: ReplicaTables,
    rank: int,
    fixed: Tensor | None = None,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    ticks: Tensor | None = None,
    pour: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
) -> tuple[ExactSplit, Tensor]:
    """:func:`plan_exact`, and of its quota what :func:`share` gives one source rank in the order "locality".

    Args:
        loads: [R, E] or [L, R, E] int32 copies per source rank.
        rank: the source rank whose row is wanted.
        ranks_per_node: divides R; None = R. Of the share's nodes, and of objective "local".
        tables, fixed, tolerance, budget, ticks, pour, objective, sweeps: as in :func:`plan_exact`.

    Returns:
        The split, and the row [P] int32 (with a leading L as the split's fields).
    """
    check_share(loads, tables, "locality")
    given = arguments(loads, tables, fixed, tolerance, budget, ticks, pour, objective, ranks_per_node, sweeps)
    *split, row = call(_plan_exact_share, *given, rank)
    return ExactSplit(*split), row


@torch.library.register_fake("isoload::plan_exact_share")
def _(
    loads: Tensor,
    tables: Tensor,
    num_ranks: int,
    num_slots: int,
    fixed: Tensor | None,
    ticks: Tensor | None,
    pour: Tensor | None,
    objective: int,
    ranks_per_node: int,
    tolerance_ppm: int,
    sweeps: int,
    budget: int,
    rank: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    row = loads.new_empty((*tables.shape[:-1], num_slots))
    return *fake_split(loads, tables, num_slots), row
