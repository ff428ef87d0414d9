"""Routed experts: count, replica_tables, plan_exact, share, route, route_sampled; wrappers and fakes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.replica_tables import ReplicaTables

UNLIMITED = 2**31 - 1
Order = Literal["locality", "rank_major"]
Prefer = Literal["visited"]
Objective = Literal["spread", "local", "packed"]
OBJECTIVES = ("spread", "local", "packed")  # the op's numbers

_count, _replica_tables, _plan_exact = (
    library.count.default,
    library.replica_tables.default,
    library.plan_exact.default,
)
_share, _share_by_rank = library.share.default, library.share_by_rank.default
_route, _route_sampled = library.route.default, library.route_sampled.default


def count(topk_ids: Tensor, num_experts: int) -> Tensor:
    """How many copies go to each logical expert.

    Args:
        topk_ids: any shape (usually [T, K]), int32 or int64; -1 = masked, not counted.
        num_experts: E.

    Returns:
        [E] int32.
    """
    counts: Tensor = call(_count, topk_ids, num_experts)
    return counts


def replica_tables(
    slot_to_expert: Tensor, num_ranks: int, num_experts: int, out: ReplicaTables | None = None
) -> ReplicaTables:
    """Derives the tables that planners and routers read from a placement.

    Args:
        slot_to_expert: [P] or [L, P] int32; -1 = empty. Ids outside -1..E-1 behave as -1.
        num_ranks: R, divides P.
        num_experts: E.
        out: refreshed in place if given (same shape), so that captured graphs keep their pointers.
    """
    if slot_to_expert.dim() not in (1, 2):
        raise ValueError(f"slot_to_expert must be [P] or [L, P], got {list(slot_to_expert.shape)}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1, got {num_experts}")
    slots = slot_to_expert.shape[-1]
    if out is not None and (out.num_ranks, out.num_experts, out.num_slots) != (num_ranks, num_experts, slots):
        raise ValueError(
            f"out must be tables of {num_experts} experts in {slots} slots on {num_ranks} ranks, got "
            f"{out.num_experts} in {out.num_slots} on {out.num_ranks}"
        )
    if out is None:
        size = ReplicaTables.size(num_experts, slots)
        data = slot_to_expert.new_empty((*slot_to_expert.shape[:-1], size), dtype=torch.int32)
        out = ReplicaTables(data, num_ranks, num_experts, slots)
    call(_replica_tables, slot_to_expert, num_ranks, num_experts, out.data)
    return out


class ExactSplit(NamedTuple):
    """What :func:`plan_exact` returns, with the leading dimension of the tables.

    quota [P] int32 copies per slot; peak [] int64 largest rank cost; bound [] int64 proved lower bound over all
    integer quotas; telemetry [4] int32: sweeps, augmentations, Newton steps, 1 if the budget ended the solve.
    Costs are copies, or ticks if ticks were given.
    """

    quota: Tensor
    peak: Tensor
    bound: Tensor
    telemetry: Tensor


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
) -> ExactSplit:
    """Splits every replicated expert's copies so that the busiest rank's cost is the least integers allow.

    Over-relaxed balancing sweeps, then shortest augmenting paths on ranks towards a Newton target; ends with
    ``peak == bound`` unless a tolerance or a budget ends it earlier. Generalises LPLB (papers/001) to integers.
    Of the many splits with this peak, objective chooses one.

    Args:
        loads: [E] or [R, E] int32 copies (with a leading L if the tables have one); sources are summed.
            [R, E] for objective "local".
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
        ranks_per_node: divides R; None = R. For "local".
        sweeps: most balancing sweeps; None = 4 for "spread", 0 for the others, whose start sweeps would undo.
    """
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, got {objective!r}")
    if not 0 <= tolerance <= 1000:
        raise ValueError(f"tolerance must be in 0..1000 (relative), got {tolerance}")
    if budget is not None and budget < 0:
        raise ValueError(f"budget must be at least 0, got {budget}")
    result = call(
        _plan_exact,
        loads,
        tables.data,
        tables.num_ranks,
        tables.num_slots,
        fixed,
        ticks,
        pour,
        OBJECTIVES.index(objective),
        tables.num_ranks if ranks_per_node is None else ranks_per_node,
        round(tolerance * 1_000_000),
        (4 if objective == "spread" else 0) if sweeps is None else sweeps,
        UNLIMITED if budget is None else min(budget, UNLIMITED),
    )
    return ExactSplit(*result)


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
    row: Tensor = call(
        _share,
        loads,
        quota,
        tables.data,
        ranks_per_node,
        -1 if rank is None else rank,
        order == "locality",
    )
    return row


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
    copies: Tensor = call(_share_by_rank, loads, quota, tables.data, ranks_per_node, order == "locality")
    return copies


def check_share(loads: Tensor, tables: ReplicaTables, order: Order) -> None:
    if order not in ("locality", "rank_major"):
        raise ValueError(f"order must be locality or rank_major, got {order!r}")
    if loads.shape[-2:] != (tables.num_ranks, tables.num_experts):
        raise ValueError(
            f"loads must be per source rank, [..., {tables.num_ranks}, {tables.num_experts}], "
            f"got {list(loads.shape)}"
        )


def route(topk_ids: Tensor, share_row: Tensor, tables: ReplicaTables, prefer: Prefer | None = None) -> Tensor:
    """The slot of every copy on this rank, exactly as often as the rank's share says.

    Stable: the i-th copy of an expert (token order) goes to the first replica whose cumulative share exceeds i.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts; -1 = masked.
        share_row: [P] int32, this rank's row of :func:`share`.
        tables: of this layer.
        prefer: "visited" permutes copies inside the same share so that more of a token's copies meet on one rank.

    Returns:
        [T, K] slots in the dtype of topk_ids; -1 where topk_ids is -1. DeepEP's ``topk_idx``.
    """
    if prefer not in (None, "visited"):
        raise ValueError(f"prefer must be None or visited, got {prefer!r}")
    slots: Tensor = call(
        _route,
        topk_ids,
        share_row,
        tables.data,
        tables.num_experts,
        prefer is not None,
    )
    return slots


def route_sampled(topk_ids: Tensor, weights: Tensor, tables: ReplicaTables, seed: int) -> Tensor:
    """Draws a replica for every copy, independently, with probability proportional to its weight.

    The published realisation of SGLang's ``dynamic`` and ``lp``. Counter based: copy i of the flattened topk_ids
    uses word i of the stream ``seed``, so the draw is the same on every device.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts; -1 = masked.
        weights: [P] float32, not negative, positive for a replica of every routed expert.
        tables: of this layer.
        seed: 64-bit.

    Returns:
        [T, K] slots in the dtype of topk_ids.
    """
    seed = (seed + 2**63) % 2**64 - 2**63
    slots: Tensor = call(_route_sampled, topk_ids, weights, tables.data, tables.num_experts, seed)
    return slots


@torch.library.register_fake("isoload::count")
def _(topk_ids: Tensor, num_experts: int) -> Tensor:
    return topk_ids.new_empty((num_experts,), dtype=torch.int32)


@torch.library.register_fake("isoload::replica_tables")
def _(slot_to_expert: Tensor, num_ranks: int, num_experts: int, tables: Tensor) -> None:
    return None


@torch.library.register_fake("isoload::plan_exact")
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch = tables.shape[:-1]
    return (
        loads.new_empty((*batch, num_slots)),
        loads.new_empty(batch, dtype=torch.int64),
        loads.new_empty(batch, dtype=torch.int64),
        loads.new_empty((*batch, 4)),
    )


@torch.library.register_fake("isoload::share")
def _(loads: Tensor, quota: Tensor, tables: Tensor, ranks_per_node: int, rank: int, locality: bool) -> Tensor:
    return loads.new_empty((*loads.shape[: -2 if rank >= 0 else -1], quota.shape[-1]))


@torch.library.register_fake("isoload::share_by_rank")
def _(loads: Tensor, quota: Tensor, tables: Tensor, ranks_per_node: int, locality: bool) -> Tensor:
    return loads.new_empty((*loads.shape[:-1], loads.shape[-2]))


@torch.library.register_fake("isoload::route")
def _(topk_ids: Tensor, share_row: Tensor, tables: Tensor, num_experts: int, prefer_visited: bool) -> Tensor:
    return torch.empty_like(topk_ids)


@torch.library.register_fake("isoload::route_sampled")
def _(topk_ids: Tensor, weights: Tensor, tables: Tensor, num_experts: int, seed: int) -> Tensor:
    return torch.empty_like(topk_ids)
