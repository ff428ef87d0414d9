"""Weights that place stores: mean load over the load of the replica's rank, each expert's split evenly."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

import isoload
from isoload.placers.base import weights_by_load
from isoload.traces import Trace


def by_hand(placement: isoload.Placement, counts: np.ndarray) -> list[Fraction]:
    """[P] exact weights of one layer, from loads [E] in whole numbers."""
    slots, topology = placement.arrays[0][0].tolist(), placement.topology
    size, tick = placement.slots_per_rank, topology.ticks
    ranks_of: dict[int, set[int]] = {}
    for slot, expert in enumerate(slots):
        ranks_of.setdefault(expert, set()).add(slot // size)
    load = [Fraction(0)] * topology.num_ranks
    for expert, copies in enumerate(counts.tolist()):
        for rank in ranks_of[expert]:
            cost = Fraction(1) if tick is None else Fraction(int(tick[rank]), 1024)
            load[rank] += cost * Fraction(int(copies), len(ranks_of[expert]))
    live = [load[rank] for rank in topology.live_ranks]
    mean = sum(live, Fraction(0)) / len(live)
    weight = [mean / max(x, mean / 10**6) if mean else Fraction(1) for x in load]
    routed = [0 <= expert < placement.num_routed for expert in slots]
    return [weight[slot // size] if there else Fraction(0) for slot, there in enumerate(routed)]


@pytest.mark.parametrize("placer", ["trivial", "eplb", "eplb:dedup=False", "scenario"])
@pytest.mark.parametrize("kind", ["plain", "spare and shared", "dead", "speeds", "no loads"])
def test_weights_are_those_of_exact_fractions(placer: str, kind: str) -> None:
    rng = np.random.default_rng(7)
    counts = rng.integers(0, 1000, 16)
    topology, size, more = isoload.Topology(4), 6, {}
    if kind == "spare and shared":
        size, more = 9, {"spare_slots": 2, "num_shared": 1}
    if kind == "dead":
        topology, size = isoload.Topology(4, alive=(True, False, True, True)), 7
    if kind == "speeds":
        topology = isoload.Topology(4, speeds=(1.0, 0.5, 1.0, 0.75))
    if kind == "no loads":
        counts *= 0
    name, *options = placer.split(":")
    more |= {"dedup": False} if options else {}
    placement = isoload.place(counts[None], topology, size, name, **more)
    found, wanted = placement.replica_weight, by_hand(placement, counts)
    assert found is not None
    assert found[0].tolist() == pytest.approx([float(x) for x in wanted], rel=1e-6, abs=0)


def test_placer_grace_has_the_same_weights_as_equation_3() -> None:
    """Its own come from the loads before replication and what the replicas take."""
    rng = np.random.default_rng(3)
    share = rng.dirichlet(np.full(24, 0.3)) + 1e-3
    ids = np.stack([rng.choice(24, 3, replace=False, p=share / share.sum()) for _ in range(600)])
    trace = Trace("drawn", 24, topk_ids=ids[:, None].astype(np.int32))
    placement = isoload.place(trace, isoload.Topology(4, 2), placer="grace")
    counts = trace.batch_counts()[0, 0]
    assert placement.replica_weight is not None and placement.provenance["replicas_by_layer"][0] > 0
    wanted = [float(x) for x in by_hand(placement, counts)]
    assert placement.replica_weight[0].tolist() == pytest.approx(wanted, rel=1e-6, abs=0)


def test_an_idle_rank_weighs_much_but_not_without_end() -> None:
    slots = np.array([[[0], [1]]], dtype=np.int32)
    found = weights_by_load(slots, np.array([[8.0, 0.0]]), np.ones(2))
    assert found.ravel().tolist() == [0.5, 1e6]


def test_two_slots_of_an_expert_on_a_rank_are_one_replica() -> None:
    slots = np.array([[[0, 0, 1], [2, 0, -1]]], dtype=np.int32)  # loads 12/2 + 2 and 4 + 12/2
    found = weights_by_load(slots, np.array([[12.0, 2.0, 4.0]]), np.ones(2))
    assert found.tolist() == [[[9 / 8] * 3, [np.float32(0.9), np.float32(0.9), 0]]]


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_engines_file_leaves_them_out(name: str, tmp_path: Path) -> None:
    placement = isoload.place(np.arange(1, 9)[None], isoload.Topology(2), 5).with_moe_layers(0)
    isoload.write_placement(placement, tmp_path / "file.json", name)
    read = isoload.read_placement(tmp_path / "file.json", placement.topology)
    assert torch.equal(read.slot_to_expert, placement.slot_to_expert) and read.replica_weight is None
