"""The protocol of LLEP's paper (papers/003, Fig. 1, 4, 6-9): plain EP and LLEP when tokens go to a few experts.

Fairness ledger
- Settings: 30, 50, 80, 95 % of the tokens into 1, 4, 16 experts; lambda 1.3, alpha 1, m 1024; 8 ranks; gpt-oss-120b at
  32K tokens per rank, DeepSeek-V3 and Kimi-K2 at 16K. Without --full divided by 64 (tokens, chunks) and 16 (widths)
  and in float32; experts, top-K and ranks are never scaled. Every row of the results says its sizes and factors.
- Forms: `repeated`, as published: a hot token names the hot experts K times, one expert more than once. `distinct`, as
  routers choose: a hot token sends one expert at most one copy, so one expert gets at most 1/K of all copies. Repeated
  tokens run stage by stage, planner to experts: the layer refuses them. From K hot experts on the loads are alike.
- --plans: whose algorithm each row is stands in it: plain EP, the paper's listing (policy `llep_section_5_1`), and
  isoload's `llep` with two spare slots per rank. 36 settings at full size, no GEMMs; Equation 4 is in bfloat16.
- Rows: EP is policy `none`; LLEP is `llep` (our planner, 2 spare slots per rank), not the published
  code: lambda bounds the ratio of ranks, as in their code. `LLEP by experts`: the ratio of experts, as in the text;
  counted, and timed where lambda is swept. `spill_cost` has its default price of an import, in copies, divided like the
  tokens, and is counted. The layer of Fig. 1 has 2048 x 2048 experts: the paper has its width only.
- virtual: the ranks one after the other in one process. A rank's time is the median over the rounds, of CPU time on CPU
  and between events on CUDA; busiest is the largest of the ranks. The rows it received are there before. Policies and
  the ideal alternate. Borrowing is timed apart and hidden behind nothing; on one machine it is a copy in memory. LLEP
  computes borrowed experts in a second grouped GEMM, as the layer does.
- ideal: balanced routing of the same shape, plain EP, its busiest rank. A ratio to it has three parts. `copies`: peak /
  ceil of mean, what the plan left. `GEMMs`: the GEMMs and the activation alone; a few hot experts make larger ones than
  the ideal's, so below 1 is possible. The rest sorts copies and adds them up, row by row and group by group: more rows,
  two groups. `over mean`: the busiest rank against the mean rank of the same plan.
- rows, MB: token rows that leave their rank, and both ways' bytes. weights MB: experts moved, of all ranks together;
  training moves as much twice more: again for backward, and their gradients home.
- peak MB: of the rank with most copies: what it received and the most that computing held at a time, no weights; LLEP
  also keeps 2 buffers of spare slots (`pool MB`), always.
- processes: the real layer, one process per rank, distinct form: the most that a rank took in forward and backward,
  other layers' borrowing between the two. On CPU 4 gloo processes and CPU time: what a collective waits or copies in
  gloo's threads counts there, no network does. Under torchrun all ranks of its group, NCCL and `pull` on GPUs. Rows and
  MB are what collectives are handed, what stays on the rank included.
- grouped: a rank's 65536 tokens evenly over N experts of 8192 x 8192 (scaled alike): N calls of torch.mm into one
  result against one torch grouped_mm, which on CPU loops inside.
- One torch thread. One batch per setting: the loads are exact, only the order of tokens is drawn. Where LLEP's plan is
  plain EP (lambda 2.5), the two differ by noise.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lib import table
from lib.clocks import timer_on
from lib.harness import begin, command, write_results
from lib.llep_plans import PLANS, plan_rows
from lib.llep_processes import bench_forked, join_torchrun, run_rank
from lib.llep_setting import FULL, NUM_HOT, POLICIES, SHAPES, SHARES, SWEPT, TIMED, Scale, Setting
from lib.llep_tables import show
from lib.llep_virtual import VirtualRanks, bench_cell

Row = dict[str, Any]
GROUPED = (1, 2, 4, 8, 16, 32, 64, 128)
GROUPED_TOKENS, GROUPED_WIDTH = 65536, 8192
FORKED_RANKS = 4


def concentrations(base: Setting, forms: Sequence[bool]) -> list[Setting]:
    return [
        replace(base, repeat=repeat, share=share, num_hot=num_hot)
        for repeat in forms
        for num_hot in NUM_HOT
        for share in SHARES
    ]


def sweeps(base: Setting) -> Iterator[tuple[str, float, Setting]]:
    """Name, value and setting of every point; 4 hot experts, as Fig. 6, 7 and 9 have them."""
    shape = base.shape
    for share in (0.3, 0.95):
        at = replace(base, share=share, num_hot=4)
        for tokens in (2048, 8192, 16384, 32768, 65536):
            yield "tokens per rank", tokens, replace(at, shape=replace(shape, tokens=tokens))
        for capacity in (1.0, 1.1, 1.25, 1.5, 2.0):
            yield "alpha", capacity, replace(at, capacity=capacity)
        for width in (1024, 2048, 4096, 8192):
            yield "hidden size", width, replace(at, shape=replace(shape, hidden=width, intermediate=width))
        for experts in (32, 64, 128, 256, 512):
            yield "experts", experts, replace(at, shape=replace(shape, experts=experts))
    for share in (0.1, 0.15, 0.2):
        at = replace(base, share=share, num_hot=4, shape=replace(shape, tokens=8192))
        for threshold in (1.0, 1.3, 1.6, 2.0, 2.5):
            yield "lambda", threshold, replace(at, threshold=threshold)


def bench_virtual(scale: Scale, device: torch.device, shapes: Sequence[str], rounds: int) -> list[Row]:
    rows = []
    for name in shapes:
        base = Setting(shape=SHAPES[name], scale=scale)
        ranks = VirtualRanks(base, device)
        for setting in concentrations(base, (True, False)):
            rows += [{"kind": "layer", **row} for row in bench_cell(ranks, setting, tuple(POLICIES), rounds)]
    return rows


def bench_sweeps(scale: Scale, device: torch.device, shape: str, rounds: int) -> list[Row]:
    rows, ranks, built = [], None, None
    for sweep, value, setting in sweeps(Setting(shape=SHAPES[shape], scale=scale)):
        if ranks is None or built != setting.shape:
            ranks = None  # its memory first
            ranks, built = VirtualRanks(setting, device), setting.shape
        found = bench_cell(ranks, setting, SWEPT if sweep == "lambda" else TIMED, rounds, SWEPT)
        rows += [{"kind": "sweep", "sweep": sweep, "value": value, **row} for row in found]
    return rows


def bench_grouped(scale: Scale, device: torch.device, rounds: int) -> list[Row]:
    """The same FLOPs as one GEMM per expert and as one grouped GEMM, after one call of each that is not counted."""
    tokens, width, timer = GROUPED_TOKENS // scale.tokens, GROUPED_WIDTH // scale.width, timer_on(device)
    draw, rows = torch.Generator(device).manual_seed(0), []
    x, y = torch.randn(2, tokens, width, generator=draw, device=device).to(scale.dtype)
    for experts in GROUPED:
        stack = torch.randn(experts, width, width, generator=draw, device=device).to(scale.dtype)
        ends = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * (tokens // experts)
        products = list(zip(x.chunk(experts), stack, y.chunk(experts), strict=True))
        calls = {
            "one GEMM per expert": lambda p=products: [torch.mm(a, b.t(), out=c) for a, b, c in p],
            "grouped": lambda s=stack, e=ends: F.grouped_mm(x, s.transpose(1, 2), offs=e),
        }
        times: dict[str, list[float]] = {path: [] for path in calls}
        for _ in range(1 + 4 * rounds):
            for path, call in calls.items():
                times[path].append(timer(call)[1])
        sizes = {"experts": experts, "tokens": tokens, "width": width}
        sizes |= {"tokens_scale": scale.tokens, "width_scale": scale.width}
        rows += [
            {"kind": "grouped", **sizes, "path": path, "ms": float(np.median(spent[1:]))}
            for path, spent in times.items()
        ]
    return rows


def bench_torchrun(scale: Scale, shapes: Sequence[str], rounds: int) -> list[Row] | None:
    """One process of torchrun's group; the rows, on rank 0."""
    device = join_torchrun()
    rows: list[Row] = []
    for name in shapes:
        base = Setting(shape=SHAPES[name], scale=scale, ranks=dist.get_world_size())
        rows += run_rank(concentrations(base, (False,)), device, rounds)
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    return rows if rank == 0 else None


