"""make cuda-check: everything for CUDA compiles, spills nothing, grows nowhere, and loads on this torch.

registers.txt holds the registers of every kernel; --update writes it anew.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nvcc

ROOT = nvcc.CSRC.parent
BUILD = ROOT / "build" / "cuda"
TABLE = nvcc.CUDA / "registers.txt"

# In a fresh process: its isoload must be this library alone.
LOAD = """
import sys, torch
from torch._C import _dispatch_get_all_op_names, _dispatch_has_kernel_for_dispatch_key as has
torch.ops.load_library(sys.argv[1])
ops = [name for name in _dispatch_get_all_op_names() if name.startswith("isoload::")]
missing = sorted(name.partition("::")[2] for name in ops if not has(name, "CUDA"))
if missing:
    sys.exit(f"without a CUDA function: {missing}")
print(f"the library loads on torch {torch.__version__}; all {len(ops)} ops have a CUDA function")
"""


def registers(kernels: list[nvcc.Kernel]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = {}
    for kernel in kernels:
        table.setdefault(kernel.name, {})[kernel.architecture] = kernel.registers
    return dict(sorted(table.items()))


def write(table: dict[str, dict[str, int]], version: str) -> None:
    lines = [f"# registers per lane, nvcc {version}; written by check.py --update"]
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


def faults(kernels: list[nvcc.Kernel], version: str) -> list[str]:
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


def show(kernels: list[nvcc.Kernel]) -> None:
    print(f"{'kernel':<44}{'':<9}{'registers':>10}{'spilled':>9}{'stack':>7}{'shared':>8}")
    for k in sorted(kernels, key=lambda k: (k.name, nvcc.ARCHITECTURES.index(k.architecture))):
        print(f"{k.name:<44}{k.architecture:<9}{k.registers:>10}{k.spilled:>9}{k.stack:>7}{k.shared:>8}")


def link_and_load() -> None:
    folders = ["--build-lib", str(BUILD / "lib"), "--build-temp", str(BUILD / "temp")]
    build = [sys.executable, "setup.py", "-q", "build_ext", *folders]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "ISOLOAD_CUDA": "1"})
    (library,) = Path(BUILD / "lib").rglob("_C*.so")
    subprocess.run([sys.executable, "-c", LOAD, str(library)], check=True)


def main() -> None:
    compiler = nvcc.find()
    if compiler is None:
        print("CUDA compile check skipped: no nvcc (neither in CUDA_HOME nor on PATH)")
        return
    version = nvcc.version(compiler)
    nvcc.compile_all(compiler, BUILD)
    kernels = nvcc.kernels(BUILD)
    show(kernels)
    if "--update" in sys.argv[1:]:
        write(registers(kernels), version)
    if found := faults(kernels, version):
        raise SystemExit("\n".join(found))
    link_and_load()


if __name__ == "__main__":
    main()
