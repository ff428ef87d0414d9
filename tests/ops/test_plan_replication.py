"""plan_replication: against Algorithm 1 written with matrices, by hand where it stalls, and what repairing gains."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import reference
from isoload import ops
from support.fills import (
    FillCase,
    algorithm_1,
    check_fill,
    fill_cases,
    loads_of,
    one_expert_each,
    per_node,
)


def solve(case: FillCase, planner: Any = ops.plan_replication, **rules: Any) -> ops.SlotFill:
    given = {"alive": case.alive_tensor(), "ranks_per_node": per_node(case), **rules}
    return planner(*case.arguments(), **given)


def test_printed_is_the_papers_algorithm() -> None:
    balanced = 0
    for case in fill_cases(300, seed=1):
        for local in range(case.spare + 1):
            fill = solve(case, local_slots=local, printed=True)
            check_fill(case, case.slots, fill)
            mapping = case.holds(fill.slot_to_expert.numpy())
            assert np.array_equal(mapping, algorithm_1(case, local)), (case.name, local)
            balanced += int(mapping.sum() > algorithm_1(case, local, 0).sum())
    assert balanced > 50, "the second phase had no work"


def test_repaired_ends_where_nothing_fits() -> None:
    """From the placement alone: no rank above the mean has an expert that the least loaded taker could hold."""
    ended = 0
    for case in fill_cases(300, seed=2):
        fill = solve(case, local_slots=case.spare // 2)
        check_fill(case, case.slots, fill)
        slots = fill.slot_to_expert.numpy()
        mapping, (load, remote) = case.holds(slots), loads_of(case, case.holds(slots))
        room = (slots.reshape(case.num_ranks, -1)[:, case.size - case.spare :] < 0).any(1) & case.live()
        rounds = mapping.sum() - algorithm_1(case, case.spare // 2, 0).sum()
        if rounds == (case.spare - case.spare // 2) * case.num_ranks:
            continue
        ended += 1
        for e in np.flatnonzero((load[case.owner] > case.mean()) & (remote > 0)):
            open_ = np.flatnonzero(room & ~mapping[:, e])
            if len(open_):
                to = min(open_, key=lambda g: (load[g], g))
                assert load[to] + case.loads[to, e] > case.mean(), (case.name, e, to)
    assert ended > 100, ended


def test_printed_stalls_where_the_repaired_goes_on() -> None:
    """Rank 0 is above the mean of 9. Its expert 0 would bring 9 copies to rank 2, which has 1; expert 1 only 3."""
    slots = np.array([0, 1, -1, 2, 3, -1, 4, 5, -1], np.int32)
    home = np.array([0, 1, 3, 4, 6, 7], np.int32)
    loads = np.array([[0, 0, 0, 0, 0, 0], [4, 2, 5, 3, 0, 0], [9, 3, 0, 0, 1, 0]], np.int32)
    case = FillCase("stall", 3, 1, slots, home, loads)
    assert case.mean() == 9
    printed, repaired = (solve(case, printed=p).slot_to_expert.tolist() for p in (True, False))
    assert printed == slots.tolist()
    assert repaired == [0, 1, -1, 2, 3, -1, 4, 5, 1]


def test_the_first_phase_takes_what_a_rank_asks_for_most() -> None:
    case = one_expert_each([[5, 9, 0, 1], [7, 0, 7, 7], [0, 0, 3, 0], [0, 2, 0, 0]], spare=2)
    fill = solve(case, local_slots=2)
    assert fill.slot_to_expert.view(4, 3).tolist() == [[0, 1, 3], [1, 0, 2], [2, -1, -1], [3, 1, -1]]
    assert fill.telemetry.tolist() == [5, 2, 2, 3, 0]


def test_equals_reference() -> None:
    for case in fill_cases(200, seed=3):
        for local in {0, case.spare // 2, case.spare}:
            for printed in (False, True):
                rules = {"local_slots": local, "printed": printed}
                mine, theirs = (
                    solve(case, p, **rules) for p in (ops.plan_replication, reference.plan_replication)
                )
                for a, b in zip(mine, theirs, strict=True):
                    assert a.dtype == b.dtype and torch.equal(a, b), (case.name, rules)


def test_layers_at_once_equal_one_by_one() -> None:
    case = next(c for c in fill_cases(50, seed=4) if c.spare > 1 and c.num_ranks > 3 and c.alive is None)
    loads, slots, home, ranks, spare, _ = case.arguments()
    layers = torch.stack([loads, loads.flip(0), loads * 0])
    both = [x.expand(3, -1).contiguous() for x in (slots, home)]
    fixed = torch.arange(3 * ranks, dtype=torch.int32).view(3, ranks)
    at_once = ops.plan_replication(layers, *both, ranks, spare, fixed, local_slots=1)
    theirs = reference.plan_replication(layers, *both, ranks, spare, fixed, local_slots=1)
    for i in range(3):
        one = ops.plan_replication(layers[i], slots, home, ranks, spare, fixed[i], local_slots=1)
        for a, b, c in zip(one, at_once, theirs, strict=True):
            assert torch.equal(a, b[i]) and torch.equal(a, c[i])
