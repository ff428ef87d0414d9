"""Trains a transformers MoE model under expert parallelism, with transformers' own exchange and with isoload's.

    torchrun --nproc-per-node 2 examples/finetune_transformers.py                 # a tiny random Qwen3-MoE, on CPU
    torchrun --nproc-per-node 8 examples/finetune_transformers.py --model FOLDER  # a checkpoint on this machine
    torchrun --nproc-per-node 8 examples/finetune_transformers.py --model FOLDER --steps 20 --sequences 8 --length 2048

Every rank has sequences of its own, of the manual that comes with Python, and its part of the experts. Both runs start
from the same checkpoint and see the same sequences, so their losses are equal up to rounding; what differs is the load
of the busiest rank. From three steps on it prints tokens per second of all ranks, by the median of the steps behind the
second, each as long as the slowest rank's; on GPUs also the most memory that a rank's tensors took. Optimizer states
are sharded as the weights are, and not offloaded, as those of LLEP's Figure 5 are (ZeRO-3).
"""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pydoc_data.topics import topics
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed import DistributedConfig

from isoload.engines import huggingface

LEARNING_RATE, FIRST = 1e-3, 2  # steps that are not timed
ON_A_CPU = (
    "The tokens per second above are no claim. On a CPU all ranks share the cores, so that a rank which waits costs "
    "nothing, and planning a batch takes longer than products of experts this small. This run shows losses and loads; "
    "measure the speed on GPUs, with a real model."
)


@dataclass
class Text:
    """Tokens of the manual, in sequences of `length`; every rank and step has `sequences` others."""

    tokens: torch.Tensor
    sequences: int
    length: int

    def batch(self, step: int, rank: int, ranks: int) -> torch.Tensor:
        """[sequences, length]; from the front again where the text ends."""
        number = self.sequences * self.length
        first = (step * ranks + rank) * number
        return self.tokens[torch.arange(first, first + number) % len(self.tokens)].view(-1, self.length)


@dataclass
class Run:
    """losses of steps; busiest rank over the mean by layer, of the last step; seconds of steps; bytes, 0 on a CPU."""

    losses: list[float]
    level: list[str]
    seconds: list[float]
    memory: int


def read_text(folder: str | None) -> torch.Tensor:
    """As bytes, or as the tokens of a checkpoint."""
    text = "\n".join(topics.values())
    return torch.tensor(
        list(text.encode()) if folder is None else AutoTokenizer.from_pretrained(folder).encode(text)
    )


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


def train(folder: str, implementation: str, steps: int, text: Text) -> Run:
    """Of all ranks: mean losses, the slowest rank's seconds, the most memory."""
    ranks, rank, gpu = dist.get_world_size(), dist.get_rank(), torch.cuda.is_available()
    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation=implementation)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    losses, seconds = [], []
    chosen: dict[torch.nn.Module, torch.Tensor] = {}  # by experts, [T, K] of this rank's last batch
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.register_forward_pre_hook(lambda module, args: chosen.update({module: args[1]}))
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        ids = text.batch(step, rank, ranks).to(model.device)
        dist.barrier()
        start = time.perf_counter()
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(float(mean))  # waits for the step
        seconds.append(time.perf_counter() - start)
    most = torch.tensor(
        [*seconds, torch.cuda.max_memory_allocated() if gpu else 0], dtype=torch.float64, device=model.device
    )
    dist.all_reduce(most, dist.ReduceOp.MAX)
    *seconds, memory = most.tolist()
    if layers := huggingface.layers(model):
        plans = [layer.last_plan for layer in layers]
        level = [f"{int(plan.peak) * ranks / int(plan.quota.sum()):.3f}" for plan in plans]
    else:
        level = [at_home(topk_ids, model.config.num_experts, ranks) for topk_ids in chosen.values()]
    return Run(losses, level, seconds, int(memory))


def at_home(topk_ids: torch.Tensor, num_experts: int, ranks: int) -> str:
    """The busiest rank over the mean where each computes its own experts, as they lie in order."""
    loads = torch.bincount(topk_ids.flatten(), minlength=num_experts)
    dist.all_reduce(loads)
    per_rank = loads.view(ranks, -1).sum(1)
    return f"{int(per_rank.max()) * ranks / int(loads.sum()):.3f}"


def show(implementation: str, run: Run, tokens: int) -> None:
    """tokens: of all ranks in a step."""
    shown = f"busiest rank over the mean, by layer: {', '.join(run.level)}"
    print(f"{implementation:10} loss {' '.join(f'{loss:.5f}' for loss in run.losses)}; {shown}")
    if timed := run.seconds[FIRST:]:
        memory = f", {run.memory / 1e9:.2f} GB at most" if run.memory else ""
        print(f"{implementation:10} {tokens / median(timed):.0f} tokens per second{memory}")


def main(
    model: Annotated[
        str | None, typer.Option(help="A folder with a MoE checkpoint and its tokenizer.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps; the first two are not timed.")] = 5,
    sequences: Annotated[int, typer.Option(min=1, help="Of every rank and step.")] = 4,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 32,
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
    text = Text(read_text(model), sequences, length)
    for implementation in ("all_to_all", "isoload"):
        run = train(folder, implementation, steps, text)
        if dist.get_rank() == 0:
            show(implementation, run, dist.get_world_size() * sequences * length)
    if dist.get_rank() == 0 and steps > FIRST and not torch.cuda.is_available():
        print(ON_A_CPU)
    dist.barrier()
    if model is None and dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
