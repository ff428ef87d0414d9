"""Splits of plan_exact, solved and held to their optimum."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from support.cases import MAX_COPIES, Case
from support.oracles import flow_optimum, lp_optimum

LP_LIMIT = 2**30  # above, only flows are exact


def optimum(case: Case, fixed: np.ndarray | None = None) -> int:
    total = case.total + (0 if fixed is None else int(fixed.sum(dtype=np.int64)))
    oracle = lp_optimum if total < LP_LIMIT else flow_optimum
    return oracle(case.expert_loads(), case.slot_to_expert, case.num_ranks, fixed)


def solve(case: Case, **options: Any) -> ops.ExactSplit:
    return ops.plan_exact(torch.from_numpy(case.loads), case.tables(), **options)


def check_split(
    case: Case, split: ops.ExactSplit, fixed: np.ndarray | None = None, ticks: np.ndarray | None = None
) -> None:
    """Every promise of a split, from the placement alone."""
    quota = split.quota.numpy().astype(np.int64)
    held = case.slot_to_expert
    per_expert = np.zeros(case.num_experts, dtype=np.int64)
    np.add.at(per_expert, held[held >= 0], quota[held >= 0])
    assert np.array_equal(per_expert, case.expert_loads()), f"{case.name}: an expert's copies"
    rows = held.reshape(case.num_ranks, -1)
    later = np.tril(rows[:, :, None] == rows[:, None, :], -1).any(-1).ravel()  # second slots on a rank
    assert not quota[(held < 0) | later].any(), f"{case.name}: copies in a slot that is no replica"
    assert (quota >= 0).all(), f"{case.name}: negative"
    carried = quota.reshape(case.num_ranks, -1).sum(1) + (0 if fixed is None else fixed)
    assert split.peak.item() == (carried * (1 if ticks is None else ticks)).max(), f"{case.name}: peak"
    assert split.bound.item() <= split.peak.item(), f"{case.name}: bound"


def random_fixed(rng: np.random.Generator, case: Case) -> np.ndarray:
    """[R] int32, about as much as the loads, on some of the ranks."""
    most = min((MAX_COPIES - case.total) // case.num_ranks, 2 * case.total // case.num_ranks + 3)
    fixed = rng.integers(0, most + 1, case.num_ranks).astype(np.int32)
    return fixed * rng.integers(0, 2, case.num_ranks).astype(np.int32)


def random_ticks(rng: np.random.Generator, ranks: int) -> np.ndarray:
    """[R] int32: two speeds, about nominal, or anything allowed."""
    low, high = ((1, 3), (900, 1100), (1, 2**20 + 1))[rng.integers(3)]
    return rng.integers(low, high, ranks).astype(np.int32)


def strided(tensor: Tensor) -> Tensor:
    """The same values with gaps between them."""
    wide = torch.full((*tensor.shape, 3), 0x7FFFFFFF, dtype=tensor.dtype)
    wide[..., 1] = tensor
    view = wide[..., 1]
    assert not view.is_contiguous()
    return view


SLOTS = torch.tensor([0, 1, 1, 2, 2, 0, 3, 3], dtype=torch.int32)  # 4 experts on 4 ranks


LOADS = torch.tensor([5, 6, 7, 8], dtype=torch.int32)


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
