"""Policy spill_cost: near the optimum of a MILP, near ranks first, and never dearer than plain EP."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoload
from isoload import ops
from support.level_cases import LevelCase, in_order
from support.spill_bounds import least_cost_bound

IMPORT = 1000  # copies


def hot(experts: int, share: float, count: int) -> np.ndarray:
    weights = np.full(experts, (1 - share) / (experts - count))
    weights[:count] = share / count
    return weights


def draw(ranks: int, weights: np.ndarray, tokens: int, seed: int) -> LevelCase:
    rng = np.random.default_rng(seed)
    weights = rng.permutation(weights)
    return in_order(rng.multinomial(tokens, weights / weights.sum()), ranks)


# Small enough that HiGHS proves the bound itself, in any time: no time limit, so no timed test.
INSTANCES = {
    "80 % on 2 of 24": draw(4, hot(24, 0.8, 2), 33_000, 0),
    "95 % on 1 of 32": draw(4, hot(32, 0.95, 1), 131_072, 0),
    "95 % on 4 of 16": draw(4, hot(16, 0.95, 4), 66_000, 0),
    "Zipf 1.2, 24 experts": draw(4, 1 / np.arange(1, 25) ** 1.2, 33_000, 0),
    "Zipf 1.5, 32 experts": draw(4, 1 / np.arange(1, 33) ** 1.5, 66_000, 0),
    "log-normal, 16 experts": draw(4, np.random.default_rng(1).lognormal(0, 1, 16), 66_000, 0),
}


@pytest.mark.slow
def test_near_the_bound_of_a_milp() -> None:
    """The bound adds a rank's own imports to its copies, the fill the busiest importer's to the largest load."""
    gaps = []
    for name, case in INSTANCES.items():
        fill = case.fill(import_costs=(IMPORT, IMPORT))
        cost = case.peak(fill.slot_to_expert) + IMPORT * int(fill.telemetry[1])
        gap = cost / least_cost_bound(case, IMPORT) - 1
        print(f"{name}: {gap:.2%}, {fill.telemetry.tolist()}")
        assert -1e-4 < gap <= 0.1, f"{name}: {gap:.2%}"
        gaps.append(gap)
    assert np.mean(gaps) <= 0.05


def test_fewer_imports_than_llep_at_nearly_the_same_peak() -> None:
    case = draw(16, hot(256, 0.5, 16), 1_000_000, 3)
    llep = case.fill()
    cost = case.fill(import_costs=(IMPORT, IMPORT), export_costs=(IMPORT, IMPORT))
    assert int(cost.telemetry[0]) < int(llep.telemetry[0])
    peaks = [case.peak(fill.slot_to_expert) for fill in (cost, llep)]
    assert peaks[0] <= 1.1 * peaks[1]


def placed(ranks: int, per_node: int, spare: int = 2) -> isoload.Placement:
    slots = torch.full((1, ranks, 4 + spare), -1)
    slots[0, :, :4] = torch.arange(4 * ranks).view(ranks, 4)
    topology = isoload.Topology(ranks, per_node, bandwidths=(400, 50))
    return isoload.Placement(slots.view(1, -1), topology, 4 * ranks, spare_slots=spare)


def loads(*hot_experts: tuple[int, int], experts: int = 32) -> torch.Tensor:
    counts = torch.full((experts,), 1000, dtype=torch.int32)
    for expert, n in hot_experts:
        counts[expert] = n
    return counts


def imports(plan: isoload.policies.plan.Plan, home_slot: list[int], size: int, spare: int) -> tuple[int, int]:
    """Experts in spare slots: borrowed inside their node, and from other nodes."""
    near = far = 0
    for p, expert in enumerate(plan.slot_to_expert.tolist()):
        if p % size >= size - spare and expert >= 0:
            inside = p // size // plan.topology.ranks_per_node == (
                home_slot[expert] // size // plan.topology.ranks_per_node
            )
            near, far = near + inside, far + (not inside)
    return near, far


def test_the_own_node_helps_while_it_can() -> None:
    placement = placed(8, 4)
    level = loads((0, 13_000))
    level[1:16] = 200  # the nodes have equal loads, the ranks have not
    small = isoload.plan(level, placement, 0, "spill_cost", expert_bytes=4_000_000)
    large = isoload.plan(loads((0, 200_000)), placement, 0, "spill_cost", expert_bytes=4_000_000)
    far = []
    for plan in (small, large):
        found = imports(plan, placement.home_slot[0].tolist(), placement.slots_per_rank, 2)
        assert plan.telemetry is not None and sum(found) == int(plan.telemetry[0]) > 0
        assert found[1] == int(plan.telemetry[3])
        far.append(found[1])
    assert far[0] == 0 and far[1] > 0


def test_nothing_moves_where_no_import_pays() -> None:
    plan = isoload.plan(loads((0, 1500)), placed(8, 4), 0, "spill_cost")
    assert plan.telemetry is not None and plan.telemetry.tolist()[:4] == [0, 0, 0, 0]


def test_exports_have_a_price() -> None:
    counts = loads((0, 100_000), (1, 100_000))
    fills = []
    for exports in ((0, 0), (20_000, 20_000)):
        placement = placed(8, 8)
        fills.append(
            ops.plan_fill(
                counts, placement.slot_to_expert[0], placement.home_slot[0], 8, 2, export_costs=exports
            )
        )
    free, dear = (int(fill.telemetry[2]) for fill in fills)
    assert 0 < dear < free


def test_default_import_costs_are_break_even_points() -> None:
    counts, placement = loads((0, 50_000), (9, 30_000)), placed(8, 4)
    near, far = (
        isoload.times.exchanges.break_even(3 * 7168 * 2048, bandwidth, 0.147) for bandwidth in (400, 50)
    )
    fill = ops.plan_fill(
        counts,
        placement.slot_to_expert[0],
        placement.home_slot[0],
        8,
        2,
        ranks_per_node=4,
        import_costs=(near, far),
        export_costs=(near, far),
    )
    plan = isoload.plan(counts, placement, 0, "spill_cost")
    assert torch.equal(plan.slot_to_expert, fill.slot_to_expert) and torch.equal(
        plan.telemetry, fill.telemetry
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_bytes": 0}, "expert_bytes must be a positive number, got 0"),
        ({"token_us": -1.0}, "token_us must be a positive number, got -1.0"),
        ({"min_chunk": 0}, r"min_chunk must be in 1..2\^31-1, got 0"),
    ],
)
def test_refuses(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        isoload.plan(loads(), placed(8, 4), 0, "spill_cost", **options)
