"""plan_exact_share: the exact split, and one source rank's row of its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from isoload.reference.gather_rows import gather_rows
from isoload.reference.plan_exact import plan_exact
from isoload.reference.share import share
from isoload.replica_tables import ReplicaTables
from isoload.results import ExactSplit


def plan_exact_share(
    loads: Tensor, tables: ReplicaTables, rank: int, *arguments: Any, **options: Any
) -> tuple[ExactSplit, Tensor]:
    """:func:`plan_exact` with these arguments and options, then :func:`share` of its quota."""
    split = plan_exact(loads, tables, *arguments, **options)
    per_node = options.get("ranks_per_node") or tables.num_ranks
    return split, share(loads, split.quota, tables, per_node, rank)


def plan_exact_share_gathered(
    rows: Sequence[Tensor], beside: Sequence[Sequence[int]], tables: ReplicaTables, rank: int, **options: Any
) -> tuple[Tensor, Tensor, ExactSplit, Tensor]:
    """:func:`gather_rows`, then :func:`plan_exact_share` of the rows."""
    gathered, told = gather_rows(rows, beside)
    return gathered, told, *plan_exact_share(gathered, tables, rank, **options)
