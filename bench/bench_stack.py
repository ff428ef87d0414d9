"""Layers in a LibraStack by stage and by batch, beside the same layers alone: Libra's Table 2 and Figure 9.

    python bench/bench_stack.py --scale 16                  # R virtual ranks in one process, on a GPU if there is one
    torchrun --nproc-per-node 8 bench/bench_stack.py        # a rank per process: NCCL, or gloo on CPU
    python bench/bench_stack.py --scale 16 --grid           # batches and lengths of Tables 4 to 13

Fairness ledger
- Layers: Qwen3-235B and GLM-4.5 (its shared expert left out: every line computes it alike), at their own widths,
  experts and top-K, in bfloat16, --layers of them that follow one another without attention in between, so that nothing
  but the layers hides what a stack fetches. --scale N divides widths and tokens by N, for CPUs, in float32. 4096 tokens
  per rank, as the paper's 32 sequences of 1024 on 8 GPUs. Forward only. --grid: 8 to 64 sequences of 1024 to 8192
  tokens over the ranks; what has as many tokens is one setting, since nothing here has attention. The paper's tables
  are whole models, and its columns beyond one output token are decode.
- Routing is made: Zipf of exponent 0.8, of which every layer of every batch is another drift (0.5). Placements are made
  from the popularity before the drift. --traces: recorded, where a trace has a shape's experts and top-K and is long
  enough: one layer's batches follow one another through all layers, and placements see those before. A stack's first
  layer is filled by its loads of the batch before, the others by forecasts: --right of the choices are true, the others
  drawn from the popularity that placements saw; every forecast costs the product and the choice of the next gate.
- Slots: alone, `none` has the experts in order, neither gathers nor plans; `eplb, exact` has --replicas more on every
  rank and layer, 1 as in the paper. planned and held have --slots spare ones (8, the paper's N), once for all layers.
- held exchanges fixed shapes, all rows of every rank to all; planned and alone exactly what is to go.
- Stages: the layer's own functions, timed where a batch goes through them (stack_stages.py), one after the other with
  a barrier before each, between CUDA events or by the wall clock on CPU. gather = count and gather of loads; predict =
  the next gate, counted; plan = plan, share and route; fetch = the next layer's fill and its weights, waited for at
  once; dispatch = packing, rows, and what a rank takes of them. What hides behind what is in `whole` alone: batches run
  again, all layers in one call. Between two batches the first layer's weights have time, as behind attention. Of every
  sample the most that a rank took; the median over batches and rounds, a mean over layers.
- virtual: all ranks in one process, in turn: stages are the sum over ranks, but local and remote are those of the
  slowest rank; exchanges are copies in memory and say nothing of a network; `whole` is all ranks in turn.
- imbalance = max / mean rank load; mean over layers. The series has `whole` and imbalance of every batch.
- Lines follow one another. Every result is compared with the dense layer's; a line that is wrong ends the bench.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import isoload
from bench_dispatch import positive
from lib import table
from lib.clocks import Timer, timed, timed_on_cuda
from lib.dispatch_routing import Routing, Source, read_folder, sources
from lib.dispatch_setting import SHAPES as LAYERS
from lib.dispatch_setting import Setting, Shape
from lib.dispatch_stages import Batch
from lib.harness import RESULTS, ResultFile, command, machine, network
from lib.llep_processes import join_torchrun
from lib.stack_stages import LINES, STAGES, Line, StackBench

Row = dict[str, Any]
SHAPES = {shape.name: shape for shape in (LAYERS["Qwen3-235B"], Shape("GLM-4.5", 5120, 1536, 160, 8))}
OTHERS = {name: replace(shape, shared=0) for name, shape in LAYERS.items() if name not in SHAPES}
SEQUENCES, LENGTHS = (8, 16, 32, 48, 64), (1024, 2048, 4096, 6144, 8192)  # of the paper's Tables 4 to 13
SEED = 0


def forecasts(routing: Routing, right: float) -> list[list[Tensor]]:
    """[batch * layer][R] guesses [T, K]: a part of the true choices, the others drawn from the popularity before."""
    seen = routing.seen.batch_counts() if isinstance(routing.seen, isoload.traces.Trace) else routing.seen
    before = torch.from_numpy(seen.sum((0, 1))).double()
    draw, found = torch.Generator().manual_seed(SEED), []
    for batch in routing.batches:
        own = []
        for ids in batch:
            drawn = before.multinomial(ids.numel(), True, generator=draw).view(ids.shape)
            own.append(torch.where(torch.rand(ids.shape, generator=draw) < right, ids, drawn))
        found.append(own)
    return found


def place(setting: Setting, line: Line, routing: Routing, slots: int, replicas: int) -> isoload.Placement:
    """In order, or by another placer with more resident slots; in a stack with spare ones."""
    own = -(-setting.shape.experts // setting.ranks)
    spare = slots if line.order != "alone" else 0
    more = replicas if line.placer != "trivial" else spare
    return isoload.place(routing.seen, setting.topology, own + more, placer=line.placer, spare_slots=spare)


def bench_line(
    setting: Setting, line: Line, routing: Routing, asked: Any, device: torch.device, local: bool
) -> Row:
    """One line: stages, and the series of whole batches. All processes call it together."""
    clock: Timer = timed_on_cuda if device.type == "cuda" else partial(timed, clock=perf_counter_ns)
    placement = place(setting, line, routing, asked.slots, asked.replicas)
    bench = StackBench(setting, line, placement, asked.layers, device, clock, local)
    guesses = forecasts(routing, asked.right)
    owned, width = bench.group.ranks, asked.layers
    batches: list[list[Batch]] = []
    told: list[list[list[Tensor]]] = []
    for first in range(0, len(routing.batches), width):
        of_layers = zip(bench.parts, routing.batches[first : first + width], strict=True)
        batches.append([part.make_batch(ids) for part, ids in of_layers])
        told.append([[of[rank].to(device) for rank in owned] for of in guesses[first : first + width]])
    stages, series = list[Row](), list[list[Row]]()
    for turn in range(asked.rounds + 1):  # the first warms up
        for by_stage in (True, False):
            samples = [bench.run(*given, by_stage) for given in zip(batches, told, strict=True)]
            if turn and by_stage:
                stages += [slowest(bench, sample) for sample in samples]
            elif turn:
                series.append([slowest(bench, sample) for sample in samples])
    whole = np.median([[sample["ms"]["whole"] for sample in of_turn] for of_turn in series], axis=0)
    ms = {stage: float(np.median([sample["ms"][stage] for sample in stages])) for stage in STAGES}
    return {
        "line": line.name,
        "policy": line.policy,
        "order": line.order,
        "placer": line.placer,
        "slots_per_rank": placement.slots_per_rank,
        "spare_slots": placement.spare_slots,
        "borrow": bench.layers[0].borrowing.backend.name if bench.layers[0].borrowing else None,
        "ms": {**ms, "whole": float(np.median(whole))},
        "series_ms": whole.tolist(),
        "series_imbalance": [sample["imbalance"] for sample in series[0]],
    }


def slowest(bench: StackBench, sample: Row) -> Row:
    """A sample with the most that any process took, of every stage."""
    of_all = bench.group.gather_objects("bench", sample["ms"])
    return {**sample, "ms": {stage: max(ms[stage] for ms in of_all) for stage in sample["ms"]}}


def bench(
    asked: Any,
    ranks: int,
    per_node: int,
    device: torch.device,
    local: bool,
    traces: Sequence[isoload.traces.Trace] = (),
) -> Iterator[Row]:
    """A row per shape, number of tokens, routing and line, as they are found. All processes call it together."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    numbers = sorted({n * length // ranks for n in SEQUENCES for length in LENGTHS}) if asked.grid else [None]
    for name, full in product(asked.shapes, numbers):
        setting = Setting(
            shape={**SHAPES, **OTHERS}[name],
            phase=asked.phase,
            ranks=ranks,
            ranks_per_node=per_node,
            scale=asked.scale,
            dtype=dtype,
            full_tokens=full,
        )
        for source in sources(setting, asked.batches * asked.layers, traces).values():
            yield from bench_setting(setting, source, asked, device, local)


