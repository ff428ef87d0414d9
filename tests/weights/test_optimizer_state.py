"""An optimizer's state of experts: full, under any placement and number of ranks; never that of other experts."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from isoload.weights.experts import ExpertWeights
from isoload.weights.shard import Shard
from support.moved_layer import deal, make_setup
from support.processes import run_ranks
from support.small_layer import EXPERTS

OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
}


def placements(ranks: int) -> list[isoload.Placement]:
    draw = random.Random(ranks)
    return [deal(draw, isoload.Topology(ranks), EXPERTS) for _ in range(3)]


def make_layer(placement: isoload.Placement, transport: Any = None) -> MoE:
    setup = make_setup(placement.topology.num_ranks)
    return MoE(setup.gate, setup.dense, transport or LocalTransport(setup.topology), placement)


def step(layer: MoE, optimizer: torch.optim.Optimizer, rows: list[torch.Tensor], times: int = 2) -> None:
    for _ in range(times):
        optimizer.zero_grad()
        sum((y**2).sum() for y in layer(rows)).backward()
        optimizer.step()
        layer.refresh_replicas()
    optimizer.zero_grad()


def flat(state: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} {key}": value for name, own in state.items() for key, value in own.items()}


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    got, wanted = flat(got), flat(wanted)
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key], value) if isinstance(value, torch.Tensor) else got[key] == value, key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_under_another_placement(name: str) -> None:
    """As if the placement had always been this one: to the bit, weights and state."""
    before, after, _ = placements(3)
    rows = make_setup(3).rows
    layer = make_layer(before)
    optimizer = OPTIMIZERS[name](layer.parameters())
    step(layer, optimizer, rows)
    saved = copy.deepcopy((layer.full_state_dict(), isoload.layer.full_optimizer_state(layer, optimizer)))

    other = make_layer(after)
    loaded = OPTIMIZERS[name](other.parameters())
    other.load_full_state_dict(saved[0])
    isoload.layer.load_full_optimizer_state(other, loaded, saved[1])
    assert_same(isoload.layer.full_optimizer_state(other, loaded), saved[1])
    layer.load_placement(after, optimizer=optimizer)  # the way that is known to be right
    for of, its in ((layer, optimizer), (other, loaded)):
        step(of, its, rows)
    for key, value in layer.full_state_dict().items():
        torch.testing.assert_close(other.full_state_dict()[key], value, rtol=1e-12, atol=0)
    for key, value in flat(isoload.layer.full_optimizer_state(layer, optimizer)).items():
        theirs = flat(isoload.layer.full_optimizer_state(other, loaded))[key]
        assert not isinstance(value, torch.Tensor) or torch.allclose(theirs, value, rtol=1e-12, atol=0)


def test_other_numbers_of_ranks() -> None:
    layer = make_layer(placements(3)[0])
    optimizer = OPTIMIZERS["AdamW"](layer.parameters())
    step(layer, optimizer, make_setup(3).rows)
    full = isoload.layer.full_optimizer_state(layer, optimizer)
    assert full["experts.gate_up"]["exp_avg"].shape[0] == EXPERTS and full["experts.gate_up"]["exp_avg"].any()
    other = make_layer(placements(2)[0])
    loaded = OPTIMIZERS["AdamW"](other.parameters())
    isoload.layer.load_full_optimizer_state(other, loaded, full)
    assert_same(isoload.layer.full_optimizer_state(other, loaded), full)


def on_rank(rank: int) -> dict[str, Any]:
    before = placements(3)[0]
    layer = make_layer(before, CollectiveTransport(before.topology))
    optimizer = OPTIMIZERS["AdamW"](layer.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        (layer(make_setup(3).rows[rank]) ** 2).sum().backward()
        optimizer.step()
        layer.refresh_replicas()
    return isoload.layer.full_optimizer_state(layer, optimizer)


def test_processes_gather_what_virtual_ranks_do() -> None:
    layer = make_layer(placements(3)[0])
    optimizer = OPTIMIZERS["AdamW"](layer.parameters())
    step(layer, optimizer, make_setup(3).rows)
    for state in run_ranks(on_rank, 3):
        assert_same(state, isoload.layer.full_optimizer_state(layer, optimizer))


def test_before_the_first_step_there_is_none() -> None:
    layer = make_layer(placements(2)[0])
    full = isoload.layer.full_optimizer_state(layer, OPTIMIZERS["AdamW"](layer.parameters()))
    assert full.keys() == {f"experts.{name}" for name in ("gate_up", "down", "gate_up_bias", "down_bias")}
    assert not any(full.values())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_stay_the_user_s(name: str) -> None:
    """Neither keys of ours in their state nor hooks on all of them: a step is torch's own."""
    before, after, _ = placements(3)
    layer = make_layer(before)
    optimizer = OPTIMIZERS[name](layer.parameters())
    twin = OPTIMIZERS[name]([torch.nn.Parameter(torch.ones(2))])
    twin.param_groups[0]["params"][0].grad = torch.ones(2)
    twin.step()
    step(layer, optimizer, make_setup(3).rows)
    layer.load_placement(after, optimizer=optimizer)
    [keys] = {tuple(own) for own in twin.state.values()}
    assert {tuple(own) for own in optimizer.state.values()} == {keys}
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks


