"""Parameters that require no gradient stay so, and cost none: no gradient is computed or sent for them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import isoload
from isoload.transport import CollectiveTransport, LocalTransport
from isoload.weights.experts import NAMES, ExpertWeights
from support import borrowed_layer
from support.hugging_face import MODELS, blocks, make_model
from support.processes import rank_outcomes
from support.small_layer import close, make_setup

FROZEN = {"none": (), "all": NAMES, "down": ("down",), "biases": ("gate_up_bias", "down_bias")}


def freeze(dense: ExpertWeights, names: tuple[str, ...]) -> ExpertWeights:
    return ExpertWeights(**{n: nn.Parameter(stack, n not in names) for n, stack in dense.stacks().items()})


def flags(module: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in module.named_parameters()}


def trained(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_what_it_trained(name: str) -> None:
    """As with LoRA elsewhere: a frozen model with a few Parameters that are not."""
    model = make_model(name).requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_()
    before = trained(model)
    layers = isoload.balance(model, isoload.Topology(2), policy="exact")
    assert trained(model) == before and not any(p.requires_grad for p in layers[0].expert_parameters())
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    model(ids, labels=ids).loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("trains", [False, True])
def test_a_block_keeps_its_flags(name: str, trains: bool) -> None:
    block = blocks(make_model(name))[0].requires_grad_(trains)
    with torch.no_grad():  # under which views lose theirs
        [layer] = isoload.balance(block, isoload.Topology(2))
    assert set(flags(layer).values()) == {trains}


LASTING = {
    "copy": copy.deepcopy,
    "pickle": lambda weights: pickle.loads(pickle.dumps(weights)),
    "cast": lambda weights: weights.float().double(),
}


@pytest.mark.parametrize("kind", FROZEN)
def test_flags_outlast_states_moves_and_copies(kind: str) -> None:
    setup = make_setup(4, bias=True)
    dense = freeze(setup.dense, FROZEN[kind])
    layer = isoload.MoE(setup.gate, dense, LocalTransport(setup.topology), setup.placement, weight_rows=8)
    wanted = {name: name.split(".")[-1] not in FROZEN[kind] for name, _ in layer.named_parameters()}
    assert flags(layer) == wanted
    layer.load_state_dict(layer.state_dict(), assign=True)
    layer.load_full_state_dict(layer.full_state_dict())
    after = isoload.place(torch.arange(11).expand(2, -1), setup.topology, setup.placement.slots_per_rank)
    layer.load_placement(after)
    assert flags(layer) == wanted
    for change in LASTING.values():
        layer.weights = change(layer.weights)
        assert flags(layer) == wanted


@pytest.mark.parametrize("kind", ["all", "down"])
def test_an_optimizer_of_the_others(kind: str) -> None:
    """Its full state is of what it trains."""
    setup = make_setup(4, bias=True)
    dense = freeze(setup.dense, FROZEN[kind])
    layer = isoload.MoE(setup.gate, dense, LocalTransport(setup.topology), setup.placement)
    other = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([other, *(p for p in layer.parameters() if p.requires_grad)])
    (sum((y**2).sum() for y in layer(setup.rows)) + other.sum()).backward()
    optimizer.step()
    state = copy.deepcopy(isoload.layer.full_optimizer_state(layer, optimizer))
    assert all(
        bool(own) == (name.removeprefix("experts.") not in FROZEN[kind]) for name, own in state.items()
    )
    isoload.layer.load_full_optimizer_state(layer, optimizer, state)
    again = isoload.layer.full_optimizer_state(layer, optimizer)
    assert all(torch.equal(again[n][k], v) for n, own in state.items() for k, v in own.items())


def batch(layer: isoload.MoE, rows: list[Any]) -> tuple[list[Any], list[Any]]:
    """Gradients of the rows and of the Parameters; what travelled is in the layer's traffic."""
    leaves = [r.clone().requires_grad_() for r in rows]
    layer.group.reset_traffic()
    sum((y**2).sum() for y in layer(leaves)).backward()
    return [r.grad for r in leaves], [p.grad for p in layer.parameters()]


