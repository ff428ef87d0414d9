"""CapturedBalancer on a GPU: graphs of CUDA give what the Balancer gives on the CPU, batch by batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import isoload
from isoload import Balancer, CapturedBalancer, LocalGroup
from isoload.balancing.captured import cuda_graph
from support.small_batches import EXPERTS, LAYERS, K, draw_ids, make_placement, make_topology

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("shared", [False, True], ids=["own memory", "a pool for two layers"])
@pytest.mark.parametrize("policy", ["static", "exact", "lp", "dynamic"])
def test_every_batch_is_the_balancers(policy: str, shared: bool) -> None:
    pool = torch.cuda.graph_pool_handle() if shared else None
    capture = partial(cuda_graph, pool=pool)
    host, there = (
        [Balancer(make_placement(), layer, policy, LocalGroup(make_topology())) for layer in range(2)]
        for _ in range(2)
    )
    graphs = [CapturedBalancer(balancer, 37, K, capture=capture) for balancer in there]
    counts = torch.randint(1, 900, (LAYERS, EXPERTS), generator=torch.Generator().manual_seed(8))
    for batch, rows in enumerate((37, 20, 37, 0, 31, 36)):
        if batch == 4:
            for balancer in (*host, *there):
                balancer.load(isoload.place(counts, make_topology(), slots_per_rank=6))
        ids = [r[: rows - n if rows else 0] for n, r in enumerate(draw_ids(batch))]
        got = [graph([r.cuda() for r in ids]) for graph in graphs]  # all layers, before any is looked at
        for balancer, slots in zip(host, got, strict=True):
            assert all(torch.equal(a, b.cpu()) for a, b in zip(balancer(ids), slots, strict=True))
    isoload.ops.check_device("cuda")


def test_a_bad_id_in_a_replay_sets_the_error_word() -> None:
    graph = CapturedBalancer(Balancer(make_placement(), 0, "exact", tokens="same"), 37, K)
    ids = draw_ids(0)[0].cuda()
    for _ in range(3):
        graph(ids)
    isoload.ops.check_device("cuda")
    graph(ids + EXPERTS)
    with pytest.raises(ValueError, match="topk_ids must be in -1..E-1"):
        isoload.ops.check_device("cuda")


def test_errors_of_replays_are_kept() -> None:
    group = LocalGroup(make_topology())
    graph = CapturedBalancer(Balancer(make_placement(), 0, "exact", group), 37, K)
    for batch in range(3):
        graph([r.cuda() for r in draw_ids(batch)])
    group.check()
    assert group._replayed is not None
    group._replayed[3] = -1
    graph([r.cuda() for r in draw_ids(0)])
    with pytest.raises(ValueError, match="rank 3 failed in stage count"):
        group.check()


def test_a_call_that_fails_is_a_replay_whose_gather_carries_the_failure() -> None:
    group = LocalGroup(make_topology())
    graph = CapturedBalancer(Balancer(make_placement(), 0, "exact", group), 37, K)
    eager = Balancer(make_placement(), 0, "exact", LocalGroup(make_topology()))
    for batch in range(3):
        graph([r.cuda() for r in draw_ids(batch)])
    with pytest.raises(ValueError, match="topk_ids must have one tensor per owned rank"):
        graph([])
    with pytest.raises(ValueError, match="rank 0 failed in stage count"):
        group.check()
    got, wanted = graph([r.cuda() for r in draw_ids(3)]), eager(draw_ids(3))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, wanted, strict=True))
    group.check()


def test_a_failure_in_the_gather_is_told_once() -> None:
    """By the counts that stand for it, which the planner refuses, too."""
    group, placement = LocalGroup(make_topology()), make_placement()
    counts = [isoload.count(ids.cuda(), EXPERTS) for ids in draw_ids(0)]
    loads = group.gather_loads(counts, [int(rank == 3) for rank in range(len(counts))])
    assert int(isoload.plan(loads, placement, 0).quota.sum()) == 0
    with pytest.raises(ValueError, match="rank 3 failed in stage count"):
        group.check()
    isoload.ops.check_device("cuda")


def test_nothing_is_captured_under_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOLOAD_CHECK", "1")
    graph = CapturedBalancer(Balancer(make_placement(), 0, "exact", tokens="same"), 37, K)
    ids = draw_ids(0)[0].cuda()
    for _ in range(3):
        graph(ids)
    with pytest.raises(ValueError, match=rf"topk_ids must be in -1\.\.{EXPERTS - 1}, got "):
        graph(ids + EXPERTS)
