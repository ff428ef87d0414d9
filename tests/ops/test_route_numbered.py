"""route by the places that count found: over parts, beside columns that are left out, and what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.replica_tables import ReplicaTables
from isoload.results import PART_ROWS
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


def test_inputs_need_not_be_contiguous() -> None:
    ids, row, tables = draw_batch(8, "eplb", 300, 4)
    counted = ops.count(ids, tables.num_experts)
    apart = torch.stack([row, -row], dim=1)[:, 0]
    turned = counted._replace(ids=ids.t().contiguous().t(), numbers=counted.numbers.t().contiguous().t())
    assert torch.equal(ops.route(turned, apart, tables), ops.route(counted, row, tables))


TABLES = ops.replica_tables(torch.tensor([0, 1, 1, 2, 2, 0, 3, 3], dtype=torch.int32), 4, 4)
IDS = torch.tensor([[0, 1], [0, -1]])
COUNTED = ops.count(IDS, 4)
SHARE = torch.tensor([1, 1, 0, 0, 0, 1, 0, 0], dtype=torch.int32)
BATCH_OF_TABLES = ReplicaTables(TABLES.data.expand(2, -1), 4, 4, 8)
OFTEN = "topk_ids must hold each expert as often as its share says, expert {} does not"


def numbers(*rows: list[int]) -> ops.Counted:
    return COUNTED._replace(numbers=torch.tensor(rows, dtype=torch.int32))


def parts(*row: int) -> ops.Counted:
    return COUNTED._replace(parts=torch.tensor([row], dtype=torch.int32))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ids dtype": (
        {"counted": COUNTED._replace(ids=IDS.float())},
        "topk_ids must be int32 or int64, got float32",
    ),
    "ids 1-d": ({"counted": COUNTED._replace(ids=IDS[0])}, r"topk_ids must be \[T, K\], got \[2\]"),
    "id high": (
        {"counted": COUNTED._replace(ids=torch.tensor([[0, 4], [0, -1]]))},
        "topk_ids must be in -1..3, got 4",
    ),
    "tables of layers": ({"tables": BATCH_OF_TABLES}, r"tables must be of one layer, got \[2, 48\]"),
    "share dtype": ({"send_counts": SHARE.long()}, "send_counts must be int32, got int64"),
    "share 2-d": ({"send_counts": SHARE.view(1, 8)}, r"send_counts must be \[P\], got \[1, 8\]"),
    "numbers dtype": (
        {"counted": COUNTED._replace(numbers=COUNTED.numbers.long())},
        "numbers must be int32, got int64",
    ),
    "numbers shape": ({"counted": numbers([0, 0])}, r"numbers must have shape \[2, 2\], got \[1, 2\]"),
    "parts dtype": (
        {"counted": COUNTED._replace(parts=COUNTED.parts.long())},
        "parts must be int32, got int64",
    ),
    "parts shape": ({"counted": parts(2, 1, 0)}, r"parts must have shape \[1, 4\], got \[1, 3\]"),
    "parts with gaps": (
        {"counted": COUNTED._replace(parts=COUNTED.parts.repeat_interleave(2, 1)[:, ::2])},
        "parts must have rows without gaps, got stride 2",
    ),
    "less than the share": ({"send_counts": SHARE + 1}, OFTEN.format(0)),
    "more than the share": ({"send_counts": SHARE * 0}, OFTEN.format(0)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    changed, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        ops.route(**{"counted": COUNTED, "send_counts": SHARE, "tables": TABLES, **changed})


def test_too_many_copies_are_refused() -> None:
    ids = torch.zeros(1, 1, dtype=torch.int32).expand(2**30, 2)  # no memory of its own
    with pytest.raises(ValueError, match=r"topk_ids must have fewer than 2\^31 entries, got 2147483648"):
        ops.route(COUNTED._replace(ids=ids), SHARE, TABLES)
