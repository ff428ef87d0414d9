"""Stacks among other layers: two buffers, calls out of order, batches that fail, weights and places that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import isoload
from isoload.balancing import prediction
from isoload.layer.stack import LibraStack
from isoload.transport import LocalTransport
from support.stacks import Model, PastChoices, close, routing_trace, run

LOCALS = pytest.mark.parametrize("local", ["planned", "held"])
CAPACITY = 15


def made(local: str = "planned", **how: Any) -> tuple[Model, list[isoload.MoE], LibraStack]:
    model = Model(4, **how)
    layers = model.layers(LocalTransport(model.topology, CAPACITY if local == "held" else None))
    return model, layers, LibraStack(layers, "lookahead", local=local)


def borrowed(slot_to_expert: torch.Tensor) -> int:
    """Experts in spare slots."""
    return int((slot_to_expert.view(4, -1)[:, -2:] >= 0).sum())


def is_filled(layer: isoload.MoE) -> bool:
    assert layer.last_plan is not None
    return borrowed(layer.last_plan.slot_to_expert) > 0


def matches(model: Model, layers: list[isoload.MoE], batch: int, only: int | None = None) -> bool:
    """Whether a batch through all layers, or through one, is the dense model's."""
    rows, part = model.rows(batch), slice(None) if only is None else slice(only, only + 1)
    with torch.no_grad():
        got, want = run(layers[part], rows), model.wanted(rows, part)
    return all(close(a, b, 1e-12) for a, b in zip(got, want, strict=True))


@LOCALS
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_any_number_of_layers_takes_the_buffers_in_turn(num_layers: int, local: str) -> None:
    """One layer computes from its buffer while the next one's weights come to the other: nothing travels twice."""
    model, layers, stack = made(local, num_layers=num_layers)
    traffic, one = layers[0].group.traffic, sum(s[0].nbytes for s in layers[0].weights[0].stored_rows())
    for batch in range(3):
        before = traffic.bytes["borrow"]
        assert matches(model, layers, batch)
        fetched = [la.last_plan.slot_to_expert for la in layers[1:]]
        if stack._fetched is not None:  # for the first layer of the next batch
            fetched.append(stack._fetched.source.slot_to_expert)
        assert traffic.bytes["borrow"] - before == one * sum(map(borrowed, fetched))


@LOCALS
def test_others_may_take_the_buffers(local: str) -> None:
    """Layers outside of the stack, on the same pool, between its layers: weights are brought again."""
    model, layers, _ = made(local)
    llep = {"policy": "llep", "min_chunk": 1, "threshold": 1.0}
    others = [model.layers(layers[0].transport, **llep)[0] for _ in range(2)]
    assert others[0].borrowing.pool is layers[0].borrowing.pool
    for batch in range(4):
        rows = model.rows(batch)
        want = model.wanted(rows)
        with torch.no_grad():
            for index, layer in enumerate(layers):
                for other in others[: batch % 3]:
                    other(model.rows(9))
                rows = [row + y for row, y in zip(rows, layer(rows), strict=True)]
                assert is_filled(layer) or batch == index == 0
        assert all(close(a, b, 1e-12) for a, b in zip(rows, want, strict=True))


@LOCALS
def test_two_stacks_in_turn(local: str) -> None:
    model = Model(4)
    transport = LocalTransport(model.topology, CAPACITY if local == "held" else None)
    pairs = [model.layers(transport) for _ in range(2)]
    for layers in pairs:
        LibraStack(layers, "lookahead", local=local)
    for batch in range(2):
        rows = [model.rows(batch), model.rows(batch + 50)]
        want = [model.wanted(r) for r in rows]
        with torch.no_grad():
            for both in zip(*pairs, strict=True):
                rows = [
                    [row + y for row, y in zip(own, layer(own), strict=True)]
                    for own, layer in zip(rows, both, strict=True)
                ]
        assert all(
            close(a, b, 1e-12) for r, w in zip(rows, want, strict=True) for a, b in zip(r, w, strict=True)
        )


