"""A compiled layer is one op of its graph: the bits of eager code, and its checks in every call."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import isoload
from isoload.layer import compiled
from support.borrowed_layer import LLEP
from support.borrowed_layer import make_setup as make_borrowed
from support.compiled import Layer, assert_equal, both_ways, compile_whole, small
from support.quantised_experts import random_quantised
from support.small_layer import make_setup
from support.stacks import Model
from support.stacks import run as run_layers
from support.sweeps import slow


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, *slow(False)])
def test_gradients(frozen: bool) -> None:
    layer = small()
    if frozen:
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("down" in name)
    run = compile_whole(layer)
    for seed in range(2):
        rows = [torch.randn(n, 8, generator=torch.Generator().manual_seed(seed)) for n in (7, 0, 13, 5)]
        assert_equal(both_ways(run, layer, rows), both_ways(layer, layer, rows))


def test_borrowed_experts() -> None:
    setup = make_borrowed(4, dtype=torch.float32)
    layer = setup.layer(**LLEP)
    gates = [setup.weights(rows) for rows in setup.rows]

    def run(rows: list[Tensor]) -> list[Tensor]:
        return list(layer.compute(rows, setup.ids, gates))

    got, want = ([] for _ in range(2))
    for function, found in ((compile_whole(run), got), (run, want)):
        leaves = setup.leaves()
        outputs = function(leaves)
        grads = torch.autograd.grad(sum(y.square().sum() for y in outputs), [*leaves, *layer.parameters()])
        found += [*outputs, *grads]
        plan = layer.last_plan
        assert plan is not None and int((plan.slot_to_expert.view(4, -1)[:, -2:] >= 0).sum()) > 0
    assert_equal(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NVFP4", *slow("fp8")])
def test_quantised_experts(name: str) -> None:
    setup = make_setup(4, dtype=torch.bfloat16)
    setup.dense = random_quantised(name, *setup.dense.down.shape, seed=1)
    layer = Layer(setup)
    with torch.no_grad():
        assert_equal(compile_whole(layer)(setup.rows), layer(setup.rows))
    with pytest.raises(ValueError, match="quantised experts must run under torch.no_grad"):
        compile_whole(layer)(setup.rows)


@pytest.mark.slow
@torch.no_grad()
def test_a_stack_is_one_graph() -> None:
    model = Model(4, dtype=torch.float32)
    layers = model.layers()
    stack = isoload.LibraStack(layers, "last")
    run = compile_whole(lambda rows: run_layers(layers, rows))
    got = [run(model.rows(batch)) for batch in range(3)]
    assert any(layer.last_plan.slot_to_expert.view(4, -1)[:, -2:].max() >= 0 for layer in layers)
    stack.close()
    again = model.layers()
    isoload.LibraStack(again, "last")
    for batch, ys in enumerate(got):
        assert_equal(ys, run_layers(again, model.rows(batch)))


@pytest.mark.slow
@torch.no_grad()
def test_a_stack_that_reads_norms_ends_the_graph_at_them() -> None:
    """In one graph its hooks would keep the residual only after the layer has run."""
    model = Model(4, dtype=torch.float32)
    norms = [nn.LayerNorm(8) for _ in range(3)]
    found = []
    for compiles in (True, False):
        layers = model.layers()
        isoload.LibraStack(layers, "lookahead", norms)

        def run(rows: list[Tensor], layers: list[isoload.MoE] = layers) -> list[Tensor]:
            for norm, layer in zip(norms, layers, strict=True):
                rows = [r + y for r, y in zip(rows, layer([norm(r) for r in rows]), strict=True)]
            return rows

        if compiles:
            with pytest.raises(torch._dynamo.exc.Unsupported, match="between two graphs"):
                compile_whole(run)(model.rows())
            torch._dynamo.reset()
        function = torch.compile(run, backend="aot_eager") if compiles else run
        found.append([y for batch in range(2) for y in function(model.rows(batch))])
    assert_equal(*found)


def test_stale_replicas_raise_in_compiled_calls() -> None:
    layer = small()
    run = compile_whole(layer)
    with torch.no_grad():
        run(layer.setup.rows)
        next(iter(layer.moe.weights)).down.mul_(1.5)
        with pytest.raises(ValueError, match="replicas must be refreshed after the expert Parameters change"):
            run(layer.setup.rows)
        layer.moe.refresh_replicas()
        assert_equal(run(layer.setup.rows), layer(layer.setup.rows))


def test_a_step_is_seen() -> None:
    layer = small()
    run = compile_whole(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    sum(y.square().sum() for y in run(layer.setup.rows)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="replicas must be refreshed"):
        run(layer.setup.rows)


@pytest.mark.parametrize("how", ["attribute", *slow("data")])
def test_a_swapped_parameter_is_read_or_refused(how: str) -> None:
    """No replica, then nothing is stale and the new weights count; with replicas the call raises."""
    for replicated in (False, True):
        setup = make_setup(4 if replicated else 1, dtype=torch.float32)
        layer = Layer(setup)
        assert layer.moe.has_replicas == replicated
        run = compile_whole(layer)
        with torch.no_grad():
            before = run(setup.rows)
            own = layer.moe.weights[0]
            new = own.down.detach() * 3
            if how == "attribute":
                own.down = nn.Parameter(new)
            else:
                own.down.data = new
            if replicated:
                with pytest.raises(ValueError, match="replicas must be refreshed"):
                    run(setup.rows)
                layer.moe.refresh_replicas()
            got = run(setup.rows)
            assert_equal(got, layer(setup.rows))
            assert not all(torch.equal(a, b) for a, b in zip(got, before, strict=True))


def test_parameters_that_are_not_the_layer_s_are_refused() -> None:
    layer = Layer(make_setup(1, dtype=torch.float32))  # without replicas, which would be stale
    other = {name: nn.Parameter(p.detach() * 2) for name, p in layer.named_parameters()}

    def swapped(rows: list[Tensor]) -> list[Tensor]:
        return torch.func.functional_call(layer, other, (rows,))  # type: ignore[no-any-return]

    def changed(rows: list[Tensor]) -> list[Tensor]:
        layer.moe.weights[0].down.mul_(2)
        return layer(rows)  # type: ignore[no-any-return]

    with torch.no_grad():
        for function in (swapped, changed):
            with pytest.raises(
                ValueError, match="expert Parameters in compiled code must be those of the layer, unchanged"
            ):
                compile_whole(function)(layer.setup.rows)


@pytest.mark.slow
def test_a_backward_over_changed_weights_raises() -> None:
    layer = small()
    run = compile_whole(layer)
    loss = sum(y.square().sum() for y in run(layer.setup.rows))
    with torch.no_grad():
        layer.moe.weights[0].down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("trains", [True, *slow(False)])
def test_what_changes_in_a_compiled_call_counts_a_version(trains: bool) -> None:
    """Else autograd would not find what it saved overwritten."""
    calls = torch.zeros(())

    def activation(gate_up: Tensor) -> Tensor:
        calls.add_(1)
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    layer = small(activation=activation)
    run = compile_whole(layer)
    with torch.set_grad_enabled(trains):
        run(layer.setup.rows)
    assert calls._version == int(calls) == 4  # per rank


@pytest.mark.slow
def test_a_copy_is_another_layer() -> None:
    layer = small()
    run = compile_whole(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
        other.moe.refresh_replicas()
        assert_equal(run(layer.setup.rows), layer(layer.setup.rows))
        assert_equal(compile_whole(other)(layer.setup.rows), other(layer.setup.rows))


@pytest.mark.slow
def test_a_moved_layer() -> None:
    """The graph from before the move."""
    layer = small()
    run = compile_whole(layer)
    with torch.no_grad():
        run(layer.setup.rows)
        counts = torch.rand(2, 11, generator=torch.Generator().manual_seed(5)) ** 3
        size = layer.moe.placement.slots_per_rank
        layer.moe.load_placement(isoload.place(counts, layer.setup.topology, slots_per_rank=size))
        assert_equal(run(layer.setup.rows), layer(layer.setup.rows))


@pytest.mark.slow
def test_one_graph_serves_layers_that_are_alike() -> None:
    layers = [small() for _ in range(12)]  # more than dynamo's limit of recompiles
    for layer in layers[1:]:
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1.1)
        layer.moe.refresh_replicas()
    torch._dynamo.reset()
    for layer in layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for layer in layers:
            assert_equal(layer(layers[0].setup.rows), layer.forward(layers[0].setup.rows))


@pytest.mark.slow
def test_recordings_end_with_their_graphs() -> None:
    layer = small()
    run = compile_whole(layer)
    outputs = run(layer.setup.rows)
    assert len(compiled._recordings) == 1
    sum(y.sum() for y in outputs).backward(retain_graph=True)
    sum(y.sum() for y in outputs).backward()
    del outputs
    gc.collect()
    assert not compiled._recordings
    run(layer.setup.rows)
    gc.collect()
    assert not compiled._recordings, "no backward came"


def test_compiled_code_does_not_capture_the_exchanges_of_a_layer() -> None:
    """NCCL requires that all ranks capture a collective in the same batch, and each rank's compiler captures alone."""
    for op in (torch.ops.isoload.run_layer, torch.ops.isoload.run_layer_backward):
        assert torch.Tag.cudagraph_unsafe in op.default.tags
