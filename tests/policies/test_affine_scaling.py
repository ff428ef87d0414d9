"""The published five steps: beside least squares in float64, HiGHS and the even split; in a plan; what is refused."""

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.policies import make_policy, parse_policy
from isoload.policies.published import plan_affine
from isoload.traces import Trace
from support.cases import instances
from support.oracles import lp_value

FAMILIES = ("eplb", "random", "chain", "clique", "one_expert")


def cases():
    for case in instances(2, seed=71, max_ranks=16, families=FAMILIES):
        if all((case.slot_to_expert == e).any() for e in range(case.num_experts)):
            yield case, torch.from_numpy(case.slot_to_expert)


def counts_of(case):
    return torch.from_numpy(case.expert_loads()).int()


def least_squares_steps(loads, slots, base, steps):
    """{(expert, rank): copies} of replicated experts; None where the published test refuses them.

    A step's prices are those of a least-squares problem: no normal equations, no Cholesky, and float64.
    """
    ranks, size = len(base), len(slots) // len(base)
    pairs = sorted({(int(e), p // size) for p, e in enumerate(slots) if 0 <= e < len(loads)})
    copies = np.bincount([e for e, _ in pairs], minlength=len(loads))
    moving = [pair for pair in pairs if copies[pair[0]] > 1]
    solo = base + np.bincount([r for _, r in pairs], [loads[e] * (copies[e] == 1) for e, _ in pairs], ranks)
    experts = sorted({e for e, _ in moving})
    if not loads[experts].any():
        return {}
    expert_rows = [[e == row for e, _ in moving] + [0] * (ranks + 1) for row in experts]
    rank_rows = [
        [r == row for _, r in moving] + [r == row for r in range(ranks)] + [-1] for row in range(ranks)
    ]
    matrix = np.array([*expert_rows, *rank_rows], dtype=np.float64)
    right = np.concatenate([loads[experts], -solo]) / (loads[experts].sum() + solo.sum())
    matrix = np.column_stack([matrix, right - matrix.sum(1)])
    cost = np.array([0.0] * (len(moving) + ranks) + [1, 1000])
    x = np.ones(len(cost))
    for _ in range(steps):
        prices = np.linalg.lstsq((matrix * x).T, x * cost, rcond=None)[0]
        move = x * (cost - matrix.T @ prices)
        x = x * (1 - 0.999 / move.max() * move)
    if move.max() >= 0.1 or x[-1] >= 1e-4:
        return None
    sums = {expert: sum(x[i] for i, (e, _) in enumerate(moving) if e == expert) for expert in experts}
    return {pair: loads[pair[0]] * x[i] / sums[pair[0]] for i, pair in enumerate(moving)}


@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize(("steps", "off"), [(3, 0.01), (5, 0.1)])  # float32 drifts from float64
def test_steps_are_those_of_least_squares(steps, off, carried):
    missed, refused = [], 0
    for case, slots in cases():
        counts, ranks = counts_of(case), case.num_ranks
        base = torch.arange(ranks, dtype=torch.int32) * int(counts.sum()) // ranks**2 * carried
        found = plan_affine(counts, slots, ranks, base, steps)
        wanted = least_squares_steps(counts.numpy(), slots.numpy(), base.numpy(), steps)
        assert (wanted is None) == (int(found.status) == 2), case
        refused += wanted is None
        for (expert, rank), copies in (wanted or {}).items():
            on_rank = slice(rank * len(slots) // ranks, (rank + 1) * len(slots) // ranks)
            here = float(found.split[on_rank][slots[on_rank] == expert].sum())
            missed.append(abs(here - copies) / max(1, int(counts[expert])))
    assert len(missed) > 20 and refused
    assert np.max(missed) < off and np.median(missed) < 0.0005


def test_near_the_optimum_and_even_where_refused():
    gaps = []
    for case, slots in cases():
        counts, ranks = counts_of(case), case.num_ranks
        found, even = (plan_affine(counts, slots, ranks, iterations=steps) for steps in (5, 0))
        best = lp_value(counts.numpy(), slots.numpy(), ranks)
        assert float(found.primal) >= best * (1 - 1e-9) and float(found.dual) == 0
        if int(found.status):
            assert torch.equal(found.split, even.split)
        elif best:
            gaps.append([float(of.primal) / best - 1 for of in (found, even)])
    five, none = np.mean(gaps, axis=0)
    assert len(gaps) > 10 and five < 0.06 and five < none / 2


def drawn(layers=2, ranks=8, experts=64, seed=3):
    """A placement, and ids [L, R, 512, 4] of its own distribution."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.rand(layers, experts, generator=generator) ** 6 + 1e-4
    placement = isoload.place(popularity * 1e5, isoload.Topology(ranks), slots_per_rank=experts // ranks + 2)
    keys = (
        popularity.log()[:, None]
        - torch.rand(layers, ranks * 512, experts, generator=generator).log().neg().log()
    )
    return placement, keys.topk(4).indices.view(layers, ranks, 512, 4)


@pytest.mark.parametrize("options", [{}, {"iterations": 4}])
def test_drawn_plans(options):
    placement, ids = drawn()
    loads = torch.stack([torch.stack([isoload.count(row, 64) for row in layer]) for layer in ids])
    steps = options.get("iterations", 5)
    sampled = isoload.plan(loads, placement, policy="lp_sampled", method="affine", **options)
    assert sampled.quota is None and sampled.telemetry.tolist() == [[steps, 0, 0, 0]] * 2
    for layer in range(2):
        slots = placement.slot_to_expert[layer]
        found = plan_affine(loads[layer].sum(0), slots, 8, iterations=steps)
        assert torch.equal(found.split.float(), sampled.weights[layer])


def test_a_balancer_and_a_replay_run_the_published_system():
    placement, ids = drawn(layers=1)
    group = isoload.LocalGroup(placement.topology)
    balancer = isoload.Balancer(placement, policy="lp_sampled", group=group, method="affine", seed=1)
    rows = list(ids[0])
    for slots, row in zip(balancer(rows), rows, strict=True):
        assert torch.equal(placement.slot_to_expert[0][slots], row.to(torch.int32))
    assert int(balancer.last_plan.telemetry[1]) == 0
    policies = ("exact", "lp_sampled:method=affine:iterations=5", "dynamic")
    trace = Trace("drawn", 64, topk_ids=ids.view(-1, 1, 4).numpy(), tokens_per_batch=np.full(8, 512))
    settings = ReplaySettings(num_ranks=8, slots_per_rank=10, policies=policies)
    exact, sampled, dynamic = replay(trace, settings).policies
    assert sampled.policy == policies[1]
    assert exact.gap_mean < sampled.gap_mean < dynamic.gap_mean


def test_refuses():
    gone = (
        "option method of policy lp was removed: use policy lp_sampled, which has the split of method affine"
    )
    with pytest.raises(ValueError, match=gone):
        parse_policy("lp:method=affine:iterations=5")
    with pytest.raises(ValueError, match="method must be one of interior, affine, got 'simplex'"):
        make_policy("lp_sampled", {"method": "simplex"})
    with pytest.raises(ValueError, match=r"iterations must be in 0\.\.1000, got 1001"):
        make_policy("lp_sampled", {"method": "affine", "iterations": 1001})
    for given in ({"precision": "float64"}, {"tolerance": 0.1}):
        with pytest.raises(ValueError, match="must be left out with method affine, got float"):
            make_policy("lp_sampled", {"method": "affine", **given})
    fast = isoload.place(torch.rand(1, 8), isoload.Topology(2, speeds=[1.0, 2.0]), slots_per_rank=5)
    for policy in ("lp", "lp_sampled", "lp_sampled:method=affine"):
        name, options = parse_policy(policy)
        refused = f"speeds must be None for policy {name}, which counts copies: use policy exact"
        with pytest.raises(ValueError, match=refused):
            isoload.plan(torch.ones(8, dtype=torch.int32), fast, 0, name, **options)
    with pytest.raises(ValueError, match="loads must be on the CPU for affine scaling, got meta"):
        plan_affine(torch.ones(8, dtype=torch.int32, device="meta"), fast.slot_to_expert[0], 2)
