"""The norm of gradients over ranks: each expert and each copy once, the same on all ranks, as in one process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as SplitOver

import isoload
from isoload.engines.huggingface import BalancedTraining, shared_scaler
from isoload.layer import clip_grad_norm_, ignore_in_ddp
from isoload.weights.experts import ExpertWeights
from isoload.weights.shard import Shard, local_part
from support.processes import rank_outcomes, run_ranks
from support.sweeps import slow

EXPERTS, HIDDEN, RANKS = 8, 8, 2


class Model(nn.Module):
    """A linear map, a layer whose busiest expert has replicas, and a linear map."""

    def __init__(self, local: bool, shard: str = "", mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(2)
        topology = isoload.Topology(RANKS)
        self.first, self.last = (nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(2))
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False, dtype=torch.float64)
        placement = isoload.place(torch.arange(EXPERTS)[None] + 1, topology, slots_per_rank=5)
        experts = ExpertWeights.random(EXPERTS, HIDDEN, 6, dtype=torch.float64)
        group = () if mesh is None else (mesh.get_group(),)
        transport = (isoload.LocalTransport if local else isoload.CollectiveTransport)(topology, *group)
        given: ExpertWeights | Shard = experts
        if shard:
            own = placement.home_experts(0, dist.get_rank(*group))
            stacks = {name: stack[own] for name, stack in experts.stacks().items()}
            if shard == "DTensors":
                assert mesh is not None
                stacks = {name: DTensor.from_local(s, mesh, [SplitOver(0)]) for name, s in stacks.items()}
            here = ExpertWeights(**{name: nn.Parameter(s) for name, s in stacks.items()})
            given = Shard(own, (lambda: here) if shard == "function" else here)
        self.layer = isoload.MoE(self.choose, given, transport, placement)

    def choose(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(rows).softmax(-1).topk(2)
        return ids, weights

    def forward(self, rows: list[Tensor]) -> Tensor:
        return torch.cat([self.last(y) for y in self.layer([self.first(row) for row in rows])])


def rows_of(rank: int) -> Tensor:
    return torch.randn(6, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def in_one_process(batches: int = RANKS) -> tuple[float, Model]:
    """The norm that torch finds where every Parameter is there once, and the model, clipped."""
    model = Model(local=True)
    rows = [torch.cat([rows_of(i) for i in range(rank, batches, RANKS)]) for rank in range(RANKS)]
    (model(rows) ** 2).sum().backward()
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


# Over 2 groups of 2 ranks: the meshes over which the first module and the rest are sharded; "" = plain, all-reduced.
MESHES = {
    "plain": ("", ""),
    "world": ("world", "world"),
    "hybrid": ("both", "both"),
    "several": ("world", "both"),
}


def over_groups(rank: int, how: str, shard: str) -> tuple[float, float, Tensor]:
    """Norm before and after, and the largest distance from the gradients of one process."""
    both = init_device_mesh("cpu", (2, RANKS), mesh_dim_names=("copies", "experts"))
    meshes = {"world": init_device_mesh("cpu", (2 * RANKS,)), "both": both}
    model = Model(local=False, shard=shard, mesh=both["experts"])
    experts = set(model.layer.expert_parameters())
    if how != "plain":
        ignore_in_ddp(model, copies=both["copies"].get_group())
    for module, over in zip((model.first, model), MESHES[how], strict=True):
        if over:
            fully_shard(module, mesh=meshes[over], ignored_params=experts)
    losses = 1 if how == "plain" else 2 * RANKS  # of which fully_shard takes the mean
    (model([rows_of(rank)]) ** 2).sum().mul(losses).backward()
    for parameter in model.parameters() if how == "plain" else ():
        assert parameter.grad is not None
        if parameter in experts:
            dist.all_reduce(local_part(parameter.grad), group=both["copies"].get_group())
        elif how == "plain":
            dist.all_reduce(parameter.grad)
    norms = [float(clip_grad_norm_(model, limit)) for limit in (0.5, 1e9)]
    wanted = in_one_process(2 * RANKS)[1]
    named = dict(wanted.named_parameters())
    twins = wanted.layer.weights[rank % RANKS]
    order = torch.tensor(twins.layout.homes).argsort() if shard else slice(None)  # a Shard's experts ascend
    pairs = zip(map(as_plain, model.layer.expert_parameters()), twins.parameters(), strict=True)
    apart = [parameter.grad - twin.grad[order] for parameter, twin in pairs]
    apart += [as_plain(p).grad - named[n].grad for n, p in model.named_parameters() if p not in experts]
    return norms[0], norms[1], torch.stack([difference.abs().max() for difference in apart]).max()


def as_plain(parameter: nn.Parameter) -> nn.Parameter:
    """A Parameter whose gradient is a plain tensor: an expert's local part, or the whole of another Parameter."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor):
        local = gradient.device_mesh.mesh_dim_names == ("experts",)
        gradient = gradient.to_local() if local else gradient.full_tensor()
    plain = nn.Parameter(torch.empty_like(gradient))
    plain.grad = gradient
    return plain


