"""make cuda-check: everything for CUDA compiles, spills nothing, grows nowhere, is linked with libtorch, and loads.

sass.py reads the machine code, where there is a cuobjdump. registers.txt has every kernel's registers, and its
instructions and divisions on sm_90, by which two versions are compared where no GPU can time them; --update writes it
anew.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import ptxas  # first: it finds nvcc in csrc/cuda

import nvcc  # isort: skip
import sass

ROOT = nvcc.CSRC.parent
BUILD = ROOT / "build" / "cuda"
TABLE = nvcc.CUDA / "registers.txt"
COUNTED = "sm_90"  # the architecture whose instructions are counted: the gate compiles for it
GROWTH = 1.05  # of instructions, at most

# In a fresh process: its isoload must be this library alone. On a torch without CUDA the function that gives the
# current stream is null. Fake tensors bring an op up to its call without a GPU; borrow allocates nothing before.
LOAD = """
import ctypes, sys, torch
from torch._C import _dispatch_has_kernel_for_dispatch_key as has
from torch._subclasses import FakeTensorMode
torch.ops.load_library(sys.argv[1])
ops = sys.argv[2:]
if missing := [name for name in ops if not has(f"isoload::{name}", "CUDA")]:
    sys.exit(f"without a CUDA function: {missing}")
if torch.version.cuda:
    ctypes.CDLL(sys.argv[1]).aoti_torch_get_current_cuda_stream  # AttributeError where no library needed brings it
    said = "finds the current stream"
else:
    with FakeTensorMode():
        slots, home = (torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((2,), (2, 2)))
        peers, spare = torch.empty(2, 1, dtype=torch.int64, device="cuda"), torch.empty(1, 3, device="cuda")
    try:
        with torch._C._DisableTorchDispatch():
            torch.ops.isoload.borrow(slots, home, peers, [spare], 2, 0, 1)
        said = "launches without a stream"
    except RuntimeError as error:
        said = f"says on CUDA: {error}"
    if "torch brings no aoti_torch_get_current_cuda_stream" not in said:
        sys.exit(said)
