"""A layer whose weights other processes read in place: what it frees, and when it meets them before it writes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

import isoload
from isoload.transport import CollectiveTransport
from isoload.weights import backends
from support.borrowed_layer import LLEP, make_setup
from support.processes import run_ranks
from support.shared_memory import SharedMemory, shared_memory

RANKS = 3


@contextmanager
def layer_of(rank: int) -> Iterator[tuple[isoload.MoE, torch.Tensor, SharedMemory]]:
    setup = make_setup(RANKS)
    with shared_memory() as double:
        yield setup.layer(CollectiveTransport(setup.placement.topology), **LLEP), setup.rows[rank], double


def freed(rank: int) -> list[int]:
    """Live handles with a layer and without one, in turn."""
    setup, live = make_setup(RANKS), list[int]()
    with shared_memory() as double:
        transport = CollectiveTransport(setup.placement.topology)
        for _ in range(3):
            layer = setup.layer(transport, **LLEP)
            assert layer.borrowing.backend.name == "pull"
            layer(setup.rows[rank]).square().sum().backward()
            live.append(double.live)
            del layer
            gc.collect()
            live.append(double.live)
    return live


def test_memory_is_freed_with_the_layer() -> None:
    for live in run_ranks(freed, RANKS):
        assert live[0] == live[2] == live[4] > live[1] == live[3] == live[5], live


def other_placement(layer: isoload.MoE) -> isoload.Placement:
    slots = layer.placement.slot_to_expert.clone()
    size = layer.placement.slots_per_rank
    slots[:, [0, size]] = slots[:, [size, 0]]
    return isoload.Placement(
        slots, layer.placement.topology, layer.placement.num_experts, spare_slots=layer.placement.spare_slots
    )


def load_state(layer: isoload.MoE) -> None:
    state = layer.state_dict()
    layer.load_state_dict({name: v * 2 if v.is_floating_point() else v for name, v in state.items()})


WRITERS: dict[str, Callable[[isoload.MoE], None]] = {
    "state": load_state,
    "full state": lambda layer: layer.load_full_state_dict(
        {name: value * 2 for name, value in layer.full_state_dict().items()}
    ),
    "placement": lambda layer: layer.load_placement(other_placement(layer)),
}


def meetings(rank: int, writer: str, trains: bool) -> tuple[list[int], bool, bool]:
    """The barriers after construction, forwards, a write and another; whether they came before it; whether it wrote."""
    with layer_of(rank) as (layer, rows, double), torch.no_grad():
        for parameter in layer.expert_parameters():
            parameter.requires_grad_(trains)
        if trains:
            with torch.enable_grad():
                layer(rows).square().sum().backward()
        counts = [len(double.barriers)]
        layer(rows)
        layer(rows)
        counts.append(len(double.barriers))
        stacks = layer.weights[0].stored_rows()
        before = [stack.clone() for stack in stacks]
        unwritten: list[bool] = []
        double.meeting = lambda: unwritten.append(all(map(torch.equal, before, stacks)))
        WRITERS[writer](layer)
        counts.append(len(double.barriers))
        written = not all(map(torch.equal, before, stacks))
        WRITERS[writer](layer)
        counts.append(len(double.barriers))
    return counts, all(unwritten), written


@pytest.mark.parametrize("writer", list(WRITERS))
def test_ranks_meet_before_a_write_that_slow_readers_could_see(writer: str) -> None:
    found = run_ranks(meetings, RANKS, writer, False)
    assert all(counts == [0, 0, 1, 1] and unwritten for counts, unwritten, _ in found), found
    assert any(written for _, _, written in found)


def meetings_of_graphs(rank: int) -> list[int]:
    with patch.object(backends, "capturing", lambda _device: True):
        return meetings(rank, "state", False)[0]


def test_ranks_meet_before_every_write_once_graphs_read_weights() -> None:
    assert run_ranks(meetings_of_graphs, RANKS) == [[0, 0, 1, 2]] * RANKS


def test_ranks_meet_after_a_batch_without_gradients_if_an_optimizer_step_may_follow() -> None:
    for counts, *_ in run_ranks(meetings, RANKS, "state", True):
        assert counts == [2, 4, 4, 4], counts