@pytest.mark.parametrize(
    ("how", "shard"),
    [("plain", ""), ("several", "DTensors"), *slow(("world", ""), ("hybrid", ""), ("plain", "DTensors"))],
)
def test_groups_with_copies_of_the_experts_have_the_norm_of_one_process(how: str, shard: str) -> None:
    wanted, _ = in_one_process(2 * RANKS)
    outcomes = run_ranks(over_groups, 2 * RANKS, how, shard)
    for before, after, apart in outcomes:
        assert before == outcomes[0][0] and after == outcomes[0][1], "the same bits on all ranks"
        assert before == pytest.approx(wanted, rel=1e-12)
        assert after == pytest.approx(0.5, rel=1e-5)
        assert apart < 1e-12


def scaled_steps(model: Model, ranks: list[int], scaler: GradScaler, sharded: bool) -> float:
    """Three steps with one overflow, in an expert of rank 0, and with clipping; returns the scale."""
    expert_list = model.layer.expert_parameters()
    others = [p for p in model.parameters() if all(p is not expert for expert in expert_list)]
    optimizers = [torch.optim.AdamW(parameters, lr=0.01) for parameters in (expert_list, others)]
    for step in range(3):
        loss = (model([rows_of(10 * step + rank) for rank in ranks]) ** 2).sum()
        scaler.scale(loss).backward()
        if step == 1 and 0 in ranks:
            assert expert_list[0].grad is not None
            expert_list[0].grad[0, 0, 0] = torch.inf
        for parameter in others if len(ranks) < RANKS and not sharded else ():
            dist.all_reduce(parameter.grad)
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model, 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        model.layer.refresh_replicas()
    return float(scaler.get_scale())


def scaled_over_processes(rank: int, sharded: bool) -> tuple[float, list[Tensor], dict[str, Tensor]]:
    model = Model(local=False)
    experts = set(model.layer.expert_parameters())
    for module in (model.first, model) if sharded else ():
        fully_shard(module, ignored_params=experts)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    scale = scaled_steps(model, [rank], ShardedGradScaler("cpu", init_scale=1024.0), sharded)
    others = {n: p.full_tensor() if sharded else p for n, p in model.named_parameters() if p not in experts}
    return scale, [p.detach() for p in experts], {n: p.detach() for n, p in others.items()}


@pytest.mark.parametrize("sharded", [False, True])
def test_an_overflow_in_one_expert_skips_the_step_on_all_ranks(sharded: bool) -> None:
    model = Model(local=True)
    scale = scaled_steps(model, list(range(RANKS)), GradScaler("cpu", init_scale=1024.0), False)
    named = dict(model.named_parameters())
    for rank, (got, experts, others) in enumerate(run_ranks(scaled_over_processes, RANKS, sharded)):
        assert got == scale == 512.0
        for parameter in experts:
            twins = [p.detach() for p in model.layer.weights[rank].parameters() if p.shape == parameter.shape]
            assert min(float((parameter - twin).abs().max()) for twin in twins) < 1e-12
        for name, parameter in others.items():
            torch.testing.assert_close(parameter, named[name].detach(), rtol=1e-12, atol=1e-12)


def clipped_by_torch(rank: int, how: str) -> None:
    model = Model(local=False)
    (model([rows_of(rank)]) ** 2).sum().backward()
    if how == "torch":
        nn.utils.clip_grad_norm_(model.parameters(), torch.inf)  # only returns a norm
        nn.utils.clip_grad_norm_((p for _, p in model.named_parameters()), max_norm=1.0)
    else:
        Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize("how", ["torch", "accelerate"])
