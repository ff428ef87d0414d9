"""Every op on a GPU, the chain from ids to slots, and Balancers: in a captured graph, and from Python.

Fairness ledger
- Instances: E = 256, top-8, Zipf 0.8 popularity per layer; placed by `eplb` on the popularity before a drift of
  exp(0.5 N(0,1)) per expert; 58 layers, all different; pack_rows, whose results are hundreds of MB, on two of them.
  T tokens on every rank. Results are compared with the CPU's before anything is timed: bit by bit, of every layer. A
  row that differs is timed all the same and says WRONG.
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
  a copy of [R, E] on the device. balancer, captured: CapturedBalancers, which hold a graph each, so there is no
  time in a graph; alone and cold are one of them, eager is all 58 from Python: a copy of ids and a launch each.
- Order: what a batch costs at every size, then the single ops. Each job runs in a process that the next takes over
  unless it failed: a CUDA error, or a kernel that hangs, costs one row.
- target: what we set ourselves for an H100 before the first measurement, for R = 16, 32 replicas, in graph.
- quoted: what others publish of their own planners on their own hardware; nothing of it ran here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

import isoload
from isoload import ops
from lib import table
from lib.gpu_balancers import BALANCERS
from lib.gpu_check import Size, check_all, check_one, compare, profile, show_wrong, starts, tried
from lib.gpu_clock import Graph, behind_others, between_events, from_python
from lib.gpu_jobs import JOBS, Job, need_cuda
from lib.gpu_layers import EXPERTS, LAYERS, RANK, TOP_K, Layer, make_layers, per_node
from lib.gpu_worker import Attempt, Worker, in_this_process
from lib.harness import RESULTS, ResultFile, command, machine

SIZES = [(16, 32, 4096), (16, 32, 128), (64, 128, 4096), (16, 32, 16384)]  # ranks, replicas, tokens
OF_RANKS = (SIZES[0], SIZES[2])  # where jobs run to which tokens do not matter
DECODE = (64, 128, 128)  # many ranks and few tokens: for what routes shared copies, which takes long there
AIMED = {"ranks": 16, "experts": EXPERTS, "replicas": 32, "tokens": 4096}  # what the targets are for
FLOOR, ALONE, AT_ONCE = "floor: one word", "chain, one after another", f"{LAYERS} at once"
HEADLINE = (
    *(FLOOR, "chain", ALONE, "share, own row", "balancer", "balancer, captured"),
    *("plan_exact", "plan_exact, of a rank", "plan_lp"),
)
BENCHED = {job.name: job for job in (*JOBS, *BALANCERS)}
torch.set_num_threads(1)  # here, so that a worker's process, which imports this, has it too


def order(sizes: Sequence[Size], headline_only: bool = False) -> list[tuple[Size, str]]:
    """Every size and what is timed at it, the most telling first, the heaviest last."""
    light_first = sorted(BENCHED, key=lambda name: BENCHED[name].layers < LAYERS)
    others = [] if headline_only else [*(name for name in light_first if name not in HEADLINE), AT_ONCE]

    def belongs(size: Size, name: str) -> bool:
        if size == DECODE:
            return name.startswith(("route_shared", "route, shared columns"))
        tokens_matter = name in (FLOOR, ALONE) or (name in BENCHED and BENCHED[name].tokens_matter)
        return tokens_matter or size in OF_RANKS

    return [
        (size, name)
        for names in (HEADLINE, others)
        for size in sizes
        for name in names
        if belongs(size, name)
    ]


class Bench:
    """One size, in the process that times it."""

    def __init__(self, layers: list[Layer], samples: int) -> None:
        self.layers, self.samples = layers, samples
        self.there = [layer.to("cuda") for layer in layers]

    def run(self, name: str) -> list[dict[str, Any]]:
        """The rows of a job: several of what takes all layers at once."""
        if name == FLOOR:
            call = lambda: torch.ops.isoload.device_errors(self.there[0].row)  # noqa: E731
            return [{"op": name, "wrong": "", **self.time([call] * LAYERS)}]
        if name == AT_ONCE:
            return self.at_once()
        if name == ALONE:
            with starts(early=False):
                return [{**self.job(BENCHED["chain"]), "op": name, "target_us": None}]
        return [self.job(BENCHED[name])]

    def job(self, job: Job) -> dict[str, Any]:
        hosts, theres = self.layers[: job.layers], self.there[: job.layers]
        got, wrong = compare(job, hosts, theres)
        fields = [getattr(theres[0], name) for name in job.reads]
        read = [f.data if isinstance(f, isoload.ops.tables.ReplicaTables) else f for f in fields]
        num_bytes = sum(t.nbytes for t in (*read, *got))
        calls = [job.on(x) for x in theres]
        times = self.time_calls(calls[0], calls) if job.captured else self.time(calls)
        more = {"target_us": job.target, "quoted_us": job.quoted, "bytes": num_bytes, "wrong": wrong}
        return {"op": job.name, **times, **more, "roof_us": self.roof(num_bytes, len(calls))}

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

    def roof(self, num_bytes: int, count: int) -> float:
        shape = (2, max(num_bytes // 8, 1))
        pairs = [torch.randint(9, shape, dtype=torch.int32, device="cuda") for _ in range(count)]
        graph = Graph([partial(p[0].copy_, p[1]) for p in pairs])
        return between_events(graph.replay, count, self.samples, 1).median

    def at_once(self) -> list[dict[str, Any]]:
        """One call of all layers."""
        data = torch.stack([x.tables.data for x in self.there])
        tables = replace(self.there[0].tables, data=data)
        loads, quota = (torch.stack([getattr(x, n) for x in self.there]) for n in ("loads", "quota"))
        calls = {
            "plan_exact": lambda: ops.plan_exact(loads, tables),
            "plan_lp": lambda: ops.plan_lp(loads, tables),
            "share, own row": lambda: ops.share(loads, quota, tables, per_node(self.there[0]), RANK),
        }
        return [
            {"op": f"{name}, {AT_ONCE}", "wrong": "", **self.time([call])} for name, call in calls.items()
        ]


@lru_cache(maxsize=1)
def bench_of(samples: int, seed: int, size: Size) -> Bench:
    return Bench(make_layers(*size, seed), samples)


def time_one(samples: int, seed: int, size: Size, name: str, early: bool) -> dict[str, Any]:
    """The rows of a job at a size; the second time, without early starts, it is compared alone."""
    bench = bench_of(samples, seed, size)
    job = BENCHED.get("chain" if name == ALONE else name)
    with starts(early):
        if job and not early:
            return {"wrong": compare(job, bench.layers[: job.layers], bench.there[: job.layers])[1]}
        rows = bench.run(name)
        return {"rows": rows, "wrong": "; ".join(row["wrong"] for row in rows if row["wrong"])}


def measure(attempt: Attempt, results: ResultFile, headline_only: bool) -> bool:
    """All rows, each on the disk as it is found; whether none is wrong."""
    rows: list[dict[str, Any]] = []
    wrong: list[tuple[str, dict[str, Any]]] = []
    try:
        for size, name in order(SIZES[:1] if headline_only else [*SIZES, DECODE], headline_only):
            found = tried(attempt, size, name)
            where = dict(zip(AIMED, (size[0], EXPERTS, *size[1:]), strict=True))
            if found["wrong"]:
                wrong.append((f"{name}, {where}", found))
            for row in found.get("rows") or [{"op": name, "wrong": found["wrong"]}]:
                if row.pop("wrong"):
                    row |= {name: found[name] for name in ("wrong", "one_after_another")}
                if where != AIMED:
                    row["target_us"] = None
                rows.append(where | row)
                results.add(rows[-1])
                print(f"R={size[0]} E={EXPERTS}+{size[1]} T={size[2]} {line(row)}", flush=True)
    finally:  # also when the time is up
        for size in (*SIZES, DECODE):
            show(size, [row for row in rows if (row["ranks"], row["replicas"], row["tokens"]) == size])
        show_wrong(wrong)
    return not wrong


def line(row: dict[str, Any]) -> str:
    times = [f"{name.removesuffix('_us')} {row[name]:.1f}" for name in TIMES if name in row]
    return f"{row['op']}: {', '.join(times)}{' WRONG' if row.get('wrong') else ''}"


TIMES = ("in_graph_us", "in_graph_p99_us", "alone_us", "cold_us", "eager_us", "roof_us")


def met(row: dict[str, Any]) -> str:
    target = row.get("target_us")
    return "" if target is None else f"{target:.0f} {'met' if row['in_graph_us'] <= target else 'MISSED'}"


COLUMNS: table.Columns = {
    "op": lambda row: row["op"] + (" WRONG" if row.get("wrong") else ""),
    "nodes": "{nodes}",
    "in graph": "{in_graph_us:.1f}",
    "p99": "{in_graph_p99_us:.1f}",
    **{name: f"{{{name}_us:.1f}}" for name in ("alone", "cold", "eager", "roof")},
    "target": met,
    "quoted elsewhere": lambda row: row.get("quoted_us", ""),
}


def show(size: Size, rows: list[dict[str, Any]]) -> None:
    if rows:
        ranks, replicas, tokens = size
        title = f"R = {ranks}, E = {EXPERTS} + {replicas}, {tokens} x {TOP_K} per rank (microseconds)"
        table.show(title, COLUMNS, rows)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--samples", type=int, default=50, help="of every time; the median is kept")
    parser.add_argument(
        "--quick", action="store_true", help="what a batch costs at one size; a file of its own"
    )
    parser.add_argument("--check", action="store_true", help="run every kernel once, compare, time nothing")
    parser.add_argument(
        "--profile", action="store_true", help="run three ops once, for ncu --profile-from-start off"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: with --check, its checksums"
    )
    parser.add_argument("--one-process", action="store_true", help="for a tool that watches the process")
    parser.add_argument("--spoil", default="", metavar="OP", help="with --check: see that it is found")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for bench_cuda[_quick].jsonl")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.device == "cpu" and not asked.check:
        parser.error("--device cpu goes with --check: times are a GPU's")
    if asked.device == "cuda":
        need_cuda()
    run: Callable[..., Any] = partial(time_one, asked.samples, asked.seed)
    if asked.check:
        run = partial(check_one, asked.device, asked.seed, asked.spoil)
    patience = 600 if asked.device == "cpu" else 20 if asked.check else 40
    attempt = in_this_process(run) if asked.one_process else Worker(run, patience)
    if asked.profile:
        profile(SIZES[0], asked.seed)
    elif asked.check:
        sys.exit(not check_all(attempt, asked.device))
    else:
        print(__doc__.strip(), "\n", file=sys.stderr)
        print(machine("cuda"), file=sys.stderr)
        results = ResultFile("bench_cuda_quick" if asked.quick else "bench_cuda", "cuda", asked.results)
        right = measure(attempt, results, asked.quick)
        print("written:", results.path)
        sys.exit(not right)


if __name__ == "__main__":
    main()
