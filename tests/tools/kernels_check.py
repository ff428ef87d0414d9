"""make kernels-check: every kernel compiles as the layer launches it, for two GPUs and without one, and spills nothing.

The launchers run on CPU tensors; what they would start is compiled instead, and read with Triton's own cuobjdump.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from isoload.kernels import DTYPES, activation, permutation

ARCHITECTURES = (90, 100)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
ROW = 2880  # gpt-oss's width: three tiles, the last one cut
ODD = 333  # rows whose elements are not aligned to more than themselves
TOP_K = 8


class Kernel(NamedTuple):
    """One launch, compiled: what cuobjdump says of it, in bytes but for registers, and its narrowest access to rows."""

    launch: str
    architecture: int
    registers: int
    spilled: int  # stack and local memory
    shared: int
    access: int


class Target:
    """Stands in for the CUDA driver: the launchers find a GPU of the architecture that is being compiled for."""

    architecture = ARCHITECTURES[0]

    def get_current_device(self) -> int:
        return self.architecture  # Triton keeps compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)


def launches(dtype: torch.dtype, width: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What the layer launches with rows of a dtype and width, by name."""
    rows, gate_up = torch.zeros(2, width, dtype=dtype), torch.zeros(2, 2 * width, dtype=dtype)
    position, weights = torch.zeros(2, TOP_K, dtype=torch.int64), torch.zeros(2, TOP_K)
    ends = torch.zeros(3, dtype=torch.int32)
    yield "spread", partial(permutation.spread_rows, rows, position, 2, False)
    part = torch.zeros(2, width + 64, dtype=dtype).narrow(1, 0, width)  # of a row as it arrives
    yield "spread of longer rows", partial(permutation.spread_rows, part, position, 2, False)
    yield "sum", partial(permutation.sum_rows, [(rows, position)], None, dtype)
    slot, of_slots = torch.zeros(2, dtype=torch.int64), torch.zeros(3, width, dtype=dtype)
    yield "bias", partial(activation.add_bias, rows, of_slots, slot, ends)
    for parts in (2, 3):  # groups of slots
        each = [(rows, position)] * parts
        yield f"weighted sum of {parts}", partial(permutation.sum_rows, each, weights, dtype)
    for summed in dict.fromkeys((dtype, torch.float32)):
        name, grad = f"weighted sum in {name_of(summed)}", rows.to(summed)
        yield name, partial(permutation.sum_rows, [(rows, position)], weights, summed)
        yield f"{name}, backward", partial(permutation.sum_rows_backward, grad, rows, weights, position)
    for name, clamp in (("SwiGLU", None), ("clamped GLU", (1.702, 7.0))):
        yield name, partial(activation.activate, gate_up, ends, clamp)
        yield f"{name}, backward", partial(activation.activate_backward, rows, gate_up, ends, clamp)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read(compiled: Any, launch: str, architecture: int) -> Kernel:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        said = subprocess.run(
            [CUOBJDUMP, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    used = {key: int(count) for key, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    # Single words of 32 and 64 bits are weights and places, but for rows of float32 that no vector fits.
    accesses = re.findall(r"(?:ld|st)\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", compiled.asm["ptx"])
    of_rows = [int(n or 1) * int(bits) // 8 for n, bits in accesses if n or bits == "16"]
    spilled = used["STACK"] + used["LOCAL"]
    return Kernel(
        launch, architecture, used["REG"], spilled, compiled.metadata.shared, min(of_rows, default=4)
    )


def compile_all() -> list[Kernel]:
    """Every launch x dtype x width x architecture."""
    compiled: list[tuple[Any, str, int]] = []
    target, run, label = Target(), JITFunction.run, ""
    driver.set_active(target)

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        one = run(kernel, *args, **{**options, "warmup": True})
        compiled.append((one, label, target.architecture))

    JITFunction.run = compile_only
    for dtype, width, target.architecture in itertools.product(DTYPES, (ROW, ODD), ARCHITECTURES):
        for name, launch in launches(dtype, width):
            label = f"{name_of(dtype)}{' odd' if width == ODD else ''}: {name}"
            launch()
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda one: read(*one), compiled))


def show(kernels: list[Kernel]) -> None:
    of_both: dict[str, list[Kernel]] = {}
    for k in kernels:
        of_both.setdefault(k.launch, []).append(k)
    titles = ("registers", "spilled", "shared", "access")
    print(f"sm_{' / sm_'.join(map(str, ARCHITECTURES)):<45}" + "".join(f"{title:>13}" for title in titles))
    for launch, pair in of_both.items():
        columns = zip(*(k[2:] for k in pair), strict=True)
        print(f"{launch:<48}" + "".join(f"{' / '.join(map(str, column)):>13}" for column in columns))


def faults(kernels: list[Kernel]) -> list[str]:
    """Spills, and rows of whole 16 bytes that are moved in smaller pieces."""
    found = [f"{k.launch} spills {k.spilled} bytes on sm_{k.architecture}" for k in kernels if k.spilled]
    for k in kernels:
        if k.access < 16 and " odd:" not in k.launch:
            found.append(f"{k.launch} moves {k.access} bytes at a time on sm_{k.architecture}, not 16")
    return found


if __name__ == "__main__":
    show(kernels := compile_all())
    if found := faults(kernels):
        sys.exit("\n".join(found))
    print(
        f"{len(kernels)} kernels compiled by Triton {triton.__version__}; none spills, rows move 16 bytes at a time"
    )
