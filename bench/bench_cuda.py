"""Every op on a GPU, and the chain count, plan_exact, share, route: in a captured graph, and from Python.

Fairness ledger
- Instances: E = 256, top-8, Zipf 0.8 popularity per layer; placed by `eplb` on the popularity before a drift of
  exp(0.5 N(0,1)) per expert; 58 layers, all different. T tokens on every rank. Results are compared with the CPU's
  before anything is timed: bit by bit, of every layer.
- in graph: one graph of a call for each of the 58 layers, replayed; time between events / 58, median over replays. What
  an op adds to a captured forward pass: no launch from the host, inputs of 58 layers in turn.
- alone: a graph of one call, ten replays between events / 10: the launch of a graph is in it.
- eager: 58 calls from Python and a synchronisation / 58, checks and allocations included.
- floor: the same three for a kernel of one thread that writes one word (device_errors).
- roof: a copy of as many bytes as the op reads and writes, in the same kind of graph: in graph.
- at once: one call of all 58 layers, time of the call.
- The chain's loads [R, E] are there already: the gather between count and plan_exact depends on the network and is
  left out; one GPU cannot measure it. nodes: of the graph of one call.
- target: what we set ourselves for an H100 before the first measurement, for R = 16, 32 replicas, in graph.
- quoted: what others publish of their own planners on their own hardware; nothing of it ran here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import isoload
from gpu_clock import Graph, between_events, from_python
from gpu_layers import EXPERTS, LAYERS, RANK, TOP_K, Layer, make_layers, per_node, size
from harness import RESULTS, machine, write_results
from isoload import ops


def chain(x: Layer) -> Tensor:
    ops.count(x.ids, EXPERTS)
    quota = ops.plan_exact(x.loads, x.tables).quota
    row = ops.share(x.loads, quota, x.tables, per_node(x), RANK)
    return ops.route(x.ids, row, x.tables)


def spill(x: Layer) -> tuple[Tensor, ...]:
    """Plain expert parallelism, two spare slots per rank: the placement that plan_spill starts from."""
    ranks, device = len(x.loads), x.loads.device
    own = -(-EXPERTS // ranks)
    held = torch.arange(ranks * own, dtype=torch.int32, device=device)
    home = (held + held // own * 2)[:EXPERTS]
    held = torch.where(held < EXPERTS, held, -1).view(ranks, own)
    slots = torch.cat([held, held.new_full((ranks, 2), -1)], dim=1).flatten()
    return tuple(ops.plan_spill(x.loads, slots, home, ranks, 2))


@dataclass(frozen=True)
class Job:
    """An op on a layer; reads: the fields that its bytes are counted of."""

    name: str
    op: str  # of torch.ops.isoload
    call: Callable[[Layer], Any]
    reads: tuple[str, ...]
    target: float | None = None
    quoted: str = ""
    tokens_matter: bool = False


LPLB, ULTRA = "DeepSeek LPLB ~100, SGLang HIP ~80", "UltraEP plan 67-78"
JOBS = (
    Job("count", "count", lambda x: ops.count(x.ids, EXPERTS), ("ids",), tokens_matter=True),
    Job(
        "replica_tables",
        "replica_tables",
        lambda x: ops.replica_tables(x.slot_to_expert, len(x.loads), EXPERTS).data,
        ("slot_to_expert",),
    ),
    Job(
        "plan_exact",
        "plan_exact",
        lambda x: ops.plan_exact(x.loads, x.tables),
        ("loads", "tables"),
        10,
        ULTRA,
    ),
    Job(
        "plan_exact, joint",
        "plan_exact",
        lambda x: ops.plan_exact(x.loads, x.tables, x.fixed, pour=x.pour),
        ("loads", "tables"),
        12,
    ),
    Job("plan_active", "plan_active", lambda x: ops.plan_active(x.loads, x.tables), ("loads", "tables")),
    Job("plan_lp", "plan_lp", lambda x: ops.plan_lp(x.loads, x.tables), ("loads", "tables"), 25, LPLB),
    Job(
        "round_split",
        "round_split",
        lambda x: ops.round_split(x.split, x.loads, x.tables),
        ("split", "loads", "tables"),
    ),
    Job("plan_spill", "plan_spill", spill, ("loads", "slot_to_expert")),
    Job(
        "share, own row",
        "share",
        lambda x: ops.share(x.loads, x.quota, x.tables, per_node(x), RANK),
        ("loads", "quota", "tables"),
    ),
    Job(
        "share_by_rank",
        "share_by_rank",
        lambda x: ops.share_by_rank(x.loads, x.quota, x.tables, per_node(x)),
        ("loads", "quota", "tables"),
    ),
    Job(
        "share_alone",
        "share_alone",
        lambda x: ops.share_alone(x.loads[RANK], x.quota, x.tables, RANK),
        ("quota", "tables"),
    ),
    Job(
        "route",
        "route",
        lambda x: ops.route(x.ids, x.row, x.tables),
        ("ids", "row", "tables"),
        None,
        "UltraEP reroute 37",
        True,
    ),
    Job(
        "route, visited",
        "route",
        lambda x: ops.route(x.ids, x.row, x.tables, "visited"),
        ("ids", "row", "tables"),
        tokens_matter=True,
    ),
    Job(
        "route_sampled",
        "route_sampled",
        lambda x: ops.route_sampled(x.ids, x.weights, x.tables, 5),
        ("ids", "weights", "tables"),
        tokens_matter=True,
    ),
    Job(
        "plan_waterfill",
        "plan_waterfill",
        lambda x: ops.plan_waterfill(x.copies, x.tokens),
        ("copies", "tokens"),
    ),
    Job(
        "route_shared",
        "route_shared",
        lambda x: ops.route_shared(x.slots, x.shared_row, size(x), RANK),
        ("slots", "shared_row"),
        tokens_matter=True,
    ),
    Job(
        "route_shared_sampled",
        "route_shared_sampled",
        lambda x: ops.route_shared_sampled(x.slots, x.tokens, None, size(x), RANK, "static"),
        ("slots", "tokens"),
        tokens_matter=True,
    ),
    Job(
        "append_shared_expert",
        "append_shared_expert",
        lambda x: ops.append_shared_expert(x.slots, x.gates, x.shared_ranks, size(x)),
        ("slots", "gates", "shared_ranks"),
        tokens_matter=True,
    ),
    Job("chain", "route", chain, ("ids", "loads", "tables"), 25, ULTRA + " + reroute 37", True),
)


SIZES = [(16, 32, 4096), (16, 32, 128), (64, 128, 4096), (16, 32, 16384)]  # ranks, replicas, tokens
CHECKED = [(16, 32, 128), (16, 32, 4100), (128, 128, 64), (192, 128, 64), (304, 352, 64)]  # every kernel
AIMED = {"ranks": 16, "experts": EXPERTS, "replicas": 32, "tokens": 4096}  # what the targets are for


@dataclass
class Bench:
    """One size; rows is what is found."""

    layers: list[Layer]
    device: str
    samples: int
    where: dict[str, int]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.there = [layer.to(self.device) for layer in self.layers]

    def run(self, job: Job) -> None:
        if not has_cuda(job):
            self.rows.append({**self.where, "op": job.name, "missing": "no CUDA function in this build"})
            return
        got = self.check(job)
        fields = [getattr(self.there[0], name) for name in job.reads]
        read = [f.data if isinstance(f, isoload.ReplicaTables) else f for f in fields]
        num_bytes = sum(t.nbytes for t in (*read, *got))
        calls = [lambda x=x: job.call(x) for x in self.there]
        aimed = job.target if self.where == AIMED else None
        row = self.time(calls) | {"target_us": aimed, "quoted_us": job.quoted, "bytes": num_bytes}
        self.rows.append({**self.where, "op": job.name, **row, "roof_us": self.roof(num_bytes)})

    def check(self, job: Job) -> list[Tensor]:
        """Raises unless every layer's result is the CPU's; returns that of the last."""
        got: list[Tensor] = []
        for i, (host, there) in enumerate(zip(self.layers, self.there, strict=True)):
            wanted, got = tensors(job.call(host)), tensors(job.call(there))
            if not all(torch.equal(a, b.cpu()) for a, b in zip(wanted, got, strict=True)):
                raise SystemExit(f"{job.name} differs from the CPU on layer {i} of {self.where}")
        isoload.check_device(self.device)
        return got

    def time(self, calls: list[Callable[[], Any]]) -> dict[str, Any]:
        one, many = Graph(calls[:1]), Graph(calls)
        inside = between_events(many.replay, len(calls), self.samples, 1)
        return {
            "in_graph_us": inside.median,
            "in_graph_p99_us": inside.p99,
            "alone_us": between_events(one.replay, 1, self.samples, 10).median,
            "eager_us": from_python(calls, max(self.samples // 5, 3)).median,
            "nodes": one.num_nodes(),
        }

    def roof(self, num_bytes: int) -> float:
        pairs = [torch.randint(9, (2, max(num_bytes // 8, 1)), dtype=torch.int32) for _ in range(LAYERS)]
        pairs = [pair.to(self.device) for pair in pairs]
        graph = Graph([lambda p=p: p[0].copy_(p[1]) for p in pairs])
        return between_events(graph.replay, LAYERS, self.samples, 1).median

    def floor(self) -> None:
        call = lambda: torch.ops.isoload.device_errors(self.there[0].row)  # noqa: E731
        self.rows.append({**self.where, "op": "floor: one word", **self.time([call] * LAYERS)})

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
        jobs = {job.name: job for job in JOBS}
        for name, call in calls.items():
            if has_cuda(jobs[name]):
                self.rows.append({**self.where, "op": f"{name}, {LAYERS} at once", **self.time([call])})


def has_cuda(job: Job) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"isoload::{job.op}", "CUDA")


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def show(rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for name in ("op", "nodes", "in graph", "p99", "alone", "eager", "roof", "target", "quoted elsewhere"):
        table.add_column(name, justify="left" if name in ("op", "quoted elsewhere") else "right")
    for row in rows:
        if "missing" in row:
            table.add_row(row["op"], *[""] * 7, row["missing"])
            continue
        names = ("in_graph_us", "in_graph_p99_us", "alone_us", "eager_us", "roof_us")
        cells = [f"{row[name]:.1f}" if name in row else "" for name in names]
        target = row.get("target_us")
        mark = "" if target is None else f"{target:.0f} {'met' if row['in_graph_us'] <= target else 'MISSED'}"
        table.add_row(row["op"], str(row["nodes"]), *cells, mark, row.get("quoted_us", ""))
    Console(width=130).print(table)


def check_all(seed: int) -> None:
    """Every kernel on one layer of several sizes, nothing timed."""
    for ranks, replicas, tokens in CHECKED:
        where = {"ranks": ranks, "experts": EXPERTS, "replicas": replicas, "tokens": tokens}
        bench = Bench(make_layers(ranks, replicas, tokens, seed, layers=1), "cuda", 1, where)
        for job in filter(has_cuda, JOBS):
            bench.check(job)
        print("as on the CPU:", where, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=50, help="of every time; the median is kept")
    parser.add_argument("--quick", action="store_true", help="one size instead of four")
    parser.add_argument("--check", action="store_true", help="run every kernel once, compare, time nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for bench_cuda.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_cuda needs a GPU")
    torch.set_num_threads(1)
    if options.check:
        check_all(options.seed)
        return
    print(__doc__.strip(), "\n", file=sys.stderr)
    print(machine("cuda"), file=sys.stderr)
    rows = []
    for n, (ranks, replicas, tokens) in enumerate(SIZES[: 1 if options.quick else None]):
        where = {"ranks": ranks, "experts": EXPERTS, "replicas": replicas, "tokens": tokens}
        bench = Bench(make_layers(ranks, replicas, tokens, options.seed), "cuda", options.samples, where)
        bench.floor()
        for job in JOBS:
            if job.tokens_matter or n in (0, 2):
                bench.run(job)
        if n in (0, 2):
            bench.at_once()
        show(
            bench.rows, f"R = {ranks}, E = {EXPERTS} + {replicas}, {tokens} x {TOP_K} per rank (microseconds)"
        )
        rows += bench.rows
    print("written:", write_results("bench_cuda", rows, "cuda", options.results).name)


if __name__ == "__main__":
    main()
