"""balance_same: in one op the slots, loads and split of count, plan_exact and route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.ops.tables import ReplicaTables
from support.cases import draw

CASES = [
    (1, "random"),
    (3, "eplb"),
    (8, "duplicates"),
    (12, "empty_slots"),
    (16, "spare_slots"),
    (31, "ring"),
]


def draw_batch(
    ranks: int, family: str, tokens: int, top_k: int, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ReplicaTables]:
    """Skewed ids [T, K], some masked and some twice in a token, and tables."""
    case, rng = draw(family, ranks, seed=tokens), np.random.default_rng([ranks, tokens, top_k])
    held = np.unique(case.slot_to_expert[case.slot_to_expert >= 0])
    chosen = held[np.minimum(rng.zipf(1.4, (tokens, top_k)), len(held)) - 1]
    return torch.from_numpy(np.where(rng.random(chosen.shape) < 0.1, -1, chosen)).to(dtype), case.tables()


@pytest.mark.parametrize("objective", ["spread", "local"])
@pytest.mark.parametrize(("ranks", "family"), CASES)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 4), (1, 1), (64, 8), (700, 5)])
def test_equals_three_ops_and_the_reference(
    tokens: int, top_k: int, ranks: int, family: str, objective: Any
) -> None:
    dtype = torch.int32 if tokens % 5 else torch.int64
    ids, tables = draw_batch(ranks, family, tokens, top_k, dtype)
    how: dict[str, Any] = {"objective": objective, "ranks_per_node": 1 if ranks % 2 else ranks // 2}
    if tokens % 2:
        how["ticks"] = torch.arange(ranks, dtype=torch.int32) * 37 % 400 + 900
    slots, loads, split = ops.balance_same(ids, tables, **how)
    counted = ops.count(ids, tables.num_experts)
    others = torch.zeros(ranks - 1, tables.num_experts, dtype=torch.int32)
    assert torch.equal(loads, torch.cat([counted.counts[None], others]))
    expected = ops.plan_exact(loads, tables, rank=0, **how)
    assert all(torch.equal(a, b) for a, b in zip(split, expected, strict=True))
    assert slots.dtype == dtype and torch.equal(slots, ops.route(counted, expected.send_counts, tables))
    if tokens < 700:
        plain = reference.balance_same(ids, tables, **how)
        assert torch.equal(slots, plain[0]) and torch.equal(loads, plain[1])
        assert torch.equal(split.quota, plain[2].quota)
