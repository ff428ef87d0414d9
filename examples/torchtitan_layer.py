"""Trains a tiny model with a torchtitan layer over four CPU processes, without isoload and with it.

    pip install torchtitan==0.3.0
    python examples/torchtitan_layer.py

The router prefers two of eight experts, so one rank has most of the work. isoload replaces the token dispatcher of
torchtitan's RoutedExperts; the model, its Parameters and its optimizer do not change. Both runs start with the same
weights and see the same batches. Their losses agree as far as bfloat16 allows; the number of copies that the busiest
rank computes differs.
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from isoload.engines import torchtitan

RANKS, EXPERTS, TOP_K, WIDTH, INNER, TOKENS, STEPS = 4, 8, 2, 32, 64, 256, 20


class TinyModel(nn.Module):
    """A router and routed experts: rows [1, T, WIDTH] -> rows of that shape."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same weights on all ranks and in both runs
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.router.bias.data[:2] += 2.0  # the skew
        dispatcher = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOP_K)
        experts = GroupedExperts.Config(dim=WIDTH, hidden_dim=INNER, num_experts=EXPERTS)
        self.routed_experts = RoutedExperts.Config(inner_experts=experts, token_dispatcher=dispatcher).build()
        # What torchtitan's parallelize does for a model with --parallelism.expert_parallel_degree 4:
        inner = self.routed_experts.inner_experts
        for name, weight in list(inner.named_parameters()):
            sharded = distribute_tensor(nn.init.normal_(weight.data, std=0.1), mesh, [Shard(0)])
            inner.register_parameter(name, nn.Parameter(sharded))
        self.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(TOP_K)
        return x + self.routed_experts(x, scores, ids, ids.flatten().bincount(minlength=EXPERTS))


def train(rank: int, store: str) -> None:
    """Train in one process, first without a plan, then with experts that follow the load."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    for policy, options in (("none", {}), ("llep", {"threshold": 1.0, "min_chunk": 1})):
        model = TinyModel(mesh)
        (dispatcher,) = torchtitan.balance(model, policy, spare_slots=2, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            torch.manual_seed(step * RANKS + rank)
            x = torch.randn(1, TOKENS, WIDTH)
            loss = F.mse_loss(model(x), x.flip(-1)) / RANKS  # of the mean over all ranks
            loss.backward()
            for weight in model.router.parameters():  # experts' gradients are complete on their ranks
                dist.all_reduce(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss)
        busiest = int(dispatcher.balancer.last_plan.peak)
        if rank == 0:
            ideal = TOKENS * TOP_K  # copies of a rank if all ranks have as many
            print(
                f"{policy}: loss {loss.item():.2f}, busiest rank {busiest} copies, {busiest / ideal:.2f} of the mean"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(train, (f"{folder}/store",), RANKS, start_method="spawn")
