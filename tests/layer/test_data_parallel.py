"""DistributedDataParallel and fully_shard around a model with a layer: right with the experts left alone, else loud."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from isoload.weights.experts import ExpertWeights
from isoload.weights.shard import Shard
from support.processes import rank_outcomes, run_ranks

RANKS, EXPERTS, HIDDEN, STEPS = 2, 8, 8, 3


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, dtype=torch.float64))

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (rows @ self.weight.t()).softmax(-1).topk(3)
        return ids, weights


def make_model(local: bool = False, replicas: bool = True, shard: str = "") -> nn.Sequential:
    """linear, layer, linear, the same on all ranks. Experts 0 and 4 have a replica, each rank is home to four.

    With a shard the linear before the layer has the experts' Parameters, too, or alone.
    """
    torch.manual_seed(5)
    topology = isoload.Topology(RANKS)
    homes = torch.tensor([[0, 1, 2, 3, 5, 6, 7, 8]])
    slots = [0, 1, 2, 3, 4, 4, 5, 6, 7, 0] if replicas else [0, 1, 2, 3, -1, 4, 5, 6, 7, -1]
    placement = isoload.Placement(torch.tensor([slots]), topology, EXPERTS, home_slot=homes)
    dense = ExpertWeights.random(EXPERTS, HIDDEN, 6, bias=True, dtype=torch.float64)
    transport = (LocalTransport if local else CollectiveTransport)(topology)
    first, last = (nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(2))
    experts: ExpertWeights | Shard = dense
    if shard:
        own = placement.home_experts(0, dist.get_rank())
        first.experts = nn.ParameterList(
            nn.Parameter(stack[own].clone()) for stack in dense.stacks().values()
        )
        here = ExpertWeights(*first.experts)
        experts = Shard(own, here if shard == "parameters" else lambda: here)
    layer = MoE(Router(), experts, transport, placement)
    assert layer.has_replicas == replicas
    return nn.Sequential(first, layer, last)


def batches(rank: int) -> Iterator[Tensor]:
    for step in range(STEPS):
        yield torch.randn(
            5 + rank, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + rank)
        )


def train(model: nn.Module, layer: MoE, rank: int, scale: float = 1.0, reduced: bool = False) -> None:
    """SGD: unlike Adam it shows a gradient that is too large."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    experts = set(layer.expert_parameters())
    for rows in batches(rank):
        optimizer.zero_grad()
        (model(rows) ** 2).mean().mul(scale).backward()
        for parameter in model.parameters() if reduced else ():
            if parameter not in experts:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        layer.refresh_replicas()


def trained(model: nn.Sequential) -> list[Tensor]:
    """All Parameters, as plain tensors."""
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def plain(rank: int, shard: str = "") -> list[Tensor]:
    model = make_model(shard=shard)
    train(model, model[1], rank, scale=1 / RANKS, reduced=True)
    return trained(model)


