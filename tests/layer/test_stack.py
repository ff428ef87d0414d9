"""A stack is the dense model, whatever is predicted; it fetches a layer's experts while the one before computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.balancing import prediction as predict
from isoload.layer.stack import LibraStack
from isoload.times import ExpertTime, Times
from isoload.transport import LocalTransport
from isoload.weights.compute import run_experts
from isoload.weights.experts import SwiGLU
from support.fp8_experts import open_experts, random_experts
from support.live_tensors import live_tensors
from support.measured_times import times
from support.quantised_experts import random_quantised
from support.stacks import EXPERTS, HIDDEN, INNER, TOKENS, Model, PastChoices, close, routing_trace, run
from support.sweeps import slow

LOCALS = pytest.mark.parametrize("local", ["planned", "held"])
LAYERS = 3
BYTES = 3 * HIDDEN * INNER * 8  # of an expert in float64


def transport_for(model: Model, local: str) -> LocalTransport:
    return LocalTransport(model.topology, max(TOKENS) + 2 if local == "held" else None)


def assert_dense(model: Model, layers: Sequence[isoload.MoE], batches: int = 3, bound: float = 1e-12) -> None:
    """A few batches through the layers; every plan of the ranks realises what it says."""
    with torch.no_grad():
        for batch in range(batches):
            rows = model.rows(batch)
            for got, want in zip(run(layers, rows), model.wanted(rows), strict=True):
                assert got.dtype == model.dtype and close(got, want, bound), batch


def filled_slots(layer: isoload.MoE) -> int:
    plan, spare = layer.last_plan, layer.placement.spare_slots
    assert plan is not None
    per_rank = plan.slot_to_expert.view(plan.topology.num_ranks, -1)
    return int((per_rank[:, per_rank.shape[1] - spare :] >= 0).sum())


@LOCALS
@pytest.mark.parametrize("ranks", [1, 3, 8, *slow(2, 4, 5, 6, 7)])
def test_equals_the_dense_model(ranks: int, local: str) -> None:
    model = Model(ranks)
    layers = model.layers(transport_for(model, local))
    LibraStack(layers, "lookahead", local=local)
    assert_dense(model, layers)
    for layer in layers:
        assert filled_slots(layer) > 0 or ranks == 1
        plan, loads = layer.last_plan, layer.balancer.last_loads
        assert isoload.policies.plan.plan_errors(plan, loads) == []
        assert local == "held" or plan.peak == plan.bound


class Says(predict.LoadsPredictor):
    """Adversarial forecasts."""

    num_layers = LAYERS

    def __init__(self, what: str) -> None:
        self.what, self.draw = what, torch.Generator().manual_seed(3)

    def predict(self, layer: int, earlier: Sequence[Tensor]) -> Tensor:
        loads = earlier[0].clone()
        if self.what == "zeros":
            return loads.zero_()
        if self.what == "reversed":
            return (loads.max() - loads).flip(0)
        if self.what == "huge":
            return loads.fill_(2**31 - 1)
        if self.what == "negative":
            return -loads - 5
        return torch.randint(0, 2**20, loads.shape, generator=self.draw, dtype=torch.int32)


class Guesses(predict.TokensPredictor):
    """All tokens to one expert, another one on every call, so that ranks disagree about it."""

    num_layers, reads, calls = LAYERS, "rows", 0

    def choose(self, layer: int, tokens: Tensor) -> Tensor:
        self.calls += 1
        return torch.full((len(tokens), 1), self.calls % EXPERTS)


PREDICTORS: dict[str, Any] = {
    **{what: lambda what=what: Says(what) for what in ("zeros", "reversed", "huge", "negative", "random")},
    "guesses": Guesses,
    "last": lambda: "last",
    "linear": lambda: predict.fit(routing_trace(LAYERS)),
    "choices": lambda: PastChoices(LAYERS),
}


@LOCALS
@pytest.mark.parametrize("policy", ["hedge", "libra"])
@pytest.mark.parametrize("name", PREDICTORS)
def test_any_prediction(name: str, policy: str, local: str) -> None:
    model = Model(4)
    kind, options = isoload.policies.parse_policy(policy)
    layers = model.layers(transport_for(model, local), policy=kind, **options)
    LibraStack(layers, PREDICTORS[name](), local=local)
    assert_dense(model, layers, batches=2)
    assert all(filled_slots(layer) > 0 for layer in layers) or name in ("zeros", "negative")


@LOCALS
@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("slots", [0, 4], ids=["no replicas", "replicas"])
def test_replicas_and_shared_experts(slots: int, num_shared: int, local: str) -> None:
    model = Model(4, slots=slots, num_shared=num_shared)
    layers = model.layers(transport_for(model, local))
    assert layers[0].has_replicas == bool(slots or num_shared)
    LibraStack(layers, "lookahead", local=local)
    assert_dense(model, layers)


@LOCALS
@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (0, 0, 13, 0), (1, 0, 0, 0)])
def test_empty_ranks(tokens: tuple[int, ...], local: str) -> None:
    model = Model(4, tokens=tokens)
    layers = model.layers(transport_for(model, local))
    LibraStack(layers, "lookahead", local=local)
    assert_dense(model, layers)


@LOCALS
@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("policy", ["hedge", "libra"])
def test_a_dead_rank_has_tokens_and_no_experts(policy: str, num_shared: int, local: str) -> None:
    model = Model(4, slots=5, num_shared=num_shared, alive=(True, True, False, True))
    layers = model.layers(transport_for(model, local), policy=policy)
    LibraStack(layers, "lookahead", local=local)
    assert_dense(model, layers)
    assert all(int(layer.last_plan.quota.view(4, -1)[2].sum()) == 0 for layer in layers)


@LOCALS
@pytest.mark.parametrize("borrow", ["copy", "all_to_all", *slow("pull")])
def test_back_ends_give_the_same_bits(borrow: str, local: str) -> None:
    model, found = Model(4, dtype=torch.float32), []
    for name in ("pull", borrow):
        layers = model.layers(transport_for(model, local), borrow=name)
        LibraStack(layers, "lookahead", local=local)
        with torch.no_grad():
            found.append([y for batch in range(2) for y in run(layers, model.rows(batch))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_own_parts_are_rounded_as_those_of_any_rank(dtype: torch.dtype) -> None:
    """The same plan gives the same sums as without a stack."""
    model, found = Model(4, dtype=dtype, slots=4), []
    for stacked in (False, True):
        layers = model.layers(policy="none")
        if stacked:
            LibraStack(layers, None)
        with torch.no_grad():
            found.append(layers[0](model.rows()))
    bound = {torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert all(close(a, b, bound) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "policy", ["exact", "llep", "joint", *slow("lp_sampled", "static", "hedge", "waterfill_sampled")]
)
def test_any_policy_in_two_stages(policy: str) -> None:
    """Without a prediction a policy does what it does alone; hedge and llep fill from the batch's own loads."""
    model = Model(4, slots=4, num_shared=1)
    options = {"min_chunk": 1, "threshold": 1.0} if policy == "llep" else {}
    layers, alone = model.layers(policy=policy, **options), model.layers(policy=policy, **options)
    LibraStack(layers, None)
    assert_dense(model, layers)
    with torch.no_grad():
        run(alone, model.rows(2))
    for layer, other in zip(layers, alone, strict=True):
        assert torch.equal(layer.last_plan.slot_to_expert, other.last_plan.slot_to_expert)
        assert filled_slots(layer) > 0 or policy not in ("llep", "hedge")


