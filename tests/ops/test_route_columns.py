"""route with shared columns: the slots of the routed alone and of route_shared, side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.ops.results import PART_ROWS, SharedColumns
from isoload.ops.tables import ReplicaTables
from support.cases import draw

CASES = [(1, "random", 1), (3, "eplb", 2), (8, "duplicates", 1), (16, "spare_slots", 3), (70, "eplb", 1)]


class Batch:
    """Ids [T, K + n] of the last rank, some copies and tokens masked; its routed row; where its shared copies go."""

    def __init__(
        self, ranks: int, family: str, tokens: int, num_shared: int, top_k: int = 4, **given: Any
    ) -> None:
        case, rng = draw(family, ranks, seed=tokens), np.random.default_rng([ranks, tokens, num_shared])
        slots = case.slot_to_expert.reshape(ranks, -1)
        held = np.unique(slots[slots >= 0])
        ids = held[np.minimum(rng.zipf(1.4, (tokens, top_k)), len(held)) - 1]
        ids = np.where(rng.random(ids.shape) < 0.1, -1, ids)
        ids[rng.random(tokens) < 0.1] = -1
        present = (ids >= 0).any(1, keepdims=True)
        shared = np.where(present, case.num_experts + np.arange(num_shared), -1)
        self.ids = torch.from_numpy(np.concatenate([ids, shared], 1)).to(given.get("dtype", torch.int64))
        self.routed = self.ids[:, :top_k]
        slots = np.pad(slots, ((0, 0), (0, num_shared + 1)), constant_values=-1).astype(np.int32)
        self.tables: ReplicaTables = ops.replica_tables(
            torch.from_numpy(slots.ravel()), ranks, case.num_experts
        )
        loads = torch.from_numpy(case.loads).clone()
        self.of_routed = ops.count(self.routed, case.num_experts)
        loads[-1] = self.of_routed.counts
        quota = ops.plan_exact(loads, self.tables).quota
        self.row = ops.share(loads, quota, self.tables, 1, ranks - 1)
        self.counted = ops.count(self.ids, case.num_experts + num_shared)
        self.tokens, self.ranks = int(present.sum()), ranks
        self.columns = SharedColumns(
            num_shared, case.slots_per_rank, ranks - 1, self.draw_row(rng, num_shared)
        )

    def draw_row(self, rng: np.random.Generator, num_shared: int) -> Tensor:
        part = rng.dirichlet(np.full(self.ranks, 0.5))
        return torch.from_numpy(rng.multinomial(num_shared * self.tokens, part).astype(np.int32))

    def apart(self, columns: SharedColumns) -> Tensor:
        """By the ops that it joins."""
        slots = ops.route(self.of_routed, self.row, self.tables)
        size = self.tables.num_slots // self.ranks
        if columns.row is None:
            ranks = torch.where((slots >= 0).any(1, keepdim=True), columns.home, -1).expand(
                -1, columns.num_shared
            )
        else:
            how = size, columns.home, columns.num_shared
            ranks = ops.route_shared(slots, columns.row, *how)
        place = columns.first_shared + torch.arange(columns.num_shared)
        return torch.cat([slots, torch.where(ranks < 0, -1, ranks * size + place).to(slots.dtype)], 1)

    def together(self, columns: SharedColumns) -> Tensor:
        return ops.route(self.counted._replace(ids=self.ids), self.row, self.tables, columns)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("ranks", "family", "num_shared"), CASES)
@pytest.mark.parametrize("tokens", [0, 1, PART_ROWS, PART_ROWS + 1, 700])
def test_equals_the_ops_apart_and_reference(
    tokens: int, ranks: int, family: str, num_shared: int, dtype: torch.dtype
) -> None:
    batch = Batch(ranks, family, tokens, num_shared, dtype=dtype)
    for columns in (batch.columns, batch.columns._replace(row=None)):
        slots = batch.together(columns)
        assert slots.dtype == dtype and torch.equal(slots, batch.apart(columns)), columns
        if tokens <= PART_ROWS + 1:
            expected = reference.route(batch.counted, batch.row, batch.tables, columns)
            assert torch.equal(slots, expected)


@pytest.mark.parametrize("top_k", [7, 8, 16, 40])
def test_many_tokens(top_k: int) -> None:
    """A lane looks up one copy, two at a time, or two in several steps: the columns fall on other lanes each time."""
    batch = Batch(8, "eplb", 2000, 1, top_k)
    for columns in (batch.columns, batch.columns._replace(row=None)):
        assert torch.equal(batch.together(columns), batch.apart(columns))


@pytest.mark.parametrize(("tokens", "ranks"), [(4097, 64), (4097, 65), (9001, 24), (32768, 3), (32769, 3)])
def test_more_than_one_block_matches(tokens: int, ranks: int) -> None:
    """Up to 32768 tokens, 64 ranks, blocks that look up match too. Where they meet in parts is left as it was."""
    batch = Batch(ranks, "eplb", tokens, 2)
    parts = batch.counted.parts.clone()
    assert torch.equal(batch.together(batch.columns), batch.apart(batch.columns))
    assert torch.equal(batch.counted.parts, parts)


def test_inputs_need_not_be_contiguous() -> None:
    batch = Batch(8, "eplb", 300, 2)
    expected = batch.together(batch.columns)
    batch.ids = batch.ids.t().contiguous().t()
    batch.counted = batch.counted._replace(numbers=batch.counted.numbers.t().contiguous().t())
    assert torch.equal(batch.together(batch.columns), expected)


def changed(batch: Batch, row: int, column: int, to: int) -> Batch:
    batch.ids[row, column] = to
    return batch


def first(batch: Batch, present: bool) -> int:
    return int(((batch.ids >= 0).any(1) == present).nonzero()[0])


EXPERTS = Batch(8, "eplb", 300, 2).tables.num_experts
WRONG = {
    "the other shared expert": (True, EXPERTS + 1),
    "masked": (True, -1),
    "a routed expert": (True, 0),
    "not masked": (False, EXPERTS),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_other_columns(name: str) -> None:
    present, to = WRONG[name]
    batch = Batch(8, "eplb", 300, 2)
    at = first(batch, present)
    for columns in (batch.columns, batch.columns._replace(row=None)):
        message = (
            rf"topk_ids must end in the shared experts from {EXPERTS} on, or in -1 where all routed choices are, "
            f"row {at} does not"
        )
        with pytest.raises(ValueError, match=message):
            changed(batch, at, 4, to).together(columns)


def test_refuses_a_shared_expert_among_the_routed() -> None:
    batch = Batch(8, "eplb", 300, 2)
    with pytest.raises(ValueError, match=rf"topk_ids must be in -1..{EXPERTS - 1}, got {EXPERTS}"):
        changed(batch, first(batch, True), 0, EXPERTS).together(batch.columns)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "num_shared low": ({"num_shared": -1}, "num_shared must be in 0..1024, got -1"),
    "num_shared high": ({"num_shared": 1025}, "num_shared must be in 0..1024, got 1025"),
    "columns": ({"num_shared": 7}, r"topk_ids must be \[T, K \+ 7\], got \[300, 6\]"),
    "place": ({"first_shared": 99}, r"first_shared must be in 0..\d+ with num_shared=2, got 99"),
    "home low": ({"home": -1}, "home must be in 0..7, got -1"),
    "home high": ({"home": 8}, "home must be in 0..7, got 8"),
    "row of others": (
        {"row": torch.zeros(7, dtype=torch.int32)},
        r"shared_row must have shape \[8\], got \[7\]",
    ),
    "row dtype": ({"row": torch.zeros(8)}, "shared_row must be int32, got float32"),
    "row negative": (
        {"row": torch.tensor([0, -1, 0, 0, 0, 0, 0, 0], dtype=torch.int32)},
        "source_quota must not be negative, got -1 for rank 1",
    ),
    "row gaps": ({"row": torch.zeros(16, dtype=torch.int32)[::2]}, "shared_row must have no gaps"),
    "row sum": (
        {"row": torch.zeros(8, dtype=torch.int32)},
        r"source_quota must sum to num_shared copies of every token with a slot, \d+, got 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    given, message = REFUSED[name]
    batch = Batch(8, "eplb", 300, 2)
    with pytest.raises(ValueError, match=message):
        batch.together(batch.columns._replace(**given))


def test_refuses_numbers_of_the_routed_alone() -> None:
    batch = Batch(8, "eplb", 300, 2)
    cut = batch.counted.routed(2)._replace(ids=batch.ids)
    with pytest.raises(ValueError, match=r"numbers must have shape \[300, 6\], got \[300, 4\]"):
        ops.route(cut, batch.row, batch.tables, batch.columns)


def test_opcheck() -> None:
    batch, op = Batch(3, "eplb", 40, 2), torch.ops.isoload.route.default
    ids, _, numbers, parts = batch.counted
    given = ids, numbers, parts, batch.row, batch.tables.data, batch.tables.num_experts, 3
    for row in (batch.columns.row, None):
        torch.library.opcheck(op, (*given, row, 2, batch.columns.first_shared, 2))
