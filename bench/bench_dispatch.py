"""The whole dispatch of a layer, stage by stage and policy by policy, on the GPUs or CPUs that there are.

    python bench/bench_dispatch.py                            # R virtual ranks in one process, on a GPU if there is one
    torchrun --nproc-per-node 8 bench/bench_dispatch.py       # a rank per process: NCCL, or gloo on CPU
    torchrun ... bench/bench_dispatch.py --transport deep_ep  # rows by EPBuffer, ElasticBuffer or Buffer

Fairness ledger
- Layers: DeepSeek-V3 (with its shared expert), Qwen3-235B, gpt-oss-120b and -20b, one layer, at their own widths,
  experts and top-K, in bfloat16; SwiGLU everywhere. --scale N divides widths and a prefill's tokens by N, for CPUs, in
  float32. A decode has 128 tokens per rank, a prefill 4096. Forward only, no gradients.
- Routing: recorded where a trace has a shape's experts and top-K (the shipped gpt-oss-20b decode, and what --traces
  holds), at the layer of median imbalance; and made: Zipf of exponent 0.8, of which every batch is another drift (0.5).
  Placements are made from the trace's first half, or from the popularity before the drift; the rest is measured.
- Rooms: `none` has the experts in order, one slot each, and neither gathers nor plans. The others have a slot more for
  every eight of a rank's, at least one: replicas by placer `eplb`, or as many spare slots beside experts in order (and
  the pool of borrowed weights has two buffers). `grace` has the placement, and the slots, that its placer wants.
- `libra` and `hedge` fill their slots from the batch itself, as if the forecast were right. `spill_cost` prices an
  import by the bytes of these experts and 600 TFLOP/s; with --scale it and llep's chunk are divided like the tokens.
- even: the same layer under perfectly even routing, plain: the limit, to which whole times are compared.
- Stages: the layer's own functions, timed where it calls them (dispatch_stages.py), one after the other with a barrier
  before each: between CUDA events, or by the wall clock on CPU. `route` includes the share; `weights` is waited for at
  once, so nothing hides it; `experts` is sort, grouped GEMMs, activation and weighted sum. `whole` is one call, with
  what overlaps, and what the host waits for. Of every sample the most that a rank took; then the median of samples.
- busiest / ideal: copies of the busiest rank over ceil(all copies / R), shared ones included; mean over the batches.
- weights GB/s: bytes of the experts that the rank with most imports borrowed, over the time of the slowest rank.
- virtual: all ranks in one process, one after the other: stages are then the sum over ranks, but `experts`, which is
  the busiest rank alone; exchanges are copies in memory and say nothing of a network.
- Policies of one room share a layer and alternate batch by batch; rooms follow one another. Every batch's copies are
  counted and its result is compared with the dense layer's; a policy that is wrong ends the bench.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import isoload
from isoload.transport import CollectiveTransport, LocalTransport, Transport
from isoload.transport.deep_ep import DeepEPTransport, installed
from isoload.weights.backends import BACKENDS
from isoload.weights.borrowing import NUM_BUFFERS
from lib import table
from lib.clocks import Timer, timed, timed_on_cuda
from lib.dispatch_routing import SHIPPED, Routing, even, read_folder, sources
from lib.dispatch_setting import (
    LINES,
    NO_BALANCE,
    PHASES,
    SHAPES,
    Line,
    Setting,
    make_placement,
    policy_of,
    why_not,
)
from lib.dispatch_stages import STAGES, Batch, LayerBench, Sample, check
from lib.harness import RESULTS, ResultFile, command, machine, network
from lib.llep_processes import join_torchrun

Row = dict[str, Any]


class Machine:
    """What the lines run on: a device, and how ranks are joined there."""

    def __init__(
        self, kind: str, device: torch.device, borrow: str | None = None, expert_major: bool = False
    ) -> None:
        self.kind, self.device, self.borrow, self.expert_major = kind, device, borrow, expert_major
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        clock: Timer = partial(timed, clock=perf_counter_ns)
        self.timer = timed_on_cuda if device.type == "cuda" else clock

    def transport(self, setting: Setting, placement: isoload.Placement, most_tokens: int) -> Transport:
        """All processes make it together."""
        topology = setting.topology
        if self.kind == "local":
            return LocalTransport(topology)
        if self.kind == "collective":
            return CollectiveTransport(topology)
        pool = NUM_BUFFERS * placement.spare_slots * setting.expert_bytes if self.borrow == "deep_ep" else 0
        return DeepEPTransport(
            topology,
            hidden=setting.hidden,
            top_k=setting.shape.top_k + setting.shape.shared,
            slots_per_rank=placement.slots_per_rank,
            max_tokens_per_rank=most_tokens,
            expert_major=self.expert_major,
            borrow_bytes=pool,
        )


def bench_setting(
    setting: Setting,
    on: Machine,
    names: Sequence[str],
    traces: Sequence[isoload.traces.Trace],
    num_batches: int,
    rounds: int,
) -> Iterator[Row]:
    """A row per routing and line, the even routing's first; rows that could not run say why."""
    lines = [LINES[name] for name in names]
    yield from bench_routing(setting, on, even(setting, num_batches), [NO_BALANCE], rounds)
    for name, source in sources(setting, num_batches, traces).items():
        try:
            routing = source()
        except ValueError as error:
            yield from not_run(setting, name, lines, str(error))
            continue
        yield from bench_routing(setting, on, routing, lines, rounds)


