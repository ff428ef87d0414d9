"""Shared experts from count to route: one joint optimum, exact fills, and nothing that moves without need."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import isoload
from isoload.analysis.batches import make_batches
from isoload.balancing.planning import share_routed
from isoload.policies.plan import per_expert
from support.oracles import lp_optimum

EXPERTS, K = 24, 3
SHARED = ["shared_local", "waterfill", "joint"]
ROUTED = ["none", "static", "even", "exact"]
EVERY = [*ROUTED, "exact_active", "lp", "dynamic", "lp_sampled", *SHARED, "waterfill_sampled"]


def draw_ids(seed, ranks, tokens, num_shared):
    """[R][T_r, K + n] logical ids, skewed; some copies and some whole tokens masked, one rank without tokens."""
    generator = torch.Generator().manual_seed(seed)
    popularity = torch.rand(EXPERTS, generator=generator) ** 4 + 1e-3
    batches = []
    for rank in range(ranks):
        count = 0 if ranks > 2 and rank == 1 else max(1, tokens + rank % 3 - 1)
        ids = torch.multinomial(popularity.expand(count or 1, -1), K, generator=generator)[:count]
        ids[torch.rand(ids.shape, generator=generator) < 0.05] = -1
        ids[torch.rand(count, generator=generator) < 0.05] = -1
        weights = torch.rand(ids.shape, generator=generator)
        ranks_of = torch.zeros(count, num_shared, dtype=torch.int32)
        batches.append(isoload.ops.append_shared_expert(ids, weights, ranks_of, EXPERTS)[0])
    return batches


def make(ranks, num_shared=1, seed=0, **topology):
    live = sum(topology.get("alive", [True] * ranks))
    slots = min(-(-EXPERTS // live) + 1, EXPERTS) + num_shared
    counts = np.random.default_rng(seed).zipf(1.5, (2, EXPERTS)).clip(max=1000)
    return isoload.place(
        counts, isoload.Topology(ranks, **topology), slots_per_rank=slots, num_shared=num_shared
    )


def gather(ids, placement):
    return torch.stack([isoload.count(row, placement.num_experts) for row in ids])


def route_all(ids, loads, plan):
    return [isoload.route(rows, loads, plan, rank) for rank, rows in enumerate(ids)]


CASES = {
    "one rank": (1, 40, 1, {}),
    "three ranks": (3, 7, 1, {}),
    "eight on two nodes": (8, 33, 1, {"ranks_per_node": 4}),
    "twelve": (12, 65, 1, {"ranks_per_node": 4}),
    "two shared experts": (8, 33, 2, {}),
    "three shared experts": (3, 20, 3, {}),
    "one token each": (8, 1, 1, {}),
    "no tokens at all": (4, None, 1, {}),
    "unequal speeds": (4, 50, 1, {"speeds": (1.0, 0.5, 2.0, 1.25)}),
    "a dead rank": (4, 30, 1, {"alive": (True, True, False, True)}),
    "seventy ranks": (70, 9, 1, {}),
}


def make_case(name, seed=0):
    ranks, tokens, num_shared, topology = CASES[name]
    placement = make(ranks, num_shared, seed, **topology)
    ids = draw_ids(seed, ranks, tokens or 5, num_shared)
    if tokens is None:
        ids = [torch.full_like(rows, -1) for rows in ids]
    return placement, ids, gather(ids, placement)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", EVERY)
def test_every_copy_is_routed_once_and_as_planned(policy, name):
    placement, ids, loads = make_case(name)
    if policy == "waterfill_sampled" and placement.num_shared > 1:
        pytest.skip("the published form knows one shared expert")
    if policy == "waterfill_sampled" and placement.topology.alive:
        pytest.skip("nor ranks that are down")
    if policy.startswith("lp") and placement.topology.speeds is not None:
        pytest.skip("lp counts copies and rejects speeds")
    for layer in range(2):
        plan = isoload.plan(loads, placement, layer, policy)
        assert isoload.policies.plan.plan_errors(plan, loads) == []
        slots = route_all(ids, loads, plan)
        for rows, wanted in zip(slots, ids, strict=True):
            held = torch.where(rows < 0, -1, plan.slot_to_expert[rows.clamp(min=0)])
            assert torch.equal(held, wanted), "the same experts, in slots that hold them"
        if plan.realisation == "quota" and plan.quota is not None:
            assert torch.equal(isoload.count(torch.cat(slots), placement.num_slots), plan.quota)
        if plan.quota is not None and plan.realisation == "quota":
            assert torch.equal(isoload.share(loads, plan).sum(0, dtype=torch.int32), plan.quota)


@pytest.mark.parametrize("policy", [*ROUTED, "exact_active", "lp", "dynamic", "lp_sampled", "shared_local"])
def test_shared_experts_stay_home_unless_a_policy_moves_them(policy):
    placement, ids, loads = make_case("eight on two nodes")
    for rank, slots in enumerate(route_all(ids, loads, isoload.plan(loads, placement, 0, policy))):
        shared = slots[:, -1]
        assert set(shared.tolist()) <= {-1, rank * placement.slots_per_rank + placement.slots_per_rank - 1}


JOINED = {
    "joint": ("joint", {}),
    "joint, local": ("joint", {"objective": "local"}),
    "joint, cut short": ("joint", {"budget": 1}),
    "joint, nearly": ("joint", {"tolerance": 0.1}),
    "waterfill": ("waterfill", {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("how", JOINED)
def test_one_kernel_makes_the_same_plan_and_row(how, name):
    policy, options = JOINED[how]
    placement, ids, loads = make_case(name, seed=1)
    placed, chosen = placement.layer(1, "cpu"), isoload.policies.make_policy(policy, options)
    other = isoload.plan(loads, placed, policy=chosen)
    assert not other.shared.in_quota
    for rank, rows in enumerate(ids):
        plan = chosen.plan(loads, placed, rank)
        row = plan.send_counts
        assert row is not None and plan.shared.in_quota == (name != "a dead rank")
        for field in ("quota", "peak", "bound", "telemetry"):
            assert torch.equal(getattr(plan, field), getattr(other, field)), field
        assert plan.shared.rule == other.shared.rule and torch.equal(
            plan.shared.by_rank, other.shared.by_rank
        )
        assert torch.equal(row, share_routed(loads, other, rank))
        for asked in (rank, (rank + 1) % len(ids), None):
            expected = isoload.share(loads, other, asked)
            assert torch.equal(isoload.share(loads, plan, asked), expected)
        assert torch.equal(isoload.route(rows, loads, plan, rank), isoload.route(rows, loads, other, rank))


def joint_optimum(loads, placement, layer):
    """The linear program over all slots, in which a shared expert is one with a replica on every rank."""
    return lp_optimum(
        loads.sum(0).numpy(), placement.slot_to_expert[layer].numpy(), placement.topology.num_ranks
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "unequal speeds"])
def test_joint_is_the_optimum_over_all_slots(name):
    for seed in range(5):
        placement, _, loads = make_case(name, seed)
        for layer in range(2):
            plan = isoload.plan(loads, placement, layer, "joint")
            assert int(plan.peak) == int(plan.bound) == joint_optimum(loads, placement, layer)
            for policy in ("exact", "waterfill", "shared_local"):
                other = isoload.plan(loads, placement, layer, policy)
                assert int(other.peak) >= int(plan.peak)


def test_joint_is_the_optimum_on_recorded_routing():
    trace = isoload.read_trace(Path(__file__).parents[2] / "examples/traces/gptoss20b_decode.npz")
    batches = make_batches(trace)
    topology = isoload.Topology(8, 4)
    placement = isoload.place(batches.counts[:7], topology, slots_per_rank=6, num_shared=1)
    batch = batches.source_batch(8, 8, "contiguous").with_shared(trace.num_experts, 1)
    for layer in range(placement.num_layers):
        loads = gather([batch.on_rank(layer, rank) for rank in range(8)], placement)
        plan = isoload.plan(loads, placement, layer, "joint")
        assert int(plan.peak) == int(plan.bound) == joint_optimum(loads, placement, layer)


@pytest.mark.parametrize("routed", ROUTED)
@pytest.mark.parametrize("name", CASES)
def test_waterfill_is_the_least_peak_for_its_routed_split(name, routed):
    """And no more leaves home than the overloaded ranks must give away."""
    placement, _, loads = make_case(name)
    topology, n = placement.topology, placement.num_shared
    plan = isoload.plan(loads, placement, 0, "waterfill", routed=routed)
    local = isoload.plan(loads, placement, 0, "shared_local", routed=routed)
    per_rank = plan.quota.view(topology.num_ranks, -1).numpy().astype(np.int64)
    ticks = np.ones(topology.num_ranks, int) if topology.ticks is None else topology.ticks.numpy().astype(int)
    base = per_rank[:, : placement.slots_per_rank - n].sum(1)
    live = np.isin(np.arange(topology.num_ranks), topology.live_ranks)
    total = int(loads[:, EXPERTS:].sum())
    peak = int((base * ticks).max())
    while (
        np.maximum(peak // ticks - base, 0) * live
    ).sum() < total:  # one step after the other: no cleverness
        peak += 1
    assert int(plan.peak) == peak <= int(local.peak)
    room = np.where(live, peak // ticks - base, 0)
    home = loads[:, EXPERTS:].sum(1).numpy()
    kept = plan.shared.by_rank.diagonal().numpy()
    assert (kept == np.minimum(home, room)).all()


def test_rules_change_what_is_routed():
    placement, ids, loads = make_case("eight on two nodes", seed=3)
    drawn = [
        torch.cat(route_all(ids, loads, isoload.plan(loads, placement, 0, "waterfill_sampled", rule=rule)))
        for rule in ("static", "dynamic", "blog", "blog_all")
    ]
    assert all(torch.equal(d[:, :-1], drawn[0][:, :-1]) for d in drawn), "routed experts keep their quotas"
    many = draw_ids(1, 8, 200, 1)
    loads = gather(many, placement)
    chosen = {
        rule: torch.cat(
            route_all(many, loads, isoload.plan(loads, placement, 0, "waterfill_sampled", rule=rule))
        )
        for rule in ("static", "dynamic", "blog")
    }
    assert not torch.equal(chosen["static"], chosen["blog"])


@pytest.mark.parametrize("policy", EVERY)
def test_all_layers_at_once_equal_one_by_one(policy):
    placement, _, loads = make_case("eight on two nodes")
    both = torch.stack([loads, loads.flip(0)])
    plans = isoload.balancing.planning.plan_layers(both, placement, policy)
    rows = None if plans.quota is None or policy == "waterfill_sampled" else isoload.share(both, plans)
    for layer in range(2):
        one, part = isoload.plan(both[layer], placement, layer, policy), plans[layer]
        for field in ("quota", "peak", "bound", "weights"):
            a, b = getattr(one, field), getattr(part, field)
            assert (a is None and b is None) or torch.equal(a, b), field
        for field in ("tokens", "by_rank", "copies"):
            a, b = getattr(one.shared, field), getattr(part.shared, field)
            assert one.shared.rule == part.shared.rule
            assert (a is None and b is None) or torch.equal(a, b), field
        if rows is not None:
            assert torch.equal(isoload.share(both[layer], one), rows[layer])
            assert torch.equal(isoload.share(both[layer], one, rank=5), rows[layer, 5])


def test_per_expert_gives_every_shared_expert_every_token():
    generator = torch.Generator().manual_seed(9)
    for num_shared in (1, 2, 5):
        tokens = torch.tensor([4, 0, 7], dtype=torch.int32)
        share = torch.zeros(3, 3, dtype=torch.int32)
        for source, count in enumerate((tokens * num_shared).tolist()):
            for rank in torch.randint(3, (count,), generator=generator).tolist():
                share[source, rank] += 1
        parts = per_expert(share, num_shared)
        assert torch.equal(parts.sum(-1), share) and (parts >= 0).all()
        assert torch.equal(parts.sum(-2), tokens.unsqueeze(1).expand(3, num_shared))
        assert int((parts.amax(-1) - parts.amin(-1)).max()) <= 1, "a token's shared experts can stay together"


@pytest.mark.parametrize("policy", EVERY)
def test_shared_experts_never_wait_for_the_device(policy):
    placement = make(8)
    with FakeTensorMode():
        ids = torch.empty((64, K + 1), dtype=torch.int64, device="cuda")
        loads = torch.stack([isoload.count(ids, placement.num_experts)] * 8)
        plan = isoload.plan(loads, placement, 1, policy)
        slots = isoload.route(ids, loads, plan, rank=3)
        assert slots.shape == ids.shape and slots.dtype == ids.dtype and slots.device.type == "cuda"
        assert isoload.balancing.planning.plan_layers(
            torch.stack([loads] * 2), placement, policy
        ).bound.shape == (2,)


@pytest.mark.slow
def test_the_gathered_chain_compiles_whole():
    placement, ids, loads = make_case("eight on two nodes")
    placement.layer(0, "cpu")

    def chain(rows, gathered):
        return isoload.route(rows, gathered, isoload.plan(gathered, placement, 0, "joint"), rank=0)

    compiled = torch.compile(chain, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ids[0], loads), chain(ids[0], loads))


def slots_with(change):
    slots = make(4).slot_to_expert.clone()
    change(slots)
    return isoload.Placement(slots, isoload.Topology(4), EXPERTS + 1, num_shared=1)


def put(slot, expert):
    return lambda: slots_with(lambda slots: slots[0].__setitem__(slot, expert))


PLACED = make(4)
LOADS = torch.ones(4, EXPERTS + 1, dtype=torch.int32)
BAD = {
    "a rank without the shared expert": (put(7, -1), "must hold the num_shared=1 shared experts"),
    "a second shared slot": (put(0, EXPERTS), "last slots before the spare ones of every rank"),
    "sums": (
        lambda: isoload.plan(LOADS.sum(0, dtype=torch.int32), PLACED, 0),
        r"loads must be per source rank, \[4, 25\], for a placement with shared experts, got the sum \[25\]",
    ),
    "no shared column": (
        lambda: isoload.route(torch.zeros(2, 1, dtype=torch.int64), LOADS, isoload.plan(LOADS, PLACED, 0), 0),
        r"topk_ids must be \[T, K \+ 1\] with the shared experts in the last columns, got \[2, 1\]",
    ),
    "routed": (
        lambda: isoload.plan(LOADS, PLACED, 0, "waterfill", routed="dynamic"),
        "routed must be a policy with a quota, 'dynamic' samples",
    ),
    "joint's routed": (
        lambda: isoload.plan(LOADS, PLACED, 0, "joint", routed="even"),
        "routed must be exact for policy joint, got 'even'",
    ),
    "negative number": (
        lambda: isoload.place(np.ones((1, 4)), isoload.Topology(2), num_shared=-1),
        "num_shared must be at least 0, got -1",
    ),
    "two for the published form": (
        lambda: isoload.plan(torch.ones(8, 26, dtype=torch.int32), make(8, 2), 0, "waterfill_sampled"),
        "num_shared must be at most 1 for policy waterfill_sampled, got 2",
    ),
    "a dead rank for the published form": (
        lambda: isoload.plan(LOADS, make(4, alive=(True, True, False, True)), 0, "waterfill_sampled"),
        "topology must have all ranks alive for policy waterfill_sampled",
    ),
    **{
        f"{policy} without shared experts": (
            lambda policy=policy: isoload.plan(
                torch.ones(2, 4, dtype=torch.int32),
                isoload.place(np.ones((1, 4)), isoload.Topology(2)),
                0,
                policy,
            ),
            f"placement must have shared experts for policy {policy}, got num_shared=0",
        )
        for policy in (*SHARED, "waterfill_sampled")
    },
}


@pytest.mark.parametrize("name", BAD)
def test_refuses(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("alive", [(True, True, False, True), (False, True, True, False)])
def test_waterfill_leaves_dead_ranks_alone(alive):
    """Also as sources: their shared copies go to the live rank that stands in for them, or on from there."""
    placement = make(4, alive=alive, ranks_per_node=2)
    ids = draw_ids(3, 4, 30, 1)
    loads = gather(ids, placement)
    plan = isoload.plan(loads, placement, 0, "waterfill")
    assert isoload.policies.plan.plan_errors(plan, loads) == []
    slots = torch.cat(route_all(ids, loads, plan))
    per_rank = torch.bincount(slots[slots >= 0] // placement.slots_per_rank, minlength=4)
    assert not per_rank[~torch.tensor(alive)].any()
    assert int((slots[:, -1] >= 0).sum()) == int(loads[:, -1].sum())
    assert int(per_rank.max()) == int(plan.peak)


@pytest.mark.parametrize("candidates", ["all", "node", "visited"])
def test_refuses_candidates(candidates):
    message = "option candidates of policy waterfill was removed: shared copies may go to all ranks"
    with pytest.raises(ValueError, match=message):
        isoload.policies.parse_policy(f"waterfill:candidates={candidates}")