def test_a_placement_loaded_without_the_optimizer_is_refused_in_training() -> None:
    """Regression: state by row became other experts' without a word."""
    before, after, _ = placements(3)
    rows = make_setup(3).rows
    layer = make_layer(before)
    layer.load_placement(after)  # no expert has had a gradient, so no optimizer a state
    layer.load_placement(before)
    optimizer, plain = OPTIMIZERS["AdamW"](layer.parameters()), torch.optim.SGD(layer.parameters(), lr=0.1)
    step(layer, optimizer, rows)
    saved = isoload.layer.full_optimizer_state(layer, optimizer)
    held = copy.deepcopy(layer.full_state_dict())
    for moved in (layer, copy.deepcopy(layer)):
        with pytest.raises(ValueError, match="optimizer must be given if experts that had gradients move"):
            moved.load_placement(after)
        assert torch.equal(moved.placement.slot_to_expert, before.slot_to_expert)
        assert all(torch.equal(value, held[key]) for key, value in moved.full_state_dict().items())
    layer.load_placement(before)  # no row changes its expert
    layer.load_placement(after, optimizer=optimizer)
    assert_same(isoload.layer.full_optimizer_state(layer, optimizer), saved)
    optimizer.state.clear()
    step(layer, plain, rows)
    layer.load_placement(before, optimizer=plain)
    layer.load_placement(after, optimizer="none")
    step(layer, plain, rows)


REFUSED = {
    "missing": (lambda s: s.pop("experts.down"), r"state must hold experts\.down, got \['experts\.down_bias"),
    "shape": (
        lambda s: s["experts.down"].update(exp_avg=torch.zeros(2, 3)),
        r"experts\.down exp_avg must be \[11, 8, 6\] or one element, got \[2, 3\]",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_before_anything_changes(what: str) -> None:
    change, message = REFUSED[what]
    layer = make_layer(placements(2)[0])
    optimizer = OPTIMIZERS["AdamW"](layer.parameters())
    step(layer, optimizer, make_setup(2).rows)
    before = isoload.layer.full_optimizer_state(layer, optimizer)
    bad = copy.deepcopy(before)
    bad["experts.gate_up"]["exp_avg"] += 1
    change(bad)
    with pytest.raises(ValueError, match=message):
        isoload.layer.load_full_optimizer_state(layer, optimizer, bad)
    assert_same(isoload.layer.full_optimizer_state(layer, optimizer), before)


@pytest.mark.parametrize("how", ["function", "parametrized"])
def test_experts_that_are_no_parameters_of_the_layer_are_refused(how: str) -> None:
    setup, placement = make_setup(1), placements(1)[0]
    layer = make_layer(placement)
    if how == "function":
        own = ExpertWeights(**{n: s[placement.home_experts(0, 0)] for n, s in setup.dense.stacks().items()})
        shard = Shard(placement.home_experts(0, 0), lambda: own)
        layer = MoE(setup.gate, shard, LocalTransport(setup.topology), placement)
    else:
        parametrize.register_parametrization(layer.weights[0], "down", torch.nn.Softplus())
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)), *layer.parameters()], lr=0.1)
    message = "experts must be plain Parameters of the layer for their optimizer state"
    with pytest.raises(ValueError, match=message):
        isoload.layer.full_optimizer_state(layer, optimizer)
    with pytest.raises(ValueError, match=message):
        isoload.layer.load_full_optimizer_state(layer, optimizer, {})


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    layer = make_layer(placements(2)[0])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    message = "optimizer must hold the layer's expert Parameters, gate_up is missing"
    with pytest.raises(ValueError, match=message):
        isoload.layer.full_optimizer_state(layer, optimizer)
    with pytest.raises(ValueError, match=message):
        isoload.layer.load_full_optimizer_state(layer, optimizer, {})