@LOCALS
def test_a_layer_out_of_order_has_empty_spare_slots(local: str) -> None:
    model, layers, _ = made(local)
    assert matches(model, layers, 0)
    for index, filled in ((1, False), (1, False), (2, True), (0, True), (2, False), (0, True), (1, True)):
        assert matches(model, layers, 0, index)
        assert is_filled(layers[index]) == filled, index
    assert matches(model, layers, 1)


FAILURES: dict[str, Callable[[list[isoload.MoE], Model], object]] = {
    "bad rows": lambda layers, model: layers[1]([row[:, :3] for row in model.rows()]),
    "bad choices": lambda layers, model: layers[1].compute(
        model.rows(), [torch.full((len(r), 2), 99) for r in model.rows()], [r[:, :2] for r in model.rows()]
    ),
}


@LOCALS
@pytest.mark.parametrize("name", FAILURES)
def test_a_batch_that_fails_leaves_nothing_behind(name: str, local: str) -> None:
    model, layers, stack = made(local)
    for batch in range(2):
        with torch.no_grad():
            layers[0](model.rows(batch))
            with pytest.raises(ValueError, match="must be"):
                FAILURES[name](layers, model)
        assert stack._fetched is None
        assert matches(model, layers, 0, 1) and not is_filled(layers[1])
        assert matches(model, layers, batch)


def test_weights_that_change_on_the_way_are_refused() -> None:
    """Between two batches, too: the first layer's weights left with the last batch."""
    model, layers, stack = made()
    assert matches(model, layers, 0)
    with torch.no_grad():
        for weights in layers[0].weights:
            weights.gate_up.mul_(2)
    model.dense[0].gate_up.mul_(2)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="stay as they are while their weights travel ahead: call forget"),
    ):
        layers[0](model.rows(1))
    assert matches(model, layers, 1)
    with torch.no_grad():
        for weights in layers[0].weights:
            weights.down.mul_(3)
    model.dense[0].down.mul_(3)
    stack.forget()
    assert matches(model, layers, 2)
    assert not is_filled(layers[0]) and is_filled(layers[1])


def test_a_new_placement_drops_what_was_filled_for_the_old_one() -> None:
    model, layers, _ = made()
    assert matches(model, layers, 0)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(4, 3)
    slots = torch.cat([order, torch.full((4, 2), -1)], dim=1).view(1, -1).expand(3, -1)
    layers[0].load_placement(isoload.Placement(slots, model.topology, 12, spare_slots=2))
    assert matches(model, layers, 1) and not is_filled(layers[0]) and is_filled(layers[1])
    with torch.no_grad():
        layers[0](model.rows(2))
    layers[1].load_placement(isoload.Placement(slots, model.topology, 12, spare_slots=2))
    assert matches(model, layers, 0, 1) and not is_filled(layers[1])
    assert matches(model, layers, 3) and is_filled(layers[1])


def test_closed_layers_run_by_themselves_and_may_join_another_stack() -> None:
    model, layers, stack = made()
    assert matches(model, layers, 0)
    stack.close()
    with torch.enable_grad():
        rows = [row.requires_grad_() for row in model.rows()]
        torch.cat(layers[0](rows)).sum().backward()
    assert layers[0].weights[0].gate_up.grad is not None
    for weights in layers[0].weights.parameters():
        weights.grad = None
    other = LibraStack(layers, "last")
    stack.close()
    assert matches(model, layers, 1) and other.events[0]


