"""The norm of gradients over ranks: each expert and each copy once, the same on all ranks, as in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import isoload
from isoload.layer import clip_grad_norm_
from isoload.weights.experts import ExpertWeights
from isoload.weights.shard import Shard
from support.processes import rank_outcomes, run_ranks

EXPERTS, HIDDEN, RANKS = 8, 8, 2


class Model(nn.Module):
    """A linear map, a layer whose busiest expert has replicas, and a linear map."""

    def __init__(self, local: bool, shard: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        topology = isoload.Topology(RANKS)
        self.first, self.last = (nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(2))
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.float64)
        placement = isoload.place(torch.arange(EXPERTS)[None] + 1, topology, slots_per_rank=5)
        experts = ExpertWeights.random(EXPERTS, HIDDEN, 6, dtype=torch.float64)
        transport = (isoload.LocalTransport if local else isoload.CollectiveTransport)(topology)
        given: ExpertWeights | Shard = experts
        if shard:
            own = placement.home_experts(0, dist.get_rank())
            here = ExpertWeights(**{name: nn.Parameter(s[own]) for name, s in experts.stacks().items()})
            given = Shard(own, lambda: here)
        self.layer = isoload.MoE(self.choose, given, transport, placement)

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(rows).softmax(-1).topk(2)
        return ids, weights

    def forward(self, rows: list[Tensor]) -> Tensor:
        return torch.cat([self.last(y) for y in self.layer([self.first(row) for row in rows])])


def rows_of(rank: int) -> Tensor:
    return torch.randn(6, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def in_one_process() -> tuple[float, Model]:
    """The norm that torch finds where every Parameter is there once, and the model, clipped."""
    model = Model(local=True)
    (model([rows_of(rank) for rank in range(RANKS)]) ** 2).sum().backward()
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)), model


def over_processes(rank: int, sharded: bool) -> tuple[float, list[Tensor], dict[str, Tensor]]:
    model = Model(local=False)
    if sharded:
        for module in (model.first, model):
            fully_shard(module, ignored_params=set(model.layer.expert_parameters()))
            module.set_gradient_divide_factor(1.0)
    (model([rows_of(rank)]) ** 2).sum().backward()
    experts = set(model.layer.expert_parameters())
    others = {name: p for name, p in model.named_parameters() if p not in experts}
    for parameter in others.values():
        if not sharded:
            dist.all_reduce(parameter.grad)
    norm = clip_grad_norm_(model, 0.5)
    whole = {n: p.grad.full_tensor() if sharded else p.grad for n, p in others.items()}
    return float(norm), [p.grad for p in model.layer.expert_parameters()], whole


@pytest.mark.parametrize("sharded", [False, True])
def test_the_norm_over_processes_is_that_of_one_process(sharded: bool) -> None:
    wanted, model = in_one_process()
    outcomes = run_ranks(over_processes, RANKS, sharded)
    assert outcomes[0][0] == pytest.approx(wanted, rel=1e-12)
    assert outcomes[0][0] == outcomes[1][0], "the same bits on all ranks"
    named = dict(model.named_parameters())
    for (_, experts, others), weights in zip(outcomes, model.layer.weights, strict=True):
        for got, parameter in zip(experts, weights.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-12)
        for name, got in others.items():
            torch.testing.assert_close(got, named[name].grad, rtol=1e-9, atol=1e-12)


def test_virtual_ranks_have_the_norm_that_torch_finds() -> None:
    wanted, _ = in_one_process()
    model = Model(local=True)
    (model([rows_of(rank) for rank in range(RANKS)]) ** 2).sum().backward()
    assert float(clip_grad_norm_(model, 0.5)) == pytest.approx(wanted, rel=1e-12)


def with_a_function(rank: int) -> None:
    clip_grad_norm_(Model(local=False, shard=True), 1.0)


def test_experts_registered_elsewhere_are_refused() -> None:
    for outcome in rank_outcomes(with_a_function, RANKS):
        assert "layer must have its experts' Parameters to clip their gradients, got a Shard" in str(
            outcome.error
        )
