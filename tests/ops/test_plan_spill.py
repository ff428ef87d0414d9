"""plan_spill: what every plan promises on 1,500 drawn ones, the reference bit for bit, and named cases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import reference
from isoload import ops
from support.spills import SpillCase, check_spill, draw, in_order


def test_every_plan_keeps_its_promises() -> None:
    lent = flagged = sought = relayed = 0
    for seed in range(1500):
        case = draw(seed)
        spill = case.spill()
        check_spill(case, spill)
        lent += int(spill.telemetry[0]) > 0
        relayed += gives_and_takes(case, spill)
        flagged += int(spill.telemetry[4]) > 1
        sought += case.rules["capacity_factor"] is None and int(spill.telemetry[0]) > 0
    assert lent > 300 and flagged > 100 and sought > 100 and relayed > 15, (lent, flagged, sought, relayed)


def gives_and_takes(case: SpillCase, spill: ops.Spill) -> bool:
    """Whether some rank borrows an expert and lends another."""
    changed = np.flatnonzero(spill.slot_to_expert.numpy() != case.slots)
    lenders = case.home[spill.slot_to_expert.numpy()[changed]] // case.size
    return bool(set(changed // case.size) & set(lenders))


def lent_as_in_reference(cases: Iterable[SpillCase]) -> int:
    """In how many of them anything is lent; the plans are the reference's."""
    lent = 0
    for case in cases:
        mine, theirs = case.spill(), case.spill(reference.plan_spill)
        for name, a, b in zip(mine._fields, mine, theirs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), (case.name, name, a, b)
        lent += int(mine.telemetry[0]) > 0
    return lent


def test_equals_reference() -> None:
    assert lent_as_in_reference(map(draw, range(2000, 2600))) > 100


def at_the_limits(seed: int) -> SpillCase:
    """A drawn one with the most copies there may be, the largest chunks, costs and tolerances."""
    case, rng = draw(seed), np.random.default_rng([11, seed])
    if case.start is None:
        fixed = 0 if case.fixed is None else int(case.fixed.sum())
        case.loads[rng.integers(len(case.loads))] += 2**31 - 1 - int(case.loads.sum(dtype=np.int64)) - fixed
    if case.rules["capacity_factor"] is not None:
        case.rules["capacity_factor"] = float(rng.choice([1, 1.0001, 1000]))
    case.rules["tolerance"] = float(rng.choice([0, 1, 1000]))
    case.rules["min_chunk"] = int(rng.choice([1, 2**30, 2**31 - 1]))
    case.rules["import_costs"] = tuple(int(cost) for cost in rng.choice([0, 1, 2**30], 2))
    return case


def test_equals_reference_at_the_limits() -> None:
    assert lent_as_in_reference(map(at_the_limits, range(3000, 3300))) > 30


