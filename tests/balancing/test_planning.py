"""The public fast clock: plan, plan_layers, share, route; sync-free by proof; errors before any work."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import isoload
from isoload.balancing.planning import in_place
from support.small_batches import (
    EXPERTS,
    LAYERS,
    RANKS,
    K,
    draw_ids,
    gather,
    make_counts,
    make_placement,
    make_topology,
)

QUOTA_POLICIES = ["none", "static", "even", "exact", "exact_active", "lp"]
SAMPLED_POLICIES = ["dynamic", "lp_sampled"]


@pytest.fixture(scope="module")
def topology():
    return make_topology()


@pytest.fixture(scope="module")
def counts():
    return make_counts()


@pytest.fixture(scope="module")
def placement():
    return make_placement()


@pytest.mark.parametrize("policy", QUOTA_POLICIES)
def test_route_realises_every_quota(policy, placement):
    ids = draw_ids(seed=11)
    loads = gather(ids)
    for layer in range(LAYERS):
        plan = isoload.plan(loads, placement, layer=layer, policy=policy)
        assert plan.realisation == "quota" and plan.layer == layer
        assert isoload.policies.plan.plan_errors(plan, loads) == []
        slots = torch.cat([isoload.route(ids[r], loads, plan, rank=r) for r in range(RANKS)])
        assert torch.equal(isoload.count(slots, placement.num_slots), plan.quota)
        held = plan.slot_to_expert[slots.clamp(min=0)]
        assert torch.equal(torch.where(slots < 0, -1, held), torch.cat(ids))


def test_exact_active_needs_fewest_slots(placement):
    """One source's few tokens: no rank reads more slots than under exact, and each expert is read once."""
    loads = gather(draw_ids(seed=5, tokens=2))
    used = {}
    for policy in ("exact", "exact_active"):
        plan = isoload.plan(loads, placement, 0, policy)
        assert isoload.policies.plan.plan_errors(plan, loads) == []
        used[policy] = (plan.quota.view(RANKS, -1) > 0).sum(1)
    assert int(used["exact_active"].max()) <= int(used["exact"].max())
    assert int(used["exact_active"].sum()) == int((loads.sum(0) > 0).sum())


@pytest.mark.parametrize("policy", [*QUOTA_POLICIES, *SAMPLED_POLICIES])
def test_all_layers_at_once_equal_one_by_one(policy, placement):
    loads = torch.stack([gather(draw_ids(seed)) for seed in range(LAYERS)])
    plans = isoload.balancing.planning.plan_layers(loads, placement, policy=policy)
    assert isoload.plan(loads, placement, policy=policy).bound.tolist() == plans.bound.tolist()
    for layer in range(LAYERS):
        one = isoload.plan(loads[layer], placement, layer=layer, policy=policy)
        part = plans[layer]
        assert part.layer == layer
        for field in ("slot_to_expert", "quota", "peak", "bound", "weights", "telemetry"):
            a, b = getattr(one, field), getattr(part, field)
            assert (a is None and b is None) or torch.equal(a, b), field


def test_exact_is_optimal_and_proved(placement):
    loads = gather(draw_ids(seed=5))
    peaks = {}
    for policy in QUOTA_POLICIES:
        plan = isoload.plan(loads, placement, layer=0, policy=policy)
        peaks[policy] = int(plan.peak)
    exact = isoload.plan(loads.sum(0, dtype=torch.int32), placement, layer=0)
    assert int(exact.peak) == int(exact.bound) == peaks["exact"] == min(peaks.values())
    assert peaks["none"] > peaks["exact"], "the case must leave something to balance"


def test_dynamic_is_seeded_and_close_to_even(placement):
    ids, loads = draw_ids(seed=7, tokens=400), None
    loads = gather(ids)

    def routed(**options):
        plan = isoload.plan(loads, placement, layer=1, policy="dynamic", **options)
        assert plan.realisation == "sample" and plan.quota is None and plan.peak is None
        return torch.cat([isoload.route(ids[r], loads, plan, rank=r) for r in range(RANKS)])

    first = routed(seed=1)
    assert torch.equal(first, routed(seed=1))
    for other in (routed(seed=2), routed(seed=1, step=1)):
        assert not torch.equal(first, other)
    even = isoload.plan(loads, placement, layer=1, policy="even").quota
    drawn = isoload.count(first, placement.num_slots)
    assert ((drawn - even).abs() <= 6 * even.float().sqrt() + 6).all()
    held = placement.slot_to_expert[1][first.clamp(min=0)]
    assert torch.equal(torch.where(first < 0, -1, held), torch.cat(ids))