def bench_routing(
    setting: Setting, on: Machine, routing: Routing, lines: Sequence[Line], rounds: int
) -> Iterator[Row]:
    """The lines on one routing, room by room."""
    for line in lines:
        if reason := why_not(line, setting):
            yield from not_run(setting, routing.name, [line], reason)
    able = [line for line in lines if not why_not(line, setting)]
    for room in dict.fromkeys(line.room for line in able):
        own = [line for line in able if line.room == room]
        try:
            yield from bench_room(setting, on, routing, own, rounds)
        except torch.OutOfMemoryError:
            if on.kind != "local":
                raise  # the other ranks wait for this one
            yield from not_run(setting, routing.name, own, "out of memory")
        gc.collect()
        if on.device.type == "cuda":
            torch.cuda.empty_cache()


def make_layer(setting: Setting, on: Machine, routing: Routing, room: str) -> LayerBench:
    """Raises ValueError or ImportError, on all ranks, where a setting has no such layer."""
    placement = make_placement(setting, room, routing.seen)
    most = max(len(ids) for batch in routing.batches for ids in batch)
    transport = on.transport(setting, placement, most)
    return LayerBench(setting, placement, transport, on.device, on.timer, on.borrow, room != "plain")


def bench_room(
    setting: Setting, on: Machine, routing: Routing, lines: Sequence[Line], rounds: int
) -> Iterator[Row]:
    """Lines that share a layer, batch by batch; the first turn warms up."""
    try:
        layer = make_layer(setting, on, routing, lines[0].room)
    except (ValueError, ImportError) as error:
        yield from not_run(setting, routing.name, lines, str(error))
        return
    samples: dict[Line, list[list[Sample]]] = {line: [] for line in lines}  # [sample][process]
    batches = [layer.make_batch(ids) for ids in routing.batches]
    for turn in range(rounds + 1):
        for batch in batches:
            for line in lines:
                of_all = measure(layer, line, batch, f"{line.policy} on {routing.name}")
                if turn:
                    samples[line].append(of_all)
    for line in lines:
        yield {
            **setting.facts(),
            "routing": routing.name,
            "policy": line.policy,
            "room": line.room,
            "slots_per_rank": layer.placement.slots_per_rank,
            "spare_slots": layer.placement.spare_slots,
            "borrow": layer.layer.borrowing.backend.name if layer.layer.borrowing else None,
            **figures(samples[line], setting),
        }


def measure(layer: LayerBench, line: Line, batch: Batch, who: str) -> list[Sample]:
    """Every process's sample of one batch, checked."""
    setting, moe = layer.setting, layer.layer
    moe.policy = policy_of(line, setting)
    of_all: list[Sample] = moe.group.gather_objects("bench", layer.run(batch))
    made = moe.last_plan
    quota = made.quota if made is not None and made.realisation == "quota" else None
    copies = torch.cat([own for sample in of_all for own in sample.copies])
    error = float(np.max([sample.error for sample in of_all]))  # NaN where there is one
    check(setting, copies, quota, batch.num_copies, error, who)
    return of_all


