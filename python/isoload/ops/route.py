"""route, route_sampled: the slot of every copy on this rank; wrappers and fakes."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from isoload.ops.library import call, library
from isoload.replica_tables import ReplicaTables

Prefer = Literal["visited"]

_route, _route_sampled = library.route.default, library.route_sampled.default


def route(
    topk_ids: Tensor, source_quota: Tensor, tables: ReplicaTables, prefer: Prefer | None = None
) -> Tensor:
    """The slot of every copy on this rank, exactly as often as the rank's share says.

    Stable: the i-th copy of an expert (token order) goes to the first replica whose cumulative share exceeds i.

    Args:
        topk_ids: [T, K] int32 or int64 logical experts; -1 = masked.
        source_quota: [P] int32, this rank's row of :func:`share`.
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
        source_quota,
        tables.data,
        tables.num_experts,
        prefer is not None,
    )
    return slots


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
    slots: Tensor = call(_route_sampled, topk_ids, weights, tables.data, tables.num_experts, seed, step, rank)
    return slots


@torch.library.register_fake("isoload::route")
def _(
    topk_ids: Tensor, source_quota: Tensor, tables: Tensor, num_experts: int, prefer_visited: bool
) -> Tensor:
    return torch.empty_like(topk_ids)


@torch.library.register_fake("isoload::route_sampled")
def _(
    topk_ids: Tensor,
    weights: Tensor,
    tables: Tensor,
    num_experts: int,
    seed: int,
    step: Tensor | None,
    rank: int,
) -> Tensor:
    return torch.empty_like(topk_ids)
