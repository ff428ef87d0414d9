"""round_split: conserves every expert, stays within a copy of the split, equals its reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from support.cases import Case, instances
from support.exact_splits import SLOTS, int32, strided
from support.relaxed_layers import layers, reals

DTYPES = (torch.float32, torch.float64)
TABLES = ops.replica_tables(SLOTS, 4, 4)  # experts 0, 1, 2 in two slots each, 3 on one rank


def check_quota(case: Case, split: Tensor, quota: Tensor) -> None:
    """Experts are conserved; at most a copy from the split, as far as float32 tells one copy from another."""
    held, copies = case.slot_to_expert, quota.numpy().astype(np.int64)
    per_expert = np.zeros(case.num_experts, dtype=np.int64)
    np.add.at(per_expert, held[held >= 0], copies[held >= 0])
    assert np.array_equal(per_expert, case.expert_loads()), case.name
    assert (copies >= 0).all() and not copies[held < 0].any(), case.name
    off = np.abs(copies - split.double().numpy())
    slack = torch.finfo(split.dtype).eps * case.num_ranks * case.expert_loads().max()
    assert off.max() <= 1 + slack, case.name


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounds_the_split_of_plan_lp(dtype: torch.dtype) -> None:
    for case in instances(3, seed=3000, max_ranks=72):
        loads = torch.from_numpy(case.loads)
        lp = ops.plan_lp(loads, case.tables(), dtype=dtype)
        quota = ops.round_split(lp.split, loads, case.tables())
        check_quota(case, lp.split, quota)
        parts = (case.tables().field("split").view(case.num_ranks, -1) >= 0).sum(1)
        peak = quota.view(case.num_ranks, -1).sum(1, dtype=torch.int64)
        if case.total < 2**20:  # a float32 knows its copies
            assert (peak <= lp.primal * (1 + 1e-5) + parts).all(), case.name
        assert torch.equal(quota, reference.round_split(lp.split, loads, case.tables())), case.name


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_reference_on_splits_that_are_off(dtype: torch.dtype) -> None:
    """Off by a thousandth, which no rounding explains, it still conserves and gives the same bits."""
    rng = np.random.default_rng(11)
    for case in instances(2, seed=3100, max_ranks=32):
        loads = torch.from_numpy(case.loads)
        split = ops.plan_lp(loads, case.tables(), dtype=dtype, iterations=2).split
        split = split * torch.from_numpy(rng.uniform(0.9995, 1.0005, len(split))).to(dtype)
        quota = ops.round_split(split, loads, case.tables())
        assert torch.equal(quota, reference.round_split(split, loads, case.tables())), case.name
        held = case.slot_to_expert
        per_expert = np.bincount(held[held >= 0], quota.numpy()[held >= 0], case.num_experts)
        assert np.array_equal(per_expert, case.expert_loads()), case.name


# Loads of experts 0, 1, 2 and 3; splits of slots 0 and 5, 1 and 2, 3 and 4, 6; quotas. Slot 7 doubles slot 6.
BY_HAND: dict[str, tuple[list[int], list[float], list[int]]] = {
    "whole": ([5, 3, 2, 1], [2, 1, 2, 2, 0, 3, 1, 0], [2, 1, 2, 2, 0, 3, 1, 0]),
    "largest fraction": ([5, 3, 2, 1], [2.6, 1.4, 1.6, 0.2, 1.8, 2.4, 1, 0], [3, 1, 2, 0, 2, 2, 1, 0]),
    "ties to the lowest slot": ([5, 3, 1, 1], [2.5, 1.5, 1.5, 0.5, 0.5, 2.5, 1, 0], [3, 2, 1, 1, 0, 2, 1, 0]),
    "too little": ([5, 3, 0, 1], [2, 1, 1, 0, 0, 2, 0.5, 0], [3, 2, 1, 0, 0, 2, 1, 0]),
    "too much": ([5, 3, 0, 1], [3, 2, 2, 0, 0, 3, 1.5, 0], [3, 2, 1, 0, 0, 2, 1, 0]),
    "nothing": ([0, 0, 0, 0], [0] * 8, [0] * 8),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    loads, split, quota = BY_HAND[name]
    for rounding in (ops.round_split, reference.round_split):
        assert rounding(reals(*split), int32(*loads), TABLES).tolist() == quota


def test_largest_loads() -> None:
    """2^31 - 1 copies in thirds: float32 is off by tens of copies, of which each replica takes its part."""
    slots = int32(0, 0, 0)
    tables, loads = ops.replica_tables(slots, 3, 1), int32(2**31 - 1)
    for split in (
        torch.full((3,), (2**31 - 1) / 3),
        torch.tensor([2.0**31, 0, 0]),
        torch.tensor([0, 0, 2.0**31]),
    ):
        quota = ops.round_split(split, loads, tables)
        assert quota.sum(dtype=torch.int64) == 2**31 - 1
        assert (quota - split.double()).abs().max() <= 128
        assert torch.equal(quota, reference.round_split(split, loads, tables))


def test_layers_at_once_equal_one_by_one() -> None:
    loads, tables, options = layers(torch.float32)
    split = ops.plan_lp(loads, tables, **options).split
    together = ops.round_split(split, loads, tables)
    assert torch.equal(together, reference.round_split(split, loads, tables))
    for i in range(len(loads)):
        assert torch.equal(together[i], ops.round_split(split[i], loads[i], tables[i]))
    apart = torch.stack([split, torch.full_like(split, torch.nan)], -1)[..., 0]
    assert torch.equal(together, ops.round_split(apart, strided(loads), tables))
