"""The Triton kernels against their torch twins and against what the memory allows. Needs a CUDA device.

Ledger. Rows are bfloat16 and choices random: N rows, K choices of each, of which a share is present (the rest went to
other ranks). Buffers have N*K places, as where the host does not know how many copies came; torch computes all of
them, the kernels those that are present. The roof is the time in which a plain copy in this run moves the bytes that
the work needs: every row read once and written once, places and weights too. A backward of the activation in torch is
autograd's, without its forward. Times are the GPU's, by events around many calls, median of samples that alternate
between the two; caches are as the calls before left them, so each size is well above a GPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload import kernels
from isoload.ops import group_copies
from isoload.ops.counting import spread_rows, sum_rows, sum_rows_backward
from isoload.ops.results import Grouping
from isoload.weights.compute import activate
from isoload.weights.experts import Activation, ClampedGLU, SwiGLU
from lib import table
from lib.harness import RESULTS, ResultFile, begin, command

SHAPES = {  # H, I, K
    "DeepSeek-V3": (7168, 2048, 8),
    "gpt-oss-20b": (2880, 2880, 4),
    "Qwen3-30B": (2048, 768, 8),
}
SHARES = (1.0, 0.25)
SLOTS, DTYPE = 32, torch.bfloat16


@dataclass(frozen=True)
class Work:
    """One call, run by the kernels or in torch as isoload.kernels says, and the bytes that it has to move."""

    name: str
    call: Callable[[], Any]
    num_bytes: int


def draw(hidden: int, inner: int, top_k: int, num_rows: int, share: float) -> list[Work]:
    """All kernels on one batch; `share` of the copies are present."""
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "generator": generator}
    slots = torch.rand(num_rows, SLOTS, **options).argsort(1)[:, :top_k]
    slots = slots.masked_fill(torch.rand(slots.shape, **options) >= share, -1)
    grouping = group_copies(slots, 0, SLOTS)
    rows = torch.randn(num_rows, hidden, **options).to(DTYPE)
    copies = torch.randn(slots.numel(), hidden, **options).to(DTYPE)
    weights = torch.rand(slots.shape, **options)
    present, row = int((slots >= 0).sum()), 2 * hidden
    places, position = 8 * slots.numel(), grouping.position
    spread = (num_rows + present) * row + places
    return [
        Work("spread", lambda: spread_rows(rows, position, grouping.copy, per_row=position.shape[1]), spread),
        Work("sum", lambda: sum_rows(copies, position), spread),
        Work("weighted sum", lambda: sum_rows(copies, position, weights, DTYPE), spread + 4 * present),
        Work(
            "weighted sum, backward",
            lambda: sum_rows_backward(rows, copies, weights, position, grouping.copy),
            spread + present * row + 4 * (present + slots.numel()),
        ),
        *draw_activation("SwiGLU", SwiGLU(), grouping, inner, present),
        *draw_activation("clamped GLU", ClampedGLU(), grouping, inner, present),
    ]


def draw_activation(
    name: str, activation: Activation, grouping: Grouping, inner: int, present: int
) -> list[Work]:
    gate_up = torch.randn(len(grouping.copy), 2 * inner, device="cuda").to(DTYPE).requires_grad_()
    grad = torch.ones(len(grouping.copy), inner, device="cuda", dtype=DTYPE)
    forward = gate_up.detach()
    recorded: dict[bool, Tensor] = {}

    def backward() -> Any:
        fused = kernels.fit(forward)
        if fused not in recorded:
            recorded[fused] = activate(activation, gate_up, grouping)
        return torch.autograd.grad(recorded[fused], gate_up, grad, retain_graph=True)

    return [
        Work(name, lambda: activate(activation, forward, grouping), 3 * present * inner * 2),
        Work(f"{name}, backward", backward, 5 * present * inner * 2),
    ]


def microseconds(call: Callable[[], Any], repeats: int = 10) -> float:
    """The GPU's time of one call, over `repeats` in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return 1000 * start.elapsed_time(end) / repeats


def copy_bandwidth() -> float:
    """Bytes per microsecond, read and written, of a copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    samples = [microseconds(lambda: target.copy_(source)) for _ in range(10)]
    return 2 * len(source) / float(np.median(samples[2:]))


def in_torch(call: Callable[[], Any]) -> Callable[[], Any]:
    """The call with the kernels left out."""

    def plain() -> Any:
        fit, kernels.fit = kernels.fit, lambda *_: False
        try:
            return call()
        finally:
            kernels.fit = fit

    return plain


def bench(work: Work, bandwidth: float, rounds: int) -> dict[str, Any]:
    calls = {"kernel_us": work.call, "torch_us": in_torch(work.call)}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # compiles, and fills the allocator
        microseconds(call, 3)
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(microseconds(call))
    medians = {name: float(np.median(times)) for name, times in samples.items()}
    roof = work.num_bytes / bandwidth
    return {"kernel": work.name, "bytes": work.num_bytes, "roof_us": roof} | medians


def show(rows: list[dict[str, Any]]) -> None:
    columns = {
        "shape": "{shape}",
        "share": "{share:.0%}",
        "kernel": "{kernel}",
        "ours": "{kernel_us:.1f}",
        **{name: f"{{{name}_us:.1f}}" for name in ("torch", "roof")},
        "of the roof": lambda row: f"{row['roof_us'] / row['kernel_us']:.0%}",
        "over torch": lambda row: f"{row['torch_us'] / row['kernel_us']:.2f}x",
    }
    table.show("microseconds", columns, rows)
    lost = [f"{r['kernel']} ({r['shape']}, {r['share']:.0%})" for r in rows if r["kernel_us"] > r["torch_us"]]
    print("slower than torch:", "; ".join(lost) or "nowhere")


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--rows", type=int, default=16384, help="N")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of bench_kernels.jsonl")
    asked = parser.parse_args()
    if reason := kernels.why_not():
        print(f"nothing to measure: {reason}")
        return
    begin(__doc__)
    bandwidth, gpu = copy_bandwidth(), torch.cuda.get_device_name()
    print(f"{gpu}: a copy moves {bandwidth / 1e3:.0f} GB/s")
    rows, results = [], ResultFile("bench_kernels", "cuda", asked.results)
    for shape, (hidden, inner, top_k) in SHAPES.items():
        for share in SHARES:
            where = {"shape": shape, "share": share, "rows": asked.rows, "gpu": gpu, "copy": bandwidth}
            for work in draw(hidden, inner, top_k, asked.rows, share):
                rows.append(where | bench(work, bandwidth, asked.rounds))
                results.add(rows[-1])
            torch.cuda.empty_cache()
    show(rows)
    print("written:", results.path)


if __name__ == "__main__":
    main()
