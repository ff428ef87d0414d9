"""Trains a tiny MoE language model over four CPU processes, once per policy, and compares the policies.

    python examples/train_tiny.py                                         # starts four processes itself; a minute
    torchrun --nproc-per-node 4 examples/train_tiny.py                    # or torchrun does
    python examples/train_tiny.py --policies none,llep:min_chunk=8,exact --replicas 1
    python examples/train_tiny.py --layers 6 --policies none              # predicts choices a layer ahead, too

A model over bytes of docs/policies.md: blocks of causal attention and an isoload.MoE with a trainable router.
Every rank has sequences of its own (data parallel) and its part of the experts (expert parallel). Three rules make
that one training run, see :func:`global_gradients`:

1. An expert's gradient is complete on its own rank: the layer brought it the tokens of all ranks. Leave it alone.
2. Every other Parameter has a copy on every rank, whose gradients are added up, so the copies stay equal.
3. Each rank's mean loss is divided by R, so that both are gradients of the mean over all ranks' tokens.

(To clip gradients, add the experts' squared norms up over the ranks first.) No loss term levels the experts, and
routers start sharp, with weights from N(0, 1): loads are skewed, and nothing but the policy levels the ranks.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

# Read when torch is loaded; without them the profiler, which measures memory, announces itself on stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
import typer
from torch import Tensor, nn

import isoload
from isoload.layer.routers import Gate, Router
from isoload.policies import parse_policy
from isoload.transport import Transport
from isoload.weights.borrowing import NUM_BUFFERS
from tiny_measure import (
    Meter,
    Run,
    largest_difference,
    peak_bytes,
    prediction_accuracy,
    print_bars,
    report,
    save_routing,
)

TEXT = Path(__file__).parents[1] / "docs" / "policies.md"
EXPERTS, TOP_K = 16, 2
HIDDEN, INNER, HEADS = 64, 128, 4
SEQUENCES, LENGTH = 8, 64  # of every rank and step
LEARNING_RATE = 3e-3
FRESH_BATCHES = 8  # after training, that the last model is measured on
POLICIES = "none,llep:min_chunk=1:threshold=1"


class Block(nn.Module):
    """Causal attention, then the MoE layer. x [B, T, H] -> [B, T, H]."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))
        attended = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.moe(self.norms[1](x).flatten(0, 1)).view_as(x)  # the layer takes rows [B * T, H]


class TinyLM(nn.Module):
    """Bytes [B, T] -> logits [B, T, 256]."""

    def __init__(self, moes: list[nn.Module]) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.Sequential(*map(Block, moes))
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens) + self.place.weight[: tokens.shape[1]]))


@dataclass(frozen=True)
class Settings:
    """What the command line says; checked when made, before any process starts."""

    layers: int
    steps: int
    policies: tuple[str, ...]
    ranks: int
    dtype: str
    seed: int
    spare_slots: int
    replicas: int
    save: Path | None
    text: Path

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.ranks < 1 or EXPERTS % self.ranks:
            raise ValueError(f"ranks must divide the {EXPERTS} experts, got {self.ranks}")
        if self.dtype not in ("float64", "float32"):
            raise ValueError(f"dtype must be float64 or float32, got {self.dtype!r}")
        if self.replicas < 0:
            raise ValueError(f"replicas must be at least 0, got {self.replicas}")
        if self.spare_slots + self.replicas < 1:  # the layer would not plan, and there is nothing to compare
            raise ValueError(f"spare_slots must be at least 1 without replicas, got {self.spare_slots}")
        if self.save is not None and (self.save.suffix != ".npz" or not self.save.parent.is_dir()):
            raise ValueError(f"save must be an .npz in a folder that exists, got {str(self.save)!r}")
        if len(self.data) <= LENGTH:
            raise ValueError(f"text must have more than {LENGTH} bytes, got {len(self.data)}")
        placement, loads = self.placement(), torch.ones(self.ranks, EXPERTS, dtype=torch.int32)
        for policy in self.policies:
            name, options = parse_policy(policy)
            plan = isoload.plan(loads, placement, 0, name, **options)  # refuses what it cannot plan
            if plan.quota is None:
                raise ValueError(f"policies must plan quotas, {name} samples")

    @cached_property
    def data(self) -> Tensor:
        """The text's bytes [N]."""
        return torch.from_numpy(np.fromfile(self.text, dtype=np.uint8))

    def placement(self) -> isoload.Placement:
        """Slot p holds expert p mod E, spare slots nothing; the same under all policies."""
        size = EXPERTS // self.ranks + self.replicas + self.spare_slots
        topology, counts = isoload.Topology(self.ranks), torch.ones(self.layers, EXPERTS)
        return isoload.place(counts, topology, size, "trivial", spare_slots=self.spare_slots)

    def batch(self, step: int, rank: int) -> Tensor:
        """[SEQUENCES, LENGTH + 1] bytes: the same for all policies, others for every rank."""
        draw = torch.Generator().manual_seed((self.seed * 1_000_000 + step) * self.ranks + rank)
        starts = torch.randint(len(self.data) - LENGTH, (SEQUENCES, 1), generator=draw)
        return self.data[starts + torch.arange(LENGTH + 1)].long()


