"""Where only sums are exchanged: each rank shares its own counts, and slots get about their quota."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import isoload
from isoload import Balancer, CollectiveGroup, LocalGroup
from support.processes import run_ranks
from support.small_batches import EXPERTS, LAYERS, RANKS, draw_ids, gather, make_placement, make_topology


@pytest.fixture(scope="module")
def placement():
    return make_placement()


@pytest.mark.parametrize("policy", ["none", "even", "exact", "exact_active"])
def test_every_rank_routes_its_own_copies(policy, placement):
    ids = draw_ids(seed=3, tokens=200)
    loads = gather(ids)
    plan = isoload.plan(loads.sum(0, dtype=torch.int32), placement, 1, policy)
    received = torch.zeros(placement.num_slots, dtype=torch.int64)
    for rank in range(RANKS):
        slots = isoload.route(ids[rank], loads[rank], plan, rank)
        held = plan.slot_to_expert[slots.clamp(min=0)]
        assert torch.equal(torch.where(slots < 0, -1, held), ids[rank]), "the same experts"
        counted = isoload.count(slots, placement.num_slots)
        assert torch.equal(counted, isoload.share(loads[rank], plan, rank))
        received += counted
    most = ((loads > 0).sum(0) - 1).clamp(min=0)[plan.slot_to_expert.clamp(min=0).long()]
    assert ((received - plan.quota).abs() <= most).all(), "off by less than one copy per further source"
    if policy in ("none", "exact_active"):
        assert torch.equal(received, plan.quota.long()), "an expert in one slot is met exactly"


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


def test_refuses(placement):
    loads = gather(draw_ids(seed=7))
    plan = isoload.plan(loads, placement, 0)
    with pytest.raises(
        ValueError, match="rank must be given where loads are one source's own counts, got None"
    ):
        isoload.share(loads[0], plan)
    fixed = isoload.plan(loads, placement, 0, "static")
    with pytest.raises(
        ValueError, match=r"loads must be per source rank, \[8, 32\], for policy static, got one"
    ):
        isoload.share(loads[0], fixed, rank=0)
    with pytest.raises(ValueError, match=r"or one source's own counts, \[32\], got \[8, 31\]"):
        isoload.share(loads[:, 1:], plan, rank=0)
    with pytest.raises(ValueError, match="as often as its share says"):
        isoload.route(draw_ids(seed=7)[0], loads[1], plan, 0)


def test_a_balancer_that_adds_up_equals_the_stages_by_hand(placement):
    for policy in ("none", "exact", "lp", "lp_sampled", "dynamic"):
        balancer = Balancer(placement, 1, policy, LocalGroup(make_topology()), gather="sum")
        for batch in range(2):
            ids = draw_ids(batch)
            loads = gather(ids)
            total = loads.sum(0, dtype=torch.int32)
            plan = isoload.plan(total, placement, 1, policy, step=batch + 1)
            found = balancer(ids)
            for rank, slots in enumerate(found):
                assert torch.equal(slots, isoload.route(ids[rank], loads[rank], plan, rank)), policy
            if policy != "none":  # which has freedom, and so is planned all the same
                assert torch.equal(balancer.last_loads, total)


def test_adding_up_compiles_whole_and_never_waits_for_the_device(placement):
    balancer = Balancer(placement, 1, group=LocalGroup(make_topology()), gather="sum")
    wanted = balancer(draw_ids(1))  # facts are agreed once
    compiled = torch.compile(balancer, backend="aot_eager", fullgraph=True)
    assert all(torch.equal(a, b) for a, b in zip(compiled(draw_ids(1)), wanted, strict=True))
    with FakeTensorMode():
        slots = balancer([torch.zeros(9, 4, dtype=torch.int64, device="cuda") for _ in range(RANKS)])
        assert slots[0].device.type == "cuda"


def summing(rank, ranks):
    """Slots of two batches, what was exchanged, and what is raised where ranks differ or one fails."""
    topology = isoload.Topology(ranks)
    placement = isoload.place(
        torch.arange(EXPERTS).expand(1, -1), topology, slots_per_rank=EXPERTS // ranks + 2
    )
    group = CollectiveGroup.own(topology)
    balancer = Balancer(placement, 0, group=group, gather="sum")
    group.reset_traffic()
    slots = [balancer(draw_ids(batch)[rank]) for batch in range(2)]
    sent, raised = group.traffic.bytes["gather"], []
    bad = draw_ids(2)[rank]
    bad[0, 0] = EXPERTS if rank == 1 else 0
    for call in (
        lambda: balancer(bad),
        lambda: Balancer(placement, 0, group=group, gather="sum" if rank else "sources"),
    ):
        try:
            call()
            raised.append("nothing")
        except ValueError as error:
            raised.append(str(error))
    balancer.batch += rank == 2
    try:
        balancer(draw_ids(3)[rank])
    except ValueError as error:
        raised.append(str(error))
    return slots, sent, raised


def test_processes_add_up_in_one_all_reduce():
    ranks = 3
    topology = isoload.Topology(ranks)
    placement = isoload.place(
        torch.arange(EXPERTS).expand(1, -1), topology, slots_per_rank=EXPERTS // ranks + 2
    )
    virtual = Balancer(placement, 0, group=LocalGroup(topology), gather="sum")
    found = run_ranks(summing, ranks, ranks)
    for batch in range(2):
        wanted = virtual(draw_ids(batch)[:ranks])
        assert all(torch.equal(of[0][batch], slots) for of, slots in zip(found, wanted, strict=True))
    facts = len(virtual.facts) + 1  # and the error's code
    assert [sent for _, sent, _ in found] == [2 * 4 * (EXPERTS + ranks * facts)] * ranks
    for rank, (_, _, raised) in enumerate(found):
        own = "topk_ids must be in -1..31, got 32" if rank == 1 else "rank 1 failed in stage count"
        assert own in raised[0]
        assert "gather must be the same on all ranks, got sources on rank 0 and sum on rank 1" in raised[1]
        assert "batch number must be the same on all ranks, got 4 on rank 0 and 5 on rank 2" in raised[2]


def test_a_balancer_refuses_to_add_up(placement):
    group = LocalGroup(make_topology())
    for given in ({"gather": "all"}, {"gather": "sum", "loads": "own"}):
        with pytest.raises(
            ValueError, match="gather must be sources or, where tokens are own and loads gathered, sum"
        ):
            Balancer(placement, group=group, **given)
    with pytest.raises(ValueError, match="got 'sum' for same tokens and gathered loads"):
        Balancer(placement, tokens="same", gather="sum")
    with pytest.raises(
        ValueError, match="gather must be sources for policy static, which needs loads per source"
    ):
        Balancer(placement, policy="static", group=group, gather="sum")
    shared = isoload.place(torch.ones(LAYERS, EXPERTS), make_topology(), slots_per_rank=7, num_shared=1)
    with pytest.raises(
        ValueError, match="gather must be sources for a placement with shared experts, got 'sum' for 1"
    ):
        Balancer(shared, group=group, gather="sum")
    balancer = Balancer(placement, group=group, gather="sum")
    with pytest.raises(ValueError, match="more must be None where only sums are gathered, got 8 rows"):
        balancer.gather(draw_ids(1), more=[torch.zeros(2, dtype=torch.int32)] * RANKS)