CASES = {"replicas": {}, "borrow": borrowed_layer.LLEP, "copied": {**borrowed_layer.LLEP, "borrow": "copy"}}
CASES["sent"] = {**borrowed_layer.LLEP, "borrow": "all_to_all"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", FROZEN)
def test_gradients_are_the_same_and_only_those_wanted(case: str, kind: str) -> None:
    if case == "replicas":
        setup: Any = make_setup(4, bias=True)
        gate, rows = setup.gate, setup.rows
    else:
        setup = borrowed_layer.make_setup(4, bias=True)
        rows = setup.rows
    found, sent = [], []
    for names in ((), FROZEN[kind]):
        dense = freeze(setup.dense, names)
        if case == "replicas":
            layer = isoload.MoE(gate, dense, LocalTransport(setup.topology), setup.placement)
        else:
            layer = type(setup)(setup.ids, rows, setup.placement, dense).layer(**CASES[case])
        found.append(batch(layer, rows))
        sent.append(layer.group.traffic.bytes)
    (rows_, weights_), (rows, weights) = found
    assert all(close(a, b, 1e-12) for a, b in zip(rows, rows_, strict=True))
    for (name, own), full in zip(layer.named_parameters(), weights_, strict=True):
        grad = weights.pop(0)
        assert (grad is None) == (name.split(".")[-1] in FROZEN[kind])
        assert grad is None or (len(own) == len(grad) and torch.equal(grad, full))
    stage = "replica gradients" if case == "replicas" else "borrowed gradients"
    size = sum(stack[0].numel() for stack in setup.dense.stacks().values())
    left = sum(s[0].numel() for n, s in setup.dense.stacks().items() if n not in FROZEN[kind])
    assert sent[0][stage] > 0 and sent[1][stage] * size == sent[0][stage] * left


def on_rank(rank: int, kinds: tuple[str, str], how: dict[str, Any]) -> tuple[Any, Any]:
    setup = borrowed_layer.make_setup(2, bias=True)
    dense = freeze(setup.dense, FROZEN[kinds[rank]])
    own = type(setup)(setup.ids, setup.rows, setup.placement, dense)
    return batch(own.layer(CollectiveTransport(setup.placement.topology), **how), [setup.rows[rank]])


@pytest.mark.parametrize("backend", ["all_to_all"])
def test_processes(backend: str) -> None:
    outcomes = rank_outcomes(on_rank, 2, ("all", "all"), {**borrowed_layer.LLEP, "borrow": backend})
    wanted = borrowed_layer.make_setup(2, bias=True)
    rows, _ = batch(wanted.layer(**borrowed_layer.LLEP), wanted.rows)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error
        ([own], weights) = outcome.value
        assert close(own, rows[outcome.rank], 1e-12) and weights == [None] * 4


def test_ranks_must_train_alike() -> None:
    for outcome in rank_outcomes(on_rank, 2, ("down", "all"), borrowed_layer.LLEP):
        assert "requires_grad of the expert stacks must be the same on all ranks" in str(outcome.error)


def test_shards_keep_their_flags() -> None:
    setup = make_setup(2, bias=True)
    placement = isoload.place(torch.ones(1, 11), setup.topology, placer="trivial")
    shards = []
    for rank in range(2):
        homes = placement.home_experts(0, rank)
        rows = {name: stack[homes].clone() for name, stack in setup.dense.stacks().items()}
        shards.append(isoload.weights.shard.Shard(homes, freeze(ExpertWeights(**rows), ("down",))))
    layer = isoload.MoE(setup.gate, shards, LocalTransport(placement.topology), placement)
    _, grads = batch(layer, setup.rows)
    assert [grad is None for grad in grads] == [False, True, False, False] * 2