def bench_setting(
    setting: Setting, source: Source, asked: Any, device: torch.device, local: bool
) -> Iterator[Row]:
    """A row per line."""
    facts = {**setting.facts(), "full_tokens": setting.full_tokens}
    facts |= {"layers": asked.layers, "right": asked.right}
    try:
        routing = source()
        if len(routing.batches) < asked.layers:
            raise ValueError(
                f"{routing.name} has batches for {len(routing.batches)} of {asked.layers} layers"
            )
    except ValueError as error:  # the same on all ranks
        yield {**facts, "routing": "recorded", "line": "all", "not_run": str(error)}
        return
    whole = len(routing.batches) // asked.layers * asked.layers
    routing = replace(routing, batches=routing.batches[:whole])
    for line in LINES:
        row = {**facts, "routing": routing.name, "line": line.name}
        try:
            yield {**row, **bench_line(setting, line, routing, asked, device, local)}
        except torch.OutOfMemoryError:
            if not local:
                raise  # the other ranks wait for this one
            yield {**row, "not_run": "out of memory"}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def show(rows: Sequence[Row]) -> None:
    """Per setting the stages of a layer, and whole batches as they follow one another; then the grid."""
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if "not_run" in row:
            print(
                f"{row['shape']}, {row['tokens_per_rank']} tokens, {row['line']}: not run, {row['not_run']}"
            )
        else:
            settings.setdefault((row["shape"], row["tokens_per_rank"], row["routing"]), []).append(row)
    for (shape, tokens, routing), own in settings.items():
        head = f"{shape}, {own[0]['phase']}, {routing}: {own[0]['ranks']} ranks, {tokens} tokens each"
        base = own[0]["ms"]["whole"]
        columns: table.Columns = {
            "line": "{line}",
            **table.same(STAGES, "{ms[NAME]:.3f}"),
            "whole": "{ms[whole]:.3f}",
            "/ first": lambda row, base=base: f"{row['ms']['whole'] / base:.2f}",
        }
        table.show(f"{head}; ms of a layer", columns, own)
        batches = [str(i) for i in range(len(own[0]["series_ms"]))]
        series = [
            [row["line"], *map("{:.2f} ({:.2f})".format, row["series_ms"], row["series_imbalance"])]
            for row in own
        ]
        table.show(
            f"{head}; batch by batch: ms of a layer (imbalance)", " | ".join(["line", *batches]), series
        )
    show_grid([row for own in settings.values() for row in own if row["full_tokens"] is not None])