def test_norms_are_read_by_hooks() -> None:
    """Whether they are called rank by rank or on all rows at once; and not twice, though the predictor calls them."""
    model = Model(4)
    norms = [torch.nn.RMSNorm(8, dtype=torch.float64) for _ in model.gates]
    for together in (True, False):
        layers = model.layers()
        stack = LibraStack(layers, "lookahead", norms)
        seen: list[torch.Tensor] = []
        predict = stack.predictor_inputs.predict
        stack.predictor_inputs.predict = lambda *args, seen=seen, predict=predict: (
            seen.append(args[1].more) or predict(*args)
        )
        with torch.no_grad():
            rows = model.rows()
            for index, (norm, layer) in enumerate(zip(norms, layers, strict=True)):
                sizes = [len(row) for row in rows]
                normed = norm(torch.cat(rows)).split(sizes) if together else [norm(row) for row in rows]
                if index + 1 < len(norms):
                    ahead = [model.gates[index + 1](norms[index + 1].forward(row))[0] for row in rows]
                    counts = torch.stack([isoload.count(ids, 12) for ids in ahead])
                rows = [row + y for row, y in zip(rows, layer(list(normed)), strict=True)]
                if index + 1 < len(norms):
                    assert torch.equal(seen[index], counts)
            with pytest.raises(
                ValueError, match=r"norms must be called right before a layer, on its 26 rows, got 0"
            ):
                layers[0](model.rows())
        stack.close()
    assert not any(norm._forward_pre_hooks for norm in norms)


@pytest.mark.parametrize("fails", [False, True], ids=["left out", "failed"])
@pytest.mark.parametrize("kind", ["linear", "choices"])
def test_a_history_with_a_gap_predicts_nothing(kind: str, fails: bool) -> None:
    """Layer 1 is missing, so what comes before layer 3 is layer 2 alone."""
    model, trace = Model(4, num_layers=4), routing_trace(4)
    layers = model.layers()
    LibraStack(layers, prediction.fit(trace) if kind == "linear" else PastChoices(4))
    assert matches(model, layers, 0) and is_filled(layers[3])
    with torch.no_grad():
        layers[0](model.rows())
        if fails:
            with pytest.raises(ValueError, match="must be"):
                layers[1]([row[:, :3] for row in model.rows()])
    for index in (2, 3):
        assert matches(model, layers, 0, index) and not is_filled(layers[index])
    assert matches(model, layers, 1) and is_filled(layers[3])


def test_the_next_layer_s_weights_are_checked_before_they_are_sent() -> None:
    model, layers, stack = made()
    assert matches(model, layers, 0)
    layers[1].weights[2].gate_up.data = layers[1].weights[2].gate_up.data[:, :3].clone()
    with torch.no_grad(), pytest.raises(ValueError, match="gate_up must be .* got"):
        layers[0](model.rows())
    assert stack._fetched is None


def test_a_batch_that_is_not_planned_brings_nothing_again() -> None:
    model = Model(4)
    layers = model.layers(min_tokens=10)
    LibraStack(layers, "lookahead")
    others = model.layers(layers[0].transport, policy="llep", min_chunk=1, threshold=1.0)[:2]
    traffic = layers[0].group.traffic
    assert matches(model, layers, 0)
    with torch.no_grad():
        for other in others:
            other(model.rows(9))
        before = traffic.bytes["borrow"]
        run(layers, model.rows(1), 5)
    assert traffic.bytes["borrow"] == before > 0
    assert matches(model, layers, 2)


@LOCALS
def test_no_fetch_crosses_the_border_of_a_captured_graph(local: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays would find weights that another batch has brought: a graph's first layer has none, nor any after it."""
    model, layers, stack = made(local)
    assert matches(model, layers, 0) and stack._fetched is not None
    with monkeypatch.context() as patch:
        for module in ("isoload.layer.stack", "isoload.weights.borrowing"):
            patch.setattr(f"{module}.capturing", lambda _device: True)
        assert matches(model, layers, 1) and stack._fetched is None
        assert [is_filled(layer) for layer in layers] == [False, True, True]
    for batch in (2, 3):  # outside of the graph, whose replays write to the same buffers
        assert matches(model, layers, batch) and stack._fetched is None
        assert [is_filled(layer) for layer in layers] == [False, True, True]


def test_what_reads_earlier_batches_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(4)
    layers = model.layers()
    LibraStack(layers, "last")
    assert matches(model, layers, 0)
    monkeypatch.setattr("isoload.layer.stack.capturing", lambda _device: True)
    message = "predict must not read earlier batches while a CUDA graph is captured, .* got Last"
    with torch.no_grad(), pytest.raises(ValueError, match=message):
        layers[0](model.rows())
