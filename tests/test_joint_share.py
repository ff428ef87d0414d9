"""The row that is made with a plan with shared experts: it serves what it was made from, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import isoload
from isoload.policies import Demand, Policy
from isoload.policies.exact import ExactPolicy
from isoload.policies.joint import JointPolicy
from isoload.policies.waterfill import WaterfillPolicy
from isoload.records import Plan

RANKS, EXPERTS, RANK = 8, 24, 3
POLICIES = ["joint", "waterfill", "exact"]


class Ran(TorchDispatchMode):
    """The ops of isoload that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op.namespace == "isoload":
            self.names.append(op.overloadpacket.__name__)
        return op(*args, **kwargs or {})


def assert_equal(a: Tensor | None, b: Tensor | None) -> None:
    assert (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def ran(call: Callable[[], Any]) -> list[str]:
    ops = Ran()
    with ops:
        call()
    return ops.names


def make_placement() -> isoload.Placement:
    counts = np.random.default_rng(0).zipf(1.5, (2, EXPERTS)).clip(max=1000)
    return isoload.place(counts, isoload.Topology(RANKS, 4), slots_per_rank=5, num_shared=1)


def draw_loads(seed: int) -> Tensor:
    """[R, E + 1], of tokens with three choices."""
    generator = torch.Generator().manual_seed(seed)
    loads = torch.randint(0, 60, (RANKS, EXPERTS), generator=generator)
    tokens = (loads.sum(1, keepdim=True) + 2) // 3
    return torch.cat([loads, tokens], 1).to(torch.int32)


@pytest.fixture
def loads() -> Tensor:
    return draw_loads(0)


@pytest.fixture(params=POLICIES)
def made(request: pytest.FixtureRequest, loads: Tensor) -> Plan:
    return isoload.plan(loads, make_placement(), 0, request.param, rank=RANK)


def plain(loads: Tensor, made: Plan) -> Plan:
    """The same plan, without a share of its own."""
    return isoload.plan(loads, make_placement(), 0, made.policy)


def same(made: Plan, loads: Tensor, rank: int | None = RANK, order: Any = "locality") -> bool:
    expected = isoload.share(loads, plain(loads, made), rank, order)
    return torch.equal(isoload.share(loads, made, rank, order), expected)


def test_it_serves_the_loads_that_it_was_made_from(loads: Tensor, made: Plan) -> None:
    assert made.own_share is not None and same(made, loads)
    assert ran(lambda: isoload.share(loads, made, RANK)) == []
    assert ran(lambda: isoload.share(loads.view_as(loads), made, RANK)) == []


def test_other_ranks_orders_and_all(loads: Tensor, made: Plan) -> None:
    others: list[tuple[int | None, Any]] = [(RANK + 1, "locality"), (None, "locality"), (RANK, "rank_major")]
    for rank, order in others:
        assert ran(partial(isoload.share, loads, made, rank, order)) == ["share"]
        assert same(made, loads, rank, order)


def test_other_loads(loads: Tensor, made: Plan) -> None:
    assert ran(lambda: isoload.share(loads.clone(), made, RANK)) == ["share"]
    assert ran(lambda: isoload.share(loads.t().contiguous().t(), made, RANK)) == ["share"]
    with pytest.raises(ValueError, match="quota must conserve loads"):
        isoload.share(draw_loads(1), made, RANK)


def test_rows_of_one_memory(loads: Tensor, made: Plan) -> None:
    """Views of one tensor that begin elsewhere."""
    both = torch.cat([loads, draw_loads(1)])
    plan = isoload.plan(both[:RANKS], make_placement(), 0, made.policy, rank=RANK)
    assert ran(lambda: isoload.share(both[:RANKS], plan, RANK)) == []
    with pytest.raises(ValueError, match="quota must conserve loads"):
        isoload.share(both[RANKS:], plan, RANK)


@pytest.mark.parametrize("written", ["quota", "loads", "a view of loads", "tables"])
def test_what_was_written_to_since(written: str, loads: Tensor, made: Plan) -> None:
    assert made.quota is not None
    if written == "tables":
        made.tables.data.copy_(make_placement().layer(1, torch.device("cpu")).tables.data)
    elif written == "quota":
        made.quota[0] += 1
    else:
        (loads if written == "loads" else loads[RANK])[..., 0] += 1
    with pytest.raises(ValueError, match="quota must conserve loads"):
        isoload.share(loads, made, RANK)


def test_other_slots_or_quota(loads: Tensor, made: Plan) -> None:
    other = isoload.plan(loads, make_placement(), 1, made.policy)
    with pytest.raises(ValueError, match="quota must conserve loads"):
        isoload.share(loads, replace(made, filled=other.filled), RANK)
    even = isoload.plan(loads, make_placement(), 0, "even")
    swapped = replace(made, quota=even.quota)
    assert torch.equal(
        isoload.share(loads, swapped, RANK)[:-1],
        isoload.share(loads, replace(even, shared=made.shared), RANK)[:-1],
    )


def test_inference_mode_keeps_none(loads: Tensor, made: Plan) -> None:
    with torch.inference_mode():
        plan = isoload.plan(loads, make_placement(), 0, made.policy, rank=RANK)
        assert plan.own_share is None
        assert_equal(plan.quota, made.quota)


class Doubled(JointPolicy):
    """Pours as its own rule says: every rank's copies at home."""

    name = "doubled"

    def pour(self, made: Plan, demand: Demand) -> Plan:
        return replace(made, policy=self)


class Nearest(WaterfillPolicy):
    name = "nearest"

    def copies(self, loads: Tensor, plan: Plan) -> Tensor:
        return super().copies(loads, plan).flip(0).contiguous()


@pytest.mark.parametrize(
    "policy", [Doubled(), Nearest(), WaterfillPolicy(routed="none"), WaterfillPolicy("exact")]
)
def test_a_policy_of_its_own_is_not_passed_over(policy: Policy, loads: Tensor) -> None:
    """Another rule, by the ops it calls."""
    plan = isoload.plan(loads, make_placement(), 0, policy, rank=RANK)
    expected = isoload.plan(loads, make_placement(), 0, policy)
    assert "plan_joint" not in ran(lambda: isoload.plan(loads, make_placement(), 0, policy, rank=RANK))
    assert plan.shared is not None and expected.shared is not None
    assert_equal(plan.quota, expected.quota)
    assert_equal(plan.shared.share, expected.shared.share)
    assert_equal(plan.peak, expected.peak)


def test_a_policy_that_writes_to_its_quota(loads: Tensor) -> None:
    """After the split that made the row: it is another's, whatever the shared copies change besides."""

    class Moved(ExactPolicy):
        name = "moved"

        def split(self, demand: Demand, filled: Any) -> Plan:
            made = super().split(demand, filled)
            assert made.quota is not None
            held = filled.slot_to_expert
            first, second = (held == held[0]).nonzero()[:2, 0].tolist()
            made.quota[first] += made.quota[second]
            made.quota[second] = 0
            return made

    made = isoload.plan(loads, make_placement(), 0, Moved(), rank=RANK)
    assert made.quota is not None
    expected = isoload.ops.share(
        loads[:, :EXPERTS], made.quota, made.tables, made.topology.ranks_per_node, RANK
    )
    found = isoload.share(loads, made, RANK)
    found.view(RANKS, -1)[:, made.placed.first_shared] = 0
    assert torch.equal(found, expected)
