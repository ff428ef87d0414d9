"""replica_tables: every field by its definition, in a buffer that is refreshed in place."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from isoload.ops.tables import ReplicaTables
from support.cases import FAMILIES, Case, draw, families_up_to, instances
from support.sweeps import slow

POISON = 0x7FFFFFFF


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_reference(family: str) -> None:
    for case in instances(1, seed=10, families=(family,)):
        expected = reference.replica_tables(
            torch.from_numpy(case.slot_to_expert), case.num_ranks, case.num_experts
        )
        assert torch.equal(case.tables().data, expected.data), case.name


@pytest.mark.parametrize("family", families_up_to(72))
def test_fields_mean_what_they_say(family: str) -> None:
    for case in instances(1, seed=20, max_ranks=72, families=(family,)):
        check_replicas(case, case.tables())
        check_classes(case, case.tables())


def fields(tables: ReplicaTables, *names: str) -> list[np.ndarray]:
    return [tables.field(name).numpy() for name in names]


def check_replicas(case: Case, tables: ReplicaTables) -> None:
    """offsets, slots, ranks, solo: the lowest slot of every expert on every rank, ascending."""
    offsets, slots, ranks, solo = fields(tables, "offsets", "slots", "ranks", "solo")
    lists = [slots[offsets[e] : offsets[e + 1]] for e in range(case.num_experts)]
    assert offsets[0] == 0 and (slots[offsets[-1] :] == -1).all() and (ranks[offsets[-1] :] == -1).all()
    assert np.array_equal(ranks[: offsets[-1]], slots[: offsets[-1]] // case.slots_per_rank)
    expected_solo = np.full(len(solo), -1)
    for e, (mine, holders) in enumerate(zip(lists, case.rank_sets(), strict=True)):
        assert (np.diff(mine) > 0).all() and (case.slot_to_expert[mine] == e).all(), case.name
        assert sorted(holders) == (mine // case.slots_per_rank).tolist(), case.name
        for p in mine:
            start = p // case.slots_per_rank * case.slots_per_rank
            assert e not in case.slot_to_expert[start:p], f"{case.name}: slot {p} is not the lowest"
        if len(mine) == 1:
            expected_solo[mine] = e
    assert np.array_equal(solo, expected_solo), case.name


def check_classes(case: Case, tables: ReplicaTables) -> None:
    """header, order, classes, split: all replicated experts once, those of a class on disjoint ranks."""
    header, offsets, order, classes, split = fields(tables, "header", "offsets", "order", "classes", "split")
    num_split, num_classes = header
    copies = np.diff(offsets)
    assert (
        sorted(order[:num_split]) == np.flatnonzero(copies > 1).tolist() and (order[num_split:] == -1).all()
    )
    assert classes[0] == 0 and (np.diff(classes[: num_classes + 1]) > 0).all()
    assert (classes[num_classes:] == num_split).all()
    holders = case.rank_sets()
    for first, last in pairwise(classes[: num_classes + 1]):
        members = order[first:last]
        assert (np.diff(members) > 0).all()
        union = set().union(*(holders[e] for e in members))
        assert len(union) == sum(len(holders[e]) for e in members), f"{case.name}: a class shares a rank"
    expected = np.full(len(split), -1)
    for i, e in enumerate(order[:num_split]):
        expected[tables.field("slots").numpy()[offsets[e] : offsets[e + 1]]] = i
    assert np.array_equal(split, expected), case.name
    counts = (split >= 0) | (tables.field("solo").numpy() >= 0)
    assert np.array_equal(tables.is_replica().numpy(), counts)


def test_layers_at_once_equal_one_by_one() -> None:
    cases = list(instances(5, seed=1, max_ranks=16, families=("split_256",)))[-5:]
    layers = torch.from_numpy(np.stack([case.slot_to_expert for case in cases]))
    tables = ops.replica_tables(layers, 16, 256)
    assert tables.data.shape == (5, ReplicaTables.size(256, layers.shape[1]))
    assert torch.equal(tables.data, reference.replica_tables(layers, 16, 256).data)
    for i, case in enumerate(cases):
        assert torch.equal(tables[i].data, case.tables().data)
        assert torch.equal(tables.field("order")[i], tables[i].field("order"))


def test_refreshed_in_place() -> None:
    rng = np.random.default_rng(30)
    case = draw("empty_slots", 12, 30)
    tables = case.tables()
    address = tables.data.data_ptr()
    for _ in range(4):
        slots = torch.from_numpy(rng.permutation(case.slot_to_expert))
        torch.ops.isoload.replica_tables(slots, 12, case.num_experts, tables.data)
        assert tables.data.data_ptr() == address
        assert torch.equal(tables.data, reference.replica_tables(slots, 12, case.num_experts).data)


@pytest.mark.parametrize("family", families_up_to(16))
def test_every_element_is_written(family: str) -> None:
    for case in instances(1, seed=40, max_ranks=16, families=(family,)):
        tables = case.tables()
        poisoned = ReplicaTables(torch.full_like(tables.data, POISON), *shape_of(tables))
        slots = torch.from_numpy(case.slot_to_expert)
        torch.ops.isoload.replica_tables(slots, case.num_ranks, case.num_experts, poisoned.data)
        assert torch.equal(poisoned.data, tables.data) and (poisoned.data != POISON).all(), case.name


def test_other_tables_are_refused() -> None:
    slots = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    for data in (torch.zeros(3, 26, dtype=torch.int32), torch.zeros(26, 2, dtype=torch.int32).t()[0]):
        with pytest.raises(
            RuntimeError, match="tables must be contiguous, one row per layer of slot_to_expert"
        ):
            torch.ops.isoload.replica_tables(slots, 2, 2, data)


def shape_of(tables: ReplicaTables) -> tuple[int, int, int]:
    return tables.num_ranks, tables.num_experts, tables.num_slots


def test_ids_outside_the_experts_count_as_empty() -> None:
    rng = np.random.default_rng(50)
    for case in instances(1, seed=50, max_ranks=16, families=("empty_slots", "spare_slots")):
        strange = case.slot_to_expert.copy()
        outside = np.array([case.num_experts, -2, POISON, -POISON - 1])
        strange[strange < 0] = rng.choice(outside, (strange < 0).sum())
        slots = torch.from_numpy(strange)
        assert torch.equal(
            ops.replica_tables(slots, case.num_ranks, case.num_experts).data, case.tables().data
        )
        theirs = reference.replica_tables(slots, case.num_ranks, case.num_experts)
        assert torch.equal(theirs.data, case.tables().data), case.name


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def tables_like(num_ranks: int, num_experts: int, num_slots: int, rows: int = 1) -> ReplicaTables:
    data = torch.zeros(rows, ReplicaTables.size(num_experts, num_slots), dtype=torch.int32)
    return ReplicaTables(data, num_ranks, num_experts, num_slots)


# What reads tables: made-up ones are refused, not followed.

PLACED = int32(
    0, 1, 2, 1, 2, 3, 0, 3, -1, 2, 2, 0
)  # four ranks; experts 0 and 2 on three, 1 on two, 3 on two
FULL = torch.ones(4, 4, dtype=torch.int32)


def planned() -> Tensor:
    return ops.plan_exact(FULL, made()).quota


def made() -> ReplicaTables:
    return ops.replica_tables(PLACED, 4, 4)


READERS: dict[str, Callable[[ReplicaTables], object]] = {
    "plan_exact": lambda t: ops.plan_exact(FULL, t),
    "plan_active": lambda t: ops.plan_active(FULL, t),
    "plan_lp": lambda t: ops.plan_lp(FULL, t),
    "round_split": lambda t: ops.round_split(planned().double(), FULL, t),
    "share": lambda t: ops.share(FULL, planned(), t, 2),
    "share_by_rank": lambda t: ops.share_by_rank(FULL, planned(), t, 2),
    "plan_own": lambda t: ops.plan_own(FULL[0], t, FULL[1], 0),
    "route": lambda t: ops.route(
        ops.count(int32(0, 1, 2, 3)[None], 4), ops.share(FULL, planned(), made(), 2, 0), t
    ),
    "route_sampled": lambda t: ops.route_sampled(int32(0, 1, 2, 3)[None], torch.ones(12), t, 1),
}
MADE_UP = {
    "replicated experts": ("header", 0, 5, "finds 0..4 replicated experts in no more classes, got 5 in "),
    "fewer than none": ("header", 0, -1, "finds 0..4 replicated experts in no more classes, got -1 in "),
    "classes": ("header", 1, 9, "finds 0..4 replicated experts in no more classes, got 4 in 9"),
    "replicas": ("offsets", 4, 13, "lists 0..12 replicas, got 0..13"),
    "replicas from": ("offsets", 0, -3, "lists 0..12 replicas, got -3..10"),
}


def made_up(field: str, place: int, value: int) -> ReplicaTables:
    tables = made()
    tables.field(field)[place] = value
    return tables


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.parametrize("op", READERS)
def test_readers_refuse_made_up_sizes(op: str, name: str) -> None:
    field, place, value, message = MADE_UP[name]
    READERS[op](made())
    with pytest.raises(ValueError, match=f"tables must be made by replica_tables, which {message}"):
        READERS[op](made_up(field, place, value))


@pytest.mark.parametrize("step", [4, *slow(1)])
@pytest.mark.parametrize("op", READERS)
def test_readers_refuse_every_wrong_number_on_demand(
    op: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ISOLOAD_CHECK=1: whichever int of the tables is another one."""
    monkeypatch.setenv("ISOLOAD_CHECK", "1")
    READERS[op](made())
    for i in range(0, made().data.numel(), step):
        for wrong in (2**30, -(2**30), int(made().data[i]) + 1):
            tables = made()
            tables.data[i] = wrong
            with pytest.raises(ValueError, match="tables must be made by replica_tables"):
                READERS[op](tables)


def test_readers_refuse_one_wrong_layer_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = ops.replica_tables(PLACED.repeat(3, 1), 4, 4)
    tables.field("slots")[2, 3] = 99
    monkeypatch.setenv("ISOLOAD_CHECK", "1")
    with pytest.raises(ValueError, match="tables must be made by replica_tables, got others in layer 2"):
        ops.plan_exact(FULL.repeat(3, 1, 1), tables)


def test_unknown_field() -> None:
    with pytest.raises(ValueError, match="name must be one of header, offsets, .*, got 'owner'"):
        tables_like(2, 2, 4).field("owner")
