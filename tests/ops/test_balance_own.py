"""balance_own: in one op the slots, counts and decayed counts of count, plan_own and route."""

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
SIZES = [(0, 4), (1, 1), (64, 8), (129, 3), (700, 5), (1025, 8)]  # tokens, choices


def draw_batch(
    ranks: int, family: str, tokens: int, top_k: int, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ReplicaTables, dict[str, Any]]:
    """Skewed ids [T, K], some masked and some twice in a token; the tables; offset, source and options."""
    case, rng = draw(family, ranks, seed=tokens), np.random.default_rng([ranks, tokens, top_k])
    held = np.unique(case.slot_to_expert[case.slot_to_expert >= 0])
    chosen = held[np.minimum(rng.zipf(1.4, (tokens, top_k)), len(held)) - 1]
    ids = torch.from_numpy(np.where(rng.random(chosen.shape) < 0.1, -1, chosen)).to(dtype)
    offset = torch.from_numpy((rng.integers(0, 2**20 + 1, ranks) >> rng.integers(0, 21)).astype(np.int32))
    how: dict[str, Any] = {"offset": offset, "source": ranks - 1, "layer": tokens}
    if tokens % 2:
        how["ticks"] = torch.from_numpy(rng.integers(512, 2048, ranks).astype(np.int32))
    return ids, case.tables(), how


def in_three(ids: Tensor, tables: ReplicaTables, **how: Any) -> tuple[Tensor, Tensor]:
    """The chain that the op stands for."""
    counted = ops.count(ids, tables.num_experts)
    sent = ops.plan_own(counted.counts, tables, **how)
    return ops.route(counted, sent, tables), counted.counts


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("ranks", "family"), CASES)
@pytest.mark.parametrize(("tokens", "top_k"), SIZES)
def test_equals_three_ops(tokens: int, top_k: int, ranks: int, family: str, dtype: torch.dtype) -> None:
    ids, tables, how = draw_batch(ranks, family, tokens, top_k, dtype)
    recent = torch.arange(tables.num_experts, dtype=torch.int64) << 20
    sent = torch.arange(3 * ranks, dtype=torch.int64).view(3, -1) << 18
    kept, also = recent.clone(), sent.clone()
    slots, counts = ops.balance_own(ids, tables, recent=recent, sent=sent, **how)
    expected = in_three(ids, tables, recent=kept, sent=also, **how)
    assert slots.dtype == dtype and torch.equal(slots, expected[0])
    assert torch.equal(counts, expected[1]) and torch.equal(recent, kept) and torch.equal(sent, also)


@pytest.mark.parametrize("tokens", [31, 32, 33, 255, 257, 6000])
def test_replicas_that_end_in_any_block(tokens: int) -> None:
    """A block of copies in which no replica ends is looked up; all copies of one expert end one in each."""
    slots = torch.arange(32, dtype=torch.int32).repeat(8) % 17
    tables, none = ops.replica_tables(slots, 32, 17), torch.zeros(32, dtype=torch.int32)
    for ids in (torch.zeros(tokens, 8, dtype=torch.int64), torch.arange(tokens * 8).view(tokens, 8) % 19 - 2):
        ids = ids.clamp(-1)
        slots_, counts = ops.balance_own(ids, tables, none, 5)
        expected = in_three(ids, tables, offset=none, source=5)
        assert torch.equal(slots_, expected[0]) and torch.equal(counts, expected[1])


def test_near_the_reference() -> None:
    """Which splits at the optimum; where every expert has one replica there is one split."""
    ids, tables, how = draw_batch(8, "eplb", 40, 4)
    slots, counts = ops.balance_own(ids, tables, **how)
    best, expected = reference.balance_own(ids, tables, **how)
    assert torch.equal(counts, expected)

    def loads(of: Tensor) -> Tensor:
        return torch.bincount(of[of >= 0] // (tables.num_slots // 8), minlength=8)

    assert int((loads(slots) - loads(best)).abs().max()) <= 1
    alone = ops.replica_tables(torch.tensor([2, 0, 1, -1], dtype=torch.int32), 2, 3)
    few = torch.tensor([[0, 2], [-1, 1]])
    none = torch.zeros(2, dtype=torch.int32)
    assert ops.balance_own(few, alone, none, 0)[0].tolist() == [[1, 0], [-1, 2]]
    assert torch.equal(ops.balance_own(few, alone, none, 0)[0], reference.balance_own(few, alone, none, 0)[0])
