"""Every op on a GPU, the chain from ids to slots, and Balancers: in a captured graph, and from Python.

Fairness ledger
- Instances: E = 256, top-8, Zipf 0.8 popularity per layer; placed by `eplb` on the popularity before a drift of
  exp(0.5 N(0,1)) per expert; 58 layers, all different. T tokens on every rank. Results are compared with the CPU's
  before anything is timed: bit by bit, of every layer.
- in graph: one graph of a call for each of the 58 layers, replayed; time between events / 58, median over replays. What
  an op adds to a captured forward pass: no launch from the host, inputs of 58 layers in turn.
- alone: a graph of one call, ten replays between events / 10: the launch of a graph is in it.
- cold: the same graph once between events, behind a GEMM and a pass over twice the L2 cache: neither the op's code nor
  its data is in a cache, as between the layers of a model.
- eager: 58 calls from Python and a synchronisation / 58, checks and allocations included.
- floor: the same for a kernel of one thread that writes one word (device_errors).
- roof: a copy of as many bytes as the op reads and writes, in the same kind of graph: in graph.
- at once: one call of all 58 layers, time of the call.
- chain, one after another: with ISOLOAD_PDL=0, so that no kernel starts before the one ahead of it has ended.
- The chain's loads [R, E] are there already: the gather between count and plan_exact depends on the network and is
  left out; one GPU cannot measure it. nodes: of the graph of one call.
- balancer: a Balancer under exact, one per layer, as engines capture it. Its peers' loads are there, too: its gather is
  a copy of [R, E + 1] on the device. balancer, captured: CapturedBalancers, which hold a graph each, so there is no
  time in a graph; alone and cold are one of them, eager is all 58 from Python: a copy of ids and a launch each.
- target: what we set ourselves for an H100 before the first measurement, for R = 16, 32 replicas, in graph.
- quoted: what others publish of their own planners on their own hardware; nothing of it ran here.
"""

from __future__ import annotations

import argparse
import os
import sys
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import isoload
from gpu_balancers import check_balancer, make_balancer, make_captured
from gpu_check import check_all, profile, same_bits
from gpu_clock import Graph, behind_others, between_events, from_python
from gpu_jobs import JOBS, Job, need_cuda
from gpu_layers import EXPERTS, LAYERS, RANK, TOP_K, Layer, make_layers, per_node
from harness import RESULTS, ResultFile, machine
from isoload import ops

SIZES = [(16, 32, 4096), (16, 32, 128), (64, 128, 4096), (16, 32, 16384)]  # ranks, replicas, tokens
AIMED = {"ranks": 16, "experts": EXPERTS, "replicas": 32, "tokens": 4096}  # what the targets are for


