"""Float32 masters with bfloat16 compute: by compute_dtype, autocast and FSDP2's MixedPrecisionPolicy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import isoload
from isoload.weights.experts import ExpertWeights
from support.hugging_face import make_model
from support.processes import rank_outcomes, run_ranks
from support.quantised_experts import random_quantised

EXPERTS, HIDDEN, TOKENS = 8, 16, 20
BF16 = torch.bfloat16
POLICIES: dict[str, tuple[dict[str, Any], int, int]] = {  # options, replicas and spare slots per rank
    "none": ({}, 0, 0),
    "exact": ({}, 1, 0),
    "llep": ({"min_chunk": 1, "threshold": 1.0}, 1, 2),
}


def make_layer(
    policy: str, dtype: torch.dtype, ranks: int = 4, local: bool = True, skew: float = 1.5, **how: Any
) -> isoload.MoE:
    draw = torch.Generator().manual_seed(4)
    options, replicas, spare = POLICIES[policy]
    topology = isoload.Topology(ranks)
    slots = EXPERTS // ranks + replicas + spare
    placement = isoload.place(torch.ones(1, EXPERTS), topology, slots, placer="trivial", spare_slots=spare)
    dense = ExpertWeights.random(EXPERTS, HIDDEN, 24, bias=True, generator=draw)
    dense = ExpertWeights(**{name: stack.to(BF16).to(dtype) for name, stack in dense.stacks().items()})
    router = skew * torch.randn(HIDDEN, EXPERTS, generator=draw)

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (rows.double() @ router.double()).softmax(-1).float().topk(2)
        return ids, weights

    transport = (isoload.LocalTransport if local else isoload.CollectiveTransport)(topology)
    return isoload.MoE(gate, dense, transport, placement, 0, policy, **options, **how)


def rows_of(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that bfloat16 has."""
    rows = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(rank)).to(BF16)
    return rows.to(dtype).requires_grad_()


