"""``isoload demo``: one MoE layer over local processes, once per policy, against the dense layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoload.cli.options import Force, JsonTarget, Range
from isoload.cli.tables import Figure, Row, columns_of, say, write_out

if TYPE_CHECKING:
    from isoload.topology import Topology
    from isoload.trace import Trace

# A link in a checkout, files in a wheel.
SHIPPED = Path(__file__).parents[1] / "traces" / "gptoss20b_decode.npz"
HIDDEN, INNER = 64, 128
MAX_RANKS = 32  # processes that one machine is asked for
FIGURES = (
    Figure("policy", "", "policy"),
    Figure("busiest_rank_rows", "busiest rank", "rows", ".1f"),
    Figure("busiest_rank_cpu_ms", "busiest rank", "CPU ms", ".1f"),
    Figure("bytes_sent", "all ranks", "bytes sent", "d"),
    Figure("plan_us", "", "plan µs", ".1f"),
    Figure("max_abs_diff", "against the dense layer", "largest difference", ".1e"),
)


def run_demo(trace_path: Path | None, num_ranks: int, layer: int, stall_seconds: float) -> list[Row]:
    """Starts the ranks and gathers what they measured: a row per policy, over all batches.

    Raises:
        RankError: a rank failed, ended or stalled; naming it.
    """
    from isoload.cli.processes import run_ranks
    from isoload.replay.batches import make_batches
    from isoload.replay.simulate import DEFAULT_POLICIES
    from isoload.topology import Topology
    from isoload.trace import read_trace

    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"ranks must be in 1..{MAX_RANKS} (processes), got {num_ranks}")
    if not 0 < stall_seconds <= 86400:
        raise ValueError(f"stall_seconds must be above 0 and at most 86400, got {stall_seconds:g}")
    trace = read_trace(SHIPPED if trace_path is None else trace_path)
    if not trace.has_tokens:
        raise ValueError(f"trace must hold per-token choices, {trace.name} has counts only")
    trace = trace.select_layers([layer])
    if len(make_batches(trace).counts) < 2:
        raise ValueError(f"trace must have at least 2 batches (one to place by), {trace.name} has one")
    topology = Topology(num_ranks)

    def body(rank: int, alive: Callable[[], None]) -> dict[str, Any]:
        return {name: _run_policy(name, rank, topology, trace, alive) for name in DEFAULT_POLICIES}

    reports = run_ranks(body, num_ranks, stall_seconds)
    return [_summarise(name, [report[name] for report in reports]) for name in DEFAULT_POLICIES]


def _run_policy(
    name: str, rank: int, topology: Topology, trace: Trace, alive: Callable[[], None]
) -> dict[str, Any]:
    """One rank's part of a policy's batches; calls alive after each."""
    import numpy as np
    import torch
    from torch import Tensor

    from isoload.balancing.planning import plan
    from isoload.experts.compute import run_experts
    from isoload.experts.weights import ExpertWeights, SwiGLU
    from isoload.layer.moe import MoE
    from isoload.placers import place
    from isoload.replay.batches import make_batches
    from isoload.transport import CollectiveTransport

    batches = make_batches(trace)
    half = len(batches.counts) // 2
    experts = trace.num_experts
    placement = place(batches.counts[:half], topology, min(experts, -(-experts // topology.num_ranks) + 1))
    dense = ExpertWeights.random(experts, HIDDEN, INNER, generator=torch.Generator().manual_seed(0))
    current: list[Tensor] = []  # what the gate answers: this rank's recorded choices

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        return current[0], current[1]

    transport = CollectiveTransport(topology)
    layer = MoE(gate, dense, transport, placement, policy=name)
    sent: list[list[int]] = []
    plan_us: list[float] = []
    worst, cpu, bytes_before = 0.0, 0.0, 0
    for index in range(half - 1, len(batches.counts)):
        batch = batches.source_batch(index, topology.num_ranks, "contiguous")
        draw = torch.Generator().manual_seed(1000 * index + rank)
        ids = batch.on_rank(0, rank).long()
        current[:] = [ids, torch.rand(ids.shape, generator=draw).softmax(-1)]
        rows = torch.randn(len(ids), HIDDEN, generator=draw)
        if index == half:  # the batch before has warmed up, and is not measured
            sent, cpu, plan_us, bytes_before = [], 0.0, [], transport.group.traffic.bytes.total()
        before = transport.group.traffic.rows[rank].clone()
        start = time.process_time()
        with torch.no_grad():
            got = layer(rows)
        cpu += time.process_time() - start
        sent.append((transport.group.traffic.rows[rank] - before).tolist())
        assert isinstance(got, Tensor)
        wanted = run_experts(rows, current[0], current[1], [dense], SwiGLU())
        worst = max(worst, float((got - wanted).abs().max()) if len(rows) else 0.0)
        loads = batch.loads(experts)[0]
        start_ns = time.perf_counter_ns()
        plan(loads, placement, 0, name)
        plan_us.append((time.perf_counter_ns() - start_ns) / 1000)
        alive()
    return {
        "sent": sent,
        "max_abs_diff": worst,
        "cpu_ms": 1000 * cpu,
        "bytes": transport.group.traffic.bytes.total() - bytes_before,
        "plan_us": float(np.median(plan_us)),
    }


def _summarise(policy: str, reports: list[dict[str, Any]]) -> Row:
    import numpy as np

    received = np.sum([report["sent"] for report in reports], axis=0)  # [batches, R] rows by destination
    busiest = int(received.sum(0).argmax())
    return {
        "policy": policy,
        "busiest_rank_rows": float(received.max(1).mean()),  # that a batch's busiest rank received, mean
        # CPU time of the process of the rank with most rows in all, over all forwards but a first.
        "busiest_rank_cpu_ms": reports[busiest]["cpu_ms"],
        # Handed to collectives, all ranks and batches.
        "bytes_sent": sum(report["bytes"] for report in reports),
        "plan_us": reports[0]["plan_us"],  # median
        # Of an element, from the dense layer's.
        "max_abs_diff": max(report["max_abs_diff"] for report in reports),
    }


def demo(
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Default: the shipped one.")] = None,
    ranks: Annotated[int, Range(1), typer.Option(help="R, processes to start.")] = 4,
    layer: Annotated[int, Range(0), typer.Option(help="Layer whose routing is used, by position.")] = 12,
    stall_seconds: Annotated[
        float,
        Range(0.001, 86400),
        typer.Option(help="A rank that ends no batch for so long has stalled, which ends the demo."),
    ] = 60.0,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """Run one MoE layer over local processes, once per policy, and compare it with the dense layer."""
    from isoload.cli.targets import check_targets

    check_targets([trace], force, json)
    found = run_demo(trace, ranks, layer, stall_seconds)
    header = "bold", [f"one MoE layer over {ranks} processes (gloo), forward, recorded routing"]
    units = "dim", ["rows: per batch, mean. CPU ms, bytes: all batches. float32."]
    columns = columns_of(FIGURES, found)
    write_out(json, {"policies": found}, lambda console: say(console, header, columns, units))