def test_static_sends_an_expert_to_one_replica(placement, topology):
    loads = gather(draw_ids(seed=13))
    plan = isoload.plan(loads, placement, layer=2, policy="static")
    rows = isoload.share(loads, plan)
    size = placement.slots_per_rank
    rank_of = torch.arange(placement.num_slots) // size
    for expert in range(EXPERTS):
        replicas = (placement.slot_to_expert[2] == expert).nonzero().flatten()
        for rank in range(RANKS):
            used = replicas[rows[rank, replicas] > 0]
            assert len(used) == (1 if loads[rank, expert] else 0)
            own, node = rank_of[replicas] == rank, rank_of[replicas] // 4 == rank // 4
            best = replicas[own] if own.any() else replicas[node] if node.any() else replicas
            assert all(slot in best for slot in used)
    assert torch.equal(rows.sum(0, dtype=torch.int32), plan.quota)
    again = isoload.plan(gather(draw_ids(seed=14)), placement, layer=2, policy="static")
    assert torch.equal(isoload.share(loads, again), rows), "fixed until re-placement"


def test_speeds_shift_load_to_faster_ranks(counts):
    topology = isoload.Topology(num_ranks=4, speeds=(1.0, 1.0, 0.5, 2.0))
    placement = isoload.place(counts, topology, slots_per_rank=12)
    loads = counts[0].to(torch.int32)
    plan = isoload.plan(loads, placement, layer=0)
    assert isoload.policies.plan.plan_errors(plan, loads) == []
    assert int(plan.peak) == int(plan.bound)
    copies = plan.quota.view(4, -1).sum(1)
    assert copies[3] > copies[0] > copies[2]


@pytest.mark.parametrize("policy", [*QUOTA_POLICIES, *SAMPLED_POLICIES])
def test_planning_never_waits_for_the_device(policy, topology, counts):
    """On a fake CUDA device every .item(), bool() and .tolist() raises: what passes cannot sync."""
    placement = isoload.place(counts, topology, slots_per_rank=6)
    with FakeTensorMode():
        ids = torch.empty((64, K), dtype=torch.int64, device="cuda")
        with pytest.raises(Exception, match=r"item|data-dependent|_local_scalar_dense"):
            ids.sum().item()
        row = isoload.count(ids, EXPERTS)
        loads = torch.stack([row] * RANKS)  # stands for the all-gather
        plan = isoload.plan(loads, placement, layer=1, policy=policy)
        if plan.quota is not None:
            assert isoload.share(loads, plan, rank=3).shape == (placement.num_slots,)
            assert isoload.share(loads, plan).shape == (RANKS, placement.num_slots)
        slots = isoload.route(ids, loads, plan, rank=3)
        assert slots.shape == ids.shape and slots.dtype == ids.dtype and slots.device.type == "cuda"
        plans = isoload.balancing.planning.plan_layers(
            torch.stack([loads] * LAYERS), placement, policy=policy
        )
        assert plans.bound.shape == (LAYERS,)


def test_the_fast_clock_compiles_whole(placement):
    plan = isoload.plan

    def chain(ids, loads):
        made = plan(loads, placement, layer=0)
        return isoload.route(ids, loads, made, rank=0)

    ids = draw_ids(seed=23)
    loads = gather(ids)
    placement.layer(0, "cpu")
    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ids[0], loads), chain(ids[0], loads))


OVER = {"negative": ([20, -3, 20, 20], "loads must not be negative, got -3 for expert 8")} | {
    f"{tokens} tokens": ([tokens] * 4, "loads must sum to less than 2.31 copies, got .* of shared experts")
    for tokens in (2**29, 2**30, 2**30 + 5, 2**31 - 1)
}


