"""The whole layer on CPU by policy: rows, bytes, peak memory and times, against `none` and the dense layer.

The protocol of LLEP's paper, with borrowed experts, is in bench_llep.py.

Fairness ledger
- Routing: layer 12 of the shipped gpt-oss-20b decode trace (E = 32, top-4, 512 tokens per batch; placed by `eplb` on
  the first 7 batches, measured on the last 7), and workload `hot_experts` of the same shape (4 hot experts at 4 times
  the mean; one popularity for placement and measurement, which flatters whoever trusts the past).
- Sizes: H = 256, I = 512, float32, SwiGLU; rows and gate weights are random. Times depend on sizes, rows do not.
- `none` computes in home slots on the same placement, replicas idle, but their gradients still travel; `no replicas`
  is `none` on a placement without any: what an engine without replicas pays. `dense`: all experts on one process.
- virtual: R = 8 ranks one after the other in one process. Balance cannot shorten the whole (the same copies are
  computed); it shortens the busiest rank's experts, which run alone here: `experts, busiest`. Exchanges are copies in
  memory: their time says nothing of a network, rows and bytes do.
- processes: R = 4 gloo processes. Times are process CPU time of the rank that took most, so that sharing cores does
  not count; what a collective spends waiting or copying in gloo's own threads counts there.
- bytes: handed to collectives, own rank's part and padding included; of the forward, of the backward (rows, replica
  gradients), and of the refresh after an optimizer step. rows: (token, destination rank) pairs, own rank included.
- peak bytes: the highest running sum of the CPU allocator's own reports (torch.profiler, profile_memory), from the
  call's start: every tensor and every scratch tensor inside an op; not what libraries take from malloc. Inputs and
  weights exist before; gradients count. Of the first batch; the forward alone runs under no_grad.
- Policies alternate batch by batch; times are medians over batches and rounds, rows and bytes means. One torch thread.
- The parts run alone, under no_grad, experts as stacks of S slots; route is the median over ranks. plan is one call
  between megabytes of weights, so with cold caches; bench_plan.py has it warm.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload.analysis.batches import make_batches
from isoload.analysis.simulate import DEFAULT_POLICIES
from isoload.cli.processes import run_ranks
from isoload.transport import CollectiveTransport, LocalTransport, Transport
from isoload.weights.compute import run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU
from lib import table
from lib.clocks import medians, peak_bytes, timed
from lib.harness import begin, command, write_results
from workloads import make_workload

TRACE = Path(__file__).parents[1] / "examples" / "traces" / "gptoss20b_decode.npz"
EXPERTS, TOP_K, BATCHES, LAYER = 32, 4, 14, 12
HIDDEN, INNER = 256, 512
NAMES = ("no replicas", "none", *DEFAULT_POLICIES[1:])
ROUTINGS = ("gptoss20b layer 12", "hot_experts")
FORWARD = ("gather", "dispatch row counts", "dispatch", "combine")
BACKWARD = ("combine backward", "replica gradients", "dispatch backward")


@dataclass(frozen=True)
class Batch:
    """One batch on every rank: ids [R][T, K], gate weights [R][T, K], rows [R][T, H]."""

    ids: list[Tensor]
    weights: list[Tensor]
    rows: list[Tensor]


def make_ids(routing: str, ranks: int) -> list[list[Tensor]]:
    """[batches][R] choices [T, K]."""
    if routing == "hot_experts":
        workload = make_workload(
            "hot_experts",
            num_ranks=ranks,
            num_experts=EXPERTS,
            top_k=TOP_K,
            tokens_per_rank=512 // ranks,
            num_hot=4,
            heat=4,
        )
        return [workload.topk_ids(step) for step in range(BATCHES)]
    batches = make_batches(isoload.read_trace(TRACE).select_layers([LAYER]))
    cut = [batches.source_batch(i, ranks, "contiguous") for i in range(BATCHES)]
    return [[batch.on_rank(0, rank).long() for rank in range(ranks)] for batch in cut]


class Setup:
    """Placements from the first half of the batches, inputs for the second, one layer per name."""

    def __init__(self, routing: str, topology: isoload.Topology, transport: Transport) -> None:
        ranks, draw = topology.num_ranks, torch.Generator().manual_seed(0)
        ids = make_ids(routing, ranks)
        counts = torch.stack([sum(isoload.count(i, EXPERTS) for i in batch) for batch in ids[: BATCHES // 2]])
        size = EXPERTS // ranks
        self.dense = ExpertWeights.random(EXPERTS, HIDDEN, INNER, generator=draw)
        self.transport = transport
        self.batches = [self._make_batch(batch, draw) for batch in ids[BATCHES // 2 :]]
        self.placements = {
            name: isoload.place(counts.sum(0)[None], topology, size + (name != "no replicas"))
            for name in NAMES
        }
        self.layers = {
            name: isoload.MoE(
                self.gate,
                self.dense,
                transport,
                placement,
                policy="none" if name == "no replicas" else name,
            )
            for name, placement in self.placements.items()
        }

    def _make_batch(self, ids: list[Tensor], draw: torch.Generator) -> Batch:
        weights = [torch.rand(i.shape, generator=draw).softmax(-1) for i in ids]
        rows = [torch.randn(len(i), HIDDEN, generator=draw) for i in ids]
        owned = self.transport.group.ranks
        return Batch(ids, [weights[r] for r in owned], [rows[r].requires_grad_() for r in owned])

    def take(self, batch: Batch) -> None:
        """What the gate answers next, for one owned rank after the other."""
        mine = [batch.ids[rank] for rank in self.transport.group.ranks]
        self.answers = itertools.cycle(zip(mine, batch.weights, strict=True))

    def gate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return next(self.answers)


def backward(outputs: Sequence[Tensor]) -> None:
    torch.cat(list(outputs)).square().sum().backward()


def bench_whole(setup: Setup, name: str, batch: Batch, clock: Callable[[], int]) -> dict[str, float]:
    """One forward and backward of the layer: times, and what was sent."""
    layer, transport = setup.layers[name], setup.transport
    transport.group.reset_traffic()
    layer.zero_grad()
    setup.take(batch)
    outputs, forward_ms = timed(lambda: layer(batch.rows), clock)
    _, backward_ms = timed(lambda: backward(outputs), clock)
    layer.refresh_replicas()
    sent = transport.group.traffic.bytes
    return {
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "rows_sent": int(transport.group.traffic.rows.sum()),
        "forward_bytes": sum(sent[stage] for stage in FORWARD),
        "backward_bytes": sum(sent[stage] for stage in BACKWARD),
        "refresh_bytes": sent["refresh"],
    }


def bench_peaks(setup: Setup, name: str) -> dict[str, int]:
    """Peak bytes on the first batch: of the forward as inference runs it, and of forward and backward."""
    layer, batch = setup.layers[name], setup.batches[0]
    setup.take(batch)
    layer.zero_grad()
    with torch.no_grad():
        forward = peak_bytes(lambda: layer(batch.rows))
    return {
        "forward_peak_bytes": forward,
        "training_peak_bytes": peak_bytes(lambda: backward(layer(batch.rows))),
    }


def bench_parts(setup: Setup, name: str, batch: Batch) -> dict[str, float]:
    """The stages one by one over virtual ranks, without gradients; route and experts also per rank."""
    layer, placement, clock = setup.layers[name], setup.placements[name], time.perf_counter_ns
    size, ranks = placement.slots_per_rank, placement.topology.num_ranks
    held = placement.slot_to_expert[0].view(ranks, size).clamp(min=0)
    stacks = [ExpertWeights(setup.dense.gate_up[slots], setup.dense.down[slots]) for slots in held]
    loads = torch.stack([isoload.count(i, EXPERTS) for i in batch.ids])
    made, plan_ms = timed(lambda: isoload.plan(loads, placement, 0, layer.policy), clock)
    routed = [
        timed(lambda r=r, i=i: isoload.route(i, loads, made, r), clock) for r, i in enumerate(batch.ids)
    ]
    slots = [s for s, _ in routed]
    received, dispatch_ms = timed(
        lambda: setup.transport.dispatcher.dispatch(batch.rows, slots, batch.weights, size), clock
    )
    computed = [
        timed(lambda g=g, w=w: run_experts(g.rows, g.slots, g.weights, [w], SwiGLU()), clock)
        for g, w in zip(received, stacks, strict=True)
    ]
    _, combine_ms = timed(
        lambda: setup.transport.dispatcher.combine([y for y, _ in computed], received), clock
    )
    return {
        "plan_us": 1000 * plan_ms,
        "route_us": 1000 * float(np.median([ms for _, ms in routed])),
        "dispatch_ms": dispatch_ms,
        "experts_ms": sum(ms for _, ms in computed),
        "experts_busiest_ms": max(ms for _, ms in computed),
        "combine_ms": combine_ms,
        "busiest_rows": max(len(got.rows) for got in received),
        "busiest_copies": max(int((got.slots >= 0).sum()) for got in received),
    }


def bench_dense(setup: Setup, rounds: int) -> dict[str, float]:
    """All experts on one process: no plan, no exchange."""
    stacks = [s.clone().requires_grad_() for s in (setup.dense.gate_up, setup.dense.down)]

    def forward(batch: Batch) -> Tensor:
        rows, weights = torch.cat(batch.rows), torch.cat(batch.weights)
        return run_experts(rows, torch.cat(batch.ids), weights, [ExpertWeights(*stacks)], SwiGLU())

    def clear(batch: Batch) -> None:
        for leaf in (*stacks, *batch.rows):
            leaf.grad = None

    samples = []
    for batch in setup.batches * rounds:
        clear(batch)
        output, forward_ms = timed(lambda b=batch: forward(b), time.perf_counter_ns)
        _, backward_ms = timed(lambda y=output: backward([y]), time.perf_counter_ns)
        samples.append({"forward_ms": forward_ms, "backward_ms": backward_ms})
    first = setup.batches[0]
    clear(first)
    with torch.no_grad():
        samples[0]["forward_peak_bytes"] = peak_bytes(lambda: forward(first))
    samples[0]["training_peak_bytes"] = peak_bytes(lambda: backward([forward(first)]))
    return medians(samples)


def bench_virtual(routing: str, ranks: int, rounds: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row per name, and the dense layer's on the same batches."""
    topology = isoload.Topology(ranks, 4)
    setup = Setup(routing, topology, LocalTransport(topology))
    samples: dict[str, list[dict[str, float]]] = {name: [bench_peaks(setup, name)] for name in NAMES}
    for batch in setup.batches * rounds:
        for name in NAMES:
            with torch.no_grad():
                parts = bench_parts(setup, name, batch)
            samples[name].append(bench_whole(setup, name, batch, time.perf_counter_ns) | parts)
    shape = {"routing": routing, "kind": "virtual", "ranks": ranks}
    rows = [shape | {"policy": name} | medians(samples[name]) for name in NAMES]
    return rows, shape | {"kind": "dense", "ranks": 1, "policy": "dense"} | bench_dense(setup, rounds)