@dataclass
class Bench:
    """One size; each row goes to `results` as it is found, and stays in `rows` for the table."""

    layers: list[Layer]
    samples: int
    where: dict[str, int]
    results: ResultFile
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.there = [layer.to("cuda") for layer in self.layers]

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.rows.append({**self.where, "op": name, **row})
        self.results.add(self.rows[-1])

    def run(self, job: Job) -> None:
        got = same_bits(job, self.layers, self.there)
        fields = [getattr(self.there[0], name) for name in job.reads]
        read = [f.data if isinstance(f, isoload.ReplicaTables) else f for f in fields]
        num_bytes = sum(t.nbytes for t in (*read, *got))
        calls = [lambda x=x: job.call(x) for x in self.there]
        aimed = job.target if self.where == AIMED else None
        row = self.time(calls) | {"target_us": aimed, "quoted_us": job.quoted, "bytes": num_bytes}
        self.add(job.name, row | {"roof_us": self.roof(num_bytes)})

    def one_after_another(self, job: Job) -> None:
        """The job without early starts."""
        with unittest.mock.patch.dict(os.environ, ISOLOAD_PDL="0"):
            same_bits(job, self.layers, self.there)
            times = self.time([lambda x=x: job.call(x) for x in self.there])
        self.add(f"{job.name}, one after another", times)

    def balancers(self) -> None:
        """From ids to slots by the Balancer, eager and captured."""
        eager, captured = ([make(x) for x in self.there] for make in (make_balancer, make_captured))
        for n, balancer in enumerate([*eager, *captured]):
            slots = check_balancer(self.layers[n % LAYERS], self.there[n % LAYERS], balancer)
        first = self.there[0]
        num_bytes = sum(t.nbytes for t in (first.ids, first.loads, first.tables.data, slots))
        bytes_and_roof = {"bytes": num_bytes, "roof_us": self.roof(num_bytes)}
        calls, replays = (
            [lambda x=x, b=b: b(x.ids) for x, b in zip(self.there, made, strict=True)]
            for made in (eager, captured)
        )
        self.add("balancer", self.time(calls) | bytes_and_roof)
        self.add("balancer, captured", self.time_calls(replays[0], replays) | bytes_and_roof)

    def time_calls(self, one: Callable[[], Any], calls: list[Callable[[], Any]]) -> dict[str, Any]:
        """One call on the device's clock, and all of them as Python's clock sees them."""
        return {
            "alone_us": between_events(one, 1, self.samples, 10).median,
            "cold_us": behind_others(one, self.samples).median,
            "eager_us": from_python(calls, max(self.samples // 5, 3)).median,
        }

    def time(self, calls: list[Callable[[], Any]]) -> dict[str, Any]:
        one, many = Graph(calls[:1]), Graph(calls)
        inside = between_events(many.replay, len(calls), self.samples, 1)
        return {
            "in_graph_us": inside.median,
            "in_graph_p99_us": inside.p99,
            **self.time_calls(one.replay, calls),
            "nodes": one.num_nodes(),
        }

    def roof(self, num_bytes: int) -> float:
        pairs = [torch.randint(9, (2, max(num_bytes // 8, 1)), dtype=torch.int32) for _ in range(LAYERS)]
        pairs = [pair.to("cuda") for pair in pairs]
        graph = Graph([lambda p=p: p[0].copy_(p[1]) for p in pairs])
        return between_events(graph.replay, LAYERS, self.samples, 1).median

    def floor(self) -> None:
        call = lambda: torch.ops.isoload.device_errors(self.there[0].row)  # noqa: E731
        self.add("floor: one word", self.time([call] * LAYERS))

    def at_once(self) -> None:
        """One call of all layers."""
        data = torch.stack([x.tables.data for x in self.there])
        first = self.there[0].tables
        tables = isoload.ReplicaTables(data, first.num_ranks, first.num_experts, first.num_slots)
        loads, quota = (torch.stack([getattr(x, n) for x in self.there]) for n in ("loads", "quota"))
        calls = {
            "plan_exact": lambda: ops.plan_exact(loads, tables),
            "plan_lp": lambda: ops.plan_lp(loads, tables),
            "share, own row": lambda: ops.share(loads, quota, tables, per_node(self.there[0]), RANK),
        }
        for name, call in calls.items():
            self.add(f"{name}, {LAYERS} at once", self.time([call]))


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in (
        "op",
        "nodes",
        "in graph",
        "p99",
        "alone",
        "cold",
        "eager",
        "roof",
        "target",
        "quoted elsewhere",
    ):
        table.add_column(name, justify="left" if name in ("op", "quoted elsewhere") else "right")
    for row in rows:
        names = ("in_graph_us", "in_graph_p99_us", "alone_us", "cold_us", "eager_us", "roof_us")
        cells = [f"{row[name]:.1f}" if name in row else "" for name in names]
        target = row.get("target_us")
        mark = "" if target is None else f"{target:.0f} {'met' if row['in_graph_us'] <= target else 'MISSED'}"
        table.add_row(row["op"], str(row.get("nodes", "")), *cells, mark, row.get("quoted_us", ""))
    Console(width=130).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=50, help="of every time; the median is kept")
    parser.add_argument("--quick", action="store_true", help="one size instead of four; a file of its own")
    parser.add_argument("--check", action="store_true", help="run every kernel once, compare, time nothing")
    parser.add_argument(
        "--profile", action="store_true", help="run three ops once, for ncu --profile-from-start off"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --check, its checksums"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for bench_cuda[_quick].jsonl")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.device == "cpu" and not options.check:
        parser.error("--device cpu goes with --check: times are a GPU's")
    if options.device == "cuda":
        need_cuda()
    torch.set_num_threads(1)
    if options.check:
        check_all(options.device, options.seed)
    elif options.profile:
        profile(*SIZES[0], options.seed)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    print(__doc__.strip(), "\n", file=sys.stderr)
    print(machine("cuda"), file=sys.stderr)
    results = ResultFile("bench_cuda_quick" if options.quick else "bench_cuda", "cuda", options.results)
    for n, (ranks, replicas, tokens) in enumerate(SIZES[: 1 if options.quick else None]):
        where = {"ranks": ranks, "experts": EXPERTS, "replicas": replicas, "tokens": tokens}
        bench = Bench(make_layers(ranks, replicas, tokens, options.seed), options.samples, where, results)
        bench.floor()
        for job in JOBS:
            if job.tokens_matter or n in (0, 2):
                bench.run(job)
            if job.name == "chain":
                bench.one_after_another(job)
        if n in (0, 2):
            bench.balancers()
            bench.at_once()
        show(
            bench.rows, f"R = {ranks}, E = {EXPERTS} + {replicas}, {tokens} x {TOP_K} per rank (microseconds)"
        )
    print("written:", results.path)


if __name__ == "__main__":
    main()
