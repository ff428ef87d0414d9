"""Balancer(loads="node"): a node's counts are gathered in it and split as one source's, towards targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CollectiveGroup, LocalGroup, ops
from isoload.balancing.own_counts import share_in_node
from support.cases import instances
from support.processes import die, rank_outcomes, run_ranks
from support.recorded_calls import recorded
from support.small_batches import EXPERTS, LAYERS, RANKS, K, draw_ids, make_placement, make_topology

NODE = 4  # ranks of one
NO_OFFSET = torch.zeros(RANKS, dtype=torch.int32)


def node_balancers(layers: int = LAYERS, **how: Any) -> list[Balancer]:
    placement, group = make_placement(), LocalGroup(make_topology())
    return [Balancer(placement, i, group=group, **{"loads": "node", **how}) for i in range(layers)]


def sent_of(slots: list[Tensor], num_slots: int) -> Tensor:
    """[R, P] copies that each rank sends to every slot."""
    return torch.stack([torch.bincount(s[s >= 0].flatten(), minlength=num_slots) for s in slots])


def test_a_node_sends_what_plan_own_says_of_its_sum() -> None:
    (balancer,) = node_balancers(1)
    placed = balancer.placed_on(torch.device("cpu"))
    for batch in range(3):
        ids = draw_ids(batch)
        ids[batch] = ids[batch][:0]  # a rank without tokens
        slots = balancer(ids)
        assert balancer.last_plan is None
        for mine, to in zip(ids, slots, strict=True):
            expert = torch.where(to >= 0, placed.slot_to_expert.long()[to.clamp(min=0)], -1)
            assert torch.equal(expert, mine)
        sent = sent_of(slots, balancer.placement.num_slots).view(2, NODE, -1).sum(1)
        for node in range(2):
            counts = sum(isoload.count(rows, EXPERTS) for rows in ids[node * NODE : (node + 1) * NODE])
            assert torch.equal(ops.plan_own(counts, placed.tables, NO_OFFSET, node).long(), sent[node])


def test_the_share_in_a_node_meets_its_quota_and_keeps_copies_on_their_rank() -> None:
    """Against a plain count: of every slot what the node sends there, of every rank what it has."""
    for n, case in enumerate(instances(1, seed=5, max_ranks=16, families=("eplb", "random", "empty_slots"))):
        ranks = case.num_ranks
        size = next(s for s in (4, 2, 1) if ranks % s == 0)
        node = n % (ranks // size)
        counts = torch.from_numpy(case.loads[node * size : (node + 1) * size] % 1000).contiguous()
        tables = case.tables()
        has = torch.from_numpy(np.isin(np.arange(case.num_experts), case.slot_to_expert))
        counts = torch.where(has, counts, 0)
        quota = ops.plan_own(
            counts.sum(0, dtype=torch.int32), tables, torch.zeros(ranks, dtype=torch.int32), node
        )
        members = range(node * size, (node + 1) * size)
        rows = share_in_node(counts, quota, tables, node, members)
        assert torch.equal(torch.stack(rows).sum(0, dtype=torch.int32), quota), case.name
        for i, (rank, row) in enumerate(zip(members, rows, strict=True)):
            assert torch.equal(row, share_in_node(counts, quota, tables, node, [rank])[0]), case.name
            of_expert, on_own = np.zeros(case.num_experts, int), np.zeros(case.num_experts, int)
            room = np.zeros(case.num_experts, int)
            for p, expert in enumerate(case.slot_to_expert):
                if expert >= 0:
                    of_expert[expert] += int(row[p])
                    if p // case.slots_per_rank == rank:
                        on_own[expert] += int(row[p])
                        room[expert] += int(quota[p])
            assert np.array_equal(of_expert, counts[i].numpy()), case.name
            assert np.array_equal(on_own, np.minimum(room, counts[i].numpy())), case.name


def domains(batch: int, tokens: int) -> list[Tensor]:
    """[R][T, K] of ranks that each have a domain of their own: other experts are popular."""
    generator = torch.Generator().manual_seed(100 + batch)
    likes = [
        torch.rand(EXPERTS, generator=torch.Generator().manual_seed(rank)) ** 4 + 1e-3
        for rank in range(RANKS)
    ]
    return [torch.multinomial(of.expand(tokens, -1), K, generator=generator) for of in likes]


def imbalance(balancer: Balancer, batches: range, tokens: int = 16) -> float:
    """Mean of the largest rank load over the proved bound of all loads."""
    found = []
    for batch in batches:
        ids = domains(batch, tokens)
        loads = torch.stack([isoload.count(rows, EXPERTS) for rows in ids])
        bound = isoload.plan(loads, balancer.placement, balancer.layer).bound
        carried = sent_of(balancer(ids), balancer.placement.num_slots).sum(0).view(RANKS, -1).sum(1)
        found.append(int(carried.max()) / int(bound))
    return float(np.mean(found))


def test_a_node_is_nearer_to_the_bound_than_its_ranks_and_its_targets_help() -> None:
    (node,), (own,) = node_balancers(1), node_balancers(1, loads="own")
    before = imbalance(node, range(16)), imbalance(own, range(16))
    node.exchange(), own.exchange()
    after = imbalance(node, range(16, 40)), imbalance(own, range(16, 40))
    assert after[0] < before[0] < before[1] and after[0] < after[1] - 0.02, (before, after)
    node.load(node.placement)
    assert node.own_counts is not None and not node.own_counts.offset.any()


def test_a_captured_graph_reads_what_an_exchange_writes() -> None:
    (eager,), (inner,) = node_balancers(1), node_balancers(1)
    graph = isoload.CapturedBalancer(inner, 16, K, device="cpu", capture=recorded)
    for batch in range(24):
        ids = domains(batch, 16)
        for mine, theirs in zip(eager(ids), graph(ids), strict=True):
            assert torch.equal(mine, theirs)
        if batch % 8 == 7:
            assert torch.equal(eager.exchange().imbalance, inner.exchange().imbalance)
    assert eager.own_counts is not None and inner.own_counts is not None
    assert torch.equal(eager.own_counts.recent, inner.own_counts.recent) and inner.own_counts.offset.any()


# Processes: two nodes of two ranks

FOUR = isoload.Topology(4, ranks_per_node=2)


def over_processes(layers: int = 2, **how: Any) -> list[Balancer]:
    group = CollectiveGroup.own(FOUR)
    placement = isoload.place(torch.arange(1, 17).repeat(layers, 1), FOUR, slots_per_rank=6)
    return [Balancer(placement, i, group=group, **{"loads": "node", **how}) for i in range(layers)]


def small_ids(rank: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return torch.rand(0 if rank == 2 else 20, 16, generator=generator).topk(2).indices


def test_over_processes_as_in_one() -> None:
    def run(layers: list[Balancer], batches: list[list[Any]]) -> list[Any]:
        results: list[Any] = []
        for i, ids in enumerate(batches):
            results += [layer(ids if len(layer.ranks) > 1 else ids[0]) for layer in layers]
            if i % 2:
                results.append(layers[0].exchange(*layers[1:]).imbalance)
        return results

    def on_rank(rank: int) -> list[Any]:
        layers = over_processes()
        return run(layers, [[small_ids(rank, seed)] for seed in range(4)])

    of_rank = run_ranks(on_rank, 4)
    placement = isoload.place(torch.arange(1, 17).repeat(2, 1), FOUR, slots_per_rank=6)
    group = LocalGroup(FOUR)
    layers = [Balancer(placement, i, group=group, loads="node") for i in range(2)]
    together = run(layers, [[small_ids(rank, seed) for rank in range(4)] for seed in range(4)])
    for i, wanted in enumerate(together):
        for rank in range(4):
            assert torch.equal(of_rank[rank][i], wanted[rank] if isinstance(wanted, list) else wanted)


def test_a_failed_batch_stops_its_node_at_once_and_all_ranks_at_the_exchange() -> None:
    def on_rank(rank: int) -> list[str]:
        (layer,) = over_processes(1)
        said = []
        ids = small_ids(rank, 0) + (99 if rank == 3 else 0)
        try:
            layer(ids)
        except ValueError as error:
            said.append(str(error))
        with pytest.raises(ValueError) as raised:
            layer.exchange()
        layer(small_ids(rank, 1))  # and goes on
        layer.exchange()
        return [*said, str(raised.value)]

    *first, third, fourth = run_ranks(on_rank, 4)
    failed = "a batch has failed since the last exchange: ValueError: topk_ids must be in -1..15"
    stopped = "so all ranks stop; see the error of that rank"
    for said in first:
        assert len(said) == 1 and said[0].startswith(
            f"rank 3 failed in stage exchange, {stopped}: ValueError: {failed}"
        )
    assert third[0] == f"rank 3 failed in stage count, {stopped}" and failed in third[1]
    assert fourth[0].startswith("topk_ids must be in -1..15") and fourth[1].startswith(failed)


def test_facts_that_differ_in_a_node_name_its_ranks() -> None:
    def on_rank(rank: int) -> str | None:
        first, second = over_processes()
        try:
            (second if rank == 3 else first)(small_ids(rank, 0))
        except ValueError as error:
            return str(error)
        return None

    *others, third, fourth = run_ranks(on_rank, 4)
    assert others == [None, None]
    assert third == fourth and third.startswith(
        "layer must be the same on all ranks, got 0 on rank 2 and 1 on rank 3"
    )


def test_a_rank_that_stops_is_named_on_its_node_and_no_other_before_the_exchange() -> None:
    def on_rank(rank: int) -> None:
        (layer,) = over_processes(1)
        layer(small_ids(rank, 0))
        if rank == 3:
            die()
        if rank == 2:
            layer(small_ids(rank, 1))
        for seed in range(1, 4):
            layer(small_ids(rank, seed))  # two ranks that need nothing of the others
        layer.exchange()

    zero, one, two, _ = rank_outcomes(on_rank, 4, group_timeout=8.0)
    for outcome in (zero, one):
        assert outcome.error is not None and "stage exchange failed on rank" in outcome.error
    assert two.error is not None and "stage gather failed on rank 2" in two.error


def test_counts_that_differ_in_a_node_are_named() -> None:
    def on_rank(rank: int) -> str:
        (layer,) = over_processes(1)
        layer(small_ids(rank, 0))
        assert layer.own_counts is not None
        layer.own_counts.recent[0, 3] += rank == 1
        with pytest.raises(ValueError) as raised:
            layer.exchange()
        return str(raised.value)

    told = "recent counts of node 0 must be the same on its ranks, got others on rank 1"
    assert run_ranks(on_rank, 4) == [told] * 4


def test_refuses_nodes_of_another_topology() -> None:
    placement = isoload.place(torch.ones(1, 8), FOUR, slots_per_rank=3)
    message = "placement must have the group's ranks_per_node=4 for loads='node', got 2"
    with pytest.raises(ValueError, match=message):
        Balancer(placement, group=LocalGroup(isoload.Topology(4)), loads="node")


@pytest.mark.parametrize(
    ("per_node", "message"),
    [
        (1, "loads must be own, because each node has one rank, got 'node' with ranks_per_node=1"),
        (4, "loads must be gathered, because one node has all ranks, got 'node' with ranks_per_node=4"),
    ],
)
def test_refuses_nodes_that_are_none(per_node: int, message: str) -> None:
    topology = isoload.Topology(4, ranks_per_node=per_node)
    placement = isoload.place(torch.ones(1, 8), topology, slots_per_rank=3)
    with pytest.raises(ValueError, match=message):
        Balancer(placement, group=LocalGroup(topology), loads="node")