def show_grid(rows: Sequence[Row]) -> None:
    """Per shape, line and length what a layer takes, by the number of sequences."""
    for shape, routing in dict.fromkeys((row["shape"], row["routing"]) for row in rows):
        own = [row for row in rows if (row["shape"], row["routing"]) == (shape, routing)]
        whole = {(row["line"], row["full_tokens"]): f"{row['ms']['whole']:.2f}" for row in own}
        lines = [
            [line, str(length)] + [whole.get((line, n * length // own[0]["ranks"]), "-") for n in SEQUENCES]
            for line in dict.fromkeys(row["line"] for row in own)
            for length in LENGTHS
        ]
        columns = " | ".join(["line", "length", *(f"{n} sequences" for n in SEQUENCES)])
        table.show(f"{shape}, {routing}; ms of a layer", columns, lines)


def arguments() -> argparse.ArgumentParser:
    parser = command(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", choices=[*SHAPES, *OTHERS], default=list(SHAPES), metavar="NAME"
    )
    parser.add_argument("--grid", action="store_true", help="every batch and length of Tables 4 to 13")
    parser.add_argument("--traces", type=Path, help="a folder of recorded routing, *.npz")
    parser.add_argument("--phase", choices=("prefill", "decode"), default="prefill")
    parser.add_argument(
        "--scale", type=positive, default=1, help="divides widths and a prefill's tokens, for CPUs"
    )
    parser.add_argument("--ranks", type=positive, default=8, help="virtual ones, without torchrun")
    parser.add_argument("--layers", type=positive, default=3)
    parser.add_argument("--slots", type=positive, default=8, help="spare ones of a rank: the paper's N")
    parser.add_argument("--replicas", type=positive, default=1, help="of every rank and layer, for eplb")
    parser.add_argument("--right", type=float, default=0.8, help="part of the forecast choices that is true")
    parser.add_argument("--batches", type=positive, default=6, help="of the series")
    parser.add_argument("--rounds", type=positive, default=3, help="times that each batch is measured")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results file")
    return parser


def main() -> None:
    parser, under_torchrun = arguments(), "TORCHELASTIC_RUN_ID" in os.environ
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if under_torchrun:
        device = join_torchrun()
        ranks, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ranks = per_node = asked.ranks
    add: Callable[[Row], None] = lambda row: None  # noqa: E731
    backend = dist.get_backend() if under_torchrun else "local"
    first = not under_torchrun or dist.get_rank() == 0
    if first:
        print(__doc__.strip(), "\n", file=sys.stderr)
        joined = network(backend, device)
        print(machine(str(device)), joined, file=sys.stderr)
        results = ResultFile(f"bench_stack_{device.type}_{backend}", str(device), asked.results)
        add = lambda row: results.add({**joined, **row})  # noqa: E731
    rows = []
    traces = read_folder(asked.traces) if asked.traces else []
    for row in bench(asked, ranks, per_node, device, not under_torchrun, traces):
        rows.append(row)
        add(row)
    if first:
        show(rows)
        print("written:", results.path)
    if under_torchrun:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
