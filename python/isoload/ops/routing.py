"""Ops that divide a plan among source ranks (share) and choose the slot of every token copy (route)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from isoload.ops.library import call, ints, like, op
from isoload.ops.planning import Objective, fake_split, split_options
from isoload.ops.results import Counted, ExactSplit, SharedColumns
from isoload.ops.tables import ReplicaTables

Order = Literal["locality", "rank_major"]

_share = op("share")(lambda a: ints(a.loads, *a.loads.shape[: -2 if a.rank >= 0 else -1], a.quota.shape[-1]))
_share_by_rank = op("share_by_rank")(lambda a: ints(a.loads, *a.loads.shape[:-1], a.loads.shape[-2]))


def share(
    loads: Tensor,
    quota: Tensor,
    tables: ReplicaTables,
    ranks_per_node: int,
    rank: int | None = None,
    order: Order = "locality",
) -> Tensor:
    """Return how many copies each source rank sends to each slot, so that over all ranks slot p gets quota[p].

    The result is [P] int32 for one rank, [R, P] for all (leading L as the loads).

    Args:
        loads: [R, E] or [L, R, E] int32 copies per source rank; for every expert their sum is its quotas' sum.
        quota: [P] or [L, P] int32.
        tables: of the same layers.
        ranks_per_node: divides R.
        rank: one source rank, or None for all.
        order: "locality" matches own rank, own node, then all ranks (the most local copies that this quota permits);
            "rank_major" gives each replica one range of the expert's copies in source order.
    """
    check_share(loads, tables, order)
    if rank is not None and rank < 0:
        raise ValueError(f"rank must be in 0..{tables.num_ranks - 1}, got {rank}")
    source, locality = -1 if rank is None else rank, order == "locality"
    return call(_share, loads, quota, tables.data, ranks_per_node, source, locality)


def share_by_rank(
    loads: Tensor, quota: Tensor, tables: ReplicaTables, ranks_per_node: int, order: Order = "locality"
) -> Tensor:
    """Return how many copies each source rank sends to each rank: the sums of :func:`share` per rank.

    The result is [R, R] int32, source by destination (leading L as the loads).

    Args:
        loads, quota, tables, ranks_per_node, order: as in :func:`share`.
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


NO_COLUMNS = SharedColumns(0, 0, 0)

_route = op("route")(lambda a: like(a.topk_ids))
_route_sampled = op("route_sampled")(lambda a: like(a.topk_ids))


def route(
    counted: Counted, send_counts: Tensor, tables: ReplicaTables, shared: SharedColumns | None = None
) -> Tensor:
    """Choose the slot of every copy on this rank, each slot exactly as often as send_counts states.

    The result [T, K] has the dtype of the ids, -1 where they are -1: DeepEP's ``topk_idx``. The i-th copy of an expert
    (token order) goes to the first replica whose cumulative count exceeds i.

    Args:
        counted: :func:`count` of this rank's ids [T, K].
        send_counts: [P] int32, this rank's row of :func:`share`.
        tables: of this layer's routed experts.
        shared: the last columns, of the shared experts (ids E and on, or -1 where all routed choices are -1), and the
            ranks of this rank's shared copies, chosen as :func:`route_shared` does.
    """
    num_shared, first_shared, home, row = NO_COLUMNS if shared is None else shared
    columns = (row, num_shared, first_shared, home)
    layout = (send_counts, tables.data, tables.num_experts, tables.num_ranks)
    return call(_route, counted.ids, counted.numbers, counted.parts, *layout, *columns)


def route_sampled(
    topk_ids: Tensor,
    weights: Tensor,
    tables: ReplicaTables,
    seed: int,
    step: Tensor | None = None,
    rank: int = 0,
) -> Tensor:
    """Draw a replica for every copy with probability proportional to its weight: [T, K] slots in the dtype of topk_ids.

    Copy i of the flattened topk_ids uses word i of the stream ``seed``: the same draw on every device.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts; -1 = masked.
        weights: [P] float32, not negative, positive for a replica of every routed expert.
        tables: of this layer.
        seed: 64-bit.
        step: [1] or [] int64 number of the batch on the device, read when the kernel runs: the stream is that of seed,
            step and rank, as isoload.policies.sample_seed mixes them. None: seed alone.
        rank: this rank; read with step only.
    """
    seed = (seed + 2**63) % 2**64 - 2**63
    return call(_route_sampled, topk_ids, weights, tables.data, tables.num_experts, seed, step, rank)


