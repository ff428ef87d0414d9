"""The layer under torch.compile and autocast, and its gradients against finite differences."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import isoload
from isoload.transport import LocalTransport
from isoload.transport.group import error_code, loads_of
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU
from support.sweeps import slow

EXPERTS, TOP_K, HIDDEN, INNER, MAX_TOKENS = 6, 3, 8, 16, 13


class Chain:
    """count -> plan -> share -> route -> dispatch -> experts -> combine over virtual ranks, in bf16.

    The float64 loop reads the ends of its groups, which ends a graph.
    """

    def __init__(self, ranks: int, capacity: int | None, trains: bool = False) -> None:
        print("seed 41")
        draw = torch.Generator().manual_seed(41)
        topology = isoload.Topology(ranks)
        self.placement = isoload.place(torch.rand(1, EXPERTS, generator=draw), topology, slots_per_rank=4)
        self.transport = LocalTransport(topology, capacity)
        self.router = torch.randn(HIDDEN, EXPERTS, generator=draw)
        made = [ExpertWeights.random(4, HIDDEN, INNER, generator=draw) for _ in range(ranks)]
        # leaves of their own: what compiles takes tensors, and makes the record inside
        self.stacks = [
            [s.bfloat16().requires_grad_(trains) for s in (weights.gate_up, weights.down)] for weights in made
        ]
        self.trains, self.random = trains, draw

    def rows(self, *tokens: int) -> list[Tensor]:
        drawn = [torch.randn(n, HIDDEN, generator=self.random).bfloat16() for n in tokens]
        return [r.requires_grad_(self.trains) for r in drawn]

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """ids and weights [T, K]; light copies are masked."""
        weights, ids = (rows.float() @ self.router).softmax(-1).topk(TOP_K)
        return ids.masked_fill(weights < 0.2, -1), weights

    def __call__(self, rows: list[Tensor]) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Outputs [T, H] per rank, share [R, P], slots [T, K] per rank."""
        ids, weights = zip(*map(self.choose, rows), strict=True)
        loads = torch.stack([isoload.count(i, EXPERTS) for i in ids])
        made = isoload.plan(loads, self.placement, 0)
        share = isoload.share(loads, made)
        slots = [isoload.route(i, loads, made, rank) for rank, i in enumerate(ids)]
        received = self.transport.dispatcher.dispatch(
            rows, slots, list(weights), self.placement.slots_per_rank
        )
        y = [
            run_experts(got.rows, got.slots, got.weights, [ExpertWeights(*stacks)], SwiGLU())
            for got, stacks in zip(received, self.stacks, strict=True)
        ]
        return self.transport.dispatcher.combine(y, received), share, slots