def make_model(settings: Settings, policy: str, transport: Transport) -> TinyLM:
    """The model of one rank: the seed gives the same weights to all ranks and policies."""
    torch.manual_seed(settings.seed)
    dtype, placement = getattr(torch, settings.dtype), settings.placement()
    name, options = parse_policy(policy)
    moes: list[nn.Module] = []
    for layer in range(settings.layers):
        gate = Gate(Router(EXPERTS, TOP_K, renormalise=True), torch.randn(EXPERTS, HIDDEN, dtype=dtype))
        dense = isoload.ExpertWeights.random(EXPERTS, HIDDEN, INNER, dtype=dtype)
        moes.append(isoload.MoE(gate, dense, transport, placement, layer, name, **options))
    return TinyLM(moes).to(dtype)


def global_gradients(model: TinyLM, tokens: Tensor) -> float:
    """Backward of the mean loss over the tokens of all ranks; returns that mean. All ranks together."""
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss = loss / dist.get_world_size()  # every rank has as many tokens
    loss.backward()
    experts = {p for block in model.blocks for p in block.moe.expert_parameters()}
    for parameter in model.parameters():
        if parameter not in experts:
            dist.all_reduce(parameter.grad)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def train_step(model: TinyLM, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    """One step on this rank's sequences [B, T + 1]; returns the mean loss over all ranks before it."""
    loss = global_gradients(model, tokens)
    optimizer.step()
    optimizer.zero_grad()
    for block in model.blocks:
        block.moe.refresh_replicas()  # nothing to do without replicas
    return loss


def train(settings: Settings, policy: str, rank: int) -> tuple[TinyLM, Run]:
    """Trains under one policy, from the start; measures the memory of the last step."""
    transport, meter = isoload.CollectiveTransport(isoload.Topology(settings.ranks)), Meter()
    model = make_model(settings, policy, transport)
    hooks = [block.moe.register_forward_hook(meter) for block in model.blocks]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = [train_step(model, optimizer, settings.batch(n, rank)) for n in range(settings.steps - 1)]
    last = settings.batch(settings.steps - 1, rank)
    peak = peak_bytes(lambda: losses.append(train_step(model, optimizer, last)))
    for hook in hooks:
        hook.remove()
    return model, Run.gather(losses, meter, transport.group.traffic.bytes, peak)


def run_rank(rank: int, settings: Settings, store: str | None = None) -> None:
    """One process: trains under every policy; rank 0 prints and saves. store: None = torchrun's."""
    torch.set_num_threads(1)
    init = None if store is None else f"file://{store}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=settings.ranks)
    runs = {}
    for policy in settings.policies:
        start = time.monotonic()
        model, runs[policy] = train(settings, policy, rank)
        if rank == 0:
            print(f"{policy}: {settings.steps} steps in {time.monotonic() - start:.0f} s", file=sys.stderr)
    fresh = [settings.batch(settings.steps + n, rank)[:, :-1] for n in range(FRESH_BATCHES)]
    if settings.save is not None:
        save_routing(settings.save, model, fresh, EXPERTS)
    accuracy = None
    if settings.layers > 2:
        norms = [block.norms[1] for block in model.blocks]
        accuracy = prediction_accuracy(model, norms, fresh, EXPERTS)
    if rank == 0:
        pool = (
            NUM_BUFFERS * settings.spare_slots * 3 * HIDDEN * INNER * getattr(torch, settings.dtype).itemsize
        )
        title = f"{settings.steps} steps, {settings.ranks} ranks, {settings.dtype}"
        print_bars(runs)
        report(runs, title, f"weights, optimizer and spare pool ({pool / 1e6:.2f} MB of a rank)")
        print(f"largest difference between the loss curves: {largest_difference(list(runs.values())):.1e}")
        if accuracy is not None:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in accuracy.items())
            print(f"accuracy a layer ahead, mean of layers 1..{settings.layers - 1}: {shares}")
    dist.barrier()
    dist.destroy_process_group()


def option(text: str) -> Any:
    return typer.Option(help=text)


def main(
    layers: Annotated[int, option("L, blocks; of more than 2 the accuracy of predictions, too.")] = 2,
    steps: Annotated[int, option("Steps of the optimizer.")] = 60,
    policies: Annotated[str, option("Names, with options as name:option=value.")] = POLICIES,
    ranks: Annotated[int, option("R, processes to start; under torchrun its own.")] = 4,
    dtype: Annotated[str, option("float64 or float32.")] = "float64",
    seed: Annotated[int, option("Of weights and batches.")] = 0,
    spare_slots: Annotated[int, option("Slots of every rank for borrowed experts.")] = 2,
    replicas: Annotated[int, option("Slots of every rank for replicas.")] = 0,
    save: Annotated[
        Path | None, option("Write what the last model's routers see and choose, an .npz.")
    ] = None,
    text: Annotated[Path, option("What is learned.")] = TEXT,
) -> None:
    """Train a tiny MoE language model over local processes, once per policy, and compare."""
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", ranks))
    try:
        names = tuple(policies.split(","))
        settings = Settings(layers, steps, names, ranks, dtype, seed, spare_slots, replicas, save, text)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if "RANK" in os.environ:
        run_rank(int(os.environ["RANK"]), settings)
        return
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(run_rank, (settings, f"{folder}/store"), ranks, start_method="fork")


if __name__ == "__main__":
    typer.run(main)
