"""Where only sums are exchanged: each rank shares its own counts, and slots get about their quota."""

import pytest
import torch

import isoload
from support.small_batches import RANKS, draw_ids, gather, make_placement


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
        assert isoload.records.plan_errors(plan, loads) == []
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