_route_shared = op("route_shared")(lambda a: ints(a.slots, a.slots.shape[0], a.num_shared))


def route_shared(
    slots: Tensor, source_quota: Tensor, slots_per_rank: int, rank: int, num_shared: int = 1
) -> Tensor:
    """Choose the rank of every shared copy on this rank, each rank exactly as often as the rank's share states.

    The result is [T, num_shared] int32; -1 for a token without a slot. Ranks choose among the tokens that visit them,
    those first with the fewest visitors to spare. Remaining tokens stay on this rank up to its share, then fill others.

    Args:
        slots: [T, K] int32 or int64 routed slots of this rank's tokens; -1 = absent.
        source_quota: [R] int32, this rank's row of :func:`plan_waterfill`: num_shared times the tokens with a slot.
        slots_per_rank: S; slot p is on rank p // S.
        rank: this rank, the source of the tokens.
        num_shared: shared experts, 1..1024; each gets its part of every rank's copies.
    """
    return call(_route_shared, slots, source_quota, slots_per_rank, rank, num_shared)


SharedRule = Literal["static", "dynamic", "blog", "blog_all"]

_route_shared_sampled = op("route_shared_sampled")(lambda a: ints(a.slots, a.slots.shape[0], 1))


def route_shared_sampled(
    slots: Tensor,
    load: Tensor,
    tokens: Tensor | None,
    slots_per_rank: int,
    rank: int,
    rule: SharedRule,
    seed: int = 0,
    step: Tensor | None = None,
) -> Tensor:
    """Draw the rank [T, 1] int32 of each token's shared expert as Waterfill was published (papers/001).

    Every rank below a target is drawn in proportion to its slack target - load; the own rank is preferred 11 to 10. If
    no candidate has a weight, the own rank keeps the copy, unless a candidate's load times 11 is below the own rank's
    times 10.

    ========  =====================================  ============================  ==========================
    rule      load of rank r                         target: the mean, up, of      candidates
    ========  =====================================  ============================  ==========================
    static    load, counted on this rank only        loads + sum(load) // K        all
    dynamic   load of all ranks + tokens[r]          loads + sum(load) // K        all if no load is above the
                                                                                   target, else visited + own
    blog      load of all ranks                      loads + sum(tokens)           visited + own
    ========  =====================================  ============================  ==========================

    static and dynamic are SGLang's (PR 19290). With fewer than 64 rows all shared copies stay on the own rank. Row i
    draws ``((i ^ rank * 0x9E3779B9) * 1664525 + 1013904223) mod 2^32 mod total``; with blog, word i of the stream
    ``seed``.

    Args:
        slots: [T, K] int32 or int64 routed slots; -1 = absent. K counts absent copies too.
        load: [R] int32 or int64 routed copies per destination rank: of this rank's tokens (static) or of all.
        tokens: [R] int32 tokens per source rank; may be None for static, which ignores it.
        slots_per_rank: S of the given slots.
        rank: this rank.
        rule: "static", "dynamic", "blog", or "blog_all": blog with all ranks as candidates.
        seed: 64-bit, used by blog and blog_all only.
        step: number of the batch on the device, see :func:`route_sampled`.
    """
    seed = (seed + 2**63) % 2**64 - 2**63
    return call(_route_shared_sampled, slots, load, tokens, slots_per_rank, rank, rule, seed, step)


_balance_own = op("balance_own")(lambda a: (like(a.topk_ids), ints(a.topk_ids, a.num_experts)))


