"""make cuda-check: everything for CUDA compiles, spills nothing, grows nowhere, is linked with libtorch, and loads.

sass.py reads the machine code, where there is a cuobjdump. registers.txt holds the registers of every kernel;
--update writes it anew.
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


def write(table: dict[str, dict[str, int]], version: str) -> None:
    lines = [f"# registers per lane, nvcc {version}; written by tests/tools/cuda_check.py --update"]
    lines.append(f"{'kernel':<44}" + "".join(f"{arch:>9}" for arch in nvcc.ARCHITECTURES))
    for name, row in table.items():
        lines.append(f"{name:<44}" + "".join(f"{row[arch]:>9}" for arch in nvcc.ARCHITECTURES))
    TABLE.write_text("\n".join(lines) + "\n")


def read() -> tuple[dict[str, dict[str, int]], str]:
    """The committed table, and the nvcc that it is of."""
    head, _, *rows = TABLE.read_text().splitlines()
    cells = (row.rsplit(maxsplit=len(nvcc.ARCHITECTURES)) for row in rows)
    table = {name: dict(zip(nvcc.ARCHITECTURES, map(int, counts), strict=True)) for name, *counts in cells}
    return table, head.split("nvcc ")[1].split(";")[0]


def faults(kernels: list[ptxas.Kernel], version: str) -> list[str]:
    found = [f"{k.name} spills {k.spilled} bytes on {k.architecture}" for k in kernels if k.spilled]
    before, of = read()
    if of != version:
        print(f"registers are not compared: registers.txt is of nvcc {of}, this is {version}")
        return found
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
    if "--update" in sys.argv[1:]:
        if nvcc.ONLY:
            raise SystemExit("--update writes a row of all architectures: unset ISOLOAD_CUDA_ARCH")
        write(registers(kernels), version)
    found = faults(kernels, version)
    if cuobjdump := sass.find(compiler):
        found += sass.faults(sass.disassemble(cuobjdump, sorted((BUILD / nvcc.ONLY).glob("*.o"))))
    else:
        print("machine code is not read: no cuobjdump (neither beside nvcc nor on PATH)")
    if found:
        raise SystemExit("\n".join(found))
    link_and_load()


if __name__ == "__main__":
    main()
