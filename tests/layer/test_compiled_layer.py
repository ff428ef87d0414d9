"""Whole balanced models, and layers, compiled into one graph: the bits of eager code, and its checks in every call."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoload
from isoload.layer import compiled
from isoload.transport import CollectiveTransport, LocalTransport
from support.borrowed_layer import LLEP
from support.borrowed_layer import make_setup as make_borrowed
from support.fp8_experts import quantise
from support.hugging_face import EXPERTS, MODELS, balanced, make_model
from support.processes import run_ranks
from support.small_layer import make_setup


def compile_whole(function: Any, backend: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


def token_ids(seed: int, length: int = 9) -> Tensor:
    return torch.randint(1, 64, (2, length), generator=torch.Generator().manual_seed(seed))


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# one model for every day, the others where time does not count
SLOWLY = [pytest.param(name, marks=[] if name == "qwen3" else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("name", SLOWLY)
def test_a_whole_model_is_one_graph(name: str) -> None:
    """Lengths differ, so that shapes become symbols."""
    torch.set_num_threads(1)
    model, layers = balanced(name)
    run = compile_whole(model)
    with torch.no_grad():
        for length in (9, 5):
            ids = token_ids(length, length)
            got = run(ids).logits
            plans = [layer.last_plan for layer in layers]
            assert torch.equal(got, model(ids).logits)
            assert all(plan is not None and plan.peak == plan.bound for plan in plans)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_a_whole_model_is_trained_as_one_graph(name: str) -> None:
    torch.set_num_threads(1)
    found = []
    for compiles in (False, True):
        model, layers = balanced(name)
        run = compile_whole(model) if compiles else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            loss = run(token_ids(step), labels=token_ids(step)).loss
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            for layer in layers:
                layer.refresh_replicas()
        found.append(seen)
    assert len(found[0]) > 3 * 10
    assert_equal(found[1], found[0])


@pytest.mark.slow
def test_a_whole_model_under_inductor() -> None:
    torch.set_num_threads(1)
    model, _ = balanced("qwen3")
    with torch.no_grad():
        got = compile_whole(model, "inductor")(token_ids(3)).logits
    torch.testing.assert_close(got, model(token_ids(3)).logits, rtol=1e-4, atol=1e-4)


class Layer(nn.Module):
    """A layer between other work, whose choices come from outside."""

    def __init__(self, setup: Any, transport: Any = None, **how: Any) -> None:
        super().__init__()
        self.setup, transport = setup, transport or LocalTransport(setup.topology)
        self.moe = isoload.MoE(setup.gate, setup.dense, transport, setup.placement, **how)

    def forward(self, rows: list[Tensor]) -> list[Tensor]:
        return [y * 2 for y in self.moe([r + 1 for r in rows])]


def small(**how: Any) -> Layer:
    return Layer(make_setup(4, dtype=torch.float32, masked=True), **how)


def both_ways(run: Any, layer: Layer, rows: list[Tensor]) -> list[Tensor]:
    """Outputs and all gradients."""
    leaves = [r.clone().requires_grad_() for r in rows]
    outputs = run(leaves)
    loss = sum(y.square().sum() for y in outputs)
    trained = [p for p in layer.parameters() if p.requires_grad]
    return [*outputs, *torch.autograd.grad(loss, [*leaves, *trained])]


@pytest.mark.parametrize("frozen", [False, True])
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


def test_experts_in_fp8() -> None:
    setup = make_setup(4, dtype=torch.bfloat16)
    setup.dense = quantise(setup.dense)
    layer = Layer(setup)
    with torch.no_grad():
        assert_equal(compile_whole(layer)(setup.rows), layer(setup.rows))
    with pytest.raises(ValueError, match="experts in fp8 must run under torch.no_grad"):
        compile_whole(layer)(setup.rows)


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


def test_a_fused_step_is_seen() -> None:
    layer = small()
    run = compile_whole(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
    sum(y.square().sum() for y in run(layer.setup.rows)).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="replicas must be refreshed"):
        run(layer.setup.rows)


@pytest.mark.parametrize("how", ["attribute", "data"])
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


def test_a_backward_over_changed_weights_raises() -> None:
    layer = small()
    run = compile_whole(layer)
    loss = sum(y.square().sum() for y in run(layer.setup.rows))
    with torch.no_grad():
        layer.moe.weights[0].down.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


def test_a_shard_given_as_a_function_ends_the_graph() -> None:
    setup = make_setup(2, dtype=torch.float32)
    placement = isoload.place(torch.ones(1, 11), setup.topology, placer="trivial")
    stacks = [
        {name: nn.Parameter(s[placement.home_experts(0, r)]) for name, s in setup.dense.stacks().items()}
        for r in range(2)
    ]
    shards = [
        isoload.Shard(placement.home_experts(0, r), lambda own=own: isoload.ExpertWeights(**own))
        for r, own in enumerate(stacks)
    ]
    layer = isoload.MoE(setup.gate, shards, LocalTransport(setup.topology), placement)
    leaves = [p for own in stacks for p in own.values()]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="expert Parameters of others"):
        compile_whole(layer)(setup.rows)
    torch._dynamo.reset()
    found = []
    for run in (torch.compile(layer, backend="aot_eager"), layer):
        loss = sum(y.square().sum() for y in run(setup.rows))
        found.append([loss, *torch.autograd.grad(loss, leaves)])
    assert_equal(*found)


def over_processes(rank: int, ranks: int) -> None:
    setup = make_setup(ranks, dtype=torch.float32, masked=True)
    layer = Layer(setup, CollectiveTransport(setup.topology))
    run = compile_whole(layer)
    for scale in (1, 2):
        rows = [setup.rows[rank] * scale]
        assert_equal(both_ways(run, layer, rows), both_ways(layer, layer, rows))
    with torch.no_grad():
        if rank == 0:
            layer.moe.weights[0].down.mul_(1.5)
        message = "replicas must be refreshed" if rank == 0 else "rank 0 failed in stage count"
        with pytest.raises(ValueError, match=message):
            run([setup.rows[rank]])
        layer.moe.refresh_replicas()
        assert_equal(run([setup.rows[rank]]), layer([setup.rows[rank]]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_over_processes(ranks: int) -> None:
    """Row counts that only the host has, in one graph; the second of 3 ranks has no tokens."""
    run_ranks(over_processes, ranks, ranks, timeout=200)


def model_over_processes(rank: int) -> None:
    torch.set_num_threads(1)
    model, topology = make_model("qwen3"), isoload.Topology(2)
    placement = isoload.place(torch.arange(EXPERTS).repeat(2, 1) ** 2, topology, slots_per_rank=6)
    isoload.balance(model, topology, transport=CollectiveTransport(topology), placement=placement)
    with torch.no_grad():
        got = compile_whole(model)(token_ids(rank)).logits
        assert torch.equal(got, model(token_ids(rank)).logits)
        plain = make_model("qwen3")(token_ids(rank)).logits
    torch.testing.assert_close(got, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_model_over_processes() -> None:
    run_ranks(model_over_processes, 2, timeout=200)