def outcome(layer: isoload.MoE, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of rows and Parameters."""
    rows = [rows_of(rank, dtype) for rank in layer.group.ranks]
    outputs = layer(rows)
    leaves = [*rows, *layer.expert_parameters()]
    return outputs, list(torch.autograd.grad(sum((y.float() ** 2).sum() for y in outputs), leaves))


@pytest.mark.parametrize("borrow", ["pull", "all_to_all"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["compute_dtype", "autocast"])
def test_masters_in_float32_compute_as_bfloat16_ones(how: str, policy: str, borrow: str) -> None:
    """Regression: bf16 rows were refused beside float32 experts, which autocast left alone."""
    wanted, _ = outcome(make_layer(policy, BF16, borrow=borrow), BF16)
    exact, exact_grads = outcome(make_layer(policy, torch.float32, borrow=borrow))
    layer = make_layer(
        policy, torch.float32, borrow=borrow, compute_dtype=BF16 if how == "compute_dtype" else None
    )
    with torch.autocast("cpu", BF16, enabled=how == "autocast"):
        got, grads = outcome(layer)
        other, _ = outcome(layer, BF16)
    for a, b, c, d in zip(got, other, wanted, exact, strict=True):
        assert (
            a.dtype == torch.float32 and b.dtype == BF16 and torch.equal(a.to(BF16), c) and torch.equal(b, c)
        )
        assert not torch.equal(a, d)
    for a, b in zip(grads, exact_grads, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.05 * max(b.abs().flatten().tolist(), default=0))
    if layer.borrowing is not None:
        assert layer.group.traffic.bytes["borrow"]
        dtypes = {stack.dtype for own in layer.borrowing.pool.buffers[0] for stack in own}
        assert dtypes == {BF16 if borrow == "all_to_all" else torch.float32}


def test_gradients_of_one_copy_are_those_of_bfloat16_experts() -> None:
    """To the bit where nothing is added up."""
    _, wanted = outcome(make_layer("none", BF16), BF16)
    _, got = outcome(make_layer("none", torch.float32, compute_dtype=BF16))
    for a, b in zip(got[4:], wanted[4:], strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b.float())


def test_borrowed_weights_travel_in_bfloat16() -> None:
    def traffic(**how: Any) -> int:
        layer = make_layer("llep", torch.float32, borrow="all_to_all", **how)
        outcome(layer)
        return layer.group.traffic.bytes["borrow"]

    assert 2 * traffic(compute_dtype=BF16) == traffic() > 0


def test_backward_brings_weights_again_in_the_same_dtype() -> None:
    """Three layers share two buffers: the first one's weights are gone by the time of its backward."""
    layers = [make_layer("llep", torch.float32, borrow="all_to_all", compute_dtype=BF16) for _ in range(3)]
    first = layers[0]
    for layer in layers[1:]:
        layer.transport, layer.group, layer.dispatcher = first.transport, first.group, first.dispatcher
        layer.balancer.group = layer.borrowing.group = first.group
    rows = [rows_of(rank) for rank in range(4)]
    alone = torch.autograd.grad(torch.cat(first(rows)).sum(), first.expert_parameters())
    outputs = first(rows)
    for layer in layers[1:]:
        layer(rows)
    again = torch.autograd.grad(torch.cat(outputs).sum(), first.expert_parameters())
    assert all(torch.equal(a, b) for a, b in zip(alone, again, strict=True))


def test_float64_stays_under_autocast() -> None:
    wanted, _ = outcome(make_layer("exact", torch.float64), torch.float64)
    with torch.autocast("cpu", BF16):
        got, _ = outcome(make_layer("exact", torch.float64), torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_frozen_experts() -> None:
    layer = make_layer("llep", torch.float32, compute_dtype=BF16)
    wanted, _ = outcome(layer)
    for parameter in layer.expert_parameters():
        parameter.requires_grad_(False)
    got = layer([rows_of(rank) for rank in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_a_model_of_transformers_under_autocast() -> None:
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    model = make_model("qwen3")
    with torch.autocast("cpu", BF16), torch.no_grad():
        wanted = model(ids).logits
        isoload.balance(model, isoload.Topology(2))
        got = model(ids).logits
    torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.1)
    explicit = make_model("qwen3")
    [layer, _] = isoload.balance(explicit, isoload.Topology(2), compute_dtype=BF16)
    assert layer.compute_dtype == BF16 and explicit(ids).logits.dtype == torch.float32


def test_a_stack_under_autocast() -> None:
    model, other = make_model("qwen3"), make_model("qwen3")
    how = {"policy": "hedge", "predict": "last"}
    stacks = [
        isoload.LibraStack.from_decoder(m.model.layers, isoload.Topology(2), **how, **more)
        for m, more in ((model, {}), (other, {"compute_dtype": BF16}))
    ]
    for step in range(3):
        rows = [layer_rows.detach() for layer_rows in (rows_for(step, 0), rows_for(step, 1))]
        choices = [choice_for(row) for row in rows]
        results = []
        for stack, enabled in zip(stacks, (True, False), strict=True):
            with torch.autocast("cpu", BF16, enabled=enabled), torch.no_grad():
                results.append([layer.compute(rows, *zip(*choices, strict=True)) for layer in stack.layers])
        for first, second in zip(*results, strict=True):
            assert all(
                torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(first, second, strict=True)
            )


def rows_for(step: int, rank: int) -> Tensor:
    return torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def choice_for(rows: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = rows[:, :EXPERTS].softmax(-1).topk(2)
    return ids, weights


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.linear(rows).softmax(-1).topk(2)
        return ids, weights


class Model(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first, self.router = nn.Linear(HIDDEN, HIDDEN), Router()
        self.layer = make_layer("llep", torch.float32, ranks=2, local=False, **how)
        self.layer.gate = self.router

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(self.first(rows))


def train(rank: int, mixed: bool) -> tuple[list[float], list[str]]:
    model = Model(compute_dtype=BF16 if mixed else None)
    policy = (
        MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)
        if mixed
        else MixedPrecisionPolicy()
    )
    for module in (model.first, model):
        fully_shard(module, ignored_params=set(model.layer.expert_parameters()), mp_policy=policy)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction in float32
    seen = list[str]()
    model.layer.register_forward_hook(lambda _, given, y: seen.append(f"{given[0].dtype} {y.dtype}"))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.3), list[float]()
    for _ in range(4):
        optimizer.zero_grad()
        loss = (model(rows_of(rank)).float() - 1).square().mean() / 2
        loss.backward()
        optimizer.step()
        model.layer.refresh_replicas()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    assert {(p.dtype, p.grad.dtype) for p in model.parameters()} == {(torch.float32, torch.float32)}
    return losses, seen


def test_fsdp_s_mixed_precision() -> None:
    """Losses are those of float32 within the rounding of bfloat16, and go down."""
    wanted, _ = run_ranks(train, 2, False)[0]
    losses, seen = run_ranks(train, 2, True)[0]
    assert set(seen) == {"torch.bfloat16 torch.bfloat16"}
    assert losses == pytest.approx(wanted, rel=1e-3) and losses != wanted
    assert losses == sorted(losses, reverse=True) and len(losses) == 4


def refused(rank: int, how: str) -> None:
    computes = {"differ": BF16 if rank else None, "dtype": torch.int64}.get(how)
    layer = make_layer("exact", torch.float32, ranks=2, local=False, compute_dtype=computes)
    with torch.autocast("cpu", BF16, enabled=rank == 1):
        layer(rows_of(rank).to(BF16) if how == "rows" else rows_of(rank))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "differ",
            "compute_dtype must be the same on all ranks, got None on rank 0 and torch.bfloat16 on rank 1",
        ),
        (
            "dtype",
            "compute_dtype must be one of torch.float64, torch.float32, torch.bfloat16, torch.float16 or None",
        ),
        ("autocast", "dtype of x must be the same on all ranks"),
        (
            "rows",
            "x must be [T, 16] torch.float32 as the experts, got [20, 16] torch.bfloat16: pass compute_dtype=",
        ),
    ],
)
def test_what_cannot_be_computed_is_refused_on_all_ranks(how: str, message: str) -> None:
    first, second = rank_outcomes(refused, 2, how, group_timeout=10.0)
    assert message in str(first.error), first
    assert second.error is not None and (message in second.error or "rank 0 failed" in second.error)


def test_quantised_experts_have_no_compute_dtype() -> None:
    topology = isoload.Topology(1)
    placement = isoload.place(torch.ones(1, EXPERTS), topology)
    experts = random_quantised("fp8", EXPERTS, 128, 128, 1)
    with pytest.raises(ValueError, match="compute_dtype must be None for quantised experts"):
        isoload.MoE(
            lambda rows: rows, experts, isoload.LocalTransport(topology), placement, compute_dtype=BF16
        )