@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("alive", [None, (True, False, True, True)])
@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("name", OVER)
def test_tokens_that_cannot_be_are_refused(name, num_shared, alive, readable, monkeypatch):
    """Regression: they cancelled out, or their sums wrapped. Where values are not read, the planner's op sees it."""
    slots = torch.arange(16).view(4, 4) % 8
    slots = torch.cat([slots, torch.arange(8, 8 + num_shared).expand(4, -1)], dim=1)
    if alive is not None:
        slots[0], slots[1] = torch.cat([torch.arange(4), slots[0, 4:]]), -1
        slots[2, :4] = torch.arange(4, 8)
    placement = isoload.Placement(
        slots.view(1, -1), isoload.Topology(4, alive=alive), 8 + num_shared, num_shared=num_shared
    )
    tokens, message = OVER[name]
    loads = torch.ones(4, 8 + num_shared, dtype=torch.int32)
    loads[:, 8:] = torch.tensor(tokens).unsqueeze(1)
    if not readable:
        monkeypatch.setattr(isoload.policies.base, "values_readable", lambda _loads: False)
    for policy in ("shared_local", "waterfill", "joint", "exact", "none", "waterfill_sampled"):
        if policy == "waterfill_sampled" and (alive or num_shared > 1):
            continue
        with pytest.raises(ValueError, match=message if readable else "must not be negative|less than 2.31"):
            isoload.plan(loads, placement, 0, policy)


def test_plan_errors_finds_each_broken_promise(placement):
    loads = gather(draw_ids(seed=29))
    plan = isoload.plan(loads, placement, layer=0)

    def broken(**fields):
        return isoload.policies.plan.plan_errors(dataclasses.replace(plan, **fields), loads)

    more = plan.quota.clone()
    more[int(plan.quota.argmax())] += 1
    assert any("conserve" in e for e in broken(quota=more))
    assert any("negative" in e for e in broken(quota=plan.quota - 10**6))
    assert any("largest rank load" in e for e in broken(peak=plan.peak + 1))
    assert any("bound must not exceed" in e for e in broken(bound=plan.bound + 1))
    assert any("weights" in e for e in broken(quota=None))


@pytest.fixture(scope="module")
def setup(placement):
    """What the bad calls are made from: a good plan, and its loads and tokens."""
    ids = draw_ids(seed=31)
    good = gather(ids)
    return SimpleNamespace(
        placement=placement,
        good=good,
        ids=ids[0],
        wide=torch.full_like(ids[0], EXPERTS),
        plan=isoload.plan(good, placement, layer=0),
        plans=isoload.balancing.planning.plan_layers(torch.stack([good] * LAYERS), placement),
        sampled=isoload.plan(good, placement, layer=0, policy="dynamic"),
    )


