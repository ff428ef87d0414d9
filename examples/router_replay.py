"""Router replay: a tiny MoE model generates with recorded routes, then four processes train on them by known plans.

    python examples/router_replay.py             # starts four processes itself; half a minute on a CPU

1. A random Qwen3-MoE generates continuations. The experts of every token are recorded, as inference engines do.
2. Four processes train on the sequences and replay these experts, the sequences divided as choose_micro_batches says:
   once with each expert on its own rank, once by isoload's plans, which all exist before the first step.

The losses are equal, because a plan changes only where an expert computes. With
plans weights travel too, but no step gathers loads: the ranks exchange them once, before training.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
import typer
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import isoload
from isoload.layer.blocks import find_blocks
from isoload.traces import Trace, read_routes

RANKS, LAYERS, EXPERTS, TOP_K = 4, 3, 16, 2
SEQUENCES, PROMPT, LENGTH, MICRO_BATCHES = 16, 4, 24, 2
LLEP = {"min_chunk": 1, "threshold": 1.0}


def make_model() -> Any:
    """Return the same random model in every process. Its routers prefer a few experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_experts=EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=32, intermediate_size=32,
    )  # fmt: skip
    config._experts_implementation = "eager"  # which computes float64
    model = Qwen3MoeForCausalLM(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(0, 0.5)
                parameter[:4] *= 3
    return model


def generate(model: Any) -> tuple[Tensor, Tensor]:
    """Return tokens [SEQUENCES, LENGTH], and the experts [SEQUENCES, LENGTH - 1, LAYERS, TOP_K] uint8 of all but the
    last token, which the model never ran.
    """
    seen: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    hooks = [
        block.experts.register_forward_pre_hook(
            lambda _, args, seen=seen[i]: seen.append(args[1].view(SEQUENCES, -1, TOP_K))
        )
        for i, (_, block) in enumerate(find_blocks([model], "model"))
    ]
    prompts = torch.randint(64, (SEQUENCES, PROMPT))
    tokens = model.eval().generate(
        prompts, max_new_tokens=LENGTH - PROMPT, min_new_tokens=LENGTH - PROMPT, do_sample=True
    )
    for hook in hooks:
        hook.remove()
    return tokens, torch.stack([torch.cat(steps, dim=1) for steps in seen], dim=2).to(torch.uint8)


@dataclass(frozen=True)
class Work:
    """Sequences and routes, and the micro-batch and rank of every sequence."""

    tokens: Tensor
    routes: Tensor
    trace: Trace
    placement: isoload.Placement
    chosen: Any

    def known(self, layer: isoload.MoE) -> isoload.KnownRoutes:
        parts = self.chosen.micro_batches, self.chosen.ranks
        return isoload.KnownRoutes(
            self.trace, layer.placement, micro_batches=parts[0], ranks=parts[1], group=layer.group
        )

    def part(self, micro_batch: int, rank: int) -> Tensor:
        """Return the sequences of a rank in a micro-batch, ascending as in the trace."""
        mine = (self.chosen.micro_batches == micro_batch) & (self.chosen.ranks == rank)
        return torch.from_numpy(mine.nonzero()[0])


@dataclass(frozen=True)
class Run:
    """losses and imbalance of a step; bytes that all ranks sent, by kind."""

    losses: list[float]
    imbalance: float
    bytes_moved: dict[str, int]


def train(work: Work, rank: int, planned: bool, steps: int) -> Run:
    """Train all sequences in every step, by known plans or with every expert on its own rank."""
    transport = isoload.CollectiveTransport(work.placement.topology)
    group, model = transport.group, make_model().train()
    how = {"policy": "llep", **LLEP} if planned else {"policy": "none"}
    layers = isoload.balance(model, group.topology, transport=transport, placement=work.placement, **how)
    experts = {parameter for layer in layers for parameter in layer.expert_parameters()}
    known = work.known(layers[0])
    plans = known.plans("llep", **LLEP) if planned else known.plans("none")
    if planned:
        isoload.LibraStack(layers, "known")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before, losses = dict(group.traffic.bytes), []
    for _ in range(steps):
        total = torch.zeros((), dtype=torch.float64)
        for batch in range(MICRO_BATCHES):
            mine = work.part(batch, rank)
            tokens, routes = work.tokens[mine], work.routes[mine]
            replay = {"routes": routes, "plans": plans.layers(batch)} if planned else {"routes": routes}
            logits = model(tokens[:, :-1], use_cache=False, **replay).logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
            loss = loss / (SEQUENCES * (LENGTH - 1))  # tokens of all ranks and micro-batches
            loss.backward()
            total += loss.detach()
        for parameter in model.parameters():  # a rank has whole gradients of its experts
            if parameter not in experts:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total))
    mean = known.loads.sum((2, 3)) / RANKS
    return Run(losses, float((plans.peak / mean).mean()), moved(group, before))


def moved(group: Any, before: dict[str, int]) -> dict[str, int]:
    """Return the bytes that all ranks sent since: weights and their gradients, gathered loads, and rows."""
    weights = ("borrow", "borrow backward", "borrowed gradients")
    found = torch.zeros(3, dtype=torch.int64)
    for stage, count in group.traffic.bytes.items():
        kind = 0 if stage in weights else 1 if stage == "gather" else 2
        found[kind] += count - before.get(stage, 0)
    dist.all_reduce(found)
    return dict(zip(("weights", "gathered loads", "rows"), found.tolist(), strict=True))


def run_rank(rank: int, work: Work, steps: int, store: str) -> None:
    """Train twice in one process of four; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name, planned in (("own ranks", False), ("known plans", True)):
        run = train(work, rank, planned, steps)
        if rank == 0:
            losses = " ".join(f"{loss:.9f}" for loss in run.losses)
            sizes = ", ".join(f"{kind} {count / 1e6:.3f} MB" for kind, count in run.bytes_moved.items())
            print(f"{name:11}  loss {losses}  imbalance {run.imbalance:.3f}  {sizes}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps of the optimizer.")] = 3,
) -> None:
    """Generate with recorded routes, then train on them over four processes, without and with known plans."""
    torch.set_num_threads(1)
    tokens, routes = generate(make_model())
    trace = read_routes(list(routes), first_moe_layer=0, num_experts=EXPERTS)
    slots = EXPERTS // RANKS + 2
    counts, topology = torch.ones(LAYERS, EXPERTS), isoload.Topology(RANKS)
    placement = isoload.place(counts, topology, slots, placer="trivial", spare_slots=2).with_moe_layers(0)
    chosen = isoload.choose_micro_batches(trace, placement, MICRO_BATCHES)
    work = Work(tokens, routes, trace, placement, chosen)
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(run_rank, (work, steps, f"{folder}/store"), RANKS, start_method="fork")


if __name__ == "__main__":
    typer.run(main)
