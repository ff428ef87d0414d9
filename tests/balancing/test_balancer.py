"""Balancer: ids in, slots out, for one layer; over virtual ranks and processes, in both modes, refreshed in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import isoload
from isoload import Balancer, CollectiveGroup, LocalGroup
from isoload.policies.plan import without_shared_slots
from support.processes import run_ranks
from support.small_batches import EXPERTS, LAYERS, RANKS, draw_ids, gather, make_placement, make_topology
from support.sweeps import slow

POLICIES = ["none", "static", "even", "exact", "exact_active", "lp", "dynamic", "lp_sampled"]


def other_placement() -> isoload.Placement:
    counts = torch.randint(1, 900, (LAYERS, EXPERTS), generator=torch.Generator().manual_seed(8))
    return isoload.place(counts, make_topology(), slots_per_rank=6)


def by_hand(
    ids: list[Tensor], placement: isoload.Placement, layer: int, policy: str, step: int
) -> list[Tensor]:
    """The stages, composed by the caller."""
    loads = gather(ids)
    plan = isoload.plan(loads, placement, layer, policy, step=step)
    return [isoload.route(rows, loads, plan, rank) for rank, rows in enumerate(ids)]


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_equals_the_stages_by_hand(policy: str) -> None:
    placement = make_placement()
    balancer = Balancer(placement, 1, policy, LocalGroup(make_topology()))
    for batch in range(3):
        ids = draw_ids(batch)
        assert same(balancer(ids), by_hand(ids, placement, 1, policy, step=batch + 1))
        assert balancer.last_plan is not None and balancer.last_plan.layer == 1


def test_sampled_policies_draw_anew_in_every_batch() -> None:
    """Regression: a layer drew one random stream again and again."""
    balancer = Balancer(make_placement(), 0, "dynamic", LocalGroup(make_topology()))
    ids = draw_ids(1)
    assert not same(balancer(ids), balancer(ids))


@pytest.mark.parametrize(
    ("policy", "dynamic"),
    [("lp_sampled", None), *slow(("dynamic", True), ("dynamic", None), ("lp_sampled", True))],
)
def test_compiled_once_sampled_policies_draw_anew_in_every_batch(policy: str, dynamic: bool | None) -> None:
    """Regression: the batch's number was part of the graph. What a compiled graph reads anew, a captured one does."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    balancer, eager = (Balancer(make_placement(), 1, policy, tokens="same") for _ in range(2))
    compiled = torch.compile(balancer, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    rows = draw_ids(3)[0]
    drawn = [compiled(rows) for _ in range(5)]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert same(drawn, [eager(rows) for _ in range(5)])
    assert len({tuple(slots.flatten().tolist()) for slots in drawn}) == 5


def test_a_batch_in_flight_keeps_its_number() -> None:
    balancer = Balancer(make_placement(), 0, "dynamic", LocalGroup(make_topology()))
    ids = draw_ids(1)
    first, second = balancer.balance(ids), balancer.balance(ids)
    for batch, step in ((second, 2), (first, 1)):
        assert same(balancer.route(batch), by_hand(ids, make_placement(), 0, "dynamic", step))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_the_same_draw(reentrant: bool, compiled: bool) -> None:
    torch._dynamo.reset()
    balancer, ids, drawn = Balancer(make_placement(), 0, "dynamic", tokens="same"), draw_ids(1)[0], []
    route = torch.compile(balancer, backend="aot_eager", fullgraph=True) if compiled else balancer

    def draw(x: Tensor) -> Tensor:
        drawn.append(route(ids).clone())
        return x.sin()

    for _ in range(2):
        x = torch.ones(3, requires_grad=True)
        checkpoint(draw, x, use_reentrant=reentrant).sum().backward()
    first, again, second, again_second = drawn
    assert torch.equal(first, again) and torch.equal(second, again_second) and not torch.equal(first, second)


@pytest.mark.parametrize("rule", ["blog", "blog_all"])
def test_sampled_shared_experts_equal_the_stages_by_hand(rule: str) -> None:
    counts = torch.arange(EXPERTS).expand(1, -1)
    placement = isoload.place(counts, make_topology(), slots_per_rank=7, num_shared=1)
    policy = isoload.POLICIES["waterfill_sampled"](rule=rule, step=40)
    balancer = Balancer(placement, 0, policy, LocalGroup(make_topology()))
    ids = [torch.cat([r, torch.where((r >= 0).any(1, keepdim=True), EXPERTS, -1)], 1) for r in draw_ids(2)]
    loads = torch.stack([isoload.count(rows, EXPERTS + 1) for rows in ids])
    for step in (1, 2):
        made = isoload.plan(loads, placement, 0, policy, step=step)
        assert same(balancer(ids), [isoload.route(r, loads, made, rank) for rank, r in enumerate(ids)])


def on_rank(rank: int, ranks: int, policy: str) -> list[Tensor]:
    topology = isoload.Topology(ranks)
    counts = torch.arange(EXPERTS).expand(1, -1)
    placement = isoload.place(counts, topology, slots_per_rank=EXPERTS // ranks + 2)
    balancer = Balancer(placement, 0, policy, CollectiveGroup.own(topology))
    slots = []
    for batch in range(3):
        rows = draw_ids(batch)[rank] if (rank, batch) != (1, 1) else draw_ids(batch)[rank][:0]
        slots.append(balancer(rows))
    return slots


@pytest.mark.parametrize("policy", ["exact", "dynamic"])
def test_processes_equal_virtual_ranks(policy: str) -> None:
    ranks = 3
    topology = isoload.Topology(ranks)
    placement = isoload.place(
        torch.arange(EXPERTS).expand(1, -1), topology, slots_per_rank=EXPERTS // ranks + 2
    )
    balancer = Balancer(placement, 0, policy, LocalGroup(topology))
    got = run_ranks(on_rank, ranks, ranks, policy)
    for batch in range(3):
        ids = draw_ids(batch)[:ranks]
        ids[1] = ids[1][:0] if batch == 1 else ids[1]
        assert same([of_rank[batch] for of_rank in got], balancer(ids))


@pytest.mark.parametrize("policy", ["static", "even", "exact", "exact_active", "lp", "dynamic"])
def test_same_tokens_make_the_same_slots_on_every_rank(policy: str) -> None:
    placement, rows = make_placement(), draw_ids(4)[0]
    balancers = [Balancer(placement, 2, policy, tokens="same") for _ in range(3)]
    for _ in range(2):
        first, *others = [balancer(rows) for balancer in balancers]
        assert all(torch.equal(first, slots) for slots in others)
        plan = balancers[0].last_plan
        assert plan is not None
        assert torch.equal(plan.slot_to_expert[first.clamp(min=0)].where(first >= 0, -1), rows.int())
        if plan.quota is not None:
            assert torch.equal(isoload.count(first, placement.num_slots), plan.quota)


def test_same_tokens_exact_is_the_optimum_of_their_sum() -> None:
    placement, rows = make_placement(), draw_ids(5)[0]
    balancer = Balancer(placement, 0, "exact", tokens="same")
    slots = balancer(rows)
    loads = torch.bincount(slots[slots >= 0] // placement.slots_per_rank, minlength=RANKS)
    assert int(loads.max()) == int(balancer.last_plan.peak) == int(balancer.last_plan.bound)


def test_two_batches_in_flight_do_not_touch_each_other() -> None:
    """Two-batch overlap: the stages of one batch run between those of the other, on one layer."""
    placement, group = make_placement(), LocalGroup(make_topology())
    balancer = Balancer(placement, 1, "exact", group)
    a, b = draw_ids(1), draw_ids(2)
    first = balancer.balance(a)
    second = balancer.balance(b)
    slots_b = balancer.route(second)
    kept = [t.clone() for t in (first.loads, first.plan.quota, second.loads, second.plan.quota, *slots_b)]
    slots_a = balancer.route(first)
    assert same(slots_a, by_hand(a, placement, 1, "exact", 0)) and same(
        slots_b, by_hand(b, placement, 1, "exact", 0)
    )
    assert same(kept, [first.loads, first.plan.quota, second.loads, second.plan.quota, *slots_b])


def test_load_keeps_every_address() -> None:
    balancer = Balancer(make_placement(), 1, "static", LocalGroup(make_topology()))
    placed = balancer.placed_on(torch.device("cpu"))
    balancer(draw_ids(1))
    tensors = [placed.slot_to_expert, placed.home_slot, placed.tables.data]
    tensors += [value for value, _ in placed.memos.values()]
    assert len(tensors) == 4
    addresses = [t.data_ptr() for t in tensors]
    new = other_placement()
    balancer.load(new)
    for policy in ("static", "exact"):
        balancer.policy = isoload.POLICIES[policy]()
        ids = draw_ids(9)
        assert same(balancer(ids), by_hand(ids, new, 1, policy, 0))
    assert [t.data_ptr() for t in tensors] == addresses
    fresh = balancer.placed_on(torch.device("cpu"))
    now = [fresh.slot_to_expert, fresh.home_slot, fresh.tables.data]
    assert [t.data_ptr() for t in [*now, *(value for value, _ in fresh.memos.values())]] == addresses


def test_small_batches_and_layers_without_freedom_gather_nothing() -> None:
    group = LocalGroup(make_topology())
    small = Balancer(make_placement(), 0, "exact", group, min_tokens=1000)
    ids = draw_ids(1)
    slots = small(ids, num_tokens=999)
    assert small.last_plan is None and not group.traffic.bytes
    assert same(slots, by_hand(ids, make_placement(), 0, "static", 0))
    small(ids, num_tokens=1000)
    assert small.last_plan is not None and group.traffic.bytes["gather"]
    single = isoload.place(torch.ones(1, EXPERTS), make_topology(), placer="trivial")
    group.reset_traffic()
    assert Balancer(single, 0, "exact", group)(ids) is not None and not group.traffic.bytes
    same_tokens = Balancer(make_placement(), 0, "exact", tokens="same", min_tokens=38)
    same_tokens(ids[0])
    assert same_tokens.last_plan is None, "T is known on the host"


@pytest.mark.parametrize("as_tensor", [False, True])
def test_rows_behind_num_valid_are_padding(as_tensor: bool) -> None:
    placement, ids = make_placement(), draw_ids(6)
    group = LocalGroup(make_topology())
    masked = [torch.cat([rows[:20], torch.full_like(rows[20:], -1)]) for rows in ids]
    num_valid = torch.tensor(20) if as_tensor else 20
    assert same(
        Balancer(placement, 0, "exact", group)(ids, num_valid), Balancer(placement, 0, "exact", group)(masked)
    )


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        *[(policy, {}) for policy in ("joint", "waterfill", "exact", "waterfill_sampled")],
        ("exact", {"min_tokens": 10**6}),
    ],
)
def test_shared_experts_with_and_without_columns(policy: str, how: dict[str, Any]) -> None:
    counts = torch.arange(EXPERTS).expand(1, -1)
    placement = isoload.place(counts, make_topology(), slots_per_rank=7, num_shared=1)
    group, ids = LocalGroup(make_topology()), draw_ids(2)
    ids[3][4] = -1
    shared = [torch.where((rows >= 0).any(1, keepdim=True), EXPERTS, -1) for rows in ids]
    full = [torch.cat(pair, dim=1) for pair in zip(ids, shared, strict=True)]
    appended = Balancer(placement, 0, policy, group, shared_columns=False, **how)
    slots = appended(ids)
    assert same(slots, Balancer(placement, 0, policy, group, **how)(full))
    routed = [row[:, :-1] for row in slots]
    engine = [without_shared_slots(row, 7, 1) for row in routed]  # numbered over six slots per rank
    for ours, theirs in zip(routed, engine, strict=True):
        assert torch.equal(torch.where(theirs < 0, -1, theirs // 6 * 7 + theirs % 6), ours)


def test_a_shared_expert_is_no_routed_choice() -> None:
    counts = torch.arange(EXPERTS).expand(1, -1)
    placement = isoload.place(counts, make_topology(), slots_per_rank=7, num_shared=1)
    balancer = Balancer(placement, 0, "joint", LocalGroup(make_topology()), shared_columns=False)
    ids = draw_ids(2)
    ids[1][0, 0] = EXPERTS
    with pytest.raises(ValueError, match=rf"topk_ids must be in -1..{EXPERTS - 1}, got {EXPERTS}"):
        balancer(ids)


@pytest.mark.parametrize("policy", ["waterfill", "joint"])
def test_same_tokens_with_shared_experts_are_level(policy: str) -> None:
    """All rows are rank 0's there: it must not keep every shared copy."""
    counts = torch.arange(EXPERTS).expand(1, -1)
    placement = isoload.place(counts, make_topology(), slots_per_rank=7, num_shared=1)
    balancer = Balancer(placement, 0, policy, tokens="same", shared_columns=False)
    slots = balancer(draw_ids(2)[0])
    plan = balancer.last_plan
    assert plan is not None and torch.equal(isoload.count(slots, placement.num_slots), plan.quota)
    assert len((slots[:, -1] // 7).unique()) > 1
    assert policy == "waterfill" or plan.peak == plan.bound


def test_from_an_engines_table() -> None:
    placement = make_placement()
    table = placement.slot_to_expert[1].long()
    own = isoload.Placement(table.unsqueeze(0), make_topology(), EXPERTS)
    made = Balancer(own, policy="exact", group=LocalGroup(make_topology()))
    ids = draw_ids(3)
    assert same(made(ids), Balancer(placement, 1, "exact", LocalGroup(make_topology()))(ids))


@pytest.mark.parametrize("policy", ["exact", "dynamic", "grace"])
@pytest.mark.parametrize("tokens", ["same", "own"])
def test_never_waits_for_the_device(tokens: str, policy: str) -> None:
    balancer = Balancer(make_placement(), 1, policy, LocalGroup(make_topology()), tokens)
    balancer(draw_ids(1) if tokens == "own" else draw_ids(1)[0])  # facts are agreed once
    with FakeTensorMode():
        ids = [torch.zeros(9, 4, dtype=torch.int64, device="cuda") for _ in range(RANKS)]
        num_valid = torch.zeros((), dtype=torch.int64, device="cuda")
        slots = balancer(ids if tokens == "own" else ids[0], num_valid)
        assert (slots[0] if tokens == "own" else slots).device.type == "cuda"
    assert {device.type for device in balancer._own} == {"cpu"}, "a FakeTensor must not outlive its mode"


def test_compiles_whole() -> None:
    torch._dynamo.reset()
    balancer = Balancer(make_placement(), 1, "exact", tokens="same")
    compiled = torch.compile(balancer, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (5, 9, 33):
        rows = draw_ids(tokens)[0][:tokens]
        assert torch.equal(compiled(rows), balancer(rows))


@pytest.mark.slow
def test_compiles_whole_with_what_a_policy_derived_before() -> None:
    torch._dynamo.reset()
    plain, balancer = (Balancer(make_placement(), 1, "grace", tokens="same") for _ in range(2))
    rows = draw_ids(33)[0][:33]
    assert torch.equal(balancer(rows), plain(rows)), "derives the table, outside of the graph"
    compiled = torch.compile(balancer, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(rows), plain(rows))


BAD = {
    "tokens": (lambda p, g: Balancer(p, tokens="some", group=g), "tokens must be own or same, got 'some'"),
    "no group": (lambda p, g: Balancer(p), "group must be given for 8 ranks with tokens of their own"),
    "ranks": (
        lambda p, g: Balancer(p, group=LocalGroup(isoload.Topology(2))),
        "placement must be for the group's 2 ranks, got 8",
    ),
    "min_tokens": (lambda p, g: Balancer(p, group=g, min_tokens=-1), "min_tokens must be at least 0, got -1"),
    "layer": (lambda p, g: Balancer(p, 9, group=g), r"layer must be in 0\.\.2, got 9"),
    "borrows": (lambda p, g: Balancer(p, policy="llep", group=g), "spare_slots must be at least 1 for policy llep"),
    "dims": (lambda p, g: Balancer(p, tokens="same")(torch.zeros(3, dtype=torch.int64)), r"topk_ids must be \[T, K\]"),
    "last": (lambda p, g: Balancer(p, group=g, loads="last"), "loads='last' was removed: use loads='own'"),
    "gather": (lambda p, g: Balancer(p, group=g, gather="sum"), "gather= was removed: the counts of"),
    "price": (lambda p, g: Balancer(p, group=g, loads="own", price=True), "price= was removed: .* need none"),
    "load": (
        lambda p, g: Balancer(p, group=g).load(isoload.place(torch.ones(1, EXPERTS), make_topology(), 6)),
        "placement must have the layer's num_layers=3, got 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_refuses(name: str) -> None:
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(make_placement(), LocalGroup(make_topology()))


def test_own_group_is_apart_from_the_default_one() -> None:
    def groups(rank: int, ranks: int) -> bool:
        own = CollectiveGroup.own(isoload.Topology(ranks))
        assert own.process_group is not dist.group.WORLD
        return own.gather("test", [torch.tensor([rank])]).flatten().tolist() == list(range(ranks))

    assert run_ranks(groups, 2, 2) == [True, True]
