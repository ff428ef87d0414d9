"""balance_same: in one op the slots, loads and split of count, plan_exact and route."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.replica_tables import ReplicaTables
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


@pytest.mark.parametrize("objective", ["spread", "local", "packed"])
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


TABLES = ops.replica_tables(torch.tensor([0, 1, 2, 0], dtype=torch.int32), 4, 4)  # expert 3 has no replica
IDS = torch.tensor([[0, 1], [2, -1]])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"topk_ids": IDS.float()}, "topk_ids must be int32 or int64, got float32"),
    "1-d": ({"topk_ids": IDS[0]}, r"topk_ids must be \[T, K\], got \[2\]"),
    "high": ({"topk_ids": IDS + 2}, "topk_ids must be in -1..3, got 4"),
    "low": ({"topk_ids": IDS.int() - 2}, "topk_ids must be in -1..3, got -2"),
    "no replica": ({"topk_ids": IDS + 1}, "topk_ids must be of experts with a replica, got 3"),
    "tables of layers": (
        {"tables": ReplicaTables(TABLES.data.expand(2, -1), 4, 4, 4)},
        r"tables must be of one layer, got \[2, 32\]",
    ),
    "ticks": ({"ticks": torch.zeros(4, dtype=torch.int32)}, r"ticks must be in 1..2\^20, got 0 for rank 0"),
    "objective": ({"objective": "near"}, "objective must be one of spread, local, packed, got 'near'"),
    "tolerance": ({"tolerance": -1}, r"tolerance must be in 0..1000 \(relative\), got -1"),
    "ranks_per_node": ({"ranks_per_node": 3}, "ranks_per_node must divide 4, got 3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        ops.balance_same(**{"topk_ids": IDS, "tables": TABLES, **REFUSED[name][0]})


def test_opcheck() -> None:
    op = torch.ops.isoload.balance_same.default
    for ids in (IDS, IDS.int()):
        torch.library.opcheck(op, (ids, TABLES.data, 4, 4, 4, None, 0, 2, 0, 4, 2**31 - 1))
