"""``isoload demo``: one MoE layer over local processes, once per policy, against the dense layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from isoload.cli.options import Force, JsonTarget, Range
from isoload.cli.tables import Figure, Row, columns_of, say, write_out

if TYPE_CHECKING:
    from isoload.topology import Topology
    from isoload.traces import Trace

# A link in a checkout, files in a wheel.
SHIPPED = Path(__file__).parents[1] / "shipped_traces" / "gptoss20b_decode.npz"
HIDDEN, INNER = 64, 128
LARGEST_DIFFERENCE = 1e-5  # between two orders of summation in float32, at these widths
MAX_RANKS = 32  # limit of processes on one machine
FIGURES = (
    Figure("policy", "", "policy"),
    Figure("busiest_rank_copies", "busiest rank", "copies", ".1f"),
    Figure("imbalance", "busiest rank", "/mean", ".3f"),
    Figure("bytes_sent", "all ranks", "bytes sent", "d"),
    Figure("max_abs_diff", "against the dense layer", "largest difference", ".1e"),
)


def run_demo(trace_path: Path | None, num_ranks: int, layer: int, stall_seconds: float) -> list[Row]:
    """Start the ranks and gather their figures: a row per policy, over all batches."""
    from isoload.analysis.batches import make_batches
    from isoload.analysis.simulate import DEFAULT_POLICIES
    from isoload.cli.processes import run_ranks
    from isoload.topology import Topology
    from isoload.traces import read_trace

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
    rows = [_summarise(name, [report[name] for report in reports]) for name in DEFAULT_POLICIES]
    if (worst := max(rows, key=lambda row: float(row["max_abs_diff"])))["max_abs_diff"] > LARGEST_DIFFERENCE:
        raise RuntimeError(
            f"output of policy {worst['policy']} differs from the dense layer's: a bug in isoload"
        )
    return rows


def _run_policy(
    name: str, rank: int, topology: Topology, trace: Trace, alive: Callable[[], None]
) -> dict[str, Any]:
    """Run one rank's part of a policy's batches; calls alive after each batch."""
    import torch
    from torch import Tensor

    from isoload.analysis.batches import make_batches
    from isoload.analysis.simulate import BASELINE, in_order
    from isoload.layer.moe import MoE
    from isoload.placers import place
    from isoload.transport import CollectiveTransport
    from isoload.weights.compute import run_experts
    from isoload.weights.experts import ExpertWeights, SwiGLU

    batches = make_batches(trace)
    half = len(batches.counts) // 2
    experts = trace.num_experts
    placement = place(batches.counts[:half], topology, min(experts, -(-experts // topology.num_ranks) + 1))
    dense = ExpertWeights.random(experts, HIDDEN, INNER, generator=torch.Generator().manual_seed(0))
    current: list[Tensor] = []  # the gate returns this rank's recorded choices

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        return current[0], current[1]

    transport = CollectiveTransport(topology)
    if name == BASELINE:
        placement, name = in_order(placement), "none"
    layer = MoE(gate, dense, transport, placement, policy=name)
    route, sent = layer.balancer.route, list[list[int]]()

    def counted(gathered: Any) -> list[Tensor]:
        slots = route(gathered)
        ranks = slots[0].flatten().long() // placement.slots_per_rank
        sent.append(torch.bincount(ranks, minlength=topology.num_ranks).tolist())
        return slots

    layer.balancer.route = counted  # type: ignore
    worst = 0.0
    for index in range(half, len(batches.counts)):
        batch = batches.source_batch(index, topology.num_ranks, "contiguous")
        draw = torch.Generator().manual_seed(1000 * index + rank)
        ids = batch.on_rank(0, rank).long()
        current[:] = [ids, torch.rand(ids.shape, generator=draw).softmax(-1)]
        rows = torch.randn(len(ids), HIDDEN, generator=draw)
        with torch.no_grad():
            got = layer(rows)
        assert isinstance(got, Tensor)
        expected = run_experts(rows, current[0], current[1], [dense], SwiGLU())
        worst = max(worst, float((got - expected).abs().max()) if len(rows) else 0.0)
        alive()
    return {"sent": sent, "max_abs_diff": worst, "bytes": transport.group.traffic.bytes.total()}


def _summarise(policy: str, reports: list[dict[str, Any]]) -> Row:
    import numpy as np

    from isoload.topology import over_mean

    received = np.sum([report["sent"] for report in reports], axis=0)  # [batches, R] copies by destination
    return {
        "policy": policy,
        "busiest_rank_copies": float(received.max(1).mean()),  # mean over batches
        "imbalance": float(over_mean(received).max(1).mean()),  # mean over batches
        # Passed to collectives, all ranks and batches.
        "bytes_sent": sum(report["bytes"] for report in reports),
        # Largest difference of an element from the dense layer's.
        "max_abs_diff": max(report["max_abs_diff"] for report in reports),
    }


def demo(
    trace: Annotated[
        Path | None, Argument(metavar="[TRACE]", help="Recorded trace. Default: the shipped one.")
    ] = None,
    ranks: Annotated[int, Range(1), Option(help="R, processes to start.")] = 4,
    layer: Annotated[int, Range(0), Option(help="Layer whose routing is used, by position.")] = 12,
    stall_seconds: Annotated[
        float,
        Range(0.001, 86400),
        Option(
            help="Seconds without a finished batch after which a rank counts as stalled and the demo ends."
        ),
    ] = 60.0,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """Run one MoE layer over local processes, once per policy, and compare it with the dense layer."""
    from isoload.cli.arguments import check_targets

    check_targets([trace], force, json)
    results = run_demo(trace, ranks, layer, stall_seconds)
    header = "bold", [f"one MoE layer over {ranks} processes (gloo), forward, recorded routing"]
    worst = max(row["max_abs_diff"] for row in results)
    units = [
        "copies: token x expert that the busiest rank computes in a batch, mean. bytes: all batches.",
        f"Every policy's output equals the dense layer's up to rounding in float32: the largest difference is "
        f"{worst:.1e}. Times are not shown: on a CPU and at these widths they do not predict a GPU's.",
    ]
    columns = columns_of(FIGURES, results)
    write_out(json, {"policies": results}, lambda console: say(console, header, columns, ("dim", units)))