def figures(samples: Sequence[Sequence[Sample]], setting: Setting) -> Row:
    """What the samples [sample][process] of one line come to."""
    ms = [{stage: max(one.ms[stage] for one in of_all) for stage in of_all[0].ms} for of_all in samples]
    loads = [torch.stack([own.sum() for one in of_all for own in one.copies]) for of_all in samples]
    ideals = [-(-int(load.sum()) // setting.ranks) for load in loads]
    imports = [[sum(one.imports) for one in of_all] for of_all in samples]
    rates = [
        max(own) * setting.expert_bytes / (of_ms["weights"] * 1e6)
        for own, of_ms in zip(imports, ms, strict=True)
        if any(own)
    ]
    return {
        "samples": len(samples),
        "copies": int(np.mean([int(load.sum()) for load in loads])),
        "busiest_over_ideal": float(
            np.mean([int(load.max()) / ideal for load, ideal in zip(loads, ideals, strict=True)])
        ),
        "imports": float(np.mean([sum(own) for own in imports])),
        "weights_gb_per_s": float(np.median(rates)) if rates else None,
        "error": max(one.error for of_all in samples for one in of_all),
        "ms": {stage: float(np.median([of_ms[stage] for of_ms in ms])) for stage in ms[0]},
    }


def not_run(setting: Setting, routing: str, lines: Sequence[Line], reason: str) -> list[Row]:
    where = {**setting.facts(), "routing": routing}
    return [{**where, "policy": line.policy, "room": line.room, "not_run": reason} for line in lines]


def show(rows: Sequence[Row]) -> None:
    """A table per shape, phase and routing; a whole time beside the limit's."""
    limits = {(r["shape"], r["phase"]): r["ms"]["whole"] for r in rows if r["routing"] == "even"}
    columns: table.Columns = {
        "policy": "{policy}",
        "busiest / ideal": "{busiest_over_ideal:.3f}",
        **table.same(STAGES, "{ms[NAME]:.3f}"),
        "GB/s": lambda row: f"{row['weights_gb_per_s']:.1f}" if row["weights_gb_per_s"] else "",
        "whole": "{ms[whole]:.3f}",
        "/ even": lambda row: f"{row['ms']['whole'] / limits[row['shape'], row['phase']]:.2f}",
    }
    for key in dict.fromkeys((r["shape"], r["phase"], r["routing"]) for r in rows):
        own = [r for r in rows if (r["shape"], r["phase"], r["routing"]) == key]
        head = f"{', '.join(key)}: {own[0]['ranks']} ranks, {own[0]['tokens_per_rank']} tokens each; ms"
        table.show(head, columns, [row for row in own if "not_run" not in row])
        print(*(f"{row['policy']}: not run, {row['not_run']}" for row in own if "not_run" in row), sep="\n")


def positive(text: str) -> int:
    """A number of the command line, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def arguments() -> argparse.ArgumentParser:
    parser = command(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES), metavar="NAME")
    parser.add_argument("--policies", nargs="+", choices=LINES, default=list(LINES), metavar="NAME")
    parser.add_argument("--traces", type=Path, help="a folder of more recorded routing, *.npz")
    parser.add_argument(
        "--scale", type=positive, default=1, help="divides widths and a prefill's tokens, for CPUs"
    )
    parser.add_argument("--ranks", type=positive, default=8, help="virtual ones, without torchrun")
    parser.add_argument("--ranks-per-node", type=positive, help="default: torchrun's, or all")
    parser.add_argument("--transport", choices=("collective", "deep_ep"), default="collective")
    parser.add_argument(
        "--expert-major", action="store_true", help="DeepEP's rows come by slot, once per copy"
    )
    parser.add_argument("--borrow", choices=BACKENDS, help="what brings weights; default: the layer's choice")
    parser.add_argument("--batches", type=positive, default=3, help="of every routing")
    parser.add_argument("--rounds", type=positive, default=3, help="times that each batch is measured")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results file")
    return parser


def bench(
    asked: argparse.Namespace, on: Machine, ranks: int, per_node: int, add: Callable[[Row], None]
) -> list[Row]:
    """All rows, each added as it is found. All processes call it together."""
    isoload.Topology(ranks, per_node)  # else every line would say that it does not fit
    traces = [isoload.read_trace(SHIPPED), *(read_folder(asked.traces) if asked.traces else [])]
    rows = []
    for shape in asked.shapes:
        for phase in asked.phases:
            how = {"ranks": ranks, "ranks_per_node": per_node, "scale": asked.scale, "dtype": on.dtype}
            setting = Setting(shape=SHAPES[shape], phase=phase, **how)
            for row in bench_setting(setting, on, asked.policies, traces, asked.batches, asked.rounds):
                rows.append({"transport": on.kind, "expert_major": on.expert_major, **row})
                add(rows[-1])
    return rows


def main() -> None:
    parser, under_torchrun = arguments(), "TORCHELASTIC_RUN_ID" in os.environ
    asked = parser.parse_args()
    if asked.transport == "deep_ep" and not under_torchrun:
        parser.error("--transport deep_ep needs torchrun")
    if asked.expert_major and asked.transport != "deep_ep":
        parser.error("--expert-major needs --transport deep_ep")
    torch.set_num_threads(1)
    if under_torchrun:
        device = join_torchrun()
        on = Machine(asked.transport, device, asked.borrow, asked.expert_major)
        ranks, per_node = dist.get_world_size(), asked.ranks_per_node or int(os.environ["LOCAL_WORLD_SIZE"])
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        on = Machine("local", device, asked.borrow)
        ranks, per_node = asked.ranks, asked.ranks_per_node or asked.ranks
    if under_torchrun and dist.get_rank():
        bench(asked, on, ranks, per_node, lambda row: None)
    else:
        print(__doc__.strip(), "\n", file=sys.stderr)
        backend = dist.get_backend() if under_torchrun else "local"
        joined = network(backend, device)
        if asked.transport == "deep_ep":
            joined["deep_ep"] = ", ".join(f"{p.buffers[0]} of {p}" for p in installed() if p.buffers)
        print(machine(str(device)), joined, file=sys.stderr)
        wire = asked.transport if asked.transport == "deep_ep" else backend
        results = ResultFile(f"bench_dispatch_{device.type}_{wire}", str(device), asked.results)
        show(bench(asked, on, ranks, per_node, lambda row: results.add({**joined, **row})))
        print("written:", results.path)
    if under_torchrun:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