def assert_close(got: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def in_ddp(rank: int, shard: str) -> None:
    model = make_model(shard=shard)
    train(DistributedDataParallel(isoload.layer.ignore_in_ddp(model)), model[1], rank)
    assert_close(trained(model), plain(rank, shard))


@pytest.mark.parametrize("shard", ["", "parameters"])
def test_training_in_ddp_is_the_plain_one(shard: str) -> None:
    """Also where the Parameters have another name, which comes first."""
    run_ranks(in_ddp, RANKS, shard)


def test_what_was_ignored_before_stays_so() -> None:
    assert isoload.layer.ignore_in_ddp(nn.Linear(1, 1))._ddp_params_and_buffers_to_ignore == []
    model = make_model(local=True)
    model._ddp_params_and_buffers_to_ignore = ["2.bias"]
    assert isoload.layer.ignore_in_ddp(model)._ddp_params_and_buffers_to_ignore == ["2.bias"]


class Renamed(nn.Module):
    """As peft renames the Parameters of a model that it wraps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model

    def forward(self, rows: Tensor) -> Tensor:
        return self.base_model(rows)


def in_a_wrapper(rank: int, inner: bool) -> None:
    model = make_model()
    isoload.layer.ignore_in_ddp(model[1] if inner else model)
    train(DistributedDataParallel(Renamed(model)), model[1], rank)
    assert_close(trained(model), plain(rank))


@pytest.mark.parametrize("inner", [False, True])
def test_wrappers_that_rename_experts_keep_them_out_of_ddp(inner: bool) -> None:
    """Regression: what DistributedDataParallel ignores was recorded by the names of one module."""
    run_ranks(in_a_wrapper, RANKS, inner)


def with_unequal_homes(rank: int, how: str) -> None:
    torch.manual_seed(5)
    slots = torch.tensor([[0, 1, 2, 3, 4, 5, 6, -1, -1, -1, -1, 7]])
    placement = isoload.Placement(slots, isoload.Topology(RANKS), EXPERTS)
    dense = ExpertWeights.random(EXPERTS, HIDDEN, 6, dtype=torch.float64)
    layer = MoE(Router(), dense, CollectiveTransport(RANKS), placement)
    kept = [p.detach().clone() for p in layer.parameters()]
    try:
        DistributedDataParallel(Renamed(layer) if how == "renamed" else layer)
    except ValueError as error:
        assert all(map(torch.equal, kept, layer.parameters()))
        raise error


@pytest.mark.parametrize("how", ["", "renamed"])
def test_ddp_is_refused_before_it_broadcasts(how: str) -> None:
    """Regression: processes with unequal numbers of home experts ended by SIGABRT, others lost their weights."""
    for outcome in rank_outcomes(with_unequal_homes, RANKS, how, group_timeout=10.0):
        assert "ValueError: expert Parameters must be ignored by DistributedDataParallel" in str(
            outcome.error
        )


def in_ddp_alone(rank: int) -> None:
    layer = make_model()[1]
    train(DistributedDataParallel(isoload.layer.ignore_in_ddp(layer)), layer, rank)


def with_all_experts(rank: int, wrapped: bool) -> list[Tensor]:
    """A layer over a group of this rank alone, under DistributedDataParallel over all."""
    torch.manual_seed(5)
    own = [dist.new_group([r]) for r in range(RANKS)][rank]
    placement = isoload.place(torch.ones(1, EXPERTS), 1, EXPERTS)
    dense = ExpertWeights.random(EXPERTS, HIDDEN, 6, dtype=torch.float64)
    layer = MoE(Router(), dense, CollectiveTransport(1, own), placement)
    model: nn.Module = nn.Sequential(layer)
    if wrapped:
        train(DistributedDataParallel(isoload.layer.ignore_in_ddp(model)), layer, rank)
    else:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
        train(model, layer, rank, scale=1 / RANKS)
    return [p.detach() for p in model.parameters()]


def test_a_rank_with_all_experts_is_an_ordinary_replica() -> None:
    for plain_rank, wrapped_rank in zip(
        run_ranks(with_all_experts, RANKS, False), run_ranks(with_all_experts, RANKS, True), strict=True
    ):
        assert_close(wrapped_rank, plain_rank)


def test_the_layer_may_be_the_wrapped_module() -> None:
    run_ranks(in_ddp_alone, RANKS)


def fully_sharded(rank: int) -> None:
    model = make_model()
    fully_shard(model, ignored_params=set(model[1].expert_parameters()))
    model.set_gradient_divide_factor(1.0)
    train(model, model[1], rank, scale=1 / RANKS)
    assert_close(trained(model), plain(rank))


def test_training_under_fully_shard_is_the_plain_one() -> None:
    run_ranks(fully_sharded, RANKS)


def sharded_by_block(
    rank: int, wrapped: tuple[int, ...], factors: tuple[int, ...], averaged: bool = False
) -> None:
    """Wraps these modules of the model one by one, then the model; -1 stands for the model itself."""
    model = make_model()
    if averaged:  # the experts' gradients are then divided by the number of ranks, as FSDP2's default does
        isoload.layer.ignore_in_ddp(model)
    modules = [model if i < 0 else model[i] for i in (*wrapped, -1)]
    for module in modules:
        fully_shard(module, ignored_params=set(model[1].expert_parameters()))
    for i in factors:
        (model if i < 0 else model[i]).set_gradient_divide_factor(1.0)
    train(model, model[1], rank, scale=1 / (1 if averaged else RANKS))
    assert_close(trained(model), plain(rank))


@pytest.mark.parametrize(
    ("wrapped", "factors", "averaged"),
    [((0, 2), (0, 2, -1), False), ((0, 1, 2), (0, 1, 2), False), ((2,), (2, -1), False), ((0, 2), (), True)],
)
def test_training_with_blocks_wrapped_one_by_one(
    wrapped: tuple[int, ...], factors: tuple[int, ...], averaged: bool
) -> None:
    run_ranks(sharded_by_block, RANKS, wrapped, factors, averaged)


@pytest.mark.parametrize(
    ("wrapped", "factors", "name"),
    [
        ((0, 2), (-1,), "the default, 2 for 0:"),
        ((0, 1), (-1, 0), "the default, 2 for 1:"),
        ((0,), (0,), "the default, 2 for the root (FSDPSequential):"),
    ],
)
def test_a_divide_factor_that_misses_a_module_is_loud(
    wrapped: tuple[int, ...], factors: tuple[int, ...], name: str
) -> None:
    """Regression: the root's factor does not reach modules wrapped one by one; gradients were too small by R."""
    message = (
        "ValueError: the gradient divide factor of every module that fully_shard wraps must be 1 as that of"
    )
    for outcome in rank_outcomes(sharded_by_block, RANKS, wrapped, factors, group_timeout=10.0):
        assert message in str(outcome.error) and name in str(outcome.error), outcome
        assert "call module.set_gradient_divide_factor(1.0) on each module" in str(outcome.error)


def sharded_for_evaluation(rank: int) -> None:
    model = make_model()
    fully_shard(model, ignored_params=set(model[1].expert_parameters()))
    with torch.no_grad():
        model(next(iter(batches(rank))))


def test_no_divide_factor_is_needed_without_gradients() -> None:
    run_ranks(sharded_for_evaluation, RANKS)


def sharded_too(rank: int, replicas: bool) -> None:
    model = make_model(replicas=replicas)
    fully_shard(model)
    model(next(iter(batches(rank))))


@pytest.mark.parametrize("replicas", [True, False])
def test_experts_that_are_sharded_over_their_ranks_are_refused(replicas: bool) -> None:
    """Regression: shards of different experts were put together as one stack."""
    message = "shard=modules) does, got other Parameters in place of the layer's gate_up, down"
    for outcome in rank_outcomes(sharded_too, RANKS, replicas, group_timeout=10.0):
        assert "ValueError: expert Parameters must not be sharded" in str(outcome.error), outcome
        assert message in str(outcome.error)


def forgotten(rank: int, how: str) -> None:
    model = make_model(shard="function" if "function" in how else "")
    if how == "function":
        isoload.layer.ignore_in_ddp(model)
    if how == "by hand":  # the gradients would not be those of a mean
        model._ddp_params_and_buffers_to_ignore = [n for n, _ in model.named_parameters() if ".weights." in n]
    group = None
    if how == "group":
        isoload.layer.ignore_in_ddp(model)
        group = [dist.new_group([r]) for r in range(RANKS)][rank]
    ddp = DistributedDataParallel(model, process_group=group)
    train(torch.compile(ddp, backend="eager") if how == "compiled" else ddp, model[1], rank)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("never", "call isoload.layer.ignore_in_ddp(model) before DistributedDataParallel(model)"),
        ("compiled", "call isoload.layer.ignore_in_ddp(model) before DistributedDataParallel(model)"),
        ("by hand", "call isoload.layer.ignore_in_ddp(model) before DistributedDataParallel(model)"),
        (
            "function",
            "model must have its experts' Parameters in its MoE layers, got a layer of a Shard given as",
        ),
        ("function, never", "call isoload.layer.ignore_in_ddp(model) before DistributedDataParallel(model)"),
        ("group", "must run over the layer's 2 ranks and the ranks with 0 copies of its experts, got 1: "),
    ],
)
def test_forgetting_it_is_loud(how: str, message: str) -> None:
    """Regression: experts became those of rank 0, and their gradients were added up once more."""
    for outcome in rank_outcomes(forgotten, RANKS, how, group_timeout=10.0):
        assert outcome.error is not None and "ValueError: " in outcome.error and message in outcome.error, (
            outcome
        )


def all_ranks_in_every_process(rank: int) -> None:
    model = make_model(local=True)
    kept = copy.deepcopy(model.state_dict())
    ddp = DistributedDataParallel(isoload.layer.ignore_in_ddp(model))
    assert not model._ddp_params_and_buffers_to_ignore
    rows = list(batches(rank))[:RANKS]
    model[1].refresh_replicas()  # DistributedDataParallel wrote the Parameters
    ddp.module[1](rows)[0].sum().backward()
    assert kept.keys() == model.state_dict().keys()


def test_layers_with_all_ranks_in_a_process_are_reduced() -> None:
    run_ranks(all_ranks_in_every_process, RANKS)
