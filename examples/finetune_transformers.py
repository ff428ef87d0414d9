"""Trains a transformers MoE model under expert parallelism, with transformers' own exchange and with isoload's.

    torchrun --nproc-per-node 2 examples/finetune_transformers.py                 # a tiny random Qwen3-MoE, on CPU
    torchrun --nproc-per-node 8 examples/finetune_transformers.py --model FOLDER  # a checkpoint on this machine

Every rank has sequences of its own and its part of the experts. Both runs start from the same checkpoint and see the
same sequences, so their losses are equal up to rounding; what differs is the load of the busiest rank.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from isoload.integrations import huggingface

SEQUENCES, LENGTH, LEARNING_RATE = 4, 32, 1e-3  # of every rank and step


def save_tiny_model(folder: str) -> None:
    """A random checkpoint whose routers prefer a few experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64, intermediate_size=64,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(0, 0.5)
                parameter[:4] *= 3
    model.save_pretrained(folder)


def train(folder: str, implementation: str, steps: int) -> tuple[list[float], list[str]]:
    """Mean losses over all ranks, and the busiest rank over the mean in every layer of the last batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation=implementation)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    draw, losses = torch.Generator().manual_seed(rank), []
    chosen: dict[torch.nn.Module, torch.Tensor] = {}  # by experts, [T, K] of this rank's last batch
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.register_forward_pre_hook(lambda module, args: chosen.update({module: args[1]}))
    for _ in range(steps):
        ids = torch.randint(model.config.vocab_size, (SEQUENCES, LENGTH), generator=draw)
        loss = model(ids.to(model.device), labels=ids.to(model.device)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(float(mean))
    if layers := huggingface.layers(model):
        plans = [layer.last_plan for layer in layers]
        return losses, [f"{int(plan.peak) * ranks / int(plan.quota.sum()):.3f}" for plan in plans]
    return losses, [at_home(topk_ids, model.config.num_experts, ranks) for topk_ids in chosen.values()]


def at_home(topk_ids: torch.Tensor, num_experts: int, ranks: int) -> str:
    """The busiest rank over the mean where each computes its own experts, as they lie in order."""
    loads = torch.bincount(topk_ids.flatten(), minlength=num_experts)
    dist.all_reduce(loads)
    per_rank = loads.view(ranks, -1).sum(1)
    return f"{int(per_rank.max()) * ranks / int(loads.sum()):.3f}"


def main(
    model: Annotated[str | None, typer.Option(help="A folder with a MoE checkpoint.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 5,
) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.set_num_threads(1)
    shared = [tempfile.mkdtemp() if model is None and dist.get_rank() == 0 else model]
    dist.broadcast_object_list(shared)
    folder = str(shared[0])
    if model is None and dist.get_rank() == 0:
        save_tiny_model(folder)
    dist.barrier()
    huggingface.register("isoload", policy="llep", min_chunk=1, threshold=1.0)
    for implementation in ("all_to_all", "isoload"):
        losses, level = train(folder, implementation, steps)
        if dist.get_rank() == 0:
            shown = f"busiest rank over the mean, by layer: {', '.join(level)}"
            print(f"{implementation:10} loss {' '.join(f'{loss:.5f}' for loss in losses)}; {shown}")
    dist.barrier()
    if model is None and dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
