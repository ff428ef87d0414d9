"""What ptxas says about every kernel that csrc/cuda/nvcc.py has compiled."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[2] / "csrc" / "cuda"))

from nvcc import ONLY


class Kernel(NamedTuple):
    """One kernel on one architecture, as ptxas reports it; bytes, but for registers."""

    name: str
    architecture: str
    registers: int
    spilled: int  # stored and loaded
    stack: int
    shared: int  # static; a launch adds the dynamic part


def version(nvcc: str) -> str:
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    return re.findall(r"release ([\d.]+)", text)[0]


def kernels(folder: Path) -> list[Kernel]:
    """What ptxas said about the objects that compile_all has put into ``folder``."""
    found = [kernel for path in sorted((folder / ONLY).glob("*.txt")) for kernel in _read(path.read_text())]
    return [k._replace(name=n) for k, n in zip(found, short_names([k.name for k in found]), strict=True)]


def _read(text: str) -> list[Kernel]:
    report = (
        r"entry function '(\w+)' for '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?"
    )
    return [
        Kernel(name, architecture, int(registers), int(stored) + int(loaded), int(stack), int(shared or 0))
        for name, architecture, stack, stored, loaded, registers, shared in re.findall(report, text, re.S)
    ]


def short_names(mangled: list[str]) -> list[str]:
    """plan_exact<16> of each kernel."""
    said = subprocess.run(["c++filt"], input="\n".join(mangled), capture_output=True, text=True, check=True)
    found = re.findall(r"(\w+)_kernel(<[^(]*>)?\(", said.stdout)
    return [kernel + arguments.replace(" ", "") for kernel, arguments in found]
