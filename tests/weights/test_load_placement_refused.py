"""What load_placement refuses, on every rank and before anything moves; and ranks that are gone in the move."""

from __future__ import annotations

import random

import pytest
import torch

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from support.moved_layer import deal, eplb, make_setup, pairs, run, same
from support.processes import die, rank_outcomes
from support.small_layer import EXPERTS


def local_layer(ranks=4, kind=1, **how):
    setup = make_setup(ranks)
    _, before, after = list(pairs(ranks))[kind]
    transport = LocalTransport(setup.topology)
    return MoE(setup.gate, setup.dense, transport, before, **how), after, setup


def test_a_backward_from_before_the_move_raises():
    layer, after, setup = local_layer(weight_rows=6)
    loss = sum(y.sum() for y in layer(setup.rows))
    layer.load_placement(after)
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        loss.backward()
    # the rows of a layer without replicas may stay where they are and still change their part
    draw = random.Random(1)
    placements = [deal(draw, isoload.Topology(1), EXPERTS) for _ in range(2)]
    layer = MoE(setup.gate, setup.dense, LocalTransport(isoload.Topology(1)), placements[0])
    loss = layer(setup.rows[0]).sum()
    layer.load_placement(placements[0])
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        loss.backward()


def placement_of(size=5, layers=1, **changes):
    given = deal(random.Random(3), isoload.Topology(4), size, layers=layers)
    fields = ("slot_to_expert", "topology", "num_experts", "home_slot", "spare_slots", "num_shared")
    return isoload.Placement(**{name: getattr(given, name) for name in fields} | changes)


WITH_SHARED = torch.cat([torch.arange(16).view(4, 4) % 10, torch.full((4, 1), 10)], dim=1).view(1, 20)

REFUSED = {
    "topology": ({"topology": isoload.Topology(4, 2)}, "placement must have the layer's topology=Topology"),
    "layers": ({"layers": 2}, "placement must have the layer's num_layers=1, got 2"),
    "shared": (
        {"num_shared": 1, "slot_to_expert": WITH_SHARED, "home_slot": None},
        "placement must have the layer's num_shared=0, got 1",
    ),
    "slots": ({"size": 6}, "placement must have the layer's slots_per_rank=5, got 6"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_placement_of_another_kind_is_refused(what):
    changes, message = REFUSED[what]
    layer, _, _ = local_layer()
    with pytest.raises(ValueError, match=message):
        layer.load_placement(placement_of(**changes))


def test_other_experts_and_spare_slots_are_refused():
    layer, _, setup = local_layer()
    few = isoload.place(torch.ones(1, EXPERTS - 1), setup.topology, slots_per_rank=5)
    with pytest.raises(ValueError, match="placement must have the layer's num_experts=11, got 10"):
        layer.load_placement(few)
    with pytest.raises(ValueError, match="placement must have the layer's spare_slots=0, got 1"):
        layer.load_placement(eplb(setup.topology, 5, 1, spare=1))


def test_arguments_that_do_not_fit_are_refused():
    layer, after, setup = local_layer()
    with pytest.raises(ValueError, match="rows_per_chunk must be at least 2, got 1"):
        layer.load_placement(after, rows_per_chunk=1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1)
    with pytest.raises(
        ValueError, match="optimizer must hold the layer's expert Parameters, gate_up is missing"
    ):
        layer.load_placement(after, optimizer=optimizer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1)
    optimizer.state[layer.weights[2].down] = {"row_variance": torch.zeros(3, 2)}
    with pytest.raises(
        ValueError, match="optimizer state row_variance of down must have the shape .* or one el"
    ):
        layer.load_placement(after, optimizer=optimizer)
    sum(y.sum() for y in layer(setup.rows)).backward()
    with pytest.raises(ValueError, match="expert Parameters must have no gradient .*, gate_up has one"):
        layer.load_placement(after, optimizer="none")
    with pytest.raises(ValueError, match="weight_rows must be at least 5, which rank 0 needs, got 4"):
        local_layer(weight_rows=4)


def test_more_rows_than_there_are_is_refused_before_anything_moves():
    setup = make_setup(4)
    slots = [0, 1, 2, -1, -1, 3, 4, 5, -1, -1, 6, 7, 8, -1, -1, 9, 10, -1, -1, -1]
    before = isoload.Placement(torch.tensor([slots]), setup.topology, EXPERTS)
    layer = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), before)
    assert layer.num_rows == [3, 3, 3, 2]
    first = run(layer, setup.rows)
    after = eplb(setup.topology, 5, 1)
    with pytest.raises(ValueError, match="placement must fit in the 3 weight rows of rank 0, got 5 experts"):
        layer.load_placement(after, optimizer="none")
    assert same(run(layer, setup.rows), first)


