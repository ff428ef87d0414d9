"""route, route_sampled: the slot of every copy on this rank; wrappers and fakes."""

from __future__ import annotations

from torch import Tensor

from isoload.ops.library import call, like, op
from isoload.ops.results import Counted, SharedColumns
from isoload.ops.tables import ReplicaTables

NO_COLUMNS = SharedColumns(0, 0, 0)

_route = op("route", lambda a: like(a.topk_ids))
_route_sampled = op("route_sampled", lambda a: like(a.topk_ids))


def route(
    counted: Counted,
    send_counts: Tensor,
    tables: ReplicaTables,
    shared: SharedColumns | None = None,
) -> Tensor:
    """The slot of every copy on this rank, exactly as often as the rank's send_counts say.

    Stable: the i-th copy of an expert (token order) goes to the first replica whose cumulative count exceeds i.

    Args:
        counted: :func:`count` of this rank's ids [T, K].
        send_counts: [P] int32, this rank's row of :func:`share`.
        tables: of this layer's routed experts.
        shared: the last columns are the shared experts', E and on, or -1 where all routed choices are; and where this
            rank's copies of them go, as :func:`route_shared` has it.

    Returns:
        [T, K] slots in the dtype of the ids; -1 where they are -1. DeepEP's ``topk_idx``.
    """
    num_shared, first_shared, home, row, strict = NO_COLUMNS if shared is None else shared
    columns = (row, num_shared, first_shared, home, strict)
    where = (send_counts, tables.data, tables.num_experts, tables.num_ranks)
    return call(_route, counted.ids, counted.numbers, counted.parts, *where, *columns)


def route_sampled(
    topk_ids: Tensor,
    weights: Tensor,
    tables: ReplicaTables,
    seed: int,
    step: Tensor | None = None,
    rank: int = 0,
) -> Tensor:
    """Draws a replica for every copy, independently, with probability proportional to its weight.

    The published realisation of SGLang's ``dynamic`` and ``lp``. Counter based: copy i of the flattened topk_ids
    uses word i of the stream ``seed``, so the draw is the same on every device.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts; -1 = masked.
        weights: [P] float32, not negative, positive for a replica of every routed expert.
        tables: of this layer.
        seed: 64-bit.
        step: [1] or [] int64 on the device of topk_ids: the batch's number, read when the kernel runs, as a captured
            graph needs it. The stream is then that of seed, step and rank, as isoload.policies.sample_seed mixes them
            on the host. None: seed alone.
        rank: this rank; read with step only.

    Returns:
        [T, K] slots in the dtype of topk_ids.
    """
    seed = (seed + 2**63) % 2**64 - 2**63
    return call(_route_sampled, topk_ids, weights, tables.data, tables.num_experts, seed, step, rank)