BAD_CALLS = {
    "count id": (lambda s: isoload.count(s.wide, EXPERTS), r"topk_ids must be in -1\.\.31, got 32"),
    "count dtype": (
        lambda s: isoload.count(s.ids.float(), EXPERTS),
        "topk_ids must be int32 or int64, got float32",
    ),
    "count experts": (lambda s: isoload.count(s.ids, 0), "num_experts must be at least 1, got 0"),
    "unknown policy": (
        lambda s: isoload.plan(s.good, s.placement, 0, "best"),
        f"policy must be one of {', '.join(isoload.POLICIES)}, got 'best'",
    ),
    "name taken": (
        lambda s: isoload.policies.register_policy(isoload.POLICIES["exact"]),
        "name must be a new one, policy exact exists",
    ),
    "unknown option": (
        lambda s: isoload.plan(s.good, s.placement, 0, "exact", speed=1),
        "option must be one of tolerance, budget, objective for policy exact, got 'speed'",
    ),
    "option without any": (
        lambda s: isoload.plan(s.good, s.placement, 0, "even", seed=1),
        r"option must be one of \(none\) for policy even, got 'seed'",
    ),
    "option beside a policy": (
        lambda s: isoload.plan(s.good, s.placement, 0, isoload.POLICIES["exact"](), budget=1),
        "options must be set on the policy itself, got budget",
    ),
    "bad tolerance": (
        lambda s: isoload.plan(s.good, s.placement, 0, tolerance=-0.1),
        r"tolerance must be in 0\.\.1000 \(relative\), got -0\.1",
    ),
    "bad budget": (
        lambda s: isoload.plan(s.good, s.placement, 0, budget=-1),
        r"budget must be in 0\.\.2\^31-1, got -1",
    ),
    "layer": (lambda s: isoload.plan(s.good, s.placement, 3), r"layer must be in 0\.\.2, got 3"),
    "loads shape": (
        lambda s: isoload.plan(s.good[:, 1:], s.placement, 0),
        r"loads must be \[32\] or, per source rank, \[8, 32\], got \[8, 31\]",
    ),
    "loads of all layers": (
        lambda s: isoload.balancing.planning.plan_layers(s.good, s.placement),
        r"loads must be \[3, 32\] or, per source rank, \[3, 8, 32\], got \[8, 32\]",
    ),
    "sum for a per-source policy": (
        lambda s: isoload.plan(s.good.sum(0, dtype=torch.int32), s.placement, 0, "static"),
        r"loads must be per source rank, \[8, 32\], for policy static, got the sum \[32\]",
    ),
    "loads dtype": (lambda s: isoload.plan(s.good.long(), s.placement, 0), "loads must be int32, got int64"),
    "negative loads": (
        lambda s: isoload.plan(s.good - 1, s.placement, 0),
        r"loads must not be negative, got -1 for expert \d+",
    ),
    "too many copies": (
        lambda s: isoload.plan(s.good + 2**30, s.placement, 0),
        r"loads, fixed and pour must sum to less than 2\^31 copies, got \d+",
    ),
    "share of a sampled plan": (
        lambda s: isoload.share(s.good, s.sampled),
        "plan must have a quota to be shared, policy dynamic samples",
    ),
    "share of summed loads": (
        lambda s: isoload.share(s.good.sum(0, dtype=torch.int32), s.plan),
        r"loads must be per source rank, \[\d+, \d+\], got \[\d+\]",
    ),
    "share device": (
        lambda s: isoload.share(s.good.to("meta"), s.plan),
        "loads must be on the plan's device cpu, got meta",
    ),
    "route device": (
        lambda s: isoload.route(s.ids.to("meta"), s.good, s.plan, 0),
        "topk_ids must be on the plan's device cpu, got meta",
    ),
    "share rank": (lambda s: isoload.share(s.good, s.plan, rank=8), r"rank must be in 0\.\.7, got 8"),
    "sampled route rank": (
        lambda s: isoload.route(s.ids, s.good, s.sampled, 99),
        r"rank must be in 0\.\.7, got 99",
    ),
    "sampled route rank below 0": (
        lambda s: isoload.route(s.ids, s.good, s.sampled, -7),
        r"rank must be in 0\.\.7, got -7",
    ),
    "share order": (
        lambda s: isoload.share(s.good, s.plan, order="fast"),
        "order must be locality or rank_major, got 'fast'",
    ),
    "share of other loads": (
        lambda s: isoload.share(s.good + 1, s.plan),
        "quota must conserve loads: that of expert",
    ),
    "route of all layers": (
        lambda s: isoload.route(s.ids, s.good, s.plans, 0),
        r"plan must be of one layer \(plans\[layer\]\), got a plan of all layers",
    ),
    "route of other tokens": (
        lambda s: isoload.route(s.ids.flip(1)[1:], s.good, s.plan, 0),
        "topk_ids must hold each expert as often as its share says",
    ),
    "layer of one layer": (
        lambda s: s.plan[0],
        "layer must index a plan of all layers, this one is of layer 0",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_refused(name, setup):
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        call(setup)


def test_a_new_fill_moves_as_little_as_it_can() -> None:
    """Layer by layer and for all layers at once."""
    ranks, size, spare, experts = 4, 7, 2, 16
    fills = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(200):
        present = torch.stack(
            [torch.randperm(experts, generator=generator)[:size] for _ in range(ranks)]
        ).int()
        wanted = torch.stack(
            [torch.randperm(experts, generator=generator)[:size] for _ in range(ranks)]
        ).int()
        wanted[torch.rand(ranks, size, generator=generator) < 0.3] = -1
        present[:, -1][torch.rand(ranks, generator=generator) < 0.3] = -1
        table = in_place(wanted.flatten(), present.flatten(), ranks, spare).view(ranks, size)
        fills.append((wanted.flatten(), present.flatten(), table.flatten()))
        assert torch.equal(table[:, :-spare], present[:, :-spare])
        for now, want, then in zip(*(t[:, -spare:].tolist() for t in (table, wanted, present)), strict=True):
            wants = {e for e in want if e >= 0}
            assert wants <= set(now)
            assert sum(a != b for a, b in zip(now, then, strict=True)) == len(wants - set(then))
            assert all(a == b for a, b in zip(now, then, strict=True) if b in wants)
    wanted, present, tables = map(torch.stack, zip(*fills, strict=True))
    assert torch.equal(in_place(wanted, present, ranks, spare), tables)