def test_planning_takes_the_layers_that_a_caller_keeps():
    layer, after, setup = local_layer()
    placed = layer.balancer.placed_on(torch.device("cpu"))
    loads = torch.ones(EXPERTS, dtype=torch.int32)
    assert torch.equal(isoload.plan(loads, placed).quota, isoload.plan(loads, layer.placement, 0).quota)
    with pytest.raises(ValueError, match="layer must be None where the placement's layers are given, got 0"):
        isoload.plan(loads, placed, 0)
    with pytest.raises(ValueError, match="loads must be on cpu as the layers, got meta"):
        isoload.plan(loads.to("meta"), placed)


def failing(rank, how):
    """Three ranks, of which rank 1 is not like the others."""
    setup = make_setup(3)
    _, before, after = list(pairs(3))[1]
    other = list(pairs(3))[1][1]
    transport = CollectiveTransport(setup.topology)
    layer = MoE(setup.gate, setup.dense, transport, before, weight_rows=before.slots_per_rank)
    optimizer = torch.optim.AdamW(layer.parameters())
    chunk, odd = 4, rank == 1
    if how == "placement" and odd:
        after = other
    elif how == "chunk" and odd:
        chunk = 5
    elif how == "gradient" and odd:
        layer.weights[0].down.grad = torch.zeros_like(layer.weights[0].down)
    elif how == "state" and odd:
        down = layer.weights[0].down
        optimizer.state[down] = {"exp_avg": torch.zeros_like(down)}
    elif how == "dead" and odd:
        transport.group.start_send = lambda *args: die()
    layer.load_placement(after, rows_per_chunk=chunk, optimizer=optimizer)


def errors_of(how):
    outcomes = rank_outcomes(failing, 3, how, timeout=30, group_timeout=5)
    return [o.error.strip().splitlines()[-1] if o.error else None for o in outcomes]


@pytest.mark.parametrize(
    ("how", "fact"),
    [
        ("placement", "checksum of slot_to_expert"),
        ("chunk", "rows_per_chunk"),
        ("state", "checksum of the optimizer's state names and dtypes"),
    ],
)
def test_ranks_that_differ_raise_alike(how, fact):
    errors = errors_of(how)
    assert errors[0].startswith(f"ValueError: {fact} must be the same on all ranks, got"), errors
    assert errors == [errors[0]] * 3


def test_a_rank_that_fails_its_checks_fails_all():
    errors = errors_of("gradient")
    told = "ValueError: rank 1 failed in stage placement, so all ranks stop; see the error of that rank"
    assert errors[0] == errors[2] == told
    assert errors[1].startswith("ValueError: expert Parameters must have no gradient")


@pytest.mark.parametrize("kind", [1, 2])
def test_what_fails_last_is_found_before_anything_moves(kind):
    """Regression: a policy's tables, written when weights had moved already, could not be."""
    layer, after, setup = local_layer(kind=kind, weight_rows=6)

    def refuse(_host, _layer):
        raise OSError("no memory")

    first = run(layer, setup.rows)
    layer.balancer.placed_on(torch.device("cpu")).memos["mine"] = (torch.zeros(1), refuse)
    with pytest.raises(OSError, match="no memory"):
        layer.load_placement(after, optimizer="none")
    assert layer.placement is not after and same(run(layer, setup.rows), first)


def test_a_rank_that_dies_in_the_move_fails_the_others_at_that_stage():
    first, gone, last = errors_of("dead")
    assert gone == "ended with exit code -9"
    for rank, error in ((0, first), (2, last)):
        assert error.startswith(f"RuntimeError: stage placement failed on rank {rank}:"), error
