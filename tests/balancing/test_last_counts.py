"""Balancer(loads="last"): slots by the counts of batches before, with no exchange but that of the counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CollectiveGroup, LocalGroup, ops
from isoload.balancing.own_counts import LastCounts
from isoload.policies.plan import in_backward
from support.processes import run_ranks
from support.small_batches import EXPERTS, LAYERS, RANKS, K, draw_ids, gather, make_placement, make_topology

CPU = torch.device("cpu")


def make_layers(layers: int = 1, **how: Any) -> list[Balancer]:
    placement, group = make_placement(), LocalGroup(make_topology())
    return [Balancer(placement, i, group=group, loads="last", **how) for i in range(layers)]


def kept(layer: Balancer) -> LastCounts:
    assert isinstance(layer.own_counts, LastCounts)
    return layer.own_counts


def received(slots: list[Tensor], num_slots: int = 48) -> Tensor:
    """[P] copies that come to each slot."""
    routed = torch.cat([s.flatten() for s in slots])
    return torch.bincount(routed[routed >= 0], minlength=num_slots)


def skewed(batch: int, tokens: int = 64) -> list[Tensor]:
    """[R][T, K], all ranks of one law: what was is what comes."""
    draw = torch.Generator().manual_seed(50 + batch)
    likes = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(9)) ** 4 + 1e-3
    return [torch.multinomial(likes.expand(tokens, -1), K, generator=draw) for _ in range(RANKS)]


def imbalance(layer: Balancer, batches: range) -> float:
    """Mean of the largest rank load over the proved bound of all loads."""
    found = []
    for batch in batches:
        ids = skewed(batch)
        bound = isoload.plan(gather(ids), layer.placement, layer.layer).bound
        found.append(int(received(layer(ids)).view(RANKS, -1).sum(1).max()) / int(bound))
    return float(np.mean(found))


def test_every_copy_gets_a_slot_of_its_expert_as_the_op_cuts() -> None:
    (layer,) = make_layers()
    placed = layer.placed_on(CPU)
    for batch in range(3):
        ids = draw_ids(batch)
        before = kept(layer).quota.clone()
        assert before.any() == (batch == 2), "zero before the first exchange"
        slots = layer(ids)
        assert layer.last_plan is None
        for rank, (mine, to) in enumerate(zip(ids, slots, strict=True)):
            expert = torch.where(to >= 0, placed.slot_to_expert.long()[to.clamp(min=0)], -1)
            assert torch.equal(expert, mine)
            sent = ops.share_alone(isoload.count(mine, EXPERTS), before, placed.tables, rank, past=True)
            assert torch.equal(received([to]), sent)
        if batch == 1:
            layer.exchange()


def test_before_an_exchange_replicas_share_alike_and_after_it_as_the_sums_are_split() -> None:
    (layer,) = make_layers()
    even = imbalance(layer, range(16))
    tables, recent = layer.placed_on(CPU).tables, kept(layer).recent
    sums = (recent // (recent.sum() // 2**29 + 1)).sum(0).int()
    exchanged = layer.exchange()
    assert exchanged.imbalance.item() > 1
    assert torch.equal(kept(layer).quota, ops.plan_exact(sums, tables).quota)
    after = imbalance(layer, range(16, 32))
    assert after < even - 0.02 and after < 1.06, (even, after)
    layer.load(layer.placement)
    assert not kept(layer).quota.any(), "the split is of the placement"


def test_an_exchange_returns_the_imbalance_of_the_last_batch() -> None:
    (layer,) = make_layers()
    for batch in range(2):
        slots = layer(draw_ids(batch))
    loads = received(slots).view(RANKS, -1).sum(1).double()
    assert layer.exchange().imbalance.item() == pytest.approx(float(loads.max() / loads.mean()))


def test_shared_copies_stay_home_and_the_split_makes_room() -> None:
    topology = isoload.Topology(8, ranks_per_node=4)
    likes = torch.rand(1, 16, generator=torch.Generator().manual_seed(1))
    placement = isoload.place(likes, topology, 5, num_shared=1)
    layer = Balancer(placement, group=LocalGroup(topology), shared_columns=False, loads="last")
    tokens, draw = [10, 10, 90, 10, 10, 10, 10, 10], torch.Generator().manual_seed(2)
    for _ in range(4):
        ids = [torch.rand(n, 16, generator=draw).topk(3).indices for n in tokens]
        slots = layer(ids)
    assert all((to[:, 3] // 5 == rank).all() for rank, to in enumerate(slots))
    carried = received(slots, 40).view(8, -1).sum(1)
    exchanged = layer.exchange()
    assert exchanged.imbalance.item() == pytest.approx(float(carried.max() / carried.double().mean()))
    fixed = kept(layer).sent[:, 1].sum(0)
    assert torch.allclose(
        fixed.double() / fixed.sum(), torch.tensor(tokens).double() / sum(tokens), atol=1e-3
    )
    routed = kept(layer).quota.view(8, -1).sum(1)
    assert routed[2] < routed.double().mean() / 2, "rank 2 has its own shared copies"


def test_layers_are_exchanged_together_as_one_by_one_and_memory_stays() -> None:
    together, single = make_layers(LAYERS), make_layers(LAYERS)
    for a, b in zip(together, single, strict=True):
        with torch.inference_mode():
            a(draw_ids(a.layer)), b(draw_ids(a.layer))
    at = [x.data_ptr() for of in together for x in (kept(of).quota, kept(of).recent)]
    together[0].exchange(*together[1:])
    for a, b in zip(together, single, strict=True):
        b.exchange()
        assert kept(a).quota.any() and torch.equal(kept(a).quota, kept(b).quota)
        a.load(a.placement)
        a(draw_ids(7))
    assert at == [x.data_ptr() for of in together for x in (kept(of).quota, kept(of).recent)]


def test_a_recompute_counts_no_batch_again() -> None:
    (layer,) = make_layers()
    ids, seen = skewed(0, 4), []

    def forward(x: Tensor) -> Tensor:
        layer(ids)
        seen.append((in_backward(), kept(layer).recent.clone(), kept(layer).sent.clone()))
        return x * x

    x = torch.ones(1, requires_grad=True)
    torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False).backward()
    assert [again for again, *_ in seen] == [False, True]
    assert all(torch.equal(a, b) for a, b in zip(seen[0][1:], seen[1][1:], strict=True))


def test_over_processes_without_an_exchange_in_the_forward() -> None:
    def on_rank(rank: int) -> tuple[list[Tensor], dict[str, int]]:
        group = CollectiveGroup.own(isoload.Topology(2))
        placement = isoload.place(torch.arange(1, 17).repeat(2, 1), group.topology, slots_per_rank=10)
        layers = [Balancer(placement, i, group=group, loads="last") for i in range(2)]
        group.reset_traffic()
        draw = torch.Generator().manual_seed(rank)
        if rank == 0:  # rank 1 has no tokens, and is not waited for
            for layer in layers:
                layer(torch.rand(20, 16, generator=draw).topk(2).indices)
        forward = dict(group.traffic.bytes)
        layers[0].exchange(layers[1])
        return [kept(layer).quota for layer in layers], forward

    (first, none), (second, _) = run_ranks(on_rank, 2)
    assert not none, "bytes of the forward"
    assert all(a.any() and torch.equal(a, b) for a, b in zip(first, second, strict=True))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "same": (
        {"tokens": "same"},
        "loads must be gathered or, where tokens are own, node, own or last, got 'last' for 'same' tokens",
    ),
    "policy": ({"policy": "dynamic"}, "policy must be exact, of objective spread, for loads='last', got"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    how, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make_layers(**how)


def test_refuses_an_exchange_with_layers_that_have_targets() -> None:
    (layer,) = make_layers()
    other = Balancer(layer.placement, 1, group=layer.group, loads="own")
    with pytest.raises(ValueError, match="balancers must be alike in loads, got last and own"):
        layer.exchange(other)