NAMED: dict[str, tuple[SpillCase, list[int], list[int]]] = {
    # case, rank loads, telemetry
    "the published planner's hang": (in_order([127, 1, 2, 1], 2), [66, 65], [1, 1, 1, 0, 0]),
    "no copies": (in_order([0, 0, 0, 0], 2), [0, 0], [0, 0, 0, 0, 1]),
    "one rank": (in_order([5, 6], 1), [11], [0, 0, 0, 0, 0]),
    "balanced": (in_order([5, 5], 2), [5, 5], [0, 0, 0, 0, 0]),
    "one copy": (in_order([0, 0, 1], 3), [0, 0, 1], [0, 0, 0, 0, 0]),
    "no spare slots": (in_order([90, 0, 0], 3, spare=0), [90, 0, 0], [0, 0, 0, 0, 2]),
    "spare slots run out": (
        in_order([10, 10, 10, 10, 0, 0, 0, 0], 2, spare=1), [30, 10], [1, 1, 1, 0, 2]
    ),
    "a giver takes what the full helper has room for": (
        in_order([60, 60, 0], 3, spare=1), [40, 40, 40], [2, 1, 1, 0, 0]
    ),
    "a relay costs one import": (
        in_order([60, 60, 0], 3, spare=1, capacity_factor=None, import_costs=(3, 3)),
        [39, 42, 39],
        [2, 1, 1, 0, 0],
    ),
    "a relay passes on at most what is left of the expert": (
        in_order([25, 25, 10, 20, 20, 20, 0, 0, 0], 3, spare=1), [47, 48, 25], [2, 1, 1, 0, 2]
    ),
    "of equally full helpers the lowest, also when it was not as full before": (
        in_order([15, 15, 15, 15, 20, 0, 0, 0, 35, 0, 0, 0, 35, 0, 0, 0], 4, capacity_factor=1.06),
        [40, 40, 35, 35],
        [2, 2, 2, 0, 0],
    ),
    "egress": (in_order([90, 0, 0], 3, egress=1), [60, 30, 0], [1, 1, 1, 0, 4]),
    "a small rest stays within the tolerance": (
        in_order([105, 95], 2, min_chunk=10, tolerance=0.05), [105, 95], [0, 0, 0, 0, 0]
    ),
    "an excess below min_chunk stays beyond the tolerance too": (
        in_order([105, 95], 2, min_chunk=10, tolerance=0.04), [105, 95], [0, 0, 0, 0, 16]
    ),
    "an excess below min_chunk stays whatever room there is": (
        in_order([1900, 700, 700, 700], 4, min_chunk=1024, tolerance=0.02),
        [1900, 700, 700, 700],
        [0, 0, 0, 0, 16],
    ),
    "a larger excess leaves in smaller chunks": (
        in_order([2100, 700, 700, 500], 4, min_chunk=1024), [1600, 700, 700, 1000], [1, 1, 1, 0, 16]
    ),
    "largest experts first where slots are scarce": (
        in_order([10, 10, 10, 17, 4, 0, 0, 0, 0, 0, 0, 0], 4, spare=1), [14, 14, 14, 9], [3, 1, 2, 0, 2]
    ),
    "an expert stays in its node": (
        in_order([60, 20, 0, 0], 4, ranks_per_node=2, within="node"), [40, 40, 0, 0], [1, 1, 1, 0, 0]
    ),
    "room for the excess": (in_order([110, 90], 2, capacity_factor=1.1), [110, 90], [0, 0, 0, 0, 0]),
    "the node helps first": (
        in_order([60, 20, 10, 10], 4, ranks_per_node=2, min_chunk=5, capacity_factor=1.2),
        [30, 30, 30, 10],
        [2, 1, 2, 1, 0],
    ),
    "a far rank where the node has little room": (
        in_order([60, 28, 6, 6], 4, ranks_per_node=2, min_chunk=5, capacity_factor=1.2),
        [30, 28, 30, 12],
        [2, 1, 2, 2, 0],
    ),
    "an import that costs more than it saves": (
        in_order([60, 40], 2, capacity_factor=None, import_costs=(20, 20)), [60, 40], [0, 0, 0, 0, 0]
    ),
    "an import that pays": (
        in_order([60, 40], 2, capacity_factor=None, import_costs=(10, 10)), [55, 45], [1, 1, 1, 0, 0]
    ),
    "per rank above the threshold": (
        in_order([4, 4, 1, 1], 2, imbalance_threshold=1.5), [5, 5], [1, 1, 1, 0, 0]
    ),
    "per rank at the threshold": (
        in_order([4, 4, 1, 1], 2, imbalance_threshold=1.6), [8, 2], [0, 0, 0, 0, 1]
    ),
    "per expert at the threshold": (
        in_order([4, 1, 4, 1, 0, 0], 2, imbalance_threshold=2.4, per_expert=True), [9, 1], [0, 0, 0, 0, 1]
    ),
    "the largest batch": (
        in_order([2**31 - 1, 0], 2), [2**30, 2**30 - 1], [1, 1, 1, 0, 0]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_named(name: str) -> None:
    case, loads, telemetry = NAMED[name]
    spill = case.spill()
    check_spill(case, spill)
    assert spill.quota.view(case.num_ranks, -1).sum(1).tolist() == loads
    assert spill.telemetry.tolist() == telemetry


def test_a_replica_takes_copies_without_an_import() -> None:
    case = in_order([80, 0, 0, 0], 2, spare=1)
    case.slots = np.array([0, 1, -1, -1, 2, 3, 0, -1], np.int32)  # expert 0 on rank 1 too
    case.home = np.array([0, 1, 4, 5], np.int32)
    spill = case.spill()
    assert spill.quota.tolist() == [40, 0, 0, 0, 0, 0, 40, 0]
    assert spill.telemetry.tolist() == [0, 0, 0, 0, 0]


def test_one_import_where_what_the_exact_split_leaves_would_need_two() -> None:
    """It leaves 42 and 43 copies on ranks 0 and 1, whose largest experts differ; from home rank 0 alone has more."""
    case = in_order([45, 5, 35, 35], 2)
    case.num_ranks = 3
    case.slots = np.array([0, 1, -1, -1, 2, 0, -1, -1, 3, -1, -1, -1], np.int32)
    case.home, case.spare = np.array([0, 1, 4, 8], np.int32), 2
    assert sorted(case.split_exactly().plain().tolist()) == [35, 42, 43]
    spill = case.spill()
    assert spill.quota.view(3, -1).sum(1).tolist() == [40, 40, 40]
    assert spill.telemetry.tolist() == [1, 1, 1, 0, 0]


def test_a_replica_that_takes_copies_does_not_come_before_larger_rests() -> None:
    """Some slots that a level has cut are replicas that take copies later: the order of the other rests stays."""
    case = in_order([100, 1, 4, 100, 144, 9, 4, 25, 25, 16, 16, 0, 49, 144, 100, 16], 8)
    case.slots = np.array(
        [[0, 1, -1], [2, 3, 6], [4, 5, 6], [6, 7, 5], [8, 9, -1], [10, 11, 14], [12, 13, -1], [14, 15, 13]]
    )
    case.slots = np.pad(case.slots, ((0, 0), (0, 1)), constant_values=-1).ravel().astype(np.int32)
    case.home, case.spare = (np.arange(16) // 2 * 4 + np.arange(16) % 2).astype(np.int32), 1
    split = [100, 1, 0, 4, 100, 2, 144, 1, 0, 2, 25, 8, 25, 16, 0, 16, 0, 17, 49, 86, 0, 83, 16, 58]
    case.start = np.pad(np.array(split).reshape(8, 3), ((0, 0), (0, 1))).ravel().astype(np.int32)
    spill = case.spill()
    check_spill(case, spill)
    assert all(torch.equal(a, b) for a, b in zip(spill, case.spill(reference.plan_spill), strict=True))


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 96, 1000, 1024])
@pytest.mark.parametrize("copies", [1, 1023, 65_537, 2**31 - 1])
def test_the_capacity_is_rounded_up_once(ranks: int, copies: int) -> None:
    """To the edges of int32, also beyond: what no rank can have is cut to 2^31 - 1."""
    loads = [copies - copies // 3, copies // 3] + [0] * (ranks * 2 - 2)
    for factor in (1.0, 1.000001, 1.333333, 3.0, 999.999999, 1000.0):
        level = int(in_order(loads, ranks, capacity_factor=factor).spill().level)
        assert level == min(-(-copies * round(factor * 1_000_000) // (1_000_000 * ranks)), 2**31 - 1)


def test_shared_copies_that_cannot_move_are_flagged() -> None:
    case = in_order([5, 5], 2)
    case.fixed = np.array([100, 0], np.int32)
    spill = case.spill()
    check_spill(case, spill)
    assert spill.quota.view(2, -1).sum(1).tolist() == [0, 10] and int(spill.telemetry[4]) == 8


def test_layers_at_once_equal_one_by_one_and_sources_are_summed() -> None:
    rng = np.random.default_rng(3)
    cases = [in_order(rng.integers(0, 1000, 24) ** 2, 4) for _ in range(3)]
    loads, slots, home = (torch.stack([c.arguments()[i] for c in cases]) for i in range(3))
    fixed = torch.arange(12, dtype=torch.int32).view(3, 4)
    parts = torch.stack([loads // 4 * 3, loads - loads // 4 * 3, loads * 0, loads * 0], 1)
    rules = {"capacity_factor": 1.1, "min_chunk": 50}
    together = ops.plan_spill(loads, slots, home, 4, 4, fixed, **rules)
    summed = ops.plan_spill(parts, slots, home, 4, 4, fixed, **rules)
    assert (together.telemetry[:, 0] > 0).all()
    for i in range(3):
        alone = ops.plan_spill(loads[i], slots[i], home[i], 4, 4, fixed[i], **rules)
        for field in range(4):
            assert torch.equal(together[field][i], alone[field]) and torch.equal(
                summed[field][i], alone[field]
            )
    theirs = reference.plan_spill(parts, slots, home, 4, 4, fixed, **rules)
    assert all(torch.equal(a, b) for a, b in zip(summed, theirs, strict=True))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


GOOD: dict[str, Any] = {
    "loads": int32(9, 1),
    "slot_to_expert": int32(0, -1, 1, -1),
    "home_slot": int32(0, 2),
    "num_ranks": 2,
    "spare_slots": 1,
}


def test_layers_must_agree() -> None:
    slots = GOOD["slot_to_expert"].expand(3, 4)
    with pytest.raises(ValueError, match=r"home_slot must have shape \[3, 2\], got \[2, 2\]"):
        ops.plan_spill(int32(1, 2).expand(3, 2), slots, GOOD["home_slot"].expand(2, 2), 2, 1)


def test_never_waits_for_a_device() -> None:
    with FakeTensorMode():
        loads, slots, home = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (2, 4, 2))
        spill = ops.plan_spill(loads, slots, home, 2, 1)
    assert [list(part.shape) for part in spill] == [[4], [4], [], [5]]
