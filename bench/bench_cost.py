"""Measures the constants of the cost model on this machine and writes the file that `isoload replay --cost` takes.

What is measured
- per copy: one expert, down(silu(gate(x)) * up(x)), by number of rows, less the overhead; experts in turn, more than
  the caches hold, so that every call reads its weights from memory, as a layer does.
- overhead: the same operators on 8 x 8 matrices and one row: what launching costs.
- bandwidth inside a node: an expert's weights copied into other memory: host memory on CPU, the next GPU's on CUDA.
  With one GPU it cannot be measured and is --near. Between nodes it is always --far, on CPU by default as inside one.

Usage: python bench/bench_cost.py [--device cuda]   (writes bench/results/cost_<device>.json; `source` says what was
measured and what was given)
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import silu

from isoload.times.cost import DEFAULT_BANDWIDTHS, CostModel
from lib.harness import RESULTS, command, machine, measure

SIZES = (1, 8, 64, 128, 512, 2048)
BEYOND_CACHES = 512 * 2**20  # bytes of weights that are used in turn
Expert = tuple[Tensor, Tensor, Tensor]


def make_experts(
    number: int, hidden: int, intermediate: int, device: str, dtype: torch.dtype
) -> list[Expert]:
    """number x (gate [H, D], up [H, D], down [D, H])."""
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return [
        tuple(torch.randn(shape, device=device, dtype=dtype) / hidden**0.5 for shape in shapes)  # type: ignore[misc]
        for _ in range(number)
    ]


def run_expert(rows: Tensor, expert: Expert) -> Tensor:
    gate, up, down = expert
    return (silu(rows @ gate.T) * (rows @ up.T)) @ down.T


def microseconds(call: Callable[[int], object], device: str, calls: int) -> float:
    """Median of a call's time; on a GPU of `calls` calls in a row, so that launches overlap with work as they do."""
    if device == "cpu":
        turn = iter(range(10**9))
        return measure(lambda: call(next(turn)), seconds=1.0, least=5).median

    def run() -> None:
        for turn in range(calls):
            call(turn)
        torch.cuda.synchronize()

    return measure(run, units=calls, seconds=0.5, least=5).median


def copy_bandwidth(expert: Expert, device: str) -> float | None:
    """GB/s at which an expert's weights are copied to another rank's memory; None where there is none."""
    if device == "cpu":
        targets = [torch.empty_like(part) for part in expert]
    elif torch.cuda.device_count() > 1:
        targets = [torch.empty_like(part, device="cuda:1") for part in expert]
    else:
        return None

    def copy(_: int) -> None:
        for target, part in zip(targets, expert, strict=True):
            target.copy_(part)

    return sum(part.nbytes for part in expert) / microseconds(copy, device, 1) / 1e3


def measure_model(
    hidden: int, intermediate: int, device: str, dtype: torch.dtype, near: float, far: float | None
) -> CostModel:
    size = 3 * hidden * intermediate * dtype.itemsize
    experts = make_experts(max(2, -(-BEYOND_CACHES // size)), hidden, intermediate, device, dtype)
    tiny, one_row = (
        make_experts(1, 8, 8, device, dtype)[0],
        torch.ones(1, 8, device=device, dtype=dtype),
    )
    overhead = microseconds(lambda _: run_expert(one_row, tiny), device, len(experts))
    points = []
    for rows in SIZES:
        x = torch.randn(rows, hidden, device=device, dtype=dtype)
        us = microseconds(lambda turn, x=x: run_expert(x, experts[turn % len(experts)]), device, len(experts))
        points.append((rows, max(us - overhead, 0.01 * us) / rows))
        print(f"{rows:5d} rows: {us:10.1f} us, {points[-1][1]:8.3f} per copy")
    copied = copy_bandwidth(experts[0], device)
    near = round(near if copied is None else copied, 1)
    print(f"overhead {overhead:.1f} us; copy {'not measured' if copied is None else f'{copied:.1f} GB/s'}")
    where = machine()
    name = torch.cuda.get_device_name() if device == "cuda" else where["device"]
    given = "bandwidths not measured" if copied is None else "bandwidth between nodes not measured"
    source = f"bench_cost on {name}, {str(dtype)[6:]}, torch {where['torch']}, {where['date']}; {given}"
    return CostModel(
        hidden,
        intermediate,
        weight_bytes=dtype.itemsize,
        token_bytes=dtype.itemsize,
        overhead_us=round(overhead, 2),
        token_us=tuple((rows, float(f"{us:.4g}")) for rows, us in points),
        bandwidths=(near, far or near),
        source=source,
    )


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: CPU float32, CUDA bf16"
    )
    parser.add_argument("--hidden", type=int, help="D; default: 2048, CUDA 7168")
    parser.add_argument("--intermediate", type=int, help="H; default: 768, CUDA 2048")
    parser.add_argument("--near", type=float, default=DEFAULT_BANDWIDTHS[0], help="GB/s where not measured")
    parser.add_argument(
        "--far", type=float, help=f"GB/s between nodes; default: as inside, CUDA {DEFAULT_BANDWIDTHS[1]:g}"
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/cost_<device>.json")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu, start = asked.device == "cuda", time.perf_counter()
    model = measure_model(
        asked.hidden or (7168 if on_gpu else 2048),
        asked.intermediate or (2048 if on_gpu else 768),
        asked.device,
        getattr(torch, asked.dtype or ("bfloat16" if on_gpu else "float32")),
        asked.near,
        asked.far or (DEFAULT_BANDWIDTHS[1] if on_gpu else None),
    )
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    target = asked.out or RESULTS / f"cost_{re.sub('[^a-z0-9]+', '_', name.lower())}.json"
    target.write_text(json.dumps(vars(model), indent=2) + "\n")
    near, far = model.break_even
    print(
        f"a borrow pays from {near} copies inside a node, {far} between; {time.perf_counter() - start:.0f} s"
    )
    print(target)


if __name__ == "__main__":
    main()