print(f"the library loads on torch {torch.__version__}; {len(ops)} ops have a CUDA function; it {said}")
"""


def registers(kernels: list[ptxas.Kernel]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for kernel in kernels:
        table.setdefault(kernel.name, {})[kernel.architecture] = kernel.registers
    return dict(sorted(table.items()))


def sizes_of(codes: list[sass.Code]) -> dict[str, tuple[int, int]]:
    """Instructions and divisions of every kernel on one architecture."""
    return {
        code.kernel: (len(code.instructions), sass.divisions(code.instructions))
        for code in codes
        if code.architecture == COUNTED
    }


def write(table: dict[str, dict[str, int]], sizes: dict[str, tuple[int, int]], version: str) -> None:
    heads = (*nvcc.ARCHITECTURES, "instructions", "divisions")
    lines = [
        f"# registers per lane by architecture; instructions and divisions on {COUNTED}; nvcc {version}; written by "
        "tests/tools/cuda_check.py --update",
        f"{'kernel':<44}" + "".join(f"{head:>14}" for head in heads),
    ]
    for name, row in table.items():
        counts = (*(row[arch] for arch in nvcc.ARCHITECTURES), *sizes[name])
        lines.append(f"{name:<44}" + "".join(f"{count:>14}" for count in counts))
    TABLE.write_text("\n".join(lines) + "\n")


def read() -> tuple[dict[str, dict[str, int]], dict[str, tuple[int, int]], str]:
    """The committed registers, sizes_of, and the nvcc that they are of."""
    head, _, *rows = TABLE.read_text().splitlines()
    cells = [row.rsplit(maxsplit=len(nvcc.ARCHITECTURES) + 2) for row in rows]
    table = {
        name: dict(zip(nvcc.ARCHITECTURES, map(int, counts[:-2]), strict=True)) for name, *counts in cells
    }
    sizes = {name: (int(counts[-2]), int(counts[-1])) for name, *counts in cells}
    return table, sizes, head.split("nvcc ")[1].split(";")[0]


def faults(kernels: list[ptxas.Kernel], sizes: dict[str, tuple[int, int]], version: str) -> list[str]:
    found = [f"{k.name} spills {k.spilled} bytes on {k.architecture}" for k in kernels if k.spilled]
    before, sizes_before, of = read()
    if of != version:
        print(f"registers are not compared: registers.txt is of nvcc {of}, this is {version}")
        return found
    for name in sizes.keys() & sizes_before.keys():
        if sizes[name][0] > GROWTH * sizes_before[name][0]:
            found.append(
                f"{name} grew from {sizes_before[name][0]} to {sizes[name][0]} instructions on {COUNTED}"
            )
        if sizes[name][1] > sizes_before[name][1]:
            found.append(
                f"{name} has {sizes[name][1]} divisions on {COUNTED}, {sizes_before[name][1]} before"
            )
    now = registers(kernels)
    if now.keys() != before.keys():
        found.append(f"registers.txt has other kernels: {sorted(now.keys() ^ before.keys())} (--update)")
    for name in now.keys() & before.keys():
        for arch, count in now[name].items():
            if count > before[name][arch]:
                found.append(f"{name} grew from {before[name][arch]} to {count} registers on {arch}")
    return found


def show(kernels: list[ptxas.Kernel]) -> None:
    print(f"{'kernel':<44}{'':<9}{'registers':>10}{'spilled':>9}{'stack':>7}{'shared':>8}")
    for k in sorted(kernels, key=lambda k: (k.name, nvcc.ARCHITECTURES.index(k.architecture))):
        print(f"{k.name:<44}{k.architecture:<9}{k.registers:>10}{k.spilled:>9}{k.stack:>7}{k.shared:>8}")


def needed(library: Path) -> set[str]:
    """The libraries that this one brings along when it is loaded."""
    command = ["readelf", "--dynamic", "--wide", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text))


def link_and_load() -> None:
    folders = ["--build-lib", str(BUILD / "lib"), "--build-temp", str(BUILD / "temp")]
    build = [sys.executable, "setup.py", "-q", "build_ext", *folders]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "ISOLOAD_CUDA": "1"})
    (library,) = Path(BUILD / "lib").rglob("_C*.so")
    if "libtorch.so" not in needed(
        library
    ):  # which alone brings libtorch_cuda and, with it, the current stream
        raise SystemExit(f"libtorch.so is not among the libraries that {library} needs")
    listed = re.findall(r"^  OP\((\w+), \\$", (nvcc.CSRC / "ops" / "list.h").read_text(), re.M)
    subprocess.run([sys.executable, "-c", LOAD, str(library), *listed], check=True)


def main() -> None:
    compiler = nvcc.find()
    if compiler is None:
        print(
            "CUDA compile check skipped: no nvcc (neither in CUDA_HOME, nor on PATH, nor in /usr/local/cuda)"
        )
        return
    version = ptxas.version(compiler)
    nvcc.compile_all(compiler, BUILD)
    kernels = ptxas.kernels(BUILD)
    show(kernels)
    codes: list[sass.Code] = []
    if cuobjdump := sass.find(compiler):
        codes = sass.disassemble(cuobjdump, sorted((BUILD / nvcc.ONLY).glob("*.o")))
    else:
        print("machine code is not read: no cuobjdump (neither beside nvcc nor on PATH)")
    if "--update" in sys.argv[1:]:
        if nvcc.ONLY or not codes:
            raise SystemExit("--update needs cuobjdump and all architectures: unset ISOLOAD_CUDA_ARCH")
        write(registers(kernels), sizes_of(codes), version)
    found = faults(kernels, sizes_of(codes), version) + sass.faults(codes)
    if found:
        raise SystemExit("\n".join(found))
    link_and_load()


if __name__ == "__main__":
    main()
