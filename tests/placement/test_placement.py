"""Placement: defaults, what it derives, and a message for everything it refuses."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from isoload import Placement, Topology
from isoload.placement.placement import placement_errors

# Three ranks of four slots, six experts. Layer 0: expert 0 on ranks 0 and 2; expert 5 twice on rank 1.
LAYERS = [
    [3, 0, 1, -1, 5, 2, 5, -1, 0, 4, -1, -1],
    [0, 1, 2, -1, 3, 4, 5, -1, -1, -1, -1, -1],
]
LOWEST = [[1, 2, 5, 0, 9, 4], [0, 1, 2, 4, 5, 6]]


def make(**changes) -> Placement:
    arguments = {"slot_to_expert": LAYERS, "topology": Topology(3), "num_experts": 6, **changes}
    return Placement(**arguments)


def test_defaults():
    placement = make()
    assert placement_errors(placement) == []
    assert (placement.num_layers, placement.num_slots, placement.slots_per_rank) == (2, 12, 4)
    assert placement.home_slot.tolist() == LOWEST
    assert placement.home_slot.dtype == placement.slot_to_expert.dtype == torch.int32
    assert placement.layer_ids == (0, 1)
    assert (placement.spare_slots, placement.num_shared, placement.replica_weight) == (0, 0, None)
    assert [a.tolist() for a in placement.arrays] == [LAYERS, LOWEST]


@pytest.mark.parametrize(
    "slots",
    [
        np.array(LAYERS, dtype=np.int16),
        np.array(LAYERS, dtype=np.int64),
        torch.tensor(LAYERS, dtype=torch.int8),
        torch.tensor(LAYERS).t().contiguous().t(),
    ],
    ids=["int16 array", "int64 array", "int8 tensor", "strided tensor"],
)
def test_any_integers_are_taken(slots):
    placement = make(slot_to_expert=slots)
    assert placement.slot_to_expert.dtype == torch.int32 and placement.slot_to_expert.is_contiguous()
    assert placement.slot_to_expert.tolist() == LAYERS


def test_a_placement_has_its_own_memory():
    slots, home = torch.tensor(LAYERS, dtype=torch.int32), torch.tensor(LOWEST, dtype=torch.int32)
    weight = torch.ones(2, 12)
    placement = make(slot_to_expert=slots, home_slot=home, replica_weight=weight)
    for tensor in (slots, home, weight):
        tensor.fill_(7)
    assert placement.slot_to_expert.tolist() == LAYERS and placement.home_slot.tolist() == LOWEST
    assert placement.replica_weight.eq(1).all()
    assert placement_errors(placement) == []


def test_home_may_be_any_replica_that_is_the_lowest_on_its_rank():
    home = [[8, 2, 5, 0, 9, 4], LOWEST[1]]
    assert make(home_slot=home).home_slot.tolist() == home


def test_spare_slots_are_the_last_of_every_rank():
    placement = make(spare_slots=1)
    assert placement.layer(0, "cpu").spare_slots == placement.layers("cpu").spare_slots == 1


def test_a_rank_may_be_all_spare_or_absent():
    slots = [[0, 1, -1, -1, -1, -1]]
    assert placement_errors(Placement(slots, Topology(3), 2, spare_slots=0)) == []
    alive = Topology(3, alive=[True, False, False])
    assert placement_errors(Placement(slots, alive, 2)) == []


def test_freedom_is_an_expert_on_two_ranks_or_a_spare_slot():
    assert make().has_freedom == (True, False)
    assert make(spare_slots=1).has_freedom == (True, True)
    merged_only = Placement([[0, 0, 1, 1]], Topology(2), 2)
    assert merged_only.has_freedom == (False,)


def test_two_slots_of_one_expert_on_one_rank_are_merged_into_the_lower():
    replicas = make().layer(0, "cpu").tables.is_replica()
    assert replicas.tolist() == [p in (0, 1, 2, 4, 5, 8, 9) for p in range(12)]


def test_layers_and_layer_are_derived_once():
    placement = make()
    assert placement.layers("cpu") is placement.layers("cpu") is placement.layers(torch.device("cpu"))
    assert placement.layer(1, "cpu") is placement.layer(1, "cpu")


def test_a_layer_is_a_row_of_the_layers():
    placement = make()
    whole = placement.layers("cpu")
    assert whole.layer is None and whole.host is placement
    for i in range(2):
        one = placement.layer(i, "cpu")
        assert one.layer == i and one.host is placement and one.topology is placement.topology
        assert torch.equal(one.slot_to_expert, whole.slot_to_expert[i])
        assert torch.equal(one.home_slot, whole.home_slot[i])
        assert torch.equal(one.tables.data, whole.tables.data[i])
        assert one.memos is not whole.memos


def test_layers_of_a_fake_device_are_not_kept():
    placement = make()
    with FakeTensorMode():
        assert placement.layer(0, "cuda").home_slot.device.type == "cuda"
        assert placement.layers("cpu").home_slot.shape == (2, 6)
    assert type(placement.layer(0, "cpu").home_slot) is torch.Tensor


def test_a_memo_of_fake_values_is_not_kept():
    placed = make().layer(0, "cpu")
    with FakeTensorMode():
        assert placed.memo("three", lambda _host, _layer: np.zeros(3)).shape == (3,)
    assert placed.memo("three", lambda _host, _layer: np.zeros(3)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("index", [-1, 2])
def test_layer_must_exist(index):
    with pytest.raises(ValueError, match=re.escape(f"layer must be in 0..1, got {index}")):
        make().layer(index, "cpu")


def test_replace_checks_again():
    with pytest.raises(ValueError, match="num_experts"):
        dataclasses.replace(make(), num_experts=0)


def changed(slot: int, expert: int, layer: int = 0) -> list[list[int]]:
    rows = [list(row) for row in LAYERS]
    rows[layer][slot] = expert
    return rows


def homes(expert: int, slot: int) -> list[list[int]]:
    rows = [list(row) for row in LOWEST]
    rows[0][expert] = slot
    return rows


DEAD = {"slot_to_expert": changed(8, 0, layer=1), "topology": Topology(3, alive=[True, True, False])}
REFUSED = [
    ("slot_to_expert must be [L, P] with L >= 1, got shape [12]", {"slot_to_expert": LAYERS[0]}),
    (
        "slot_to_expert must be [L, P] with L >= 1, got shape [0, 12]",
        {"slot_to_expert": np.zeros((0, 12), int)},
    ),
    ("slot_to_expert must be integers, got torch.float32", {"slot_to_expert": torch.zeros(2, 12)}),
    ("slot_to_expert must be integers, got torch.bool", {"slot_to_expert": torch.zeros(2, 12).bool()}),
    ("slot_to_expert must fit in int32, got -1..4294967296", {"slot_to_expert": changed(0, 2**32)}),
    ("slot_to_expert must have a multiple of num_ranks=5 slots, got 12", {"topology": Topology(5)}),
    (
        "slot_to_expert must have a multiple of num_ranks=3 slots, got 0",
        {"slot_to_expert": torch.zeros(2, 0, dtype=torch.int32)},
    ),
    ("slot_to_expert must be in -1..5, got -2..5", {"slot_to_expert": changed(3, -2)}),
    ("slot_to_expert must be in -1..5, got -1..6", {"slot_to_expert": changed(0, 6)}),
    (
        "slot_to_expert must hold every expert, layer 1 has no replica of expert 4",
        {"slot_to_expert": changed(5, 3, layer=1)},
    ),
    ("slot_to_expert must be -1 in the last spare_slots=2 slots of a rank", {"spare_slots": 2}),
    ("slot_to_expert must be -1 on ranks that are not alive ([2])", DEAD),
    ("num_experts must be at least 1, got 0", {"num_experts": 0}),
    ("num_experts must be at least 1, got -1", {"num_experts": -1}),
    ("num_shared must be in 0..6, got 7", {"num_shared": 7}),
    ("num_shared must be in 0..6, got -1", {"num_shared": -1}),
    ("spare_slots must be in 0..4 (slots per rank), got 5", {"spare_slots": 5}),
    ("spare_slots must be in 0..4 (slots per rank), got -1", {"spare_slots": -1}),
    ("home_slot must be [2, 6], got [1, 6]", {"home_slot": LOWEST[:1]}),
    ("home_slot must be integers, got torch.float32", {"home_slot": torch.tensor(LOWEST).float()}),
    (
        "home_slot must hold its expert, slot 3 does not hold expert 2 in layer 0",
        {"home_slot": homes(expert=2, slot=3)},
    ),
    (
        "home_slot must hold its expert, slot -1 does not hold expert 3 in layer 0",
        {"home_slot": homes(expert=3, slot=-1)},
    ),
    (
        "home_slot must hold its expert, slot 12 does not hold expert 3 in layer 0",
        {"home_slot": homes(expert=3, slot=12)},
    ),
    (
        "home_slot must be the expert's lowest slot on its rank, expert 5 of layer 0 has a lower one",
        {"home_slot": homes(expert=5, slot=6)},
    ),
    ("layer_ids must have 2 entries, got 3", {"layer_ids": (3, 4, 5)}),
    ("layer_ids must be distinct, got [3, 3]", {"layer_ids": (3, 3)}),
    ("replica_weight must be [2, 12], got [12]", {"replica_weight": torch.ones(12)}),
    ("replica_weight must be finite and not negative, got -1.0", {"replica_weight": -torch.ones(2, 12)}),
    (
        "replica_weight must be finite and not negative, got nan",
        {"replica_weight": torch.full((2, 12), torch.nan)},
    ),
]


@pytest.mark.parametrize(("message", "arguments"), REFUSED)
def test_placement_names_what_it_refuses(message, arguments):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make(**arguments)


def test_all_faults_of_a_kind_are_named_at_once():
    with pytest.raises(ValueError, match=r"num_shared .*; spare_slots .*; layer_ids "):
        make(num_shared=7, spare_slots=5, layer_ids=(1,))
