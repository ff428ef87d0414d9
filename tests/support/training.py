"""A small language model with two MoE layers: dense in one process, or over ranks, for tests of training stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import isoload
from isoload.layer.routers import Gate, Router
from isoload.weights.experts import ExpertWeights

EXPERTS, TOP_K, HIDDEN, INNER, WORDS, TOKENS, PARTS = 8, 2, 8, 12, 16, 10, 4

# policy, its options, replicas and spare slots of a rank
POLICIES: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "none": ("none", {}, 0, 0),
    "exact": ("exact", {}, 1, 0),
    "llep": ("llep", {"min_chunk": 1, "threshold": 1.0}, 1, 1),
    "hedge": ("hedge", {}, 0, 2),
}


class Dense(nn.Module):
    """The layer in one process: every expert on the tokens that choose it."""

    def __init__(self, gate: Gate, experts: ExpertWeights) -> None:
        super().__init__()
        self.gate = gate
        self.gate_up, self.down = nn.Parameter(experts.gate_up), nn.Parameter(experts.down)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = self.gate(x)
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, k = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[rows] @ self.gate_up[expert].T).chunk(2, -1)
            out = (F.silu(gate) * up) @ self.down[expert].T
            y = y.index_add(0, rows, out * weights[rows, k, None].to(x.dtype))
        return y


class Block(nn.Module):
    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(HIDDEN, dtype=torch.float64), linear(HIDDEN)
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(x))
        return x + self.moe(x)


class Model(nn.Module):
    def __init__(self, make_layer: Callable[[int, Gate, ExpertWeights], nn.Module] | None = None) -> None:
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(1)
        self.recomputes = False  # activation checkpointing
        self.embed = nn.Embedding(WORDS, HIDDEN, dtype=torch.float64)
        self.head, mixers = linear(WORDS), []
        for number in range(2):
            router = torch.randn(EXPERTS, HIDDEN, dtype=torch.float64) * 1.5
            experts = ExpertWeights.random(EXPERTS, HIDDEN, INNER, dtype=torch.float64)
            gate = Gate(Router(EXPERTS, TOP_K, renormalise=True), router)
            mixers.append((number, gate, experts))
        self.blocks = nn.ModuleList(
            Block(Dense(gate, e) if make_layer is None else make_layer(i, gate, e)) for i, gate, e in mixers
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of words [B, T]."""
        x = self.embed(tokens[:, :-1].flatten())
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return F.cross_entropy(self.head(x), tokens[:, 1:].flatten())


def linear(width: int) -> nn.Linear:
    return nn.Linear(HIDDEN, width, dtype=torch.float64)


def words(step: int, part: int) -> Tensor:
    """Return one of the PARTS of a step's batch."""
    draw = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(WORDS, (2, TOKENS), generator=draw)


def parallel(ranks: int, policy: str, group: Any = None, seed: int = 0, **options: Any) -> Model:
    """Return the model over the ranks of a group; a seed other than 0 scatters the experts' home slots."""
    name, how, replicas, spare = POLICIES[policy]
    loads = torch.ones(2, EXPERTS) if not seed else torch.arange(2 * EXPERTS).view(2, -1).roll(seed, 1) + 1.0
    topology = isoload.Topology(ranks)
    placement = isoload.place(
        loads,
        topology,
        EXPERTS // ranks + replicas + spare,
        placer="eplb" if seed and replicas else "trivial",
        spare_slots=spare,
    )
    transport = isoload.CollectiveTransport(topology, group)
    return Model(lambda i, gate, e: isoload.MoE(gate, e, transport, placement, i, name, **how, **options))


def layers(model: nn.Module) -> list[isoload.MoE]:
    return [module for module in model.modules() if isinstance(module, isoload.MoE)]


def experts_of(model: nn.Module) -> set[nn.Parameter]:
    return {p for layer in layers(model) for p in layer.expert_parameters()}


def refresh(model: nn.Module) -> None:
    for layer in layers(model):
        layer.refresh_replicas()


def reduce_others(model: nn.Module) -> None:
    """All-reduce the gradients of all Parameters but experts and DTensors."""
    experts = experts_of(model)
    for p in model.parameters():
        if p not in experts and not hasattr(p, "full_tensor"):
            dist.all_reduce(p.grad)


def own_parts(rank: int, ranks: int) -> Iterator[int]:
    return iter(range(rank, PARTS, ranks))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3)


def dense_states(make: Callable[[nn.Module], torch.optim.Optimizer], steps: int) -> dict[str, Tensor]:
    """Return the Parameters after a run of the dense model in this process."""
    model = Model()
    optimizer = make(model)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(PARTS):
            (model(words(step, part)) / PARTS).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def whole_states(model: nn.Module) -> dict[str, Tensor]:
    """Return the Parameters by the dense model's names. All ranks call it together."""
    found, experts = {}, experts_of(model)
    for name, p in model.named_parameters():
        if p not in experts:
            for wrapper in ("module.", "_orig_mod.", "_checkpoint_wrapped_module."):
                name = name.replace(wrapper, "")
            found[name] = p.full_tensor().detach() if hasattr(p, "full_tensor") else p.detach().clone()
    for number, layer in enumerate(layers(model)):
        found |= {f"blocks.{number}.moe.{name}": s.detach() for name, s in layer.full_experts().items()}
    return found


def distance(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)
