"""Workloads: made routing whose imbalance is known to the copy, for tests, benches and demos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from workloads.base import Workload
from workloads.concentrated import Concentrated
from workloads.hot import (
    Balanced,
    Burst,
    HotExperts,
    HotRank,
    RaggedSource,
    RotatingHotspot,
    Spread,
    ZeroExpertRank,
)
from workloads.skewed import Drift, Lognormal, MaxVio, Zipf

_CLASSES: tuple[type[Workload], ...] = (
    Balanced,
    HotExperts,
    HotRank,
    Spread,
    RaggedSource,
    ZeroExpertRank,
    RotatingHotspot,
    Burst,
    Zipf,
    Drift,
    Lognormal,
    MaxVio,
    Concentrated,
)
WORKLOADS: dict[str, type[Workload]] = {workload.name: workload for workload in _CLASSES}
W0_TO_W7 = tuple(WORKLOADS)[:8]


def make_workload(
    name: str,
    *,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    tokens_per_rank: int | Sequence[int],
    seed: int = 0,
    **options: Any,
) -> Workload:
    """A workload by name: ``make_workload("hot_rank", ..., heat=3).topk_ids(step)[rank]`` is [T_r, K] int64.

    Args:
        name: a name in ``WORKLOADS``.
        num_ranks: R source ranks.
        num_experts: E.
        top_k: K distinct experts per token.
        tokens_per_rank: T, or T_r of every rank; 0 is allowed.
        seed: of everything that is drawn.
        **options: the workload's own, see its class.

    Raises:
        ValueError: naming the argument, the rule and the value; also for an imbalance that tokens of K distinct
            experts cannot have.
    """
    if name not in WORKLOADS:
        raise ValueError(f"name must be one of {', '.join(WORKLOADS)}, got {name!r}")
    shape = {f.name for f in fields(Workload)}
    known = [f.name for f in fields(WORKLOADS[name]) if f.name not in shape]
    if unknown := [key for key in options if key not in known]:
        raise ValueError(
            f"option must be one of {', '.join(known) or '(none)'} for workload {name}, got {unknown[0]!r}"
        )
    return WORKLOADS[name](
        num_ranks=num_ranks,
        num_experts=num_experts,
        top_k=top_k,
        tokens_per_rank=tokens_per_rank,
        seed=seed,
        **options,
    )


__all__ = ["W0_TO_W7", "WORKLOADS", "Workload", "make_workload"]
