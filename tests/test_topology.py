"""Topology: defaults, derived values, and a message for everything it refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from isoload.topology import Topology, topology_errors


def test_one_node_is_the_default():
    topology = Topology(12)
    assert (topology.ranks_per_node, topology.num_nodes) == (12, 1)
    assert topology.live_ranks == list(range(12))
    assert topology.ticks is None and topology.ticks_on(torch.device("cpu")) is None
    assert topology_errors(topology) == []


def test_nodes_and_live_ranks():
    topology = Topology(6, ranks_per_node=2, alive=[True, False, True, True, True, False])
    assert topology.num_nodes == 3
    assert topology.live_ranks == [0, 2, 3, 4]


def test_ticks_are_1024_for_a_nominal_rank_and_fewer_for_a_fast_one():
    topology = Topology(6, speeds=[1.0, 2.0, 0.5, 3.0, 1 / 1024, 1024.0])
    assert topology.ticks.dtype == torch.int32
    assert topology.ticks.tolist() == [1024, 512, 2048, 341, 1 << 20, 1]


def test_the_mean_load_is_that_of_live_ranks_that_end_together():
    assert Topology(6).copies_per_cost == 6 and Topology(3, alive=[True, False, True]).copies_per_cost == 2
    topology = Topology(3, speeds=[1.0, 0.5, 2.0], alive=[True, True, False])
    assert topology.copies_per_cost == 1 / 1024 + 1 / 2048


def test_equal_speeds_still_count_in_ticks():
    assert Topology(2, speeds=(2.0, 2.0)).ticks.tolist() == [512, 512]


def test_ticks_are_made_once_per_device():
    topology = Topology(2, speeds=(1.0, 2.0))
    assert topology.ticks is topology.ticks_on(torch.device("cpu"))


def test_ticks_of_a_fake_device_are_not_kept():
    topology = Topology(2, speeds=(1.0, 2.0))
    with FakeTensorMode():
        assert topology.ticks_on(torch.device("cuda")).device.type == "cuda"
        assert topology.ticks.shape == (2,)
    assert type(topology.ticks) is torch.Tensor
    assert topology.ticks.tolist() == [1024, 512]


def test_lists_arrays_and_tensors_make_the_same_hashable_record():
    a = Topology(2, speeds=[1.0, 0.5], alive=[True, False], bandwidths=[400, 50])
    b = Topology(
        np.int64(2), speeds=torch.tensor([1.0, 0.5]), alive=np.array([1, 0]), bandwidths=(400.0, 50.0)
    )
    assert a == b and hash(a) == hash(b)
    assert b.alive == (True, False)


REFUSED = [
    ("num_ranks must be an integer in 1..1024, got 0", {"num_ranks": 0}),
    ("num_ranks must be an integer in 1..1024, got 1025", {"num_ranks": 1025}),
    ("num_ranks must be an integer in 1..1024, got 4.0", {"num_ranks": 4.0}),
    ("ranks_per_node must divide num_ranks=4, got 3", {"ranks_per_node": 3}),
    ("ranks_per_node must divide num_ranks=4, got 8", {"ranks_per_node": 8}),
    ("ranks_per_node must divide num_ranks=4, got -2", {"ranks_per_node": -2}),
    ("ranks_per_node must divide num_ranks=4, got 2.0", {"ranks_per_node": 2.0}),
    ("speeds must have one entry per rank (4), got 3", {"speeds": [1.0] * 3}),
    ("alive must have one entry per rank (4), got 5", {"alive": [True] * 5}),
    ("alive must be True for at least one rank, got none", {"alive": [False] * 4}),
    ("speeds must be in [0.000976562, 1024], got [1.0, 0.0, 1.0, 1.0]", {"speeds": [1, 0, 1, 1]}),
    ("speeds must be in [0.000976562, 1024], got [1.0, 1025.0, 1.0, 1.0]", {"speeds": [1, 1025, 1, 1]}),
    ("speeds must be in [0.000976562, 1024], got [nan, 1.0, 1.0, 1.0]", {"speeds": [float("nan"), 1, 1, 1]}),
    ("bandwidths must be two positive numbers (node, network), got (400.0,)", {"bandwidths": [400]}),
    ("bandwidths must be two positive numbers (node, network), got (400.0, 0.0)", {"bandwidths": [400, 0]}),
    (
        "bandwidths must be two positive numbers (node, network), got (nan, 50.0)",
        {"bandwidths": [float("nan"), 50]},
    ),
]


@pytest.mark.parametrize(("message", "arguments"), REFUSED)
def test_topology_names_what_it_refuses(message, arguments):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Topology(**{"num_ranks": 4, **arguments})


def test_all_faults_are_named_at_once():
    with pytest.raises(ValueError, match=r"ranks_per_node .*; speeds .*; alive must be True"):
        Topology(4, ranks_per_node=3, speeds=[1.0], alive=[False] * 4)
