"""shard_tokens: against Algorithm 2 written with matrices, and against the exact split above what stays local."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from support.fills import FillCase, algorithm_2, fill_cases, loads_of


def filled_cases(count: int, seed: int) -> list[tuple[FillCase, np.ndarray]]:
    """With spare slots filled by who asks for what, or at random."""
    rng, cases = np.random.default_rng(seed), []
    for i, case in enumerate(fill_cases(count, seed)):
        alive = case.alive_tensor()
        planned = ops.plan_replication(*case.arguments(), alive=alive, local_slots=case.spare // 2)
        cases.append((case, planned.slot_to_expert.numpy() if i % 2 else case.fill_at_random(rng)))
    return cases


def solve(case: FillCase, slots: np.ndarray, planner: Any = ops.shard_tokens, **rules: Any) -> Tensor:
    home = torch.from_numpy(case.home)
    given = {"alive": case.alive_tensor(), **rules}
    return planner(torch.from_numpy(case.loads), case.tables(slots), home, case.fixed_tensor(), **given)


def per_rank(case: FillCase, slots: np.ndarray, quota: Tensor) -> np.ndarray:
    """[R, E] copies of every expert that a rank computes."""
    made = np.zeros((case.num_ranks, len(case.home)), np.int64)
    for p in np.flatnonzero(quota.numpy()):
        made[p // case.size, slots[p]] += int(quota[p])
    return made


def test_printed_is_the_papers_algorithm() -> None:
    moved = 0
    for case, slots in filled_cases(300, seed=21):
        for tolerance in (0.0, 0.25):
            made = per_rank(case, slots, solve(case, slots, printed=True, tolerance=tolerance))
            assert np.array_equal(made, algorithm_2(case, case.holds(slots), tolerance)), case.name
            moved += int((made.sum(1) + case.besides() != loads_of(case, case.holds(slots))[0]).any())
    assert moved > 100


@pytest.mark.parametrize("printed", [False, True])
def test_conserves_keeps_local_copies_and_raises_nobody_above_the_mean(printed: bool) -> None:
    for case, slots in filled_cases(200, seed=22):
        made = per_rank(case, slots, solve(case, slots, printed=printed))
        assert np.array_equal(made.sum(0), case.loads.sum(0)), case.name
        local = np.where(case.holds(slots), case.loads, 0)
        assert (made >= local).all(), f"{case.name}: local copies stay"
        before = loads_of(case, case.holds(slots))[0]
        after = made.sum(1) + case.besides()
        raised = after > before
        assert (after[raised] <= case.mean()).all() and after.max() <= before.max(), case.name


def test_repaired_leaves_no_rank_that_gave_below_the_mean() -> None:
    fell = 0
    for case, slots in filled_cases(300, seed=23):
        before = loads_of(case, case.holds(slots))[0]
        ends = [
            per_rank(case, slots, solve(case, slots, printed=p)).sum(1) + case.besides()
            for p in (False, True)
        ]
        assert (ends[0][before > case.mean()] >= case.mean()).all(), case.name
        fell += (ends[1][before > case.mean()] < case.mean()).any()
    assert fell > 20, "as printed no rank gave too much: the test sees nothing"


def test_never_below_the_exact_split_of_what_may_move() -> None:
    """Which is optimal over all quotas that keep local copies; sharding often reaches it."""
    reached = above = 0
    for case, slots in filled_cases(300, seed=24):
        local = np.where(case.holds(slots), case.loads, 0)
        rest = torch.from_numpy((case.loads - local).sum(0, dtype=np.int32))
        kept = torch.from_numpy((local.sum(1) + case.besides()).astype(np.int32))
        best = ops.plan_exact(rest, case.tables(slots), kept).peak.item()
        peak = int((per_rank(case, slots, solve(case, slots)).sum(1) + case.besides()).max())
        assert peak >= best, case.name
        reached, above = reached + (peak == best), above + (peak > best)
    assert reached > 100 and above > 10, (reached, above)


def test_equals_reference() -> None:
    for case, slots in filled_cases(200, seed=25):
        for rules in ({}, {"printed": True}, {"tolerance": 0.1}):
            mine, theirs = (
                solve(case, slots, p, **rules) for p in (ops.shard_tokens, reference.shard_tokens)
            )
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), (case.name, rules)


def test_layers_at_once_equal_one_by_one() -> None:
    case, slots = next(
        pair for pair in filled_cases(80, seed=26) if pair[0].spare > 1 and pair[0].num_ranks > 3
    )
    loads, _, home, ranks, _, _ = case.arguments()
    layers = torch.stack([loads, loads.flip(0), loads * 0])
    held, homes = (x.expand(3, -1).contiguous() for x in (torch.from_numpy(slots), home))
    tables = ops.replica_tables(held, ranks, len(home))
    fixed = torch.arange(3 * ranks, dtype=torch.int32).view(3, ranks)
    at_once = ops.shard_tokens(layers, tables, homes, fixed)
    assert torch.equal(at_once, reference.shard_tokens(layers, tables, homes, fixed))
    for i in range(3):
        assert torch.equal(ops.shard_tokens(layers[i], tables[i], home, fixed[i]), at_once[i])


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


SLOTS, HOME, LOADS = int32(0, 1, 2, 2, 3, 0), int32(0, 1, 3, 4), int32(*range(8)).view(2, 4)


def test_the_op_itself_refuses_a_tolerance() -> None:
    tables = ops.replica_tables(SLOTS, 2, 4).data
    with pytest.raises(RuntimeError, match=r"tolerance_ppm must be in 0..10\^9, got -1"):
        torch.ops.isoload.shard_tokens.default(LOADS, tables, HOME, 2, 6, None, None, -1, False)