def bench_all(scale: Scale, shapes: Sequence[str], rounds: int) -> list[Row]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows: list[Row] = []
    if device.type == "cuda":
        print("processes: not run, they need torchrun", file=sys.stderr)
    else:  # first: forked before this process has run anything
        base = Setting(shape=SHAPES[shapes[0]], scale=scale, ranks=FORKED_RANKS)
        rows += bench_forked(concentrations(base, (False,)), rounds)
    rows += bench_virtual(scale, device, shapes, rounds)
    rows += bench_sweeps(scale, device, shapes[0], rounds)
    return rows + bench_grouped(scale, device, rounds)


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--full", action="store_true", help="the paper's sizes in bfloat16, for GPUs")
    parser.add_argument("--plans", action="store_true", help="plans of section 5.1 at full size, no GEMMs")
    parser.add_argument("--rounds", type=int, default=3, help="times that each setting is measured")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    asked = parser.parse_args()
    if asked.full and not torch.cuda.is_available():
        parser.error("--full needs a GPU, got none")
    torch.set_num_threads(1)
    if asked.plans:
        table.show("section 5.1, plans", PLANS, plan_rows())
        return
    scale = FULL if asked.full else Scale()
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    if under_torchrun:
        rows = bench_torchrun(scale, asked.shapes, asked.rounds)
        if rows is None:
            return
    begin(__doc__)
    if not under_torchrun:
        rows = bench_all(scale, asked.shapes, asked.rounds)
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    show(rows)
    name = "bench_llep" + ("_cuda" if gpu else "") + ("_torchrun" if under_torchrun else "")
    print("written:", write_results(name, [row | gpu for row in rows]).name)


if __name__ == "__main__":
    main()