def assert_same(got: tuple[Any, ...], wanted: tuple[Any, ...], tolerance: float = 0.0) -> None:
    """Integers to the bit; outputs within the tolerance of the largest."""
    assert torch.equal(got[1], wanted[1])
    for a, b in zip(got[2], wanted[2], strict=True):
        assert torch.equal(a, b)
    largest = float(torch.cat(wanted[0]).detach().abs().max())
    for a, b in zip(got[0], wanted[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * largest)


@pytest.mark.slow
@torch.no_grad()
def test_one_rank_is_one_graph_under_inductor() -> None:
    """Without the exchanges, whose packing of bytes alone is two dozen C++ kernels to compile."""
    chain = Chain(3, None)
    rows = chain.rows(7, 4, 5)
    others = [isoload.count(chain.choose(r)[0], EXPERTS) for r in rows[1:]]

    def first_rank(rows: Tensor) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        ids, weights = chain.choose(rows)
        loads = torch.stack([isoload.count(ids, EXPERTS), *others])
        made = isoload.plan(loads, chain.placement, 0)
        slots = isoload.route(ids, loads, made, 0)
        here = slots.masked_fill(slots >= chain.placement.slots_per_rank, -1)
        y = run_experts(rows, here, weights, [ExpertWeights(*chain.stacks[0])], SwiGLU())
        return [y], isoload.share(loads, made, 0), [slots]

    wanted = first_rank(rows[0])
    assert any((wanted[2][0] >= 0).flatten()) and wanted[0][0].any()
    got = torch.compile(first_rank, backend="inductor", fullgraph=True)(rows[0])
    assert_same(got, wanted, 2e-2)  # a fused kernel rounds to bf16 less often


@pytest.mark.slow
@torch.no_grad()
def test_the_chain_is_one_graph_with_fixed_shapes() -> None:
    chain = Chain(3, MAX_TOKENS)
    chain(chain.rows(5, 0, 3))
    compiled = torch.compile(chain.__call__, backend="aot_eager", fullgraph=True)
    for tokens in ((5, 0, 3), (6, 2, 13)):
        rows = chain.rows(*tokens)
        chain.transport.group.reset_traffic()
        wanted, eager = chain(rows), chain.transport.group.traffic
        assert any((slots < 0).any() for slots in wanted[2]), "a masked copy"
        chain.transport.group.reset_traffic()
        assert_same(compiled(rows), wanted)
        assert eager.bytes.pop("dispatch agreement")  # in every batch on CPU, but not from within a graph
        assert chain.transport.group.traffic.bytes == eager.bytes
        assert torch.equal(chain.transport.group.traffic.rows, eager.rows)


def breaking_functions(chain: Chain, rows: list[Tensor]) -> set[str]:
    """Where dynamo ends a graph."""
    torch._dynamo.reset()
    explained = torch._dynamo.explain(chain.__call__)(rows)
    return {reason.user_stack[-1].name for reason in explained.break_reasons}


@pytest.mark.slow
@torch.no_grad()
def test_without_fixed_shapes_the_graph_ends_where_dispatch_reads_the_row_counts() -> None:
    chain = Chain(2, None)
    rows = chain.rows(5, 3)
    chain(rows)
    assert breaking_functions(chain, rows) == {"swap_counts"}


@pytest.mark.slow
def test_in_training_graphs_end_at_the_anchor_and_where_backward_counts_bytes() -> None:
    """dynamo makes no leaf with a gradient, and changes nothing outside from within a backward."""
    chain = Chain(3, MAX_TOKENS, trains=True)
    rows = chain.rows(5, 2, 3)
    wanted = chain(rows)
    assert breaking_functions(chain, rows) == {"anchor", "swap"}

    torch._dynamo.reset()
    got = torch.compile(chain.__call__, backend="aot_eager", dynamic=False)(rows)
    assert_same(got, wanted)
    leaves = [*rows, *(stack for stacks in chain.stacks for stack in stacks)]
    losses = [torch.cat(out).double().square().sum() for out, *_ in (got, wanted)]
    for a, b in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        assert torch.equal(a, b)


def make_layer(dtype: torch.dtype, hidden: int = 16) -> tuple[isoload.MoE, list[Tensor]]:
    print("seed 43")
    draw = torch.Generator().manual_seed(43)
    topology = isoload.Topology(2)
    placement = isoload.place(torch.rand(1, EXPERTS, generator=draw), topology, slots_per_rank=4)
    dense = ExpertWeights.random(EXPERTS, hidden, 32, bias=True, generator=draw, dtype=dtype)
    router = torch.randn(hidden, EXPERTS, generator=draw)

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (rows.double() @ router.double()).softmax(-1).float().topk(2)
        return ids, weights

    rows = [torch.randn(n, hidden, generator=draw).to(dtype).requires_grad_() for n in (5, 3)]
    return isoload.MoE(gate, dense, LocalTransport(topology), placement), rows


def both_ways(layer: Any, leaves: list[Tensor], rows: list[Tensor], autocast: bool = False) -> list[Tensor]:
    """Outputs and all gradients."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = layer(rows)
    return [*outputs, *torch.autograd.grad(torch.cat(outputs).double().square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.float32, torch.bfloat16)])
def test_a_compiled_layer_has_the_bits_of_the_eager_one(dtype: torch.dtype) -> None:
    """Regression: torch's shape rule of grouped_mm refuses all dtypes but bf16."""
    torch._dynamo.reset()
    layer, rows = make_layer(dtype)
    leaves = [*rows, *layer.expert_parameters()]
    wanted = both_ways(layer, leaves, rows)
    got = both_ways(torch.compile(layer, backend="aot_eager"), leaves, rows)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.slow
def test_a_float32_layer_under_inductor() -> None:
    torch._dynamo.reset()
    layer, rows = make_layer(torch.float32)
    leaves = [*rows, *layer.expert_parameters()]
    wanted = both_ways(layer, leaves, rows)
    for a, b in zip(both_ways(torch.compile(layer), leaves, rows), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("hidden", [16, 6], ids=["grouped_mm", "loop"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_an_explicit_compute_dtype(dtype: torch.dtype, hidden: int) -> None:
    """To the bit, whatever the width: autocast itself would cast what the loop multiplies, and not grouped_mm."""
    layer, rows = make_layer(dtype, hidden)
    leaves = [*rows, *layer.expert_parameters()]
    got = both_ways(layer, leaves, rows, autocast=True)
    layer.compute_dtype = torch.bfloat16
    wanted = both_ways(layer, leaves, rows)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert all(a.dtype == dtype for a in got)


def test_a_compiled_layer_follows_autocast() -> None:
    """Regression: compiled code runs with autocast off, so that it computed in float32."""
    torch._dynamo.reset()
    layer, rows = make_layer(torch.float32)
    leaves = [*rows, *layer.expert_parameters()]
    wanted = both_ways(layer, leaves, rows, autocast=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    got = both_ways(compiled, leaves, rows, autocast=True)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    plain = both_ways(compiled, leaves, rows)
    assert not torch.equal(plain[0], got[0])


class Layer:
    """A float64 layer with a replica of every expert's, whose choices are fixed: 2, 0 and 3 tokens, one copy masked."""

    def __init__(self, policy: str) -> None:
        print("seed 42")
        draw = torch.Generator().manual_seed(42)
        topology = isoload.Topology(3)
        placement = isoload.place(torch.tensor([[9, 4, 2, 1]]), topology, slots_per_rank=3)
        dense = ExpertWeights.random(4, 2, 2, bias=True, generator=draw, dtype=torch.float64)
        ids = [
            torch.tensor([[0, 3], [0, 1]]),
            torch.zeros(0, 2).long(),
            torch.tensor([[0, 2], [-1, 0], [1, 3]]),
        ]
        self.rows, self.weights = (
            [torch.rand(len(i), 2, generator=draw, dtype=torch.float64).requires_grad_() for i in ids]
            for _ in range(2)
        )
        choices = cycle(zip(ids, self.weights, strict=True))
        self.moe = isoload.MoE(
            lambda rows: next(choices), dense, LocalTransport(topology), placement, policy=policy
        )

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """gradcheck moves its inputs unseen, the Parameters among them. Replicas follow as unseen: the backward that it
        compares with comes last, when all are back to one eps."""
        stored = tuple(b for w in self.moe.weights for b in w.stored_rows())
        with torch.autograd._unsafe_preserve_version_counter(stored):
            self.moe.refresh_replicas()
        for weights in self.moe.weights:
            weights.note_refreshed()  # versions are back to what they were
        return tuple(self.moe(self.rows))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["exact", *slow("none")])
def test_gradients_are_finite_differences(policy: str) -> None:
    layer = Layer(policy)
    assert layer.moe.has_replicas
    assert gradcheck(layer, (*layer.rows, *layer.weights, *layer.moe.parameters()))
    made = layer.moe.last_plan
    used = torch.unique(made.slot_to_expert[made.quota > 0])
    assert (len(used) < int((made.quota > 0).sum())) == (policy == "exact"), "copies on replicas"


def test_a_balancer_over_a_group_is_one_graph_and_reads_the_codes_of_other_ranks() -> None:
    topology = isoload.Topology(2)
    placement = isoload.place(torch.rand(1, EXPERTS), topology, slots_per_rank=4)
    balancer = isoload.Balancer(placement, 0, group=isoload.LocalGroup(topology))
    ids = [torch.randint(EXPERTS, (n, TOP_K)) for n in (5, 3)]
    wanted = balancer(ids)
    got = torch.compile(balancer, backend="aot_eager", fullgraph=True)(ids)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    read = torch.compile(lambda loads: loads_of(loads, loads[:, 0]) + 1, backend="aot_eager", fullgraph=True)
    gathered = torch.arange(6, dtype=torch.int32).view(2, 3)
    gathered[1] = -error_code("route")
    with pytest.raises(ValueError, match="rank 1 failed in stage route"):
        read(gathered)
    gathered[1] = 4
    assert torch.equal(read(gathered), gathered + 1)
