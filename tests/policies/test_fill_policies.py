"""What llep, spill_cost and hedge share: the exact split, nodes as a hard limit, and a last fill that is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.balancing import planning
from isoload.policies.plan import plan_errors

RANKS, EXPERTS, SPARE = 8, 32, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "llep": {"min_chunk": 1, "threshold": 1.0},
    "spill_cost": {"expert_bytes": 1.0},
    "hedge": {},
}


def place(replicas: int = 0, layers: int = 1) -> isoload.Placement:
    topology = isoload.Topology(RANKS, ranks_per_node=4)
    loads = torch.from_numpy(np.random.default_rng(1).lognormal(0, 1, (layers, EXPERTS)))
    placer = "eplb" if replicas else "trivial"
    size = EXPERTS // RANKS + replicas + SPARE
    return isoload.place(loads, topology, size, placer, spare_slots=SPARE)


def draw_loads(seed: int, drift: float = 0.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    shares = rng.lognormal(0, 1, EXPERTS) * np.random.default_rng(seed + 99).lognormal(0, drift, EXPERTS)
    return torch.from_numpy(rng.multinomial(80_000, shares / shares.sum()).astype(np.int32))


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("within", ["all", "node"])
@pytest.mark.parametrize("policy", OPTIONS)
def test_plans_meet_their_bound_and_nodes_are_a_limit(policy: str, within: str, replicas: int) -> None:
    placement, moved = place(replicas), 0
    for seed in range(20):
        loads = draw_loads(seed)
        plan = isoload.plan(loads, placement, 0, policy, within=within, **OPTIONS[policy])
        assert plan_errors(plan, loads) == [] and plan.telemetry is not None
        assert plan.peak.item() == plan.bound.item() <= isoload.plan(loads, placement, 0).peak.item()
        assert plan.policy.name == policy
        moved += int(plan.telemetry[0])
        assert within == "all" or int(plan.telemetry[3]) == 0, "an expert left its node"
    assert moved > 20


@pytest.mark.parametrize("policy", OPTIONS)
def test_a_last_fill_is_kept_while_it_is_level(policy: str) -> None:
    placement, kept = place(), 0
    options = {**OPTIONS[policy], "refill_above": 1.1}
    for seed in range(12):
        last = planning.fill(draw_loads(seed), placement, 0, policy, **options)
        for drift in (0.0, 0.1, 0.6):
            loads = draw_loads(seed, drift)
            over_last = isoload.plan(loads, placement, 0, "exact", filled=last).peak.item()
            filled = planning.fill(loads, placement, 0, policy, last=last, **options)
            level = over_last * RANKS * 10 <= 80_000 * 11
            anew = planning.fill(loads, placement, 0, policy, **options)
            wanted = last if level else anew
            assert torch.equal(filled.slot_to_expert, wanted.slot_to_expert), (seed, drift)
            assert torch.equal(filled.telemetry, wanted.telemetry)
            kept += level and not torch.equal(last.slot_to_expert, anew.slot_to_expert)
            always = planning.fill(loads, placement, 0, policy, last=last, **OPTIONS[policy])
            assert torch.equal(always.slot_to_expert, anew.slot_to_expert), (
                "the default fills every batch anew"
            )
    assert kept > 3


@pytest.mark.parametrize("policy", OPTIONS)
def test_layers_keep_their_last_fill_one_by_one(policy: str) -> None:
    placement = place(layers=3)
    options = {**OPTIONS[policy], "refill_above": 1.1}
    before, now = (
        torch.stack([draw_loads(seed, drift) for seed, drift in pairs])
        for pairs in (((0, 0), (1, 0), (2, 0)), ((0, 0), (1, 0.6), (2, 0.1)))
    )
    last = planning.fill(before, placement, None, policy, **options)
    filled = planning.fill(now, placement, None, policy, last=last, **options)
    for i in range(3):
        one = planning.fill(now[i], placement, i, policy, last=last[i], **options)
        assert torch.equal(filled.slot_to_expert[i], one.slot_to_expert)


def test_refuses_a_last_fill_of_other_layers() -> None:
    placement, loads = place(layers=2), draw_loads(0)
    last = planning.fill(loads, placement, 1, "llep")
    with pytest.raises(ValueError, match="last must be of the placement and layer that are filled, 0, got 1"):
        planning.fill(loads, placement, 0, "llep", last=last)