def run_rank(
    rank: int, alive: Callable[[], None], ranks: int, rounds: int
) -> list[tuple[str, str, list[dict[str, float]]]]:
    """The body of one process: routing, name and what each sample took."""
    topology, mine = isoload.Topology(ranks, 2), []
    for routing in ROUTINGS:
        setup = Setup(routing, topology, CollectiveTransport(topology))
        samples: dict[str, list[dict[str, float]]] = {name: [bench_peaks(setup, name)] for name in NAMES}
        for batch in setup.batches * rounds:
            for name in NAMES:
                samples[name].append(bench_whole(setup, name, batch, time.process_time_ns))
                alive()
        mine += [(routing, name, samples[name]) for name in NAMES]
    return mine


def bench_processes(ranks: int, rounds: int) -> list[dict[str, Any]]:
    """Of every sample the most that a rank took; rows and bytes as sums over ranks."""
    gathered = run_ranks(partial(run_rank, ranks=ranks, rounds=rounds), ranks, stall_seconds=60.0)
    rows = []
    for each in zip(*gathered, strict=True):
        routing, name = each[0][:2]
        samples = []
        for of_ranks in zip(*(samples for *_, samples in each), strict=True):
            summed = {k for k in of_ranks[0] if k.endswith(("sent", "bytes")) and "peak" not in k}
            samples.append({k: (sum if k in summed else max)(s[k] for s in of_ranks) for k in of_ranks[0]})
        rows.append(
            {"routing": routing, "kind": "processes", "ranks": ranks, "policy": name} | medians(samples)
        )
    return rows