def test_clipping_by_the_norm_of_one_rank_is_refused(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: ranks clipped by different norms, and copies of other Parameters diverged."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for outcome in rank_outcomes(clipped_by_torch, RANKS, how):
        assert "gradients must be clipped by their norm over all ranks: call isoload.clip_grad_norm_" in str(
            outcome.error
        )
    model = Model(local=True)
    (model([rows_of(rank) for rank in range(RANKS)]) ** 2).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def steps_in_half(rank: int | None, policy: str) -> tuple[list[float], Tensor, dict[str, Tensor]]:
    """Four steps in float16; in the second the weights of one expert get an infinite gradient, and nothing else.

    Returns:
        The scale after every step, another Parameter, and the experts; rank None: in one process.
    """
    torch.manual_seed(3)
    topology, ranks = isoload.Topology(RANKS), list(range(RANKS)) if rank is None else [rank]
    placement = isoload.place(
        torch.arange(EXPERTS)[None] + 1, topology, 6, spare_slots=1 + (policy == "none")
    )
    experts = ExpertWeights.random(EXPERTS, HIDDEN, 16)
    transport = (isoload.LocalTransport if rank is None else isoload.CollectiveTransport)(topology)
    if policy == "none":
        placement = isoload.place(torch.ones(1, EXPERTS), topology, placer="trivial")
    how = {"threshold": 1.0, "min_chunk": 1} if policy == "llep" else {}
    layer = isoload.MoE(no_gate, experts, transport, placement, policy=policy, **how)
    other, scaler = nn.Linear(HIDDEN, 1), GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD([*layer.parameters(), *other.parameters()], lr=1e-3)
    scales = []
    for step in range(4):
        rows = [rows_of(10 * step + r).float() for r in ranks]
        ids = [torch.tensor([[1, 2], [2, 3], [4, 5], [5, 6], [7, 4], [7, 3]]) for _ in ranks]
        for r, part, chosen in zip(ranks, rows, ids, strict=True):
            if step == 1 and r == 1:
                part[0] *= 300
                chosen[0] = torch.tensor([0, -1])
        with torch.autocast("cpu", torch.float16):
            outputs = layer.compute(rows, ids, [torch.ones(6, 2) for _ in ranks])
            loss = sum(y.float().sum() + other(torch.ones(2, HIDDEN)).sum() for y in outputs)
        scaler.scale(loss).backward()
        for parameter in other.parameters() if rank is not None else ():
            dist.all_reduce(parameter.grad)
        assert all(bool(p.grad.isfinite().all()) for p in other.parameters())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        layer.refresh_replicas()
        scales.append(scaler.get_scale())
    return scales, other.weight.detach(), {n: s.detach() for n, s in layer.full_experts().items()}


def no_gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("the test makes the choices")


@pytest.mark.parametrize("policy", ["none", "exact", "llep"])
def test_an_overflow_in_one_expert_reaches_the_gradients_of_all_ranks(policy: str) -> None:
    """Regression: with torch's GradScaler ranks ended with different scales and Parameters."""
    scales, other, experts = steps_in_half(None, policy)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    for got, parameter, stacks in run_ranks(steps_in_half, RANKS, policy):
        assert got == scales
        torch.testing.assert_close(parameter, other, rtol=1e-4, atol=1e-6)
        for name, stack in stacks.items():
            torch.testing.assert_close(stack, experts[name], rtol=1e-3, atol=1e-5)


def without_experts(rank: int) -> None:
    placement = isoload.Placement(torch.tensor([[0, 1, -1, -1]]), isoload.Topology(RANKS), 2)
    transport = isoload.CollectiveTransport(isoload.Topology(RANKS))
    layer = isoload.MoE(no_gate, ExpertWeights.random(2, HIDDEN, 16), transport, placement)
    with torch.autocast("cpu", torch.float16):
        layer.compute(torch.ones(1, HIDDEN), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))


def test_a_rank_without_experts_cannot_train_in_half_precision() -> None:
    other, alone = rank_outcomes(without_experts, RANKS, group_timeout=10.0)
    assert "each rank must be the home of an expert to train in float16" in str(alone.error)
    assert "rank 1 failed in stage count" in str(other.error)


class FakeTrainer:
    """As transformers' Trainer in fp16, which needs a GPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=7, backoff_factor=0.25)
        self.accelerator = SimpleNamespace(scaler=scaler)


def in_a_trainer(rank: int) -> tuple[float, int, float]:
    class Trainer(BalancedTraining, FakeTrainer):
        pass

    model = Model(local=False)
    scaler = Trainer(model).accelerator.scaler
    return (
        scaled_steps(model, [rank], scaler, False),
        scaler.get_growth_interval(),
        scaler.get_backoff_factor(),
    )


def test_an_overflow_in_one_expert_skips_the_step_of_a_trainer_on_all_ranks() -> None:
    """Regression: ranks ended with different scales."""
    assert run_ranks(in_a_trainer, RANKS) == [(256.0, 7, 0.25)] * RANKS
    assert shared_scaler(None) is None
    scaler = GradScaler("cpu")
    assert shared_scaler(scaler) is scaler, "of one process"


def test_virtual_ranks_have_the_norm_that_torch_finds() -> None:
    wanted, _ = in_one_process()
    model = Model(local=True)
    (model([rows_of(rank) for rank in range(RANKS)]) ** 2).sum().backward()
    assert float(clip_grad_norm_(model, 0.5)) == pytest.approx(wanted, rel=1e-12)


def with_a_function(rank: int) -> None:
    clip_grad_norm_(Model(local=False, shard="function"), 1.0)


def test_experts_registered_elsewhere_are_refused() -> None:
    for outcome in rank_outcomes(with_a_function, RANKS):
        assert "layer must have its experts' Parameters to clip their gradients, got a Shard" in str(
            outcome.error
        )
