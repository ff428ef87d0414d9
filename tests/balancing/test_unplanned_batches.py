"""exchange().imbalance is of the last batch: planned, too small to plan, empty, or of a layer without replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CollectiveGroup, LocalGroup
from isoload.policies.plan import in_backward
from support.processes import run_ranks
from support.recorded_calls import recorded
from support.small_batches import EXPERTS, RANKS, K, draw_ids, make_topology

LOADS = pytest.mark.parametrize("loads", ["own", "node"])


def make_layer(loads: str, replicas: bool = True, num_shared: int = 0, **how: Any) -> Balancer:
    slots = EXPERTS // RANKS + (2 if replicas else 0) + num_shared
    likes = torch.rand(1, EXPERTS, generator=torch.Generator().manual_seed(1))
    placement = isoload.place(likes, make_topology(), slots_per_rank=slots, num_shared=num_shared)
    return Balancer(placement, group=LocalGroup(make_topology()), loads=loads, shared_columns=False, **how)  # type: ignore[arg-type]


def imbalance(slots: list[Tensor], balancer: Balancer) -> float:
    """max/mean rank load of routed copies."""
    routed = torch.cat([s.flatten() for s in slots])
    carried = torch.bincount(routed[routed >= 0] // balancer.placement.slots_per_rank, minlength=RANKS)
    return float(carried.max() / carried.double().mean())


def routed(balancer: Balancer, ids: list[Tensor], **how: Any) -> list[Tensor]:
    slots = balancer(ids, **how)
    assert isinstance(slots, list)
    return slots


@LOADS
@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_layer_without_replicas(loads: str, num_shared: int) -> None:
    layer = make_layer(loads, replicas=False, num_shared=num_shared)
    assert layer.has_freedom == bool(num_shared), "shared copies could move"
    for seed in range(2):
        slots = routed(layer, draw_ids(seed), num_valid=30)
        assert layer.exchange().imbalance.tolist() == pytest.approx([imbalance(slots, layer)])


@LOADS
@pytest.mark.parametrize("num_shared", [0, 2])
def test_small_and_planned_batches_in_turn(loads: str, num_shared: int) -> None:
    layer, small = make_layer(loads, num_shared=num_shared, min_tokens=100), draw_ids(1, tokens=3)
    small[5] = small[5][:0]
    for ids, tokens in ((draw_ids(0), 296), (small, 21), (draw_ids(2), 296), (small, 21)):
        slots = routed(layer, ids, num_tokens=tokens)
        assert layer.own_counts is not None and (layer.own_counts.last is not None) == (tokens >= 100)
        assert layer.exchange().imbalance.tolist() == pytest.approx([imbalance(slots, layer)])


@LOADS
@pytest.mark.parametrize("min_tokens", [0, 100])
def test_an_empty_batch_has_none(loads: str, min_tokens: int) -> None:
    """Planned or not, a batch without a copy leaves nothing of the batch before it."""
    layer = make_layer(loads, min_tokens=min_tokens)
    routed(layer, draw_ids(0), num_tokens=296)
    routed(layer, [rows[:0] for rows in draw_ids(0)], num_tokens=0)
    assert layer.exchange().imbalance.isnan().all()


def test_over_processes_a_rank_of_a_node_knows_its_own_copies_alone() -> None:
    """Two nodes of two ranks: nothing is gathered in an unplanned batch, and the exchange adds the ranks up."""
    four = isoload.Topology(4, ranks_per_node=2)

    def on_rank(rank: int) -> tuple[list[Tensor], list[float], dict[str, int]]:
        group = CollectiveGroup.own(four)
        placement = isoload.place(torch.arange(1, 17)[None], four, slots_per_rank=6)
        layer = Balancer(placement, group=group, loads="node", min_tokens=50)
        draw = torch.Generator().manual_seed(rank)
        all_slots, found, bytes_of_small = [], [], {}
        for tokens in (20, 5, 20, 5):
            ids = torch.rand(tokens * (rank != 2), 16, generator=draw).topk(2).indices
            group.reset_traffic()
            slots = layer(ids, num_tokens=3 * tokens)
            bytes_of_small = dict(group.traffic.bytes)
            assert isinstance(slots, Tensor)
            all_slots.append(slots)
            found.append(layer.exchange().imbalance.item())
        return all_slots, found, bytes_of_small

    of_rank = run_ranks(on_rank, 4)
    for batch in range(4):
        carried = torch.bincount(torch.cat([of[0][batch].flatten() for of in of_rank]) // 6, minlength=4)
        wanted = float(carried.max() / carried.double().mean())
        assert [of[1][batch] for of in of_rank] == pytest.approx([wanted] * 4)
    assert all(not of[2] for of in of_rank), "bytes of a small batch"


def test_a_captured_graph_of_small_batches_says_where_they_went() -> None:
    layer = make_layer("own", min_tokens=100)
    graph = isoload.CapturedBalancer(layer, 37, K, device="cpu", capture=recorded)
    for batch in range(8):
        ids, tokens = (draw_ids(batch, 3), 24) if batch % 2 else (draw_ids(batch), 296)
        slots = graph(ids, num_tokens=tokens)
        assert isinstance(slots, list)
        assert layer.exchange().imbalance.tolist() == pytest.approx([imbalance(slots, layer)])


def test_a_recompute_of_an_earlier_batch_is_not_the_last_one() -> None:
    layer, seen = make_layer("own", replicas=False), []

    def forward(x: Tensor) -> Tensor:
        routed(layer, draw_ids(0))
        seen.append(in_backward())
        return x * x

    x = torch.ones(1, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    last = routed(layer, draw_ids(1))
    y.backward()
    assert seen == [False, True]
    assert layer.exchange().imbalance.tolist() == pytest.approx([imbalance(last, layer)])
