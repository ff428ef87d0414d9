"""The ops from ids to slots on one rank, the gather left out, and how many nodes they are in a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.ops.tables import ReplicaTables
from support.cases import Case, draw

# By tokens of 8 choices each: kernels, and the memset of count from 1,025 tokens on. test_cuda_on_simt.py counts both.
NODES = {1: 4, 4096: 5}


def draw_batch(case: Case, rng: np.random.Generator, tokens: int) -> tuple[Tensor, Tensor]:
    """ids [T, 8] of rank 0, masked ones among them, and what the other ranks count."""
    ids = torch.from_numpy(rng.integers(-1, case.num_experts, (tokens, 8)))
    others = rng.integers(0, 900, (case.num_ranks - 1, case.num_experts)).astype(np.int32)
    return ids, torch.from_numpy(others)


@functools.cache
def chain(tokens: int, device: str = "cpu") -> Callable[[], Tensor]:
    """count, plan_exact, share and route of a drawn batch."""
    case, rng = draw("eplb", 16, 9), np.random.default_rng(tokens)
    of = case.tables()
    tables = ReplicaTables(of.data.to(device), of.num_ranks, of.num_experts, of.num_slots)
    ids, others = draw_batch(case, rng, tokens)
    counts = ops.count(ids, case.num_experts).counts
    ids, loads = ids.to(device), torch.cat([counts[None], others]).to(device)

    def run() -> Tensor:
        counted = ops.count(ids, case.num_experts)
        quota = ops.plan_exact(loads, tables).quota
        return ops.route(counted, ops.share(loads, quota, tables, 8, 0), tables)

    return run
