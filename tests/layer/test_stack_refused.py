"""What a stack refuses when it is made, a test per message; a refused one leaves the layers as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import isoload
from isoload.balancing import prediction
from isoload.layer.stack import LibraStack
from isoload.times import ExpertTime
from isoload.transport import LocalTransport
from support.hugging_face import make_model
from support.measured_times import times
from support.stacks import EXPERTS, HIDDEN, INNER, Model, PastChoices

MODEL = Model(4)
TIMES = times(experts=ExpertTime("GPU", "isoload", "float64", HIDDEN, INNER, 0.0, 0.0, 1.0, 0.0, 1.0))


def layers(local: LocalTransport | None = None, model: Model = MODEL, **how: Any) -> list[isoload.MoE]:
    return model.layers(local, **how)


def mixed(**how: Any) -> list[isoload.MoE]:
    """Layers of one transport, the last of them of another model."""
    transport = LocalTransport(MODEL.topology)
    other = Model(4, **how)
    return [*MODEL.layers(transport)[:2], other.layers(transport)[2]]


def wide() -> list[isoload.MoE]:
    made = layers()
    dense = isoload.ExpertWeights.random(EXPERTS, HIDDEN, 2 * INNER, dtype=torch.float64)
    return [*made[:2], isoload.MoE(MODEL.gates[2], dense, made[0].transport, MODEL.placement, policy="hedge")]


def other_backend() -> list[isoload.MoE]:
    transport = LocalTransport(MODEL.topology)
    return [*MODEL.layers(transport)[:2], MODEL.layers(transport, borrow="all_to_all")[2]]


def held(
    capacity: int | None = 15, model: Model = MODEL, predict: Any = "lookahead", **how: Any
) -> LibraStack:
    return LibraStack(layers(LocalTransport(MODEL.topology, capacity), model, **how), predict, local="held")


def by_nodes() -> LocalTransport:
    ranks = MODEL.topology.num_ranks
    return LocalTransport(isoload.Topology(ranks, 2), 15, dispatch="node")


def stacked_twice() -> LibraStack:
    made = layers()
    LibraStack(made, "last")
    return LibraStack(made, "last")


def gate_of(experts: int, hidden: int) -> isoload.layer.routers.Gate:
    router = isoload.layer.routers.Router(experts, 2)
    return isoload.layer.routers.Gate(router, torch.zeros(experts, hidden))


def linear(num_layers: int = 3, experts: int = EXPERTS) -> prediction.Linear:
    return prediction.Linear([torch.zeros(0, experts, experts, dtype=torch.float64)] * num_layers)


def experts_alone() -> list[isoload.MoE]:
    """Layers as BlockExperts makes them, which get choices made elsewhere."""
    model = make_model("olmoe")
    return isoload.balance(model, MODEL.topology, policy="hedge", placement=spare_placement())


def spare_placement() -> isoload.Placement:
    return isoload.place(torch.ones(2, 8), MODEL.topology, spare_slots=1, placer="trivial")


BARE = Model(4, spare=0)
Refused = tuple[Callable[[], object], str]
REFUSED: dict[str, Refused] = {
    "no layers": (lambda: LibraStack([], "last"), "layers must be at least one, got none"),
    "twice": (
        lambda: LibraStack(layers()[:1] * 2, "last"),
        "layers must be in one stack at a time and only once, got layer 1",
    ),
    "two stacks": (stacked_twice, "layers must be in one stack at a time and only once, got layer 0 again"),
    "transport": (
        lambda: LibraStack([layers()[0], layers()[1]], "last"),
        "layers must share one transport, got another in layer 1",
    ),
    "ranks": (
        lambda: LibraStack([layers()[0], Model(2).layers()[0]], "last"),
        "layers must have the same num_ranks, got 4 in layer 0 and 2 in layer 1",
    ),
    "spare slots": (
        lambda: LibraStack(mixed(spare=1), "last"),
        "layers must have the same spare_slots, got 2 in layer 0 and 1 in layer 2",
    ),
    "shared": (
        lambda: LibraStack(mixed(num_shared=1), "last"),
        "layers must have the same num_shared, got 0 in layer 0 and 1 in layer 2",
    ),
    "experts": (
        lambda: LibraStack(wide(), "last"),
        r"the same experts, got gate_up \[12, 8\], .* in layer 0 and gate_up \[24, 8\], .* in layer 2",
    ),
    "back end": (
        lambda: LibraStack(other_backend(), "last"),
        "layers must have the same borrow, got pull in layer 0 and all_to_all in layer 2",
    ),
    "local": (
        lambda: LibraStack(layers(), "last", local="first"),
        "local must be one of planned, held, got 'first'",
    ),
    "capacity": (
        lambda: held(None),
        "local='held' needs a .* got a RowDispatcher with max_tokens_per_rank=None",
    ),
    "held by nodes": (
        lambda: LibraStack(layers(by_nodes()), "lookahead", local="held"),
        "max_tokens_per_rank and dispatch='rank', got a NodeDispatcher with max_tokens_per_rank=15",
    ),
    "held fills": (
        lambda: held(predict=None),
        "local='held' needs slots filled ahead, but policy hedge fills them from the batch's own loads",
    ),
    "held samples": (
        lambda: held(predict=None, policy="lp_sampled"),
        "local='held' does not support policy lp_sampled, which samples or fixes the share",
    ),
    "name": (
        lambda: LibraStack(layers(), "best"),
        "predict must be lookahead, last, known or a Predictor, got 'best'",
    ),
    "no ahead": (
        lambda: LibraStack(layers(policy="exact"), "last"),
        r"predict= needs a policy that prefetches experts \(hedge, .*, got Last for exact",
    ),
    "layers of linear": (
        lambda: LibraStack(layers(), linear(4)),
        "predict must be of 3 layers and 12 experts as the stack, got 4 and 12",
    ),
    "experts of linear": (
        lambda: LibraStack(layers(), linear(3, 5)),
        "predict must be of 3 layers and 12 experts as the stack, got 3 and 5",
    ),
    "layers of choices": (
        lambda: LibraStack(layers(), PastChoices(2)),
        "predict must be of 3 layers and 12 experts as the stack, got 2 and 12",
    ),
    "layers of last": (
        lambda: LibraStack(layers(), prediction.Last(2)),
        "predict must be of 3 layers and 12 experts as the stack, got 2 and None",
    ),
    "gates": (
        lambda: LibraStack(
            layers(), prediction.Lookahead([gate_of(EXPERTS, HIDDEN)] * 2 + [gate_of(11, HIDDEN)])
        ),
        r"gates must be \[12, 8\] as the layers, got \[11, 8\] for layer 2",
    ),
    "no gates": (
        lambda: LibraStack(experts_alone(), "lookahead"),
        "predict must not be 'lookahead' for layers without gates: see from_decoder",
    ),
    "norms": (
        lambda: LibraStack(layers(), "lookahead", [nn.Identity()]),
        "norms must be as many as gates, 3, got 1",
    ),
    "functions": (
        lambda: LibraStack(layers(), "lookahead", [nn.Identity(), nn.Identity(), torch.relu]),
        "norms must be modules, whose input is kept, got .* for layer 2",
    ),
    "norms for nobody": (
        lambda: LibraStack(layers(), "last", [nn.Identity()] * 3),
        "norms must be None unless predict is 'lookahead', got 3",
    ),
    "slots": (
        lambda: LibraStack(layers(), "last", slots=3),
        "slots must be None, 'auto' or in 1..spare_slots=2, got 3",
    ),
    "no slots": (
        lambda: LibraStack(layers(), "last", slots=0),
        "slots must be None, 'auto' or in 1..spare_slots=2, got 0",
    ),
    "slots by name": (
        lambda: LibraStack(layers(), "last", slots="all"),
        "slots must be None, 'auto' or in 1..spare_slots=2, got 'all'",
    ),
    "none spare": (
        lambda: layers(model=BARE),
        "spare_slots must be at least 1 for policy hedge, got 0",
    ),
    "slots for nobody": (
        lambda: LibraStack(layers(), None, slots=1),
        "slots must be None where predict is None, got 1",
    ),
    "auto": (
        lambda: LibraStack(layers(), "last", slots="auto"),
        "slots must come with times and copies_per_rank if 'auto', got None, None",
    ),
    "times": (
        lambda: LibraStack(layers(), "last", times=TIMES),
        "times, copies_per_rank and memory must be None unless slots is 'auto', got slots=None",
    ),
    "memory without auto": (
        lambda: LibraStack(layers(), "last", slots=1, memory=10),
        "times, copies_per_rank and memory must be None unless slots is 'auto', got slots=1",
    ),
    "memory": (
        lambda: LibraStack(layers(), "last", slots="auto", times=TIMES, copies_per_rank=1, memory=-1),
        "memory must be a number of bytes from 0 on, or None, got -1",
    ),
    "times of others": (
        lambda: LibraStack(layers(), "last", slots="auto", times=times(), copies_per_rank=10),
        "times must be of the layers' experts, 8 x 6, got 64 x 32",
    ),
    "no times": (
        lambda: LibraStack(layers(), "last", slots="auto", times="mine.json", copies_per_rank=10),
        "times must be what isoload.times.load returns, got 'mine.json'",
    ),
    "cost": (
        lambda: LibraStack(layers(), "last", slots="auto", cost=1, copies_per_rank=10),
        r"cost= was removed: use times=isoload.times.load\(FILE\), which isoload measure writes",
    ),
    "cost of a decoder": (
        lambda: LibraStack.from_decoder([nn.Linear(2, 2)], MODEL.topology, cost=1),
        r"cost= was removed: use times=isoload.times.load\(FILE\), which isoload measure writes",
    ),
    "copies": (
        lambda: LibraStack(layers(), "last", slots="auto", times=TIMES, copies_per_rank=0),
        "copies must be a number of at least 1, got 0",
    ),
    "alpha": (lambda: layers(policy="libra", alpha=1.5), "alpha must be in 0..1, got 1.5"),
    "no choices": (
        lambda: prediction.fit(isoload.traces.Trace("counted", 4, counts=torch.ones(1, 2, 4).int().numpy())),
        "trace must have per-token choices to fit a predictor, counted has counts only",
    ),
    "dense model": (
        lambda: LibraStack.from_decoder([nn.Linear(2, 2)], MODEL.topology),
        "layers must have MoE blocks with experts that transformers fuses, got Linear",
    ),
    "placement": (
        lambda: LibraStack.from_decoder(
            make_model("olmoe").model.layers,
            MODEL.topology,
            placement=isoload.place(torch.ones(3, 8), MODEL.topology),
        ),
        "placement must have a layer for each of the 2 MoE blocks, got 3",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_a_refused_stack_leaves_the_layers_alone() -> None:
    made, norms = layers(), [nn.Identity() for _ in range(3)]
    with pytest.raises(ValueError, match="slots must be"):
        LibraStack(made, "lookahead", norms, slots=7)
    assert all(layer.run_by is None for layer in made) and not any(norm._forward_pre_hooks for norm in norms)


def test_a_refused_decoder_stays_as_it_was() -> None:
    model = make_model("olmoe")
    before = [layer.mlp.experts for layer in model.model.layers]
    with pytest.raises(ValueError, match="local must be"):
        LibraStack.from_decoder(model.model.layers, MODEL.topology, local="x")
    assert before == [layer.mlp.experts for layer in model.model.layers]
    unnamed = nn.Module()
    unnamed.mlp = model.model.layers[0].mlp
    with pytest.raises(
        ValueError,
        match="predict='lookahead' needs a known norm before the block .* in a Module",
    ):
        LibraStack.from_decoder([unnamed], MODEL.topology)


def test_gradients_are_refused() -> None:
    made = layers()
    LibraStack(made, "last")
    with pytest.raises(
        ValueError, match=r"a LibraStack must run under torch.no_grad\(\), got gradients recorded"
    ):
        made[0](MODEL.rows())
    with torch.inference_mode():
        made[0](MODEL.rows())


class Wrong(prediction.LoadsPredictor):
    num_layers = 3

    def predict(self, layer: int, earlier: Any) -> torch.Tensor:
        return earlier[0].double()


def test_a_prediction_must_be_loads() -> None:
    made = layers()
    LibraStack(made, Wrong())
    with (
        torch.no_grad(),
        pytest.raises(
            ValueError, match=r"predict must return \[4, 12\] torch.int32, got \[4, 12\] torch.float64"
        ),
    ):
        made[0](MODEL.rows())


class Writes(prediction.TokensPredictor):
    """A gate that normalises its rows in place."""

    num_layers, reads = 3, "rows"

    def choose(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        return MODEL.gates[layer](tokens.mul_(0.5))[0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_predictor_that_writes_to_the_rows_is_refused(mode: Any) -> None:
    """Regression: the layer computed from what was left of them."""
    made = layers()
    LibraStack(made, Writes())
    with (
        mode(),
        pytest.raises(ValueError, match="Writes.choose must not write to its tokens, which"),
    ):
        made[0](MODEL.rows())


def test_a_gate_that_chooses_others_fails_with_its_layer() -> None:
    """As the layer's own choices would: before anything is gathered."""
    made = layers()
    LibraStack(made, prediction.Lookahead([lambda rows: (torch.full((len(rows), 2), 99), rows)] * 3))
    with torch.no_grad(), pytest.raises(ValueError, match="topk_ids must be in -1..11, got 99"):
        made[0](MODEL.rows())
