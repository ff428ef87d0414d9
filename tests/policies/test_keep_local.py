"""plan(keep_local=True): local copies stay, the rest is split above them; against flows and slot by slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoload
from isoload.policies import POLICIES, make_policy
from isoload.policies.borrowing import may_keep_local
from support.cases import instances
from support.fills import fill_cases
from support.oracles import flow_optimum

KEEPING = [name for name in POLICIES if may_keep_local(make_policy(name)) and not make_policy(name).borrows]


def placed(slots: np.ndarray, home: np.ndarray, ranks: int, spare: int = 0) -> isoload.Placement:
    return isoload.Placement(
        torch.from_numpy(slots[None]),
        isoload.Topology(ranks),
        len(home),
        torch.from_numpy(home[None]),
        spare_slots=spare,
    )


def test_who_may() -> None:
    assert KEEPING == ["none", "even", "exact", "exact_active", "lp"]


@pytest.mark.parametrize("policy", [*KEEPING, "llep", "hedge"])
def test_local_copies_stay(policy: str) -> None:
    kept = 0
    for case in fill_cases(40, seed=31):
        if case.alive is not None or case.num_ranks == 1 or case.spare == 0:
            continue
        placement, loads = (
            placed(case.slots, case.home, case.num_ranks, case.spare),
            torch.from_numpy(case.loads),
        )
        plan = isoload.plan(loads, placement, 0, policy, keep_local=True)
        assert isoload.policies.plan.plan_errors(plan, loads) == [], case.name
        shares, size = isoload.share(loads, plan), case.size
        assert torch.equal(shares.sum(0, dtype=torch.int32), plan.quota), case.name
        holds = case.holds(plan.slot_to_expert.numpy())
        for rank in range(case.num_ranks):
            own = shares[rank, rank * size : (rank + 1) * size].sum()
            local = case.loads[rank][holds[rank]].sum()
            assert own >= local, case.name
            kept += int(local)
    assert kept > 0


def test_the_peak_is_the_least_above_what_stays() -> None:
    """By a maximum flow that has what stays as its fixed loads; without keep_local it can be lower, never higher."""
    dearer = 0
    for case in instances(1, seed=32, max_ranks=12, families=("eplb", "random", "ring", "clique")):
        experts = np.arange(case.loads.shape[1])
        rows = case.slot_to_expert.reshape(case.num_ranks, -1)
        local = np.where([np.isin(experts, row) for row in rows], case.loads, 0)
        rest = (case.loads - local).sum(0).astype(np.int32)
        best = flow_optimum(rest, case.slot_to_expert, case.num_ranks, local.sum(1).astype(np.int32))
        home = np.array([np.flatnonzero(case.slot_to_expert == e)[0] for e in experts], np.int32)
        placement = placed(case.slot_to_expert, home, case.num_ranks)
        loads = torch.from_numpy(case.loads)
        kept = isoload.plan(loads, placement, 0, keep_local=True)
        free = isoload.plan(loads, placement, 0)
        assert kept.peak.item() == best and kept.bound.item() <= free.peak.item() <= best, case.name
        dearer += free.peak.item() < best
    assert dearer > 0


def test_refuses() -> None:
    case = next(c for c in fill_cases(20, seed=33) if c.alive is None and c.num_ranks > 1 and c.spare)
    placement, loads = placed(case.slots, case.home, case.num_ranks, case.spare), torch.from_numpy(case.loads)
    for policy in ("static", "lp_sampled"):
        message = f"keep_local must be False for policy {policy}, which draws or fixes the share"
        with pytest.raises(ValueError, match=message):
            isoload.plan(loads, placement, 0, policy, keep_local=True)
    with pytest.raises(ValueError, match=r"loads must be per source rank, .* for keep_local, got the sum"):
        isoload.plan(loads.sum(0, dtype=torch.int32), placement, 0, keep_local=True)
