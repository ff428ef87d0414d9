"""plan_fill: what every fill promises on 1,500 drawn ones, the reference bit for bit, and named cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import reference
from isoload import ops
from support.level_cases import LevelCase, check_fill, draw, in_order


def test_every_fill_keeps_its_promises() -> None:
    moved = above = relayed = 0
    for seed in range(1500):
        case = draw(seed)
        fill = case.fill()
        check_fill(case, fill)
        moved += int(fill.telemetry[0]) > 0
        relayed += gives_and_takes(case, fill)
        above += int(fill.telemetry[4]) > 1
    assert moved > 300 and above > 100 and relayed > 15, (moved, above, relayed)


def gives_and_takes(case: LevelCase, fill: ops.SlotFill) -> bool:
    """Whether some rank borrows an expert and lends another."""
    changed = np.flatnonzero(fill.slot_to_expert.numpy() != case.slots)
    lenders = case.home[fill.slot_to_expert.numpy()[changed]] // case.size
    return bool(set(changed // case.size) & set(lenders))


def filled_as_in_reference(cases: Iterable[LevelCase]) -> int:
    """In how many of them anything moves; the fills are the reference's."""
    moved = 0
    for case in cases:
        mine, theirs = case.fill(), case.fill(reference.plan_fill)
        for name, a, b in zip(mine._fields, mine, theirs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (case.name, name, a, b)
        moved += int(mine.telemetry[0]) > 0
    return moved


def test_equals_reference() -> None:
    assert filled_as_in_reference(map(draw, range(2000, 2600))) > 100


def at_the_limits(seed: int) -> LevelCase:
    """A drawn one with the most copies there may be, the largest chunks and costs."""
    case, rng = draw(seed), np.random.default_rng([11, seed])
    if case.start is None:
        fixed = 0 if case.fixed is None else int(case.fixed.sum())
        case.loads[rng.integers(len(case.loads))] += 2**31 - 1 - int(case.loads.sum(dtype=np.int64)) - fixed
    case.rules["capacity_factor"] = float(rng.choice([1, 1.0001, 1000]))
    case.rules["min_chunk"] = int(rng.choice([1, 2**30, 2**31 - 1]))
    for costs in ("import_costs", "export_costs"):
        case.rules[costs] = tuple(int(cost) for cost in rng.choice([0, 1, 2**30], 2))
    return case


def test_equals_reference_at_the_limits() -> None:
    assert filled_as_in_reference(map(at_the_limits, range(3000, 3300))) > 15


NAMED: dict[str, tuple[LevelCase, int, list[int]]] = {
    # case, peak of the exact split, telemetry
    "the published planner's hang": (in_order([127, 1, 2, 1], 2), 66, [1, 1, 1, 0, 0]),
    "no copies": (in_order([0, 0, 0, 0], 2), 0, [0, 0, 0, 0, 1]),
    "one rank": (in_order([5, 6], 1), 11, [0, 0, 0, 0, 0]),
    "balanced": (in_order([5, 5], 2), 5, [0, 0, 0, 0, 0]),
    "one copy": (in_order([0, 0, 1], 3), 1, [0, 0, 0, 0, 0]),
    "no spare slots": (in_order([90, 0, 0], 3, spare=0), 90, [0, 0, 0, 0, 2]),
    "spare slots run out": (in_order([10, 10, 10, 10, 0, 0, 0, 0], 2, spare=1), 30, [1, 1, 1, 0, 2]),
    "a giver takes what the full helper has room for": (
        in_order([60, 60, 0], 3, spare=1), 40, [2, 1, 1, 0, 0]
    ),
    "an excess below min_chunk stays": (
        in_order([1900, 700, 700, 700], 4, min_chunk=1024), 1900, [0, 0, 0, 0, 0]
    ),
    "a larger excess leaves in smaller chunks": (
        in_order([2100, 700, 700, 500], 4, min_chunk=1024), 1300, [1, 1, 1, 0, 0]
    ),
    "largest experts first where slots are scarce": (
        in_order([10, 10, 10, 17, 4, 0, 0, 0, 0, 0, 0, 0], 4, spare=1), 14, [3, 1, 2, 0, 2]
    ),
    "an expert stays in its node": (
        in_order([60, 20, 0, 0], 4, ranks_per_node=2, within="node"), 40, [1, 1, 1, 0, 0]
    ),
    "room for the excess": (in_order([110, 90], 2, capacity_factor=1.1), 110, [0, 0, 0, 0, 0]),
    "an import that costs more than it saves": (
        in_order([60, 40], 2, import_costs=(20, 20)), 60, [0, 0, 0, 0, 2]
    ),
    "an import that pays": (in_order([60, 40], 2, import_costs=(5, 5)), 50, [1, 1, 1, 0, 0]),
    "an export that costs more than it saves": (
        in_order([60, 40], 2, import_costs=(5, 5), export_costs=(5, 5)), 60, [0, 0, 0, 0, 2]
    ),
    "the near rank is cheaper": (
        in_order([60, 20, 10, 10], 4, ranks_per_node=2, import_costs=(1, 40)), 40, [1, 1, 1, 0, 2]
    ),
    "per rank above the threshold": (in_order([4, 4, 1, 1], 2, imbalance_threshold=1.5), 5, [1, 1, 1, 0, 0]),
    "per rank at the threshold": (in_order([4, 4, 1, 1], 2, imbalance_threshold=1.6), 8, [0, 0, 0, 0, 1]),
    "per expert at the threshold": (
        in_order([4, 1, 4, 1, 0, 0], 2, imbalance_threshold=2.4, per_expert=True), 9, [0, 0, 0, 0, 1]
    ),
    "the largest batch": (in_order([2**31 - 1, 0], 2), 2**30, [1, 1, 1, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str) -> None:
    case, peak, telemetry = NAMED[name]
    fill = case.fill()
    check_fill(case, fill)
    assert (case.peak(fill.slot_to_expert), fill.telemetry.tolist()) == (peak, telemetry)


def test_a_replica_takes_copies_without_an_import() -> None:
    case = in_order([80, 0, 0, 0], 2, spare=1)
    case.slots = np.array([0, 1, -1, -1, 2, 3, 0, -1], np.int32)  # expert 0 on rank 1 too
    case.home = np.array([0, 1, 4, 5], np.int32)
    assert case.fill().telemetry.tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 96, 1000, 1024])
@pytest.mark.parametrize("copies", [1, 1023, 65_537, 2**31 - 1])
def test_the_capacity_is_rounded_up_once(ranks: int, copies: int) -> None:
    """To the edges of int32: a rank at the capacity lends nothing, one copy above it lends."""
    for factor in (1.0, 1.000001, 1.333333, 3.0):
        level = min(-(-copies * round(factor * 1_000_000) // (1_000_000 * ranks)), 2**31 - 1)
        for most in (min(level, copies), min(level + 1, copies)):
            loads = [most] + [0] * (ranks - 1)
            rest, each = copies - most, min(level, copies)
            for r in range(1, ranks):
                loads[r] = min(rest, each)
                rest -= loads[r]
            if rest:
                continue
            flags = int(in_order(loads, ranks, spare=0, capacity_factor=factor).fill().telemetry[4])
            assert flags == 2 * (max(loads) > level), (factor, most, level)


def test_layers_at_once_equal_one_by_one_and_sources_are_summed() -> None:
    rng = np.random.default_rng(3)
    cases = [in_order(rng.integers(0, 1000, 24) ** 2, 4) for _ in range(3)]
    loads, slots, home = (torch.stack([c.arguments()[i] for c in cases]) for i in range(3))
    fixed = torch.arange(12, dtype=torch.int32).view(3, 4)
    parts = torch.stack([loads // 4 * 3, loads - loads // 4 * 3, loads * 0, loads * 0], 1)
    rules: dict[str, Any] = {"capacity_factor": 1.1, "min_chunk": 50, "import_costs": (9, 90)}
    together = ops.plan_fill(loads, slots, home, 4, 4, fixed, **rules)
    summed = ops.plan_fill(parts, slots, home, 4, 4, fixed, **rules)
    assert (together.telemetry[:, 0] > 0).all()
    for i in range(3):
        alone = ops.plan_fill(loads[i], slots[i], home[i], 4, 4, fixed[i], **rules)
        for field in range(2):
            assert torch.equal(together[field][i], alone[field])
            assert torch.equal(summed[field][i], alone[field])
    theirs = reference.plan_fill(parts, slots, home, 4, 4, fixed, **rules)
    assert all(torch.equal(a, b) for a, b in zip(summed, theirs, strict=True))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_layers_must_agree() -> None:
    slots, home = int32(0, -1, 1, -1).expand(3, 4), int32(0, 2).expand(2, 2)
    with pytest.raises(ValueError, match=r"home_slot must have shape \[3, 2\], got \[2, 2\]"):
        ops.plan_fill(int32(1, 2).expand(3, 2), slots, home, 2, 1)


def test_never_waits_for_a_device() -> None:
    with FakeTensorMode():
        loads, slots, home = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (2, 4, 2))
        fill = ops.plan_fill(loads, slots, home, 2, 1)
    assert [list(part.shape) for part in fill] == [[4], [5]]
