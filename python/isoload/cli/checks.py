"""What this machine offers to isoload, what is off, and why: the checks of ``isoload doctor``."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from isoload import __version__, kernels
from isoload.cli.engines import look_at_all
from isoload.cost import CostModel
from isoload.transport import deep_ep

PACKAGE = Path(__file__).parents[1]
CUDA_OP = "isoload::plan_exact"  # stands for all ops: they are compiled for CUDA together


@dataclass(frozen=True)
class Item:
    """What isoload can use or go into: whether it is so; what there is, or why not; whether a variable asks for it."""

    name: str
    on: bool
    detail: str
    asked: bool = False


def report(cost: CostModel | None = None) -> list[Item]:
    """Everything isoload can use, from the interpreter up. Imports only what the checks need.

    Args:
        cost: constants from which the break-even point of a borrow follows; None = the built-in ones.
    """
    checks: dict[str, Callable[[], tuple[bool, str]]] = {
        "python": lambda: (True, f"{platform.python_version()} on {platform.machine()}"),
        "torch": lambda: (True, f"{torch.__version__}, {torch.get_num_threads()} CPU threads"),
        "isoload ops": _ops,
        "isoload CUDA ops": _cuda_ops,
        "CUDA device": _cuda_device,
        "nvcc": _nvcc,
        "NCCL": _nccl,
        "Triton": lambda: _package("triton", "the Triton kernels", "triton"),
        "Triton kernels": _kernels,
        "DeepEP": _deep_ep,
        "HiGHS (scipy)": lambda: _package("scipy", "the LP oracle of tests and benchmarks", "plan"),
        "break-even": lambda: _break_even(cost or CostModel()),
    }
    engines = [Item(*found) for found in look_at_all()]
    items = [Item(name, *check()) for name, check in checks.items()]
    return [*items[:-2], *engines, *items[-2:]]


def _ops() -> tuple[bool, str]:
    files = sorted(PACKAGE.glob("_C*.so"))
    return (True, f"{__version__}, {files[0].name}") if files else (False, "not compiled: run `make build`")


def _cuda_ops() -> tuple[bool, str]:
    if torch._C._dispatch_has_kernel_for_dispatch_key(CUDA_OP, "CUDA"):
        return True, "compiled in"
    return False, "this build has CPU ops only"


def _cuda_device() -> tuple[bool, str]:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return True, f"{names}; {free / 2**30:.0f} of {total / 2**30:.0f} GiB free on the first"
    if torch.version.cuda is None:
        return False, f"torch {torch.__version__} is built without CUDA"
    return False, f"torch is built for CUDA {torch.version.cuda} but finds no device or driver"


def _nvcc() -> tuple[bool, str]:
    homes = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    places = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    path = shutil.which("nvcc", path=os.pathsep.join(places))  # as setup.py looks
    if path is None:
        return (
            False,
            "neither in CUDA_HOME, nor on PATH, nor in /usr/local/cuda: CUDA sources cannot be compiled",
        )
    try:
        said = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"{path} does not run: {error}"
    release = re.search(r"release ([\d.]+)", said)
    return True, f"CUDA {release.group(1) if release else 'of unknown release'}, {path}"


def _nccl() -> tuple[bool, str]:
    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return True, ".".join(map(str, torch.cuda.nccl.version()))
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return False, f"torch is built without NCCL{': collectives run on Gloo' if gloo else ''}"


def _kernels() -> tuple[bool, str]:
    if reason := kernels.why_not():
        return False, f"plain torch computes: {reason}"
    return True, "permutation and activation of rows"


def _deep_ep() -> tuple[bool, str]:
    """What is installed, by its files: importing it needs a GPU."""
    found = [package for package in deep_ep.installed() if package.buffers]
    if not found:
        others = ", ".join(f"{p.module} is there but not DeepSeek's" for p in deep_ep.installed())
        lacks = others or "not installed"
        return False, f"{lacks}, needed for DeepEPTransport: pip install 'isoload[deepep]'"
    can = "; ".join(f"{package}: {_abilities(package)}" for package in found)
    if not torch.cuda.is_available():
        return False, f"{can}; needs a GPU, and torch finds none"
    return True, can


def _abilities(package: deep_ep.Package) -> str:
    low_latency = ", low latency" if "Buffer" in package.buffers else ""
    borrows = ", borrows (borrow='deep_ep')" if package.borrows else ""
    return f"{', '.join(package.buffers)} by DeepEPTransport{low_latency}{borrows}"


def _package(module: str, use: str, extra: str) -> tuple[bool, str]:
    if importlib.util.find_spec(module) is None:
        return False, f"not installed, needed for {use}: pip install 'isoload[{extra}]'"
    try:
        return True, f"{importlib.metadata.version(module)}, for {use}"
    except importlib.metadata.PackageNotFoundError:
        return True, f"version unknown, for {use}"


def _break_even(model: CostModel) -> tuple[bool, str]:
    """From how many tokens borrowing an expert pays."""
    (near, far), (inside, outside) = model.break_even, model.bandwidths
    return True, (
        f"borrowing an expert pays from {near} tokens inside a node ({inside:g} GB/s), {far} between nodes "
        f"({outside:g} GB/s): {model.source}"
    )
