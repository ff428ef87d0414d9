"""Policies libra and hedge: filled from a forecast or from the loads, split of what came; and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import isoload
from isoload.balancing import planning
from isoload.policies import POLICIES, make_policy, parse_policy

RANKS, EXPERTS, SPARE = 8, 32, 3
TOPOLOGY = isoload.Topology(RANKS, ranks_per_node=4)
LIBRAS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("libra", {}),
    "published": ("libra_published", {}),
    "tolerant": ("libra", {"tolerance": 0.1}),
    "all local": ("libra", {"alpha": 1.0}),
}


def place(replicas: int = 0, num_shared: int = 0, topology: isoload.Topology = TOPOLOGY) -> isoload.Placement:
    size = EXPERTS // RANKS + replicas + num_shared + SPARE
    counts = np.random.default_rng(3).zipf(1.5, (2, EXPERTS)).clip(max=300)
    placer = "eplb" if replicas else "trivial"
    return isoload.place(counts, topology, size, placer, spare_slots=SPARE, num_shared=num_shared)


def draw_loads(seed: int, num_shared: int = 0) -> Tensor:
    """[R, E] skewed, and each rank a little in its own way."""
    rng = np.random.default_rng(seed)
    popularity = rng.dirichlet(np.full(EXPERTS, 0.3)) * rng.gamma(2, size=(RANKS, EXPERTS))
    rows = [rng.multinomial(400, row / row.sum()) for row in popularity]
    tokens = np.full((RANKS, num_shared), 50)
    return torch.from_numpy(np.concatenate([np.stack(rows), tokens], axis=1).astype(np.int32))


def predicted(loads: Tensor, seed: int) -> Tensor:
    """Half of every expert's copies on other experts."""
    others = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(seed))
    return (loads - loads // 2) + (loads // 2)[:, others]


def local_part(plan: isoload.policies.plan.Plan, loads: Tensor) -> Tensor:
    """[R, P] copies whose expert has a slot on their own rank, in the first such slot; slot by slot."""
    rows, size = (
        torch.zeros(RANKS, len(plan.slot_to_expert), dtype=torch.int32),
        plan.placed.host.slots_per_rank,
    )
    for rank in range(RANKS):
        held = plan.slot_to_expert[rank * size : (rank + 1) * size].tolist()
        for expert in set(held) & set(range(EXPERTS)):
            rows[rank, rank * size + held.index(expert)] = loads[rank, expert]
    return rows


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("name", LIBRAS)
def test_libra_keeps_local_copies_and_its_plan_is_one(name: str, replicas: int) -> None:
    placement = place(replicas)
    for seed in range(6):
        loads, policy = draw_loads(seed), make_policy(*LIBRAS[name])
        filled = planning.fill(predicted(loads, seed), placement, 0, policy)
        for plan in (
            isoload.plan(loads, placement, 0, policy),
            isoload.plan(loads, placement, 0, policy, filled=filled),
        ):
            assert isoload.policies.plan.plan_errors(plan, loads) == [] and plan.policy == policy
            shares = isoload.share(loads, plan)
            assert torch.equal(shares.sum(0, dtype=torch.int32), plan.quota)
            local = local_part(plan, loads)
            assert (shares >= local).all() and local.sum() > 0, "the default share keeps local copies"
        assert torch.equal(plan.slot_to_expert, filled.slot_to_expert)


def test_libra_is_never_above_the_papers_sharding_of_the_same_slots() -> None:
    lower = 0
    for seed in range(40):
        placement, loads = place(seed % 2), draw_loads(seed)
        filled = planning.fill(predicted(loads, seed), placement, 0, "libra")
        peaks = [
            isoload.plan(loads, placement, 0, policy, filled=filled).peak.item()
            for policy in ("libra_published", "libra")
        ]
        assert peaks[1] <= peaks[0]
        lower += peaks[1] < peaks[0]
    assert lower > 3


@pytest.mark.parametrize("replicas", [0, 1])
def test_hedge_splits_exactly_and_fills_all_slots(replicas: int) -> None:
    placement = place(replicas)
    for seed in range(6):
        loads = draw_loads(seed)
        for forecast in (loads, predicted(loads, seed)):
            filled = planning.fill(forecast, placement, 0, "hedge")
            plan = isoload.plan(loads, placement, 0, "hedge", filled=filled)
            assert isoload.policies.plan.plan_errors(plan, loads) == []
            assert plan.peak.item() == plan.bound.item()
            assert filled.telemetry[0] == RANKS * SPARE and plan.telemetry is filled.telemetry
            level = make_policy("llep", {"min_chunk": 1, "threshold": 0.0})
            held = planning.fill(forecast, placement, 0, level).slot_to_expert
            assert torch.equal(torch.where(held >= 0, filled.slot_to_expert, -1), held), (
                "the level's plan is in it"
            )


def test_few_slots_are_the_last_ones() -> None:
    placement, loads = place(), draw_loads(0)
    for name in ("libra", "libra_published", "hedge"):
        filled = planning.fill(loads, placement, 0, name, slots=1)
        spare = filled.slot_to_expert.view(RANKS, -1)[:, -SPARE:]
        assert (spare[:, :-1] == -1).all() and (spare[:, -1] >= 0).any()
        assert filled.telemetry[1] == 1


@pytest.mark.parametrize("name", ["libra", "libra_published", "hedge"])
def test_shared_experts_stay_and_layers_equal_one_by_one(name: str) -> None:
    placement = place(1, num_shared=1)
    loads = torch.stack([draw_loads(seed, 1) for seed in range(2)])
    policy, options = parse_policy(name)
    plans = isoload.balancing.planning.plan_layers(loads, placement, policy, **options)
    for layer in range(2):
        one = isoload.plan(loads[layer], placement, layer, policy, **options)
        assert isoload.policies.plan.plan_errors(one, loads[layer]) == []
        assert torch.equal(one.quota, plans[layer].quota) and torch.equal(one.peak, plans[layer].peak)


@pytest.mark.parametrize("name", ["libra", "libra_published", "hedge"])
def test_dead_ranks_borrow_nothing(name: str) -> None:
    alive = (True,) * (RANKS - 1) + (False,)
    counts = np.random.default_rng(3).zipf(1.5, (1, EXPERTS)).clip(max=300)
    topology = isoload.Topology(RANKS, ranks_per_node=4, alive=alive)
    placement = isoload.place(counts, topology, 5 + SPARE, "eplb", spare_slots=SPARE)
    loads = draw_loads(1)
    loads[-1] = 0
    policy, options = parse_policy(name)
    plan = isoload.plan(loads, placement, 0, policy, **options)
    assert isoload.policies.plan.plan_errors(plan, loads) == []
    assert (plan.slot_to_expert.view(RANKS, -1)[-1] == -1).all()
    assert plan.quota.view(RANKS, -1)[-1].sum() == 0


@pytest.mark.parametrize("name", ["libra", "hedge"])
def test_nothing_waits_for_the_device(name: str) -> None:
    """On a fake CUDA device every .item(), bool() and .tolist() raises."""
    policy, options = parse_policy(name)
    placement = place(1)
    with FakeTensorMode():
        loads = torch.empty((RANKS, EXPERTS), dtype=torch.int32, device="cuda")
        filled = planning.fill(loads, placement, 0, policy, **options)
        for keep_local in (False, True):
            plan = isoload.plan(loads, placement, 0, "hedge", filled=filled, keep_local=keep_local)
            assert plan.quota.shape == (placement.num_slots,) and plan.quota.device.type == "cuda"
        assert isoload.plan(loads, placement, 0, policy, filled=filled, **options).peak.shape == ()


def test_who_declares_ahead() -> None:
    assert [name for name in POLICIES if make_policy(name).ahead] == ["libra", "libra_published", "hedge"]


@pytest.mark.parametrize("replicas", [0, 1])
def test_libra_borrows_what_each_rank_chooses_most(replicas: int) -> None:
    """Ties go to the lowest expert; alpha is rounded down as it is written: a third of three slots is one."""
    for seed in range(6):
        placement, loads = place(replicas), draw_loads(seed) // 8 * 8  # with ties
        resident = placement.slot_to_expert[0].view(RANKS, -1)[:, :-SPARE].tolist()
        for alpha, local in ((0.34, 1), (0.33, 0), (2 / 3 + 1e-6, 2), (1.0, 3)):
            filled = planning.fill(loads, placement, 0, "libra", alpha=alpha)
            for rank, row in enumerate(filled.slot_to_expert.view(RANKS, -1).tolist()):
                wanted = [e for e in range(EXPERTS) if e not in resident[rank] and loads[rank, e] > 0]
                first = sorted(wanted, key=lambda e: (-int(loads[rank, e]), e))[:local]
                spare = row[-SPARE:]
                assert row[:-SPARE] == resident[rank]
                assert spare[:local] == first + [-1] * (local - len(first))
                borrowed = [e for e in spare if e >= 0]
                assert len({*borrowed, *resident[rank]} - {-1}) == len(borrowed) + len(
                    {*resident[rank]} - {-1}
                )


def test_libras_telemetry_counts_what_is_borrowed() -> None:
    for seed in range(6):
        placement, loads = place(seed % 2), draw_loads(seed)
        filled = planning.fill(loads, placement, 0, "libra")
        size, homes = placement.slots_per_rank, placement.home_slot[0]
        spare = filled.slot_to_expert.view(RANKS, -1)[:, -SPARE:].tolist()
        pairs = [(r, int(homes[e]) // size) for r, row in enumerate(spare) for e in row if e >= 0]
        imports, exports = ([pair[i] for pair in pairs] for i in (0, 1))
        assert filled.telemetry.tolist() == [
            len(pairs),
            max(map(imports.count, range(RANKS))),
            max(map(exports.count, range(RANKS))),
            sum(taker // 4 != giver // 4 for taker, giver in pairs),
            0,
        ]


def test_options_are_read_as_written() -> None:
    assert parse_policy("libra:alpha=0.25:slots=2") == ("libra", {"alpha": 0.25, "slots": 2})
    for option, use in (
        ("printed=True", "policy libra_published runs both algorithms as printed in the paper"),
        ("split_by=exact", "copies that may leave their rank are split exactly, libra_published shards them"),
    ):
        gone = f"option {option.split('=')[0]} of policy libra was removed: {use}"
        with pytest.raises(ValueError, match=gone):
            parse_policy(f"libra:{option}")


REFUSED = {
    "alpha": ("libra", {"alpha": 1.1}, r"alpha must be in 0..1, got 1.1"),
    "tolerance": ("libra", {"tolerance": -1.0}, r"tolerance must be in 0..1000, got -1.0"),
    "no slots": ("hedge", {"slots": 0}, "slots must be at least 1, got 0"),
    "published alpha": ("libra_published", {"alpha": 1.1}, r"alpha must be in 0..1, got 1.1"),
    "published tolerance": (
        "libra_published",
        {"tolerance": -1.0},
        r"tolerance must be in 0..1000, got -1.0",
    ),
    "slots": ("libra", {"slots": 4}, r"slots must be at most spare_slots \(3\) for policy libra, got 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    policy, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        isoload.plan(draw_loads(0), place(), 0, policy, **options)


@pytest.mark.parametrize("name", ["libra", "hedge"])
def test_refuses_placements(name: str) -> None:
    bare = isoload.place(np.ones((1, EXPERTS)), TOPOLOGY, EXPERTS // RANKS, "trivial")
    with pytest.raises(ValueError, match=f"spare_slots must be at least 1 for policy {name}, got 0"):
        isoload.plan(draw_loads(0), bare, 0, name)
    slow = place(topology=isoload.Topology(RANKS, 4, speeds=(1.0,) * (RANKS - 1) + (0.5,)))
    with pytest.raises(ValueError, match=f"speeds must be None for policy {name}, which counts copies"):
        isoload.plan(draw_loads(0), slow, 0, name)


def test_libra_needs_sources() -> None:
    with pytest.raises(ValueError, match="loads must be per source rank, .* for policy libra"):
        isoload.plan(draw_loads(0).sum(0, dtype=torch.int32), place(), 0, "libra")
