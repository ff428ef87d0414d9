"""torchtitan's RoutedExperts with isoload's dispatcher: outputs and gradients of a dense layer, and what is refused.

Runs with torchtitan where it is installed (`make test-torchtitan`), else with a double of its signatures.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

import isoload
from support import torchtitan_double
from support.processes import run_ranks

with torchtitan_double.importable():
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from isoload.engines import torchtitan

RANKS, EXPERTS, TOP_K, WIDTH, INNER, TOKENS = 4, 8, 2, 6, 5, 12
POLICIES: dict[str, dict[str, Any]] = {
    "llep": {"min_chunk": 1, "threshold": 1.0},
    "spill_cost": {"expert_bytes": 10.0, "min_chunk": 1},
    "exact": {},
    "none": {},
}


class Experts(nn.Module):
    """The Parameters and arguments of GroupedExperts, in float64: its grouped GEMM is bfloat16 alone."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        for name, shape in {
            "w1_EFD": (INNER, WIDTH),
            "w2_EDF": (WIDTH, INNER),
            "w3_EFD": (INNER, WIDTH),
        }.items():
            weight = torch.randn(EXPERTS, *shape, generator=draw, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        w1, w2, w3 = (
            weight.to_local() if hasattr(weight, "to_local") else weight for weight in self.parameters()
        )
        parts = x_RD.split(num_tokens_per_expert_E.tolist())
        outputs = [(F.silu(part @ w1[i].T) * (part @ w3[i].T)) @ w2[i].T for i, part in enumerate(parts)]
        return torch.cat(outputs)


def dense(experts: Experts, x: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
    w1, w2, w3 = experts.parameters()
    results = (F.silu(x @ w1.mT) * (x @ w3.mT)) @ w2.mT  # [E, T, D]
    one_hot = F.one_hot(ids, EXPERTS).to(x)  # [T, K, E]
    return torch.einsum("tke,tk,etd->td", one_hot, scores.to(x), results)


def routed(mesh: Any, count: int | None = None) -> Any:
    """A RoutedExperts as torchtitan has parallelized it: Parameters sharded by experts, the dispatcher has the mesh."""
    layer = RoutedExperts.__new__(RoutedExperts)
    nn.Module.__init__(layer)
    layer.inner_experts = Experts()
    config = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
    layer.token_dispatcher = AllToAllTokenDispatcher(config)
    if mesh is not None:
        for name, weight in list(layer.inner_experts.named_parameters()):
            sharded = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)]))
            layer.inner_experts.register_parameter(name, sharded)
        layer.token_dispatcher.wire_meshes(ep_mesh=mesh)
    return layer


