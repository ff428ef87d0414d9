"""The layer with borrowed weights is the dense layer; its memory is constant; backward brings the weights again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import isoload
from isoload.transport import CollectiveTransport, LocalTransport
from support.borrowed_layer import LLEP, Setup, assert_dense, make_setup
from support.live_tensors import live_tensors
from support.made_routing import W0_TO_W7
from support.processes import run_ranks
from support.sweeps import slow

LOCAL = ("pull", "copy", "all_to_all")


def borrowed_experts(layer: isoload.MoE) -> int:
    assert layer.last_plan is not None and layer.last_plan.telemetry is not None
    return int(layer.last_plan.telemetry[0])


@pytest.mark.parametrize("capacity", [1.0, 1.1])
@pytest.mark.parametrize("workload", W0_TO_W7)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_equals_the_dense_layer(ranks: int, workload: str, capacity: float) -> None:
    setup = make_setup(ranks, workload, tokens=(17,) * ranks)
    layer = setup.layer(**LLEP, capacity=capacity)
    assert_dense(setup, layer)


@pytest.mark.parametrize(
    "policy",
    [
        {"policy": "llep", "split_by": "exact", "min_chunk": 1, "threshold": 1.0},
        {"policy": "spill_cost", "expert_bytes": 1, "min_chunk": 1},
    ],
)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_other_policies_and_ragged_tokens(ranks: int, policy: dict[str, object]) -> None:
    setup = make_setup(ranks)
    layer = setup.layer(**policy)
    assert_dense(setup, layer)
    assert borrowed_experts(layer) > 0 or ranks == 1


def test_replicas_and_borrowed_experts_side_by_side() -> None:
    setup = make_setup(4, slots=5)
    layer = setup.layer(**LLEP)
    assert layer.has_replicas
    assert_dense(setup, layer)
    assert borrowed_experts(layer) > 0


@pytest.mark.parametrize("policy", [LLEP, {"policy": "spill_cost", "expert_bytes": 1, "min_chunk": 1}])
def test_shared_experts_stay_home(policy: dict[str, object]) -> None:
    """Dispatched ones: they are not borrowed, and the routed ones are borrowed as without them."""
    setup, found = make_setup(4), []
    topology = setup.placement.topology
    placement = isoload.place(
        torch.ones(1, 16), topology, slots_per_rank=7, spare_slots=2, num_shared=1, placer="trivial"
    )
    dense = isoload.ExpertWeights.random(17, 8, 8, dtype=torch.float64)
    for how in ({"policy": "none"}, policy):
        layer = Setup(setup.ids, setup.rows, placement, dense).layer(**how)
        rows = setup.leaves()
        ys = layer(rows)
        torch.cat(ys).square().sum().backward()
        found.append([*ys, *(leaf.grad for leaf in (*rows, *layer.parameters()))])
    assert borrowed_experts(layer) > 0
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_with_biases(dtype: torch.dtype) -> None:
    setup = make_setup(4, dtype=dtype, bias=True)
    layer = setup.layer(**LLEP)
    assert_dense(setup, layer)
    assert borrowed_experts(layer) > 0


@pytest.mark.parametrize("tokens", [(0, 0, 0, 0), (0, 0, 29, 0)], ids=["no tokens", "one rank has all"])
def test_lopsided_batches(tokens: tuple[int, ...]) -> None:
    setup = make_setup(4, "zipf", tokens=tokens)
    if sum(tokens):
        assert_dense(setup, setup.layer(**LLEP))
    else:
        assert [len(y) for y in setup.layer(**LLEP)(setup.rows)] == [0] * 4


@pytest.mark.parametrize("bias", [False, True])
def test_backends_give_the_same_bits(bias: bool) -> None:
    setup = make_setup(4, slots=5, dtype=torch.float32, bias=bias)
    found = []
    for name in LOCAL:
        layer = setup.layer(**LLEP, borrow=name)
        assert layer.borrowing is not None and layer.borrowing.backend.name == name
        found.append(assert_dense(setup, layer))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def on_rank(rank: int, ranks: int, backend: str) -> tuple[list[torch.Tensor], dict[str, int], int]:
    setup = make_setup(ranks)
    transport = CollectiveTransport(setup.placement.topology)
    layer = setup.layer(transport, **LLEP, borrow=backend)
    rows = setup.rows[rank].clone().requires_grad_()
    y = layer(rows)
    syncs = transport.group.traffic.host_syncs
    y.square().sum().backward()
    tensors = [y.detach(), rows.grad, *(p.grad for p in layer.parameters())]
    return tensors, dict(transport.group.traffic.bytes), syncs


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("backend", ["all_to_all"])
def test_processes_equal_virtual_ranks(ranks: int, backend: str) -> None:
    results = run_ranks(on_rank, ranks, ranks, backend)
    setup = make_setup(ranks)
    layer = setup.layer(**LLEP)
    rows = setup.leaves()
    ys = layer(rows)
    torch.cat(ys).square().sum().backward()
    assert borrowed_experts(layer) > 0
    one = sum(s[0].numel() * s.element_size() for s in layer.weights[0].stored_rows())
    sent = {stage: sum(b.get(stage, 0) for _, b, _ in results) for stage in ("borrow", "borrowed gradients")}
    assert sent == dict.fromkeys(sent, one * borrowed_experts(layer))
    for rank, (tensors, _, syncs) in enumerate(results):
        wanted = [ys[rank], rows[rank].grad, *(p.grad for p in layer.weights[rank].parameters())]
        assert all(torch.equal(a, b) for a, b in zip(tensors, wanted, strict=True))
        assert syncs == 1, "one wait for the host per forward"


def run_layers(layers: list[isoload.MoE], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    for layer in layers:
        rows = [a + b for a, b in zip(rows, layer(rows), strict=True)]
    return rows


def test_layers_share_one_pool_and_backward_brings_again_what_was_overwritten() -> None:
    """Four layers, two buffers: the last two still find their weights."""
    setup = make_setup(4)
    transport = LocalTransport(setup.placement.topology)
    layers = [setup.layer(transport, **LLEP) for _ in range(4)]
    pools = {id(layer.borrowing.pool) for layer in layers if layer.borrowing is not None}
    assert len(pools) == 1
    pool = layers[0].borrowing.pool
    pointers = [s.data_ptr() for buffer in pool.buffers for stacks in buffer for s in stacks]
    rows = setup.leaves()
    y = run_layers(layers, rows)
    first = transport.group.traffic.bytes["borrow"]
    torch.cat(y).square().sum().backward()
    assert transport.group.traffic.bytes["borrow backward"] == first // 2 > 0
    assert [s.data_ptr() for buffer in pool.buffers for stacks in buffer for s in stacks] == pointers
    assert sum(s.numel() for buffer in pool.buffers for stacks in buffer for s in stacks) == (
        2 * 4 * 2 * (2 * 8 * 8 + 8 * 8)  # buffers, ranks, spare slots, weights of an expert
    )


@pytest.mark.parametrize("backend", LOCAL)
def test_nothing_of_the_pool_survives_until_backward(backend: str) -> None:
    setup = make_setup(4, bias=True)
    grads = []
    for poisoned in (False, True):
        layer = setup.layer(**LLEP, borrow=backend)
        rows = setup.leaves()
        loss = torch.cat(layer(rows)).square().sum()
        if poisoned:
            pool = layer.borrowing.pool
            for stack in (s for buffer in pool.buffers for stacks in buffer for s in stacks):
                stack.fill_(torch.nan)
            pool.holds[:] = [None, None]
        loss.backward()
        grads.append([r.grad for r in rows] + [p.grad for p in layer.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("region", [2, 3, *slow(1, 5)])
def test_checkpointing_recomputes_the_same_loans(region: int, reentrant: bool) -> None:
    """Five layers of different weights, so many of them in a checkpoint: recomputing takes buffers of the pool, too."""
    setup, grads = make_setup(4), []
    for checkpointed in (False, True):
        transport = LocalTransport(setup.placement.topology)
        layers = [make_setup(4, seed=seed).layer(transport, **LLEP) for seed in range(5)]
        rows = passed = setup.leaves()
        for at in range(0, 5, region):

            def run(*given: torch.Tensor, some: list[isoload.MoE] = layers[at : at + region]) -> object:
                return tuple(run_layers(some, list(given)))

            passed = list(checkpoint(run, *passed, use_reentrant=reentrant) if checkpointed else run(*passed))
        torch.cat(passed).square().sum().backward()
        grads.append([r.grad for r in rows] + [p.grad for layer in layers for p in layer.parameters()])
    for a, b in zip(*grads, strict=True):  # the reentrant one adds up the residuals in another order
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12) if reentrant else torch.equal(a, b)


def train(setup: Setup, layer: isoload.MoE, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        ys = layer(setup.rows)
        loss = (torch.cat(ys) - torch.cat(setup.rows).sin()).square().sum()
        loss.backward()
        optimizer.step()
        layer.refresh_replicas()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("slots", [4, 5], ids=["no replicas", "replicas"])
def test_training_is_the_training_of_plain_ep(slots: int) -> None:
    setup = make_setup(4, slots=slots)
    plain, borrowing = setup.layer(policy="none"), setup.layer(**LLEP)
    assert train(setup, borrowing, 5) == pytest.approx(train(setup, plain, 5), rel=1e-12)
    assert borrowed_experts(borrowing) > 0
    for a, b in zip(plain.parameters(), borrowing.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "backend", ["pull", *(pytest.param(name, marks=pytest.mark.slow) for name in LOCAL[1:])]
)
def test_steps_leave_nothing_behind(backend: str) -> None:
    setup = make_setup(4)
    layer = setup.layer(**LLEP, borrow=backend)
    train(setup, layer, 3)
    before = live_tensors()
    train(setup, layer, 3)
    assert live_tensors() <= before


def test_a_layer_that_is_dropped_is_freed() -> None:
    setup = make_setup(4)
    transport = LocalTransport(setup.placement.topology)
    layer = setup.layer(transport, **LLEP)
    layer(setup.rows)
    alive = weakref.ref(layer.weights[0])
    del layer
    gc.collect()
    assert alive() is None


def test_below_the_threshold_nothing_travels() -> None:
    setup = make_setup(4, "balanced", tokens=(16,) * 4)
    layer = setup.layer(policy="llep")
    assert_dense(setup, layer)
    assert borrowed_experts(layer) == 0
    assert not {"borrow", "borrow backward", "borrowed gradients"} & set(layer.transport.group.traffic.bytes)


def test_another_placement_moves_the_homes() -> None:
    setup = make_setup(4, slots=5)
    layer = setup.layer(**LLEP)
    layer(setup.rows)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).view(4, 4)
    slots = torch.cat([order, torch.full((4, 3), -1)], dim=1)  # no replicas, so that some rank has to borrow
    layer.load_placement(isoload.Placement(slots.view(1, -1), setup.placement.topology, 16, spare_slots=2))
    assert_dense(setup, layer)
    assert borrowed_experts(layer) > 0


def test_a_step_between_forward_and_backward_is_refused() -> None:
    setup = make_setup(4)
    layer = setup.layer(**LLEP)
    loss = torch.cat(layer(setup.rows)).square().sum()
    layer.weights[0].gate_up.data.mul_(2)
    torch.autograd.graph.increment_version(layer.weights[0].gate_up)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()


def test_a_module_gets_spare_slots_with_a_policy_that_borrows() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.OlmoeConfig(
        hidden_size=8, intermediate_size=16, num_experts=8, num_experts_per_tok=3
    )
    torch.manual_seed(5)
    block = transformers.models.olmoe.modeling_olmoe.OlmoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    rows, topology = torch.randn(1, 17, 8), isoload.Topology(4)
    with pytest.raises(ValueError, match="policy must be one of"):
        isoload.balance(block, topology, policy="best")
    outputs = []
    with torch.no_grad():
        outputs.append(block(rows))
        [borrowing] = isoload.balance(block, topology, **LLEP)
        outputs.append(block(rows))
    a, b = (y[0] if isinstance(y, tuple) else y for y in outputs)
    assert torch.allclose(a, b, rtol=0, atol=1e-5)
    assert borrowed_experts(borrowing) > 0