@LOCALS
def test_small_batches_are_not_planned(local: str) -> None:
    """And end what a prediction could be made from; the batches after are as any."""
    model = Model(4, slots=4)
    layers = model.layers(transport_for(model, local), min_tokens=100)
    LibraStack(layers, "lookahead", local=local)
    with torch.no_grad():
        for batch, num_tokens in enumerate((1000, 10, 1000, 1000)):
            rows = model.rows(batch)
            for got, want in zip(run(layers, rows, num_tokens), model.wanted(rows), strict=True):
                assert close(got, want, 1e-12)
            assert all((layer.last_plan is None) == (num_tokens == 10) for layer in layers)
            if num_tokens == 1000:
                assert [filled_slots(layer) > 0 for layer in layers] == [batch == 3, True, True]


@LOCALS
def test_masked_copies_are_neither_computed_nor_predicted(local: str) -> None:
    """Rows that chose nothing, as padding does, count in no forecast; other absent copies are just that."""
    model = Model(2)
    layers = model.layers(transport_for(model, local))
    stack = LibraStack(layers, "lookahead", local=local)
    seen: list[Tensor] = []
    predict_loads = stack.predictor_inputs.predict
    stack.predictor_inputs.predict = lambda *args: seen.append(args[1].more) or predict_loads(*args)
    rows, given, all_weights = model.rows(), [], []
    for row in rows:
        ids, weights = model.gates[0](row)
        token = torch.arange(len(ids)).unsqueeze(1)
        absent = (token % 2 == 1) | ((token % 4 == 2) & (torch.arange(3) == 1))
        given.append(ids.masked_fill(absent, -1).int())
        all_weights.append(weights)
    with torch.no_grad():
        for _ in range(2):
            got = layers[0].compute(rows, given, all_weights)
            for y, row, ids, weights in zip(got, rows, given, all_weights, strict=True):
                assert close(y, run_experts(row, ids.long(), weights, [model.dense[0]], SwiGLU()), 1e-12)
    assert seen[0].sum(1).tolist() == [3 * (-(-len(row) // 2)) for row in rows]


@LOCALS
def test_local_copies_are_computed_before_remote_ones_arrive(local: str) -> None:
    model = Model(4)
    layers = model.layers(transport_for(model, local))
    stack = LibraStack(layers, "lookahead", local=local)
    assert_dense(model, layers, batches=2)
    for spans in stack.events:
        assert set(spans) == {"dispatch", "fetch", "local", "remote", "combine"}
        assert spans["dispatch"].begin <= spans["fetch"].begin <= spans["fetch"].end <= spans["local"].begin
        assert spans["local"].begin < spans["dispatch"].end <= spans["remote"].begin <= spans["combine"].begin


def measured(inner: int = INNER) -> Times:
    """1 us per copy, 288 us per move."""
    experts = ExpertTime("GPU", "isoload", "float16", HIDDEN, inner, 0.0, 0.0, 1.0, 0.0, 1.0)
    return times(experts=experts, move_us=288.0)


@pytest.mark.parametrize(
    ("copies", "slots"), [(1, 0), (300, 1), (100_000, 2)], ids=["too short", "for one", "for all"]
)
def test_slots_by_times(copies: int, slots: int) -> None:
    model = Model(4)
    layers = model.layers()
    stack = LibraStack(layers, "lookahead", slots="auto", times=measured(), copies_per_rank=copies)
    assert stack.slots == slots
    assert stack.bounded_by == ("spare slots" if slots == 2 else "time")
    assert_dense(model, layers)
    for layer in layers:
        spare = layer.last_plan.slot_to_expert.view(4, -1)[:, -2:]
        assert (spare[:, : 2 - slots] == -1).all() and bool((spare >= 0).any()) == (slots > 0)


@pytest.mark.parametrize(("memory", "slots"), [(0, 0), (2 * BYTES - 1, 0), (2 * BYTES, 1), (4 * BYTES, 2)])
def test_slots_by_memory(memory: int, slots: int) -> None:
    """Of two layers at once."""
    model = Model(4)
    layers = model.layers()
    how = {"slots": "auto", "times": measured(), "copies_per_rank": 100_000}
    stack = LibraStack(layers, "lookahead", memory=memory, **how)
    assert (stack.slots, stack.bounded_by) == (slots, "memory" if slots < 2 else "spare slots")
    assert_dense(model, layers)


def test_times_are_of_values_and_not_of_their_bytes() -> None:
    model = Model(4)
    model.dense = [random_quantised("MXFP4", EXPERTS, HIDDEN, INNER, 1) for _ in model.dense]
    for inner in (INNER, INNER // 2):
        how = {"slots": "auto", "times": measured(inner), "copies_per_rank": 9}
        if inner == INNER:
            LibraStack(model.layers(), "last", **how)
        else:
            with pytest.raises(ValueError, match=f"times must be of the layers' experts, {HIDDEN} x {INNER}"):
                LibraStack(model.layers(), "last", **how)


@LOCALS
def test_experts_in_fp8_are_what_they_stand_for(local: str) -> None:
    """To the bit, borrowed ones included: their scales travel with them."""
    model, found = Model(4, dtype=torch.float32), []
    draw = torch.Generator().manual_seed(4)
    stored = [random_experts(EXPERTS, HIDDEN, INNER, draw) for _ in model.dense]
    for dense in (stored, [open_experts(weights, torch.float32) for weights in stored]):
        model.dense = dense
        layers = model.layers(transport_for(model, local))
        LibraStack(layers, "lookahead", local=local)
        with torch.no_grad():
            found.append([y for batch in range(2) for y in run(layers, model.rows(batch))])
        assert all(filled_slots(layer) > 0 for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@LOCALS
def test_batches_leave_nothing_behind(local: str) -> None:
    model = Model(4)
    layers = model.layers(transport_for(model, local))
    LibraStack(layers, PastChoices(LAYERS), local=local)
    assert_dense(model, layers)
    before = live_tensors()
    assert_dense(model, layers, batches=2)
    assert live_tensors() <= before