def batch(rank: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, scores and skewed ids of a rank."""
    draw = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(1, tokens, WIDTH, generator=draw, dtype=torch.float64)
    scores = torch.rand(1, tokens, TOP_K, generator=draw)  # float32, as torchtitan's router has them
    chances = torch.tensor([9.0, 5, 1, 1, 1, 1, 1, 1]).expand(tokens, -1)
    return x, scores, torch.multinomial(chances, TOP_K, generator=draw).view(1, tokens, TOP_K)


def replicas() -> isoload.Placement:
    """Experts in order, and a replica of the next rank's first one on every rank."""
    slots = [[2 * rank, 2 * rank + 1, (2 * rank + 2) % EXPERTS] for rank in range(RANKS)]
    homes = [[expert // 2 * 3 + expert % 2 for expert in range(EXPERTS)]]
    return isoload.Placement(
        torch.tensor([slots], dtype=torch.int32).view(1, -1),
        isoload.Topology(RANKS),
        EXPERTS,
        home_slot=torch.tensor(homes, dtype=torch.int32),
    )


def body(rank: int, policy: str, steps: int) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    layer, whole = routed(mesh), Experts()
    placement = None if isoload.POLICIES[policy]().borrows else replicas()
    (dispatcher,) = torchtitan.balance(layer, policy, placement=placement, **POLICIES[policy])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (layer, whole)]
    for step in range(steps):
        # A rank without tokens in the second step, which torchtitan itself never has.
        tokens = int(torchtitan_double.INSTALLED) if (step, rank) == (1, 2) else TOKENS
        x, scores, ids = batch(rank, tokens)
        x, scores = x.requires_grad_(), scores.requires_grad_()
        x_dense, scores_dense = (value.detach().clone().requires_grad_() for value in (x, scores))
        expected = dense(whole, x_dense[0], scores_dense[0], ids[0])
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        output = layer(x, scores, ids, counts)
        torch.testing.assert_close(output[0], expected)
        for optimizer in optimizers:
            optimizer.zero_grad()
        for result in (output, expected):
            result.square().sum().backward()
        torch.testing.assert_close(x.grad, x_dense.grad)
        torch.testing.assert_close(
            scores.grad, scores_dense.grad, rtol=1e-5, atol=1e-5
        )  # weights are float32
        for (name, weight), full in zip(
            layer.inner_experts.named_parameters(), whole.parameters(), strict=True
        ):
            dist.all_reduce(full.grad)  # the dense layer has this rank's tokens alone
            own = full.grad[2 * rank : 2 * rank + 2]
            torch.testing.assert_close(weight.grad.to_local(), own, msg=lambda m, n=name: n + m)
        for optimizer in optimizers:
            optimizer.step()
    plan, loads = dispatcher.balancer.last_plan, dispatcher.balancer.last_loads
    peak = None if plan is None or plan.peak is None else int(plan.peak)
    return peak, int(loads.sum(0).view(RANKS, -1).sum(1).max()), dispatcher.group.traffic.bytes["borrow"]


@pytest.mark.parametrize("policy", POLICIES)
def test_three_steps_equal_those_of_a_dense_layer(policy: str) -> None:
    ((peak, stock, borrowed), *others) = run_ranks(body, RANKS, policy, 3)
    if policy in ("llep", "spill_cost"):
        assert peak < stock and borrowed + sum(other[2] for other in others) > 0
    assert all(other[0] == peak for other in others)


def refusals(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    found = []

    def refused(layer: Any, **options: Any) -> None:
        with pytest.raises(ValueError) as error:
            torchtitan.balance(layer, **options)
        found.append(str(error.value))

    refused(nn.Linear(1, 1))
    refused(routed(None))
    whole = routed(mesh)
    whole.inner_experts = Experts()
    refused(whole)
    for name, value in (("pad_multiple", 16), ("non_blocking_capacity_factor", 0.5), ("cudagraphable", True)):
        layer = routed(mesh)
        setattr(layer.token_dispatcher, name, value)
        refused(layer)
    topology = isoload.Topology(2)
    reverse = torch.arange(EXPERTS - 1, -1, -1, dtype=torch.int32).view(1, -1)
    refused(routed(mesh), placement=isoload.Placement(reverse, topology, EXPERTS))
    few = torch.arange(4, dtype=torch.int32).view(1, -1)
    refused(routed(mesh), placement=isoload.Placement(few, topology, 4))
    refused(routed(mesh), policy="llep" if rank else "spill_cost")
    return found


def test_what_is_refused_on_all_ranks() -> None:
    first, second = run_ranks(refusals, 2)
    assert first[:6] == second[:6] == [
        "model must have a RoutedExperts, got a Linear without",
        "model must be parallelized over experts, got a AllToAllTokenDispatcher without a mesh: pass "
        "--parallelism.expert_parallel_degree",
        "experts must have Parameters [4, ...] on this rank, got w1_EFD [8, 5, 6] in a Experts: apply isoload after "
        "torchtitan has parallelized the model",
        "pad_multiple must be None, as for experts that are not quantised, got 16",
        *2 * ["AllToAllTokenDispatcher must not have a fixed capacity: pass comm_backend='standard'"],
    ]  # fmt: skip
    assert "placement must have the layer's experts [0, 1, 2, 3] as home experts of rank 0, got" in first[6]
    assert "placement must be of the layer's 8 experts and no shared experts, got 4 and 0" in first[7]
    assert "policy" in first[8] and "policy" in second[8]


def test_borrowed_experts_are_computed_by_the_same_module() -> None:
    experts = Experts()
    stacks = torchtitan.StackedExperts(experts, EXPERTS)
    copies = torch.randn(7, WIDTH, dtype=torch.float64)
    ends = [3, 3, 7]
    lent = [torch.stack([weight[i] for i in (5, 0, 2)]) for weight in experts.parameters()]
    same = functional_call(
        experts, dict(zip(stacks.names, lent, strict=True)), (copies, torch.tensor([3, 0, 4]))
    )
    assert torch.equal(stacks.run(copies, ends, lent), same)
    assert [list(weight.shape) for weight in stacks.weights(3)] == [
        [INNER, WIDTH],
        [WIDTH, INNER],
        [INNER, WIDTH],
    ]


@pytest.mark.skipif(not torchtitan_double.INSTALLED, reason="needs torchtitan")
def test_the_base_class_is_torchtitans() -> None:
    from torchtitan.models.common.moe import GroupedExperts

    from isoload.engines.seams import read_seams

    assert [seam.fault() for seam in read_seams("torchtitan")] == [None] * len(read_seams("torchtitan"))
    config = GroupedExperts.Config(dim=16, hidden_dim=16, num_experts=4)
    experts = GroupedExperts(config)
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.1)
    stacks = torchtitan.StackedExperts(experts, 4)
    copies = torch.randn(6, 16, dtype=torch.bfloat16)
    own = experts(copies, torch.tensor([2, 0, 3, 1]))
    assert torch.equal(stacks.run(copies, [2, 2, 5, 6], list(experts.parameters())), own)


@pytest.mark.skipif(not torchtitan_double.INSTALLED, reason="needs torchtitan")
def test_the_example_levels_the_ranks() -> None:
    example = Path(__file__).parents[2] / "examples" / "torchtitan_layer.py"
    shown = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, check=True).stdout
    shares = {name: float(share) for name, share in re.findall(r"(\w+): loss .* ([\d.]+) of the mean", shown)}
    assert shares["none"] > 2 and shares["llep"] == 1
