"""The demo: four processes run one MoE layer on recorded routing, once per policy, and compare with the dense layer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from isoload.counting import count
from isoload.experts.compute import run_experts
from isoload.experts.weights import ExpertWeights, SwiGLU
from isoload.layer.moe import MoE
from isoload.placers import place
from isoload.planning import plan
from isoload.replay.batches import make_batches
from isoload.replay.simulate import DEFAULT_POLICIES
from isoload.report.tables import Column, print_lines, print_table, table
from isoload.topology import Topology
from isoload.trace import Trace, read_trace
from isoload.transport import CollectiveTransport

SHIPPED = Path(__file__).parents[3] / "examples" / "traces" / "gptoss20b_decode.npz"
HIDDEN, INNER = 64, 128


@dataclass(frozen=True)
class DemoFigures:
    """One policy over all batches.

    max_abs_diff         largest difference of any output element from the dense layer's
    busiest_rank_rows    rows that the busiest rank of a batch received, mean over batches
    busiest_rank_cpu_ms  process CPU time of the rank with most rows in all, over all forwards
    bytes_sent           handed to collectives, all ranks and batches
    plan_us              median time of a plan
    """

    policy: str
    max_abs_diff: float
    busiest_rank_rows: float
    busiest_rank_cpu_ms: float
    bytes_sent: int
    plan_us: float


def run_demo(trace_path: Path | None, num_ranks: int, layer: int) -> list[DemoFigures]:
    """Starts the ranks and gathers what they measured.

    Args:
        trace_path: a per-token trace; None = the one that ships with the repository.
        num_ranks: R processes.
        layer: position of the layer whose routing is used.

    Raises:
        ValueError: naming the argument, the rule and the value.
        RuntimeError: a rank failed; with its message.
    """
    if trace_path is None and not SHIPPED.exists():
        raise ValueError(
            "TRACE must be given: the shipped one lies in the repository's examples, not in the package"
        )
    trace = read_trace(SHIPPED if trace_path is None else trace_path)
    if not trace.has_tokens:
        raise ValueError(f"trace must hold per-token choices, {trace.name} has counts only")
    trace = trace.select_layers([layer])
    topology = Topology(num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        context = get_context("fork")
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        processes = [
            context.Process(target=_run_rank, args=(rank, topology, trace, f"{folder}/store", pipes[rank][1]))
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            reports = [_receive(rank, pipes[rank][0], process) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    return [_summarise(name, [report[name] for report in reports]) for name in DEFAULT_POLICIES]


def _receive(rank: int, reader: Connection, process: BaseProcess) -> dict[str, Any]:
    """What a rank measured; RuntimeError if it failed or its process ended first."""
    try:
        report: dict[str, Any] | str = reader.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"rank {rank} ended with exit code {process.exitcode} and no result") from None
    if isinstance(report, str):
        raise RuntimeError(f"rank {rank} failed: {report}")
    return report


def _run_rank(rank: int, topology: Topology, trace: Trace, store: str, writer: Connection) -> None:
    """The body of one process: every policy on the same batches."""
    try:
        torch.set_num_threads(1)
        init = f"file://{store}"
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=topology.num_ranks)
        writer.send({name: _run_policy(name, rank, topology, trace) for name in DEFAULT_POLICIES})
        dist.barrier()
    except Exception as error:
        writer.send(f"{type(error).__name__}: {error}")


def _run_policy(name: str, rank: int, topology: Topology, trace: Trace) -> dict[str, Any]:
    batches = make_batches(trace)
    half = len(batches.counts) // 2
    experts = trace.num_experts
    placement = place(batches.counts[:half], topology, -(-experts // topology.num_ranks) + 1)
    dense = ExpertWeights.random(experts, HIDDEN, INNER, generator=torch.Generator().manual_seed(0))
    current: list[Tensor] = []  # what the gate returns: this rank's recorded choices

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        return current[0], current[1]

    transport = CollectiveTransport(topology)
    layer = MoE(gate, dense, transport, placement, policy=name)
    sent, worst, cpu, plan_us = [], 0.0, 0.0, []
    for index in range(half, len(batches.counts)):
        batch = batches.source_batch(index, topology.num_ranks, "contiguous")
        draw = torch.Generator().manual_seed(1000 * index + rank)
        ids = batch.on_rank(0, rank).long()
        current[:] = [ids, torch.rand(ids.shape, generator=draw).softmax(-1)]
        rows = torch.randn(len(ids), HIDDEN, generator=draw)
        before = transport.traffic.rows[rank].clone()
        start = time.process_time()
        with torch.no_grad():
            got = layer(rows)
        cpu += time.process_time() - start
        sent.append((transport.traffic.rows[rank] - before).tolist())
        assert isinstance(got, Tensor)
        wanted = run_experts(rows, current[0], current[1], [dense], SwiGLU())
        worst = max(worst, float((got - wanted).abs().max()) if len(rows) else 0.0)
        loads = torch.stack([count(batch.on_rank(0, r), experts) for r in range(topology.num_ranks)])
        start_ns = time.perf_counter_ns()
        plan(loads, placement, 0, name)
        plan_us.append((time.perf_counter_ns() - start_ns) / 1000)
    return {
        "sent": sent,
        "max_abs_diff": worst,
        "cpu_ms": 1000 * cpu,
        "bytes": sum(transport.traffic.bytes.values()),
        "plan_us": float(np.median(plan_us)),
    }


def _summarise(policy: str, reports: list[dict[str, Any]]) -> DemoFigures:
    received = np.sum([report["sent"] for report in reports], axis=0)  # [batches, R] rows by destination
    busiest = int(received.sum(0).argmax())
    return DemoFigures(
        policy=policy,
        max_abs_diff=max(report["max_abs_diff"] for report in reports),
        busiest_rank_rows=float(received.max(1).mean()),
        busiest_rank_cpu_ms=reports[busiest]["cpu_ms"],
        bytes_sent=sum(report["bytes"] for report in reports),
        plan_us=reports[0]["plan_us"],
    )


def demo_table(rows: Sequence[DemoFigures]) -> tuple[list[str], list[str]]:
    """Heading and a row per policy of the demo."""
    return table(
        [
            Column("", "policy", [row.policy for row in rows]),
            Column("busiest rank", "rows", [f"{row.busiest_rank_rows:.1f}" for row in rows]),
            Column("busiest rank", "CPU ms", [f"{row.busiest_rank_cpu_ms:.1f}" for row in rows]),
            Column("all ranks", "bytes sent", [f"{row.bytes_sent}" for row in rows]),
            Column("", "plan µs", [f"{row.plan_us:.1f}" for row in rows]),
            Column(
                "against the dense layer", "largest difference", [f"{row.max_abs_diff:.1e}" for row in rows]
            ),
        ]
    )


def print_demo(num_ranks: int, rows: Sequence[DemoFigures], console: Console) -> None:
    print_lines(
        console, [f"one MoE layer over {num_ranks} processes (gloo), forward, recorded routing"], "bold"
    )
    print_table(console, *demo_table(rows))
    print_lines(console, ["rows: per batch, mean. CPU ms, bytes: all batches. float32."], "dim")