def balance_own(
    topk_ids: Tensor,
    tables: ReplicaTables,
    offset: Tensor,
    source: int,
    *,
    ticks: Tensor | None = None,
    recent: Tensor | None = None,
    sent: Tensor | None = None,
    layer: int = 0,
    sweeps: int = 6,
) -> tuple[Tensor, Tensor]:
    """Run :func:`count`, :func:`plan_own` and :func:`route` in one op; on a GPU in one kernel.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts, each with a replica; -1 = masked.
        tables: of this layer.
        offset, source, ticks, recent, sent, layer, sweeps: see :func:`plan_own`.

    Returns:
        [T, K] slots in the dtype of topk_ids, -1 where masked, and [E] int32 counts.
    """
    layout = (tables.data, tables.num_experts, tables.num_ranks, tables.num_slots)
    return call(_balance_own, topk_ids, *layout, offset, ticks, recent, sent, source, layer, sweeps)


@op("balance_same")
def _balance_same(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return like(a.topk_ids), ints(a.topk_ids, a.num_ranks, a.num_experts), *fake_split(a, a.topk_ids)


def balance_same(
    topk_ids: Tensor,
    tables: ReplicaTables,
    tolerance: float = 0.0,
    budget: int | None = None,
    *,
    ticks: Tensor | None = None,
    objective: Objective = "spread",
    ranks_per_node: int | None = None,
    sweeps: int | None = None,
) -> tuple[Tensor, Tensor, ExactSplit]:
    """Run :func:`count`, :func:`plan_exact` and :func:`route` in one op, with all copies counted as rank 0's.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts, each with a replica; -1 = masked.
        tables: of this layer.
        tolerance, budget, ticks, objective, ranks_per_node, sweeps: see :func:`plan_exact`.

    Returns:
        [T, K] slots in the dtype of topk_ids, the same on every rank; [R, E] int32 loads, all in row 0; the split.
    """
    options = split_options(tables, tolerance, budget, objective, ranks_per_node, sweeps)
    layout = (tables.data, tables.num_experts, tables.num_ranks, tables.num_slots)
    slots, loads, quota, peak, bound, telemetry = call(_balance_same, topk_ids, *layout, ticks, *options)
    return slots, loads, ExactSplit(quota, peak, bound, telemetry, quota)


@op("append_shared_expert")
def _append_shared_expert(a: Any) -> tuple[Tensor, Tensor]:
    shape = (a.slots.shape[0], a.slots.shape[1] + a.ranks.shape[1])
    return a.slots.new_empty(shape), a.weights.new_empty(shape)


def append_shared_expert(
    slots: Tensor,
    weights: Tensor,
    ranks: Tensor,
    routed_per_rank: int,
    slots_per_rank: int | None = None,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Append a column per shared expert, and renumber slots: shared ones follow every rank's routed ones.

    Routed slot p becomes ``p // routed_per_rank * S + p % routed_per_rank``; shared expert j on rank r is slot ``r * S
    + routed_per_rank + j``, SGLang's layout (PR 20089). Absent copies weigh 0; a token without a routed copy has no
    shared copies. For *logical* ids pass slots = logical ids, ranks = 0 and routed_per_rank = E.

    Returns slots and weights [T, K + n] in the dtypes of the arguments.

    Args:
        slots: [T, K] int32 or int64 routed slots, routed_per_rank on every rank; -1 = absent.
        weights: [T, K] float32 or float64 gate weights; may require grad.
        ranks: [T, n] int32, the rank that computes each of the token's n shared experts; -1 = none.
        routed_per_rank: routed slots per rank in the given ids.
        slots_per_rank: S of the returned ids. Default: routed_per_rank + n.
        weight: gate weight of every shared copy: 1 / factor where a model scales the sum by ``routed_scaling_factor``.
    """
    return call(_append_shared_expert, slots, weights, ranks, routed_per_rank, slots_per_rank, weight)


def _save_slots(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _routed_gradient(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (slots,) = ctx.saved_tensors
    routed = gradient[:, : slots.shape[1]].masked_fill(slots < 0, 0)
    return None, routed, None, None, None, None


torch.library.register_autograd("isoload::append_shared_expert", _routed_gradient, setup_context=_save_slots)
