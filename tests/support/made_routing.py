"""The benches' workloads by shape (R, E, K, tokens per rank), and what tests ask of their tokens."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from workloads import W0_TO_W7, make_workload

__all__ = ["W0_TO_W7", "all_ids", "close", "make", "make_workload", "total_tokens"]


def make(name, shape, **options):
    ranks, experts, top_k, tokens = shape
    return make_workload(
        name, num_ranks=ranks, num_experts=experts, top_k=top_k, tokens_per_rank=tokens, **options
    )


def total_tokens(shape):
    return shape[0] * shape[3] if isinstance(shape[3], int) else sum(shape[3])


def all_ids(workload, step):
    return torch.cat(workload.topk_ids(step)).numpy()


def close(loads, parts, error=1.0):
    """Every load is within `error` of its part, exactly."""
    return all(abs(int(n) - part) < error for n, part in zip(loads, parts, strict=True))
