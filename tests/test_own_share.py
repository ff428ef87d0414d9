"""A plan's own share: used where it is that of the plan, the loads and the rank that are asked for, and never else."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import isoload
from isoload.policies import Demand, ExactPolicy, Policy
from isoload.records import Plan
from support.small_batches import EXPERTS, RANKS, draw_ids, gather, make_placement

RANK = 3


class Shares(TorchDispatchMode):
    """How often the op share runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.isoload.share.default
        return op(*args, **kwargs or {})


def ran(call: Callable[[], Any]) -> int:
    with Shares() as shares:
        call()
    return shares.count


@pytest.fixture
def loads() -> Tensor:
    return gather(draw_ids(4))


@pytest.fixture
def made(loads: Tensor) -> Plan:
    return isoload.plan(loads, make_placement(), 2, rank=RANK)


def plain(loads: Tensor, **options: Any) -> Plan:
    """The same plan, without a share of its own."""
    made = isoload.plan(loads, make_placement(), 2, **options)
    assert made.own_share is None
    return made


def test_no_plan_depends_on_the_rank(loads: Tensor, made: Plan) -> None:
    other = plain(loads)
    for field in ("quota", "peak", "bound", "telemetry"):
        assert torch.equal(getattr(made, field), getattr(other, field))


def test_share_and_route_use_it(loads: Tensor, made: Plan) -> None:
    ids, other = draw_ids(4)[RANK], plain(loads)
    assert ran(lambda: isoload.share(loads, made, RANK)) == 0
    assert torch.equal(isoload.share(loads, made, RANK), isoload.share(loads, other, RANK))
    assert ran(lambda: isoload.route(ids, loads, made, RANK)) == 0
    assert torch.equal(isoload.route(ids, loads, made, RANK), isoload.route(ids, loads, other, RANK))


@pytest.mark.parametrize("policy", ["exact", "hedge", "llep", "lp"])
def test_a_balancer_s_slots_are_those_of_plan_and_share(policy: str) -> None:
    ids = draw_ids(5)
    borrows = isoload.POLICIES[policy]().borrows
    placement = isoload.place(
        torch.ones(1, EXPERTS),
        make_placement().topology,
        slots_per_rank=6,
        spare_slots=2 if borrows else 0,
        placer="trivial" if borrows else "eplb",
    )
    loads, rows = torch.zeros(RANKS, EXPERTS, dtype=torch.int32), ids[0]
    loads[0] = isoload.count(rows, EXPERTS)
    slots = isoload.Balancer(placement, 0, policy, tokens="same")(rows)
    made = isoload.plan(loads, placement, 0, policy)
    assert made.own_share is None and torch.equal(slots, isoload.route(rows, loads, made, 0))


def test_the_caller_may_write_to_a_share(loads: Tensor, made: Plan) -> None:
    before = isoload.share(loads, plain(loads), RANK)
    isoload.share(loads, made, RANK).fill_(7)
    assert torch.equal(isoload.share(loads, made, RANK), before)


def test_other_rank_order_or_all_ranks(loads: Tensor, made: Plan) -> None:
    other = plain(loads)
    for rank, order in (
        (RANK + 1, "locality"),
        (None, "locality"),
        (RANK, "rank_major"),
        (None, "rank_major"),
    ):
        assert ran(lambda r=rank, o=order: isoload.share(loads, made, r, o)) == 1
        expected = isoload.share(loads, other, rank, order)
        assert torch.equal(isoload.share(loads, made, rank, order), expected)


def test_other_views_of_the_same_memory(made: Plan, loads: Tensor) -> None:
    fewer, turned = loads[:-1], loads.as_strided(loads.shape, (1, RANKS))
    assert loads.data_ptr() == fewer.data_ptr() == turned.data_ptr()
    for view in (fewer, turned):
        with pytest.raises(ValueError, match="loads must|quota"):
            isoload.share(view, made, RANK)


def test_other_loads(made: Plan, loads: Tensor) -> None:
    """A source may have other counts than the plan's: refused, as without a share."""
    assert torch.equal(isoload.share(loads.clone(), made, RANK), isoload.share(loads, made, RANK))
    wrong = loads + torch.eye(RANKS, EXPERTS, dtype=torch.int32)
    with pytest.raises(ValueError, match="quota must conserve loads"):
        isoload.share(wrong, made, RANK)
    assert torch.equal(isoload.share(loads[RANK], made, RANK), isoload.share(loads[RANK], plain(loads), RANK))


def test_another_quota_of_the_same_loads(loads: Tensor, made: Plan) -> None:
    even = plain(loads, policy="even")
    assert not torch.equal(even.quota, made.quota)
    swapped = replace(made, quota=even.quota)
    assert torch.equal(isoload.share(loads, swapped, RANK), isoload.share(loads, even, RANK))


