"""A program: every policy and every entry point of the package once.

Prints what of torch's compiler was imported by then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import nn

import isoload

COMPILER = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers")


def say(when: str) -> None:
    print(f"{when}: {[name for name in COMPILER if name in sys.modules]}", flush=True)


say("import")

from isoload.balancing.prediction import fit  # noqa: E402
from isoload.cli.app import app  # noqa: E402
from isoload.layer.routers import Gate, Router  # noqa: E402
from support.checkpoints import PREFIX, deepseek_v3  # noqa: E402
from support.fp8_experts import random_experts  # noqa: E402
from support.recorded_calls import recorded  # noqa: E402
from support.stacks import EXPERTS, HIDDEN, Model, routing_trace, run  # noqa: E402

RANKS = 4
OF_SHARED = ("shared_local", "waterfill", "waterfill_sampled", "joint")


def every_policy() -> None:
    """In a layer with gradients, in Balancers of both kinds of tokens, and out of a graph's double."""
    for name, policy in isoload.POLICIES.items():
        borrows, shared = policy().borrows, int(name in OF_SHARED)
        model = Model(RANKS, 1, slots=0 if borrows else 5, spare=2 if borrows else 0, num_shared=shared)
        model.gates[0].requires_grad_()
        parts = model.gates[0], model.dense[0], isoload.LocalTransport(model.topology), model.placement
        inner = isoload.Balancer(model.placement, 0, name, tokens="same", shared_columns=False)
        ids = [model.gates[0](rows)[0] for rows in model.rows()]
        inner(ids[0])
        if not shared:
            outputs = isoload.MoE(*parts, policy=name)(model.rows())
            sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
        inner = isoload.Balancer(model.placement, 0, name, parts[2].group, shared_columns=False)
        inner(ids)
        if not borrows:
            isoload.CapturedBalancer(inner, len(max(ids, key=len)), 3, device="cpu", capture=recorded)(ids)


def stacks_and_what_runs_beside_them() -> None:
    trace = routing_trace(2)
    for predictor in ("lookahead", "last", fit(trace)):
        model = Model(RANKS, 2)
        layers = model.layers()
        isoload.LibraStack(layers, predictor)
        with torch.no_grad():
            run(layers, model.rows())
    model = Model(RANKS, 2, slots=5, spare=0)
    layers = model.layers(policy="exact")
    recorder = isoload.Recorder(2, EXPERTS)
    rebalancer = isoload.Rebalancer(layers, recorder, every=3, delay=1)
    for _ in range(6):
        run(layers, model.rows())
        rebalancer.step()
    rebalancer.close()
    layers[0].load_placement(isoload.place(torch.ones(2, EXPERTS), model.topology, slots_per_rank=5))


def experts_from_elsewhere() -> None:
    topology = isoload.Topology(2)
    dense = random_experts(4, 8, 8, torch.Generator().manual_seed(1))
    state, _ = deepseek_v3(4, 8, 8)
    gate = Gate(Router(4, 2), torch.eye(4, 8)).requires_grad_(False)
    for experts in (dense, isoload.weights.checkpoints.Checkpoint(state, PREFIX)):
        placement = isoload.place(torch.arange(1, 5)[None], topology, slots_per_rank=3)
        layer = isoload.MoE(gate, experts, isoload.LocalTransport(topology), placement)
        with torch.no_grad():
            layer([torch.ones(n, 8, dtype=torch.bfloat16) for n in (3, 2)])


def processes() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Model(1, 1)
    run(model.layers(isoload.CollectiveTransport(model.topology)), model.rows())
    dist.destroy_process_group()


class FusedExperts(nn.Module):
    """With the parts of transformers', whose own modules import the compiler."""

    is_transposed, has_bias, has_gate, has_post_expert_norm = False, False, True, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(4, 2 * HIDDEN, HIDDEN))
        self.down_proj = nn.Parameter(torch.ones(4, HIDDEN, HIDDEN))

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def models_of_others() -> None:
    block = nn.Module()
    block.experts = FusedExperts()
    isoload.balance(nn.ModuleList([block]), isoload.Topology(2))
    block.experts(torch.ones(3, HIDDEN), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)).sum().backward()


def the_command() -> None:
    trace = str(Path(__file__).parents[2] / "examples/traces/gptoss20b_decode.npz")
    with TemporaryDirectory() as folder:
        placement, ranks = f"{folder}/placement.json", ["--ranks", "8"]
        for command in (
            ["place", trace, *ranks, "--slots-per-rank", "5", "-o", placement],
            ["inspect", placement],
            ["inspect", trace],
            ["replay", trace, *ranks, "--layers", "0", "--json", f"{folder}/figures.json"],
            ["doctor"],
        ):
            app(command, standalone_mode=False)


if __name__ == "__main__":
    every_policy()
    stacks_and_what_runs_beside_them()
    experts_from_elsewhere()
    processes()
    models_of_others()
    the_command()
    say("every entry point")