SIZES: dict[str, tuple[str, float]] = {  # title, unit
    "busiest_rows": ("busiest rows", 1),
    "busiest_copies": ("its copies", 1),
    "rows_sent": ("rows sent", 1),
    "forward_bytes": ("forward MB", 1e6),
    "backward_bytes": ("backward MB", 1e6),
    "refresh_bytes": ("refresh MB", 1e6),
    "forward_peak_bytes": ("forward peak MB", 1e6),
    "training_peak_bytes": ("training peak MB", 1e6),
}
TIMES: dict[str, tuple[str, float]] = {
    "plan_us": ("plan us", 1),
    "route_us": ("route us", 1),
    "dispatch_ms": ("dispatch ms", 1),
    "experts_ms": ("experts ms", 1),
    "experts_busiest_ms": ("experts, busiest", 1),
    "combine_ms": ("combine ms", 1),
    "forward_ms": ("forward ms", 1),
    "backward_ms": ("backward ms", 1),
}


def show(routing: str, rows: list[dict[str, Any]]) -> None:
    """Sizes and times of one routing, then where exact loses."""
    kinds = [list(group) for _, group in itertools.groupby(rows, key=lambda r: r["kind"])]
    for what, columns in (("sizes", SIZES), ("times", TIMES)):
        cells = {title: f"{{{key}:.4g/{unit}}}" for key, (title, unit) in columns.items()}
        table.show(f"{routing}: {what}", {"policy": "{policy}, {kind}, R = {ranks}", **cells}, rows)
    for of_kind in kinds[:2]:
        by_name = {row["policy"]: row for row in of_kind}
        for other in ("none", "no replicas"):
            print(f"{of_kind[0]['kind']}: exact loses to {other}:", losses(by_name["exact"], by_name[other]))
    print()


def losses(mine: dict[str, Any], its: dict[str, Any]) -> str:
    """Every figure in which `mine` is more than half a per cent above."""
    lost = []
    for key, (title, unit) in (SIZES | TIMES).items():
        if key in mine and mine[key] > 1.005 * its[key]:
            than = (
                f"{100 * (mine[key] / its[key] - 1):+.0f} %" if its[key] else f"{mine[key] / unit:.3g} for 0"
            )
            lost.append(f"{title} {than}")
    return "; ".join(lost) or "nowhere"


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="times that each batch is measured")
    asked = parser.parse_args()
    begin(__doc__)
    in_processes = bench_processes(4, asked.rounds)  # first: forked before this process has run anything
    rows = []
    for routing in ROUTINGS:
        virtual, dense = bench_virtual(routing, 8, asked.rounds)
        of_routing = [*virtual, *(row for row in in_processes if row["routing"] == routing), dense]
        show(routing, of_routing)
        rows += of_routing
    print("written:", write_results("bench_layer", rows).name)


if __name__ == "__main__":
    main()