def test_other_slots_with_the_same_loads(loads: Tensor, made: Plan) -> None:
    other = isoload.plan(loads, make_placement(), 1)
    with pytest.raises(ValueError, match="quota must conserve loads"):
        isoload.share(loads, replace(made, filled=other.filled), RANK)


@pytest.mark.parametrize("written", ["quota", "loads", "tables"])
def test_what_was_written_to_since(written: str, loads: Tensor, made: Plan) -> None:
    """As without a share: refused, as the quota is no longer that of the loads."""
    tensor = {"quota": made.quota, "loads": loads, "tables": made.tables.data}[written]
    assert tensor is not None
    if written == "tables":
        tensor.copy_(make_placement().layer(1, torch.device("cpu")).tables.data)
    else:
        tensor.view(-1)[tensor.argmax()] += 1
    with pytest.raises(ValueError, match="quota must conserve loads"):
        isoload.share(loads, made, RANK)


def test_inference_mode_counts_no_writes(loads: Tensor) -> None:
    with torch.inference_mode():
        made = isoload.plan(loads, make_placement(), 2, rank=RANK)
        assert made.own_share is None and made.quota is not None
        made.quota[made.quota.argmax()] += 1
        with pytest.raises(ValueError, match="quota must conserve loads"):
            isoload.share(loads, made, RANK)


def test_kept_local_copies(loads: Tensor) -> None:
    made = isoload.plan(loads, make_placement(), 2, keep_local=True, rank=RANK)
    expected = isoload.share(loads, plain(loads, keep_local=True), RANK)
    assert torch.equal(isoload.share(loads, made, RANK), expected)


def test_a_policy_with_a_share_of_its_own_over_an_exact_split(loads: Tensor) -> None:
    class RankMajor(ExactPolicy):
        name = "rank_major"

        def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Any) -> Tensor:
            return super().share(loads, plan, rank, "rank_major")

    made = isoload.plan(loads, make_placement(), 2, RankMajor(), rank=RANK)
    assert torch.equal(isoload.share(loads, made, RANK), isoload.share(loads, made, RANK, "rank_major"))


def test_a_policy_that_splits_a_part_of_the_loads(loads: Tensor) -> None:
    """Copies of half the ranks by the exact split, the rest on their experts' lowest slots: the rank is passed on."""

    class Half(Policy):
        name = "half"

        def split(self, demand: Demand, filled: Any) -> Plan:
            part = demand.loads.clone()
            part[RANKS // 2 :] = 0
            made = ExactPolicy().split(demand._replace(loads=part), filled)
            rest = Policy().split(Demand(demand.loads - part), filled)
            return replace(made, policy=self, quota=made.quota + rest.quota)

    made = isoload.plan(loads, make_placement(), 2, Half(), rank=RANK)
    assert made.own_share is not None
    expected = isoload.ops.share(loads, made.quota, made.tables, 4, RANK)
    assert torch.equal(isoload.share(loads, made, RANK), expected)


def test_a_moved_placement() -> None:
    """A plan made before is void: where its slots still fit the loads, it is shared anew."""
    rows, balancer = draw_ids(4)[0], isoload.Balancer(make_placement(), 2, tokens="same")
    balanced = balancer.balance([rows])
    balancer.load(replace_layers(make_placement()))
    with pytest.raises(ValueError, match="quota must conserve loads"):
        balancer.route(balanced)


def replace_layers(placement: isoload.Placement) -> isoload.Placement:
    """The same layers, in another order."""
    return replace(
        placement,
        slot_to_expert=placement.slot_to_expert.roll(1, 0),
        home_slot=placement.home_slot.roll(1, 0),
    )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copied_share_is_none(copied: Callable[[Any], Any], made: Plan) -> None:
    """Its tensors would count writes anew."""
    assert made.own_share is not None and copied(made.own_share) is None


def test_layers_at_once(loads: Tensor) -> None:
    all_loads = torch.stack([gather(draw_ids(seed)) for seed in range(3)])
    made = isoload.plan_layers(all_loads, make_placement(), rank=RANK)
    other = isoload.plan_layers(all_loads, make_placement())
    assert torch.equal(isoload.share(all_loads, made, RANK), isoload.share(all_loads, other, RANK))
    assert made[1].own_share is None


def test_refuses(loads: Tensor) -> None:
    with pytest.raises(ValueError, match=r"rank must be in 0..7, got 8"):
        isoload.plan(loads, make_placement(), 2, rank=8)
    with pytest.raises(
        ValueError, match=r"loads must be per source rank, \[8, 32\], for rank, got the sum \[32\]"
    ):
        isoload.plan(loads.sum(0, dtype=torch.int32), make_placement(), 2, rank=0)
