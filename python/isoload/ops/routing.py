"""share, share_by_rank: how many copies each source rank sends to each slot, or rank; wrappers and fakes."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from isoload.ops.library import call, ints, op
from isoload.ops.tables import ReplicaTables

Order = Literal["locality", "rank_major"]

_share = op("share", lambda a: ints(a.loads, *a.loads.shape[: -2 if a.rank >= 0 else -1], a.quota.shape[-1]))
_share_by_rank = op("share_by_rank", lambda a: ints(a.loads, *a.loads.shape[:-1], a.loads.shape[-2]))


def share(
    loads: Tensor,
    quota: Tensor,
    tables: ReplicaTables,
    ranks_per_node: int,
    rank: int | None = None,
    order: Order = "locality",
) -> Tensor:
    """How many copies each source rank sends to each slot, so that over all ranks slot p gets quota[p].

    Args:
        loads: [R, E] or [L, R, E] int32 copies per source rank; for every expert their sum is its quotas' sum.
        quota: [P] or [L, P] int32.
        tables: of the same layers.
        ranks_per_node: divides R.
        rank: one source rank, or None for all.
        order: "locality" matches own rank, own node, then all (the most local and node-local copies this quota
            permits); "rank_major" gives each replica one range of the expert's copies in source order.

    Returns:
        [P] int32 for one rank, [R, P] for all (with a leading L if loads have one).
    """
    check_share(loads, tables, order)
    if rank is not None and rank < 0:
        raise ValueError(f"rank must be in 0..{tables.num_ranks - 1}, got {rank}")
    source, locality = -1 if rank is None else rank, order == "locality"
    return call(_share, loads, quota, tables.data, ranks_per_node, source, locality)


def share_by_rank(
    loads: Tensor,
    quota: Tensor,
    tables: ReplicaTables,
    ranks_per_node: int,
    order: Order = "locality",
) -> Tensor:
    """How many copies each source rank sends to each rank: :func:`share` of all rows, summed over a rank's slots.

    Args:
        loads, quota, tables, ranks_per_node, order: as in :func:`share`.

    Returns:
        [R, R] int32, source by destination (with a leading L if loads have one).
    """
    check_share(loads, tables, order)
    return call(_share_by_rank, loads, quota, tables.data, ranks_per_node, order == "locality")


def check_share(loads: Tensor, tables: ReplicaTables, order: Order) -> None:
    if order not in ("locality", "rank_major"):
        raise ValueError(f"order must be locality or rank_major, got {order!r}")
    if loads.shape[-2:] != (tables.num_ranks, tables.num_experts):
        raise ValueError(
            f"loads must be per source rank, [..., {tables.num_ranks}, {tables.num_experts}], "
            f"got {list(loads.shape)}"
        )
