"""A rank's share that the op which plans has made: the Balancer hands it on, and share() computes from what it gets."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.balancing.planning import share_routed
from isoload.policies import Policy
from isoload.policies.borrowing import HedgePolicy, keeping_local
from isoload.policies.exact import ExactPolicy
from isoload.policies.plan import Plan
from isoload.policies.shared import JointPolicy, WaterfillPolicy
from support.small_batches import EXPERTS, RANKS, draw_ids, gather, make_placement, make_topology

RANK = 3


def shared_placement() -> isoload.Placement:
    counts = torch.arange(EXPERTS).expand(1, -1)
    return isoload.place(counts, make_topology(), slots_per_rank=7, num_shared=1)


def spare_placement() -> isoload.Placement:
    counts = torch.ones(1, EXPERTS)
    return isoload.place(counts, make_topology(), slots_per_rank=6, spare_slots=2, placer="trivial")


def shared_ids(seed: int) -> list[Tensor]:
    """[R][T, K + 1]"""
    ids = draw_ids(seed)
    columns = [torch.where((rows >= 0).any(1, keepdim=True), EXPERTS, -1) for rows in ids]
    return [torch.cat(pair, dim=1) for pair in zip(ids, columns, strict=True)]


def shared_loads(seed: int) -> Tensor:
    return torch.stack([isoload.count(rows, EXPERTS + 1) for rows in shared_ids(seed)])


def by_numpy(tensor: Tensor) -> None:
    tensor.numpy()[..., 0] += 1


def by_storage(tensor: Tensor) -> None:
    torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).fill_(7)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda tensor: tensor[..., 0].add_(1),
    "data": lambda tensor: tensor.data[..., 0].add_(1),
    "numpy": by_numpy,
    "storage": by_storage,
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", ["loads", "quota"])
@pytest.mark.parametrize("write", WRITES)
def test_share_reads_what_it_is_given(write: str, what: str, inference: bool) -> None:
    """Regression: it served loads that were written through .data, NumPy or storage as they had been."""
    rows = draw_ids(4)[0]
    with torch.inference_mode(inference):
        balancer = isoload.Balancer(make_placement(), 2, "exact", tokens="same")
        balancer(rows)
        made, loads = balancer.last_plan, balancer.last_loads
        assert made is not None and made.quota is not None and loads is not None
        WRITES[write](loads if what == "loads" else made.quota)
        with pytest.raises(ValueError, match="quota must conserve loads"):
            isoload.share(loads, made, 0)
        with pytest.raises(ValueError, match="quota must conserve loads"):
            isoload.route(rows, loads, made, 0)


@pytest.mark.parametrize("policy", ["exact", "hedge", "llep", "lp"])
def test_a_balancer_s_slots_are_those_of_plan_and_share(policy: str) -> None:
    placement = spare_placement() if isoload.POLICIES[policy]().borrows else make_placement()
    loads, rows = torch.zeros(RANKS, EXPERTS, dtype=torch.int32), draw_ids(5)[0]
    loads[0] = isoload.count(rows, EXPERTS)
    slots = isoload.Balancer(placement, 0, policy, tokens="same")(rows)
    made = isoload.plan(loads, placement, 0, policy)
    assert torch.equal(slots, isoload.route(rows, loads, made, 0))


@pytest.mark.parametrize("policy", ["exact", "joint", "waterfill"])
def test_a_balancer_s_slots_with_a_shared_expert(policy: str) -> None:
    rows, placement = shared_ids(6)[0], shared_placement()
    loads = torch.zeros(RANKS, EXPERTS + 1, dtype=torch.int32)
    loads[0] = isoload.count(rows, EXPERTS + 1)
    slots = isoload.Balancer(placement, 0, policy, tokens="same")(rows)
    made = isoload.plan(loads, placement, 0, policy)
    assert torch.equal(slots, isoload.route(rows, loads, made, 0))


class RankMajor(ExactPolicy):
    name = "rank_major"

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Any) -> Tensor:
        return super().share(loads, plan, rank, "rank_major")


class Later(HedgePolicy):
    name = "later"

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Any) -> Tensor:
        return super().share(loads, plan, rank, "rank_major")


class Moved(ExactPolicy):
    """Moves an expert's copies to one of its replicas, after the exact split."""

    name = "moved"

    def split(self, demand: Any, placed: Any) -> Plan:
        made = super().split(demand, placed)
        assert made.quota is not None
        held = placed.slot_to_expert
        first, second = (held == held[0]).nonzero()[:2, 0].tolist()
        made.quota[first] += made.quota[second]
        made.quota[second] = 0
        return made


class Doubled(JointPolicy):
    """Pours as its own rule says: every rank's copies at home."""

    name = "doubled"

    def pour(self, made: Plan, demand: Any) -> Plan:
        return replace(made, policy=self)


class Nearest(WaterfillPolicy):
    name = "nearest"

    def split_routed(self, demand: Any, placed: Any) -> Plan:
        return isoload.POLICIES["none"]().split(demand.routed, placed)


PLAIN: list[str | Policy] = ["exact", "even", "lp", RankMajor(), Moved()]
SHARED: list[str | Policy] = [
    *["exact", "joint", "waterfill", "shared_local", Doubled(), Nearest()],
    *[WaterfillPolicy(routed="none"), WaterfillPolicy("exact"), RankMajor(), Moved()],
]
CASES = [
    *itertools.product([make_placement], PLAIN),
    *itertools.product([spare_placement], ["hedge", "llep", Later()]),
    *itertools.product([shared_placement], SHARED),
]


@pytest.mark.parametrize(("place", "policy"), CASES)
def test_the_row_is_the_share_of_the_plan(place: Any, policy: str | Policy) -> None:
    """Whether the op that plans makes it, or a second one."""
    loads = shared_loads(4) if place is shared_placement else gather(draw_ids(4))
    placed = place().layer(0, "cpu")
    chosen = isoload.policies.make_policy(policy)
    made = chosen.plan(loads, placed, RANK)
    row = made.send_counts
    other = isoload.plan(loads, placed, policy=policy)
    for field in ("quota", "peak", "bound"):
        assert torch.equal(getattr(made, field), getattr(other, field))
    if made.quota is None:
        assert row is None
    else:
        assert row is not None and torch.equal(row, share_routed(loads, other, RANK))


def test_the_row_of_copies_that_stay_local() -> None:
    placed, exact, loads = make_placement().layer(2, "cpu"), ExactPolicy(), gather(draw_ids(4))
    made = exact.plan(loads, placed, RANK, split=keeping_local(exact))
    assert made.send_counts is not None and torch.equal(made.send_counts, share_routed(loads, made, RANK))


def test_a_moved_placement() -> None:
    """A plan made before is void: where its slots do not fit the copies any more, it is refused."""
    rows, balancer = draw_ids(4)[0], isoload.Balancer(make_placement(), 2, tokens="same")
    balanced = balancer.balance([rows])
    assert balanced.send_counts is not None
    placement = make_placement()
    rolled = {name: getattr(placement, name).roll(1, 0) for name in ("slot_to_expert", "home_slot")}
    balancer.load(replace(placement, **rolled))
    with pytest.raises(ValueError, match="topk_ids must hold each expert as often as its share says"):
        balancer.route(balanced)
