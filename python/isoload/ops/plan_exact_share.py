"""plan_exact_share: the exact split and one source rank's row of its share, together; wrappers and fakes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.ops.plan_exact import Objective, arguments, fake_split
from isoload.ops.share import check_share
from isoload.replica_tables import ReplicaTables
from isoload.results import ExactSplit

_plan_exact_share = library.plan_exact_share.default
_gathered = library.plan_exact_share_gathered.default


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


def plan_exact_share_gathered(
    row: Tensor,
    boards: Tensor,
    board: Tensor,
    rank: int,
    tables: ReplicaTables,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    beside: Sequence[int] = (),
    timeout: float = 60.0,
    ticks: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
) -> tuple[Tensor, Tensor, ExactSplit, Tensor]:
    """:func:`gather_rows`, and :func:`plan_exact_share` of the rows for this rank; on CUDA mostly by one kernel.

    Two kernels where ranks have ticks, with another objective than "spread", or with more than 64 ranks. All ranks call
    it together, or :func:`gather_rows` with the same board.

    Args:
        row: [E] int32 copies of this rank.
        tables: of one layer.
        boards, board, rank, beside, timeout: as in :func:`gather_rows`.
        tolerance, budget, ticks, objective, ranks_per_node, sweeps: as in :func:`plan_exact_share`.

    Returns:
        [R, E] and [R, F] as of :func:`gather_rows`; the split, and the row [P] int32 of this rank's share.

    Raises:
        RuntimeError: on the CPU, naming the rank that was late.
    """
    _, data, _, num_slots, _, _, _, *options = arguments(
        row, tables, None, tolerance, budget, ticks, None, objective, ranks_per_node, sweeps
    )
    patience = round(timeout * 1000)
    rows, told, *split, share = call(
        _gathered, row, list(beside), boards, board, rank, patience, data, num_slots, ticks, *options
    )
    return rows, told, ExactSplit(*split), share


@torch.library.register_fake("isoload::plan_exact_share_gathered")
def _(
    row: Tensor,
    beside: list[int],
    boards: Tensor,
    board: Tensor,
    rank: int,
    timeout_ms: int,
    tables: Tensor,
    num_slots: int,
    ticks: Tensor | None,
    objective: int,
    ranks_per_node: int,
    tolerance_ppm: int,
    sweeps: int,
    budget: int,
) -> tuple[Tensor, ...]:
    ranks = boards.shape[0]
    gathered = row.new_empty(ranks, row.shape[0]), row.new_empty(ranks, len(beside))
    return *gathered, *fake_split(row, tables, num_slots), row.new_empty(num_slots)
