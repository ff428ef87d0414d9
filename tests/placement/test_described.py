"""One line for each record, and tables as text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import isoload
from isoload import Topology
from isoload.traces import Trace
from isoload.wording import text_table

COUNTS = np.array([[60, 10, 10, 10, 5, 5], [10, 10, 10, 10, 10, 10]])


def loads(*rows: list[int]) -> torch.Tensor:
    """[L, 3, E] int32 with all copies on source 0."""
    whole = torch.zeros(len(rows), 3, 6, dtype=torch.int32)
    whole[:, 0] = torch.tensor(rows, dtype=torch.int32)
    return whole


@pytest.fixture
def placement() -> isoload.Placement:
    return isoload.place(COUNTS, Topology(3), 3)


def test_a_placement_is_one_line(placement: isoload.Placement) -> None:
    assert repr(placement) == "Placement(2 layers, 6 experts, 3 ranks x 3 slots, 3 replicas per layer)"
    whole = isoload.place(np.ones((75, 256)), 16, 18)
    assert repr(whole) == "Placement(75 layers, 256 experts, 16 ranks x 18 slots, 32 replicas per layer)"
    more = isoload.place(COUNTS, 3, 5, spare_slots=1, num_shared=1)
    assert repr(more) == (
        "Placement(2 layers, 6 experts, 3 ranks x 5 slots, 3 replicas per layer, 1 spare slots per rank, "
        "1 shared expert)"
    )
    ragged = isoload.Placement([[0, 1, 2, -1], [0, 1, 2, 0]], 2, 3)
    assert repr(ragged) == "Placement(2 layers, 3 experts, 2 ranks x 2 slots, 0 to 1 replicas per layer)"


def test_a_placement_is_described_by_layer() -> None:
    slots = [[0, 1, 2, 0, 1, 0], [0, 1, 2, -1, -1, -1]]
    lines = isoload.Placement(slots, 3, 3, layer_ids=(4, 9)).describe().splitlines()
    assert lines[0] == "Placement(2 layers, 3 experts, 3 ranks x 2 slots, 0 to 3 replicas per layer)"
    assert [line.split() for line in lines[2:]] == [
        ["4", "3", "2", "0", "3", "0"],
        ["9", "0", "0", "0", "1", "3"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1


def test_a_plan_is_one_line(placement: isoload.Placement) -> None:
    batch = loads([6000, 10, 10, 10, 5, 5], [0, 0, 0, 0, 0, 0])
    one = isoload.plan(batch[0], placement, 0)
    assert (
        repr(one) == f"Plan(exact, 3 ranks, peak {int(one.peak):,} = bound)" and "," in f"{int(one.peak):,}"
    )
    whole = isoload.plan(batch, placement, None)
    assert repr(whole) == f"Plan(exact, 2 layers, 3 ranks, peak 0 to {int(one.peak):,} = bound)"
    assert repr(isoload.plan(batch[0], placement, 0, "none")) == (
        f"Plan(none, 3 ranks, peak 6,015, bound {int(one.bound):,})"
    )
    assert repr(isoload.plan(batch[0], placement, 0, "dynamic")) == (
        f"Plan(dynamic, 3 ranks, sampled, bound {int(one.bound):,})"
    )
    slow = isoload.place(COUNTS, Topology(3, speeds=[1, 1, 0.5]), 3)
    assert " ticks = bound)" in repr(isoload.plan(batch[0], slow, 0))


def test_a_plan_on_a_device_shows_no_values(placement: isoload.Placement) -> None:
    """Reading them would make the host wait and end a capture; a meta tensor raises where it is read."""
    made = isoload.plan(loads(COUNTS[0].tolist())[0], placement, 0)
    away = replace(made, bound=made.bound.to("meta"), peak=made.peak.to("meta"))
    assert repr(away) == "Plan(exact, 3 ranks, on meta)"


def test_a_plan_is_described_by_rank_or_by_layer(placement: isoload.Placement) -> None:
    batch = loads(COUNTS[0].tolist(), [0] * 6)
    made = isoload.plan(batch, placement, None)
    head, *rows = [line.split() for line in made.describe().splitlines()[1:]]
    assert head == ["layer", "peak", "bound", "imbalance"]
    assert rows == [["0", "34", "34", "1.020"], ["1", "0", "0", "1.000"]]
    lines = made[0].describe().splitlines()
    assert lines[0] == repr(made[0]) and lines[1].split()[:2] == ["rank", "load"]
    assert sum(int(line.split()[1]) for line in lines[2:]) == COUNTS[0].sum() and len(lines) == 5
    drawn = isoload.plan(batch[0], placement, 0, "dynamic")
    assert drawn.describe() == repr(drawn)


def test_borrowed_experts_are_described() -> None:
    spare = isoload.place(COUNTS, 3, 3, spare_slots=1)
    made = isoload.plan(loads([6000, 10, 10, 10, 5, 5])[0], spare, 0, "llep")
    borrowed = [line.split()[3] for line in made.describe().splitlines()[2:]]
    assert "0" in borrowed and sorted(borrowed)[0] == "-"


def test_other_records_are_one_line(placement: isoload.Placement) -> None:
    trace = Trace("a" * 300, 6, counts=COUNTS[None])
    assert repr(Trace("run", 6, counts=COUNTS[None])) == (
        "Trace('run', 1 batch, 2 layers, 6 experts, top-k unknown, counts alone)"
    )
    ids = np.zeros((5, 2, 1), dtype=np.int32)
    assert (
        repr(Trace("run", 6, topk_ids=ids)) == "Trace('run', 1 batch, 2 layers, 6 experts, top-1, 5 tokens)"
    )
    balancer = isoload.Balancer(placement, 1, "exact", isoload.LocalGroup(3))
    assert repr(balancer) == "Balancer(exact, layer 1 of 2, 3 ranks, own tokens, gathered loads)"
    assert repr(isoload.Recorder(2, 6)) == "Recorder(2 layers, 6 experts, 0 batches of at most 64)"
    layers = placement.layer(1, "cpu")
    assert repr(layers) == f"PlacedLayers(layer 1 of {placement!r}, on cpu)"
    for record in (trace, balancer, layers, placement):
        assert "\n" not in repr(record) and len(repr(record)) < 250


def test_a_name_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in repr(Trace("\x1b[31mred", 6, counts=COUNTS[None]))


def test_columns_are_right_aligned() -> None:
    assert text_table(("a", "long"), [("word", 1), ("b", 2000.5)]) == (
        "   a      long\nword         1\n   b  2000.500"
    )
