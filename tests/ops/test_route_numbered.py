"""route by the places that count found: over parts, beside columns that are left out, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.ops.results import PART_ROWS
from isoload.ops.tables import ReplicaTables
from support.cases import draw

CASES = [
    (1, "random"),
    (3, "eplb"),
    (8, "duplicates"),
    (12, "empty_slots"),
    (16, "spare_slots"),
    (31, "random"),
]


def draw_batch(
    ranks: int, family: str, tokens: int, top_k: int, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor, ReplicaTables]:
    """Skewed ids [T, K] of the last rank, some masked and some twice in a token; its share row; the tables."""
    case = draw(family, ranks, seed=tokens)
    rng = np.random.default_rng([ranks, tokens, top_k])
    held = np.unique(case.slot_to_expert[case.slot_to_expert >= 0])
    chosen = held[np.minimum(rng.zipf(1.4, (tokens, top_k)), len(held)) - 1]
    ids = torch.from_numpy(np.where(rng.random(chosen.shape) < 0.1, -1, chosen)).to(dtype)
    loads = torch.from_numpy(case.loads).clone()
    loads[-1] = ops.count(ids, case.num_experts).counts
    tables = case.tables()
    quota = ops.plan_exact(loads, tables).quota
    return ids, ops.share(loads, quota, tables, 1, ranks - 1), tables


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("ranks", "family"), CASES)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 4), (1, 1), (PART_ROWS, 3), (PART_ROWS + 1, 8), (700, 5)])
def test_equals_reference(tokens: int, top_k: int, ranks: int, family: str, dtype: torch.dtype) -> None:
    ids, row, tables = draw_batch(ranks, family, tokens, top_k, dtype)
    counted = ops.count(ids, tables.num_experts)
    slots = ops.route(counted, row, tables)
    assert slots.dtype == dtype and torch.equal(slots, reference.route(counted, row, tables))


@pytest.mark.parametrize("top_k", [8, 12, 40])
def test_equals_reference_where_many_tokens_are_routed(top_k: int) -> None:
    """More parts than a lane reads at once; of 12 copies a token a lane looks up two at a time, of 40 three times."""
    ids, row, tables = draw_batch(8, "eplb", 4500, top_k)
    counted = ops.count(ids, tables.num_experts)
    assert torch.equal(ops.route(counted, row, tables), reference.route(counted, row, tables))


def test_serves_with_other_columns_and_experts_left_out() -> None:
    """As a batch with a shared expert, the last, in a column of its own."""
    ids, row, tables = draw_batch(8, "eplb", 600, 4)
    shared = torch.full((len(ids), 1), tables.num_experts)
    cut = ops.count(torch.cat([ids, shared], dim=1), tables.num_experts + 1).routed(1)
    assert not cut.parts.is_contiguous() and torch.equal(cut.ids, ids)
    assert torch.equal(
        ops.route(cut, row, tables), ops.route(ops.count(ids, tables.num_experts), row, tables)
    )
