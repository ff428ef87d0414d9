"""top_up: against exact fractions, full slots, and the split that has more to choose from."""

from __future__ import annotations

from fractions import Fraction
from functools import partial
from math import floor
from typing import Any

import numpy as np
import torch

import reference
from isoload import ops
from support.fills import FillCase, check_fill, fill_cases, one_expert_each, per_node


def solve(case: FillCase, slots: np.ndarray, planner: Any = ops.top_up) -> ops.SlotFill:
    loads, _, *others = case.arguments()
    given = {"alive": case.alive_tensor(), "ranks_per_node": per_node(case)}
    return planner(loads, torch.from_numpy(slots), *others, **given)


def by_fractions(case: FillCase, slots: np.ndarray) -> np.ndarray:
    """[R, E] bool who holds what in the end, with a matrix of parts that is made anew in every step."""
    holds, totals = case.holds(slots), case.loads.sum(0, dtype=np.int64)
    rows = slots.reshape(case.num_ranks, -1)[:, case.size - case.spare :]
    room = np.where(case.live(), (rows < 0).sum(1), 0)
    while True:
        part = [Fraction(int(n), int(k)) for n, k in zip(totals, holds.sum(0), strict=True)]
        part = [Fraction(floor(x * 2**16), 2**16) for x in part]
        load = [
            int(b) + sum((part[e] for e in np.flatnonzero(row)), Fraction(0))
            for b, row in zip(case.besides(), holds, strict=True)
        ]
        open_ = [e for e in range(len(part)) if part[e] > 0 and ((room > 0) & ~holds[:, e]).any()]
        if not open_:
            return holds
        e = max(open_, key=lambda e: (part[e], -e))
        to = min(np.flatnonzero((room > 0) & ~holds[:, e]), key=lambda r: (load[r], r))
        holds[to, e], room[to] = True, room[to] - 1


def test_is_the_greedy_of_exact_fractions() -> None:
    rng, filled = np.random.default_rng(1), 0
    for case in fill_cases(300, seed=11):
        slots = case.fill_at_random(rng)
        fill = solve(case, slots)
        check_fill(case, slots, fill)
        after = fill.slot_to_expert.numpy()
        assert np.array_equal(case.holds(after), by_fractions(case, slots)), case.name
        filled += int((after != slots).sum())
    assert filled > 300


def test_more_replicas_never_raise_the_least_peak() -> None:
    rng, lower = np.random.default_rng(2), 0
    for case in fill_cases(200, seed=12):
        slots = case.fill_at_random(rng)
        after = solve(case, slots).slot_to_expert.numpy()
        loads, fixed = torch.from_numpy(case.loads), case.fixed_tensor()
        before, now = (ops.plan_exact(loads, case.tables(s), fixed).peak.item() for s in (slots, after))
        assert now <= before, case.name
        lower += now < before
    assert lower > 50


def test_by_hand() -> None:
    """12 copies of expert 0 go to rank 2, then 6 per replica to rank 1; of expert 1 nobody lacks more than 5."""
    case = one_expert_each([[12, 0, 0], [0, 5, 0], [0, 0, 1]], spare=1)
    fill = solve(case, case.slots)
    assert fill.slot_to_expert.tolist() == [0, 1, 1, 0, 2, 0]
    assert fill.telemetry.tolist() == [3, 1, 2, 0, 0]


def test_nothing_is_filled_for_no_copies() -> None:
    case = one_expert_each([[0, 0], [0, 0]], spare=1)
    assert solve(case, case.slots).slot_to_expert.tolist() == case.slots.tolist()


def test_equals_reference() -> None:
    rng = np.random.default_rng(3)
    for case in fill_cases(200, seed=13):
        slots = case.fill_at_random(rng)
        for within in ("all", "node"):
            mine, theirs = (
                solve(case, slots, partial(planner, within=within))
                for planner in (ops.top_up, reference.top_up)
            )
            for a, b in zip(mine, theirs, strict=True):
                assert a.dtype == b.dtype and torch.equal(a, b), (case.name, within)


def test_within_the_node() -> None:
    """Expert 0 goes to rank 1 alone, the other rank of its node."""
    case = one_expert_each([[12, 0, 0, 0], [0, 5, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]], spare=1)
    loads, _, *others = case.arguments()
    fill = ops.top_up(loads, torch.from_numpy(case.slots), *others, ranks_per_node=2, within="node")
    assert fill.slot_to_expert.tolist() == [0, 1, 1, 0, 2, -1, 3, 2]
    assert fill.telemetry.tolist() == [3, 1, 1, 0, 0]


def test_layers_at_once_equal_one_by_one_and_sources_are_summed() -> None:
    case = next(c for c in fill_cases(50, seed=14) if c.spare > 1 and c.num_ranks > 3 and c.alive is None)
    loads, slots, home, ranks, spare, _ = case.arguments()
    layers = torch.stack([loads, loads.flip(1), loads * 0])
    both = [x.expand(3, -1).contiguous() for x in (slots, home)]
    fixed = torch.arange(3 * ranks, dtype=torch.int32).view(3, ranks)
    at_once = ops.top_up(layers, *both, ranks, spare, fixed)
    theirs = reference.top_up(layers, *both, ranks, spare, fixed)
    for i in range(3):
        one = ops.top_up(layers[i].sum(0, dtype=torch.int32), slots, home, ranks, spare, fixed[i])
        for a, b, c in zip(one, at_once, theirs, strict=True):
            assert torch.equal(a, b[i]) and torch.equal(a, c[i])


def test_the_largest_batch_does_not_wrap() -> None:
    case = one_expert_each([[2**30, 0], [0, 2**30 - 1]], spare=1)
    assert solve(case, case.slots).slot_to_expert.tolist() == [0, 1, 1, 0]
