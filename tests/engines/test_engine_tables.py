"""Tables of engines to placements and back."""

import pytest
import torch

import isoload
from isoload.engines.tables import engine_topology, fill_spare_slots, placement_of, replica_lists


def test_an_engines_map_is_the_placement() -> None:
    table = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
    made = placement_of(table, 3, isoload.Topology(2))
    assert torch.equal(made.slot_to_expert.long(), table) and made.num_shared == 0


def test_every_rank_gets_a_slot_of_the_shared_expert() -> None:
    made = placement_of(torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]]), 3, isoload.Topology(2), num_shared=1)
    assert made.slot_to_expert.tolist() == [[0, 1, 3, 2, 0, 3], [2, 1, 3, 0, 1, 3]]
    assert made.num_shared == 1 and made.num_experts == 4


def test_replica_lists_by_hand() -> None:
    lists = replica_lists(placement_of(torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]]), 3, isoload.Topology(2)))
    assert lists.physical_to_logical.tolist() == [[0, 1, 2, 0], [2, 1, 0, 1]]
    assert lists.num_replicas.tolist() == [[2, 1, 1], [1, 2, 1]]
    assert lists.logical_to_physical.tolist() == [[[0, 3], [1, -1], [2, -1]], [[2, -1], [1, 3], [0, -1]]]
    assert {t.dtype for t in lists} == {torch.int64}


def test_replica_lists_refuse_empty_slots() -> None:
    placement = isoload.place(torch.ones(1, 4), isoload.Topology(2), 3, spare_slots=1)
    with pytest.raises(ValueError, match="placement must fill every slot"):
        replica_lists(placement)


@pytest.mark.parametrize(("ranks", "nodes", "per_node"), [(16, 2, 8), (8, 1, 8), (6, 4, 6), (2, 4, 2)])
def test_nodes(ranks: int, nodes: int, per_node: int) -> None:
    assert engine_topology(ranks, nodes).ranks_per_node == per_node


def test_spare_slots_start_with_experts_of_other_nodes() -> None:
    """A rebalance may cross nodes, and prefill keeps what it need not replace: else no split levels the nodes."""
    ranks, experts, topology = 4, 16, isoload.Topology(4, 2)
    homes = torch.arange(experts, dtype=torch.int32).view(ranks, -1)
    slots = torch.cat([homes, torch.full((ranks, 2), -1, dtype=torch.int32)], dim=1).view(1, -1)
    placed = isoload.Placement(slots, topology, experts, spare_slots=2)
    counts = torch.where(torch.arange(experts) < experts // 2, 300.0, 100.0).view(
        1, -1
    )  # node 0 has the hot half
    table = fill_spare_slots(placed, counts)[0]
    full = isoload.Placement(table.view(1, -1), topology, experts)
    peak = int(isoload.plan(counts[0].int(), full, 0).peak)
    assert peak < 1.01 * float(counts.sum()) / ranks < float(counts[0, : experts // 2].sum()) / 2
