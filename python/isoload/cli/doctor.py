"""``isoload doctor``: the libraries, devices and engines found on this machine, and why some cannot be used."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text
from typer import Argument

from isoload.cli.options import Force, JsonTarget
from isoload.cli.tables import say, write_out
from isoload.files import printable

if TYPE_CHECKING:
    from isoload.transport import deep_ep


@dataclass(frozen=True)
class Item:
    """One library, device or engine: whether isoload can use it, and details or the reason."""

    name: str
    on: bool
    detail: str
    asked: bool = False  # whether a variable requires it


def report() -> list[Item]:
    import torch

    from isoload import __version__
    from isoload.cli.engines import ENGINES, hook_versions, look
    from isoload.ops.library import LIBRARY, ON_CUDA

    checks: dict[str, Callable[[], tuple[bool, str]]] = {
        "python": lambda: (True, f"{platform.python_version()} on {platform.machine()}"),
        "torch": lambda: (True, f"{torch.__version__}, {torch.get_num_threads()} CPU threads"),
        "isoload ops": lambda: (True, f"{__version__}, {Path(LIBRARY._name).name}"),
        "isoload CUDA ops": lambda: (ON_CUDA, "compiled in" if ON_CUDA else "this build has CPU ops only"),
        "CUDA device": _cuda_device,
        "symmetric memory": _symmetric_memory,
        "nvcc": _nvcc,
        "NCCL": _nccl,
        "Triton": lambda: _package("triton", "the Triton kernels", "triton"),
        "Triton kernels": _kernels,
        "DeepEP": _deep_ep,
        "HiGHS (scipy)": lambda: _package("scipy", "the LP oracle of tests and benchmarks", "plan"),
        "break-even": _break_even,
    }
    engines = [Item(engine.name, *look(engine, os.environ)) for engine in ENGINES]
    engines += [Item(f"{engine.name} versions", True, hook_versions(engine.name)) for engine in ENGINES]
    items = [Item(name, *check()) for name, check in checks.items()]
    return [*items[:-2], *engines, *items[-2:]]


def _cuda_device() -> tuple[bool, str]:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        return True, f"{names}; {free / 2**30:.0f} of {total / 2**30:.0f} GiB free on the first"
    if torch.version.cuda is None:
        return False, f"torch {torch.__version__} is built without CUDA"
    return False, f"torch is built for CUDA {torch.version.cuda} but finds no device or driver"


def _symmetric_memory() -> tuple[bool, str]:
    """Return whether ranks may read each other's weights, as far as one process can find out."""
    import torch

    from isoload.transport.collective import fabric_of, gpu_of, host_of

    if not torch.cuda.is_available():
        return False, "torch finds no GPU: processes borrow experts by all_to_all"
    domains = {fabric_of(gpu_of(torch.device("cuda", i))) for i in range(torch.cuda.device_count())}
    domain = f"host {host_of()[0]}, NVLink fabric domain {', '.join(filter(None, domains)) or 'none'}"
    return True, f"{domain}: borrow='pull' is tried where all ranks have the host or the domain in common"


def _nvcc() -> tuple[bool, str]:
    homes = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    places = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    path = shutil.which("nvcc", path=os.pathsep.join(places))  # the same search as in setup.py
    if path is None:
        where = "neither in CUDA_HOME, nor on PATH, nor in /usr/local/cuda"
        return False, f"{where}: CUDA sources cannot be compiled"
    asked = [path, "--version"]
    try:
        output = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return False, f"{path} does not run: {error}"
    release = re.search(r"release ([\d.]+)", output.stdout)
    return True, f"CUDA {release.group(1) if release else 'of unknown release'}, {path}"


def _nccl() -> tuple[bool, str]:
    import torch

    if torch.distributed.is_available() and torch.distributed.is_nccl_available():
        return True, ".".join(map(str, torch.cuda.nccl.version()))
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return False, f"torch is built without NCCL{': collectives run on Gloo' if gloo else ''}"


def _kernels() -> tuple[bool, str]:
    from isoload import kernels

    if reason := kernels.why_not():
        return False, f"plain torch computes: {reason}"
    return True, "permutation and activation of rows"


def _deep_ep() -> tuple[bool, str]:
    """Return the installed version, read from its files: importing it needs a GPU."""
    import torch

    from isoload.transport import deep_ep

    packages = [package for package in deep_ep.installed() if package.buffers]
    if not packages:
        others = ", ".join(f"{p.module} is installed but not DeepSeek's" for p in deep_ep.installed())
        reason = others or "not installed"
        return False, f"{reason}, needed for DeepEPTransport: pip install 'isoload[deepep]'"
    can = "; ".join(f"{package}: {_abilities(package)}" for package in packages)
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
    from importlib import metadata  # imported here: it would add a seventh to the time of --help

    try:
        return True, f"{metadata.version(module)}, for {use}"
    except metadata.PackageNotFoundError:
        return True, f"version unknown, for {use}"


def _break_even() -> tuple[bool, str]:
    from isoload.times import exchanges

    inside, outside = exchanges.DEFAULT_BANDWIDTHS
    size, token_us = exchanges.DEEPSEEK_V3_FP8, exchanges.DEEPSEEK_V3_TOKEN_US
    near, far = (exchanges.break_even(size, bandwidth, token_us) for bandwidth in (inside, outside))
    return True, (
        f"borrowing an expert pays from {near} tokens inside a node ({inside:g} GB/s), {far} between nodes "
        f"({outside:g} GB/s): arithmetic for DeepSeek-V3's experts in FP8 on an H100"
    )


def print_doctor(items: Sequence[Item], console: Console) -> None:
    width = max(len(item.name) for item in items)
    for item in items:
        on, colour = ("on", "green") if item.on else ("off", "yellow")
        line = Text(f"{item.name:<{width}}  ").append(f"{on:<3}", colour)
        line.append(f"  {printable(item.detail)}")
        console.print(line, soft_wrap=True)


def print_file(items: Sequence[Item], console: Console) -> None:
    """Print a line per fact; a command that starts an engine is never wrapped, so that it can be copied."""
    for item in items:
        line = f"{item.name}: {item.detail}"
        if item.name.startswith("Start "):
            console.print(Text(printable(line)), soft_wrap=True)
        else:
            say(console, ("", [line]))


def file_items(paths: Sequence[Path]) -> list[Item]:
    from isoload.cli.arguments import AS_FOUND, load_traces, record_facts

    file = paths[0]
    if len(paths) == 1 and not file.is_dir() and holds_text(file):
        for facts_of, other_kinds in READERS:
            try:
                return [Item(label, True, text) for label, text in facts_of(file).items()]
            except ValueError as error:
                if not any(kind in str(error) for kind in other_kinds):
                    raise
    facts = [record_facts(trace) for trace in load_traces(paths, AS_FOUND)]
    return [Item(label, True, text) for record in facts for label, text in record.items()]


def times_facts(path: Path) -> dict[str, str]:
    from isoload.times import load

    times = load(path)
    experts, spread = times.experts, max(times.speeds) / min(times.speeds) - 1
    use = "" if times.rank_speeds else ": less than 1 %, so that engines and place ignore it"
    date = times.software.get("date", "an unknown date")
    return {
        "times": f"{times.device}, {times.ranks} ranks on {times.nodes} nodes, measured on {date}",
        "experts": f"{experts.hidden} x {experts.intermediate} {experts.dtype}, {experts.kernel}",
        "speeds": f"the fastest rank's experts are {100 * spread:.1f} % faster than the slowest's{use}",
    } | ({"GPUs": ", ".join(times.gpus)} if times.gpus else {})


def placement_file_facts(path: Path) -> dict[str, str]:
    from isoload.cli.arguments import placement_facts
    from isoload.placement.engine_files import ENGINES, UnknownRanks, launch_line
    from isoload.placement.files import format_of, read_placement
    from isoload.topology import Topology

    num_ranks: int | None = None
    try:
        placement = read_placement(path)
        num_ranks = placement.topology.num_ranks
        facts = placement_facts(placement)
        facts["ranks"] = f"{num_ranks} on nodes of {placement.topology.ranks_per_node}"
    except UnknownRanks:  # only the engine has the number
        placement = read_placement(path, Topology(1))
        facts = placement_facts(placement)
        slots = facts.pop("slots").partition(" ")[0]
        facts |= {"slots": f"{slots} in a layer", "ranks": "not stated by this format"}
    file_format = format_of(path)
    line = launch_line(placement, file_format, str(path), num_ranks)
    return facts | ({f"Start {ENGINES[file_format]}": line} if line else {})


# Each with the beginnings of the errors after which the file may be of another kind.
READERS = (
    (times_facts, ("is not a times file", "cannot be read")),
    (placement_file_facts, ("is no placement file", "is not JSON")),
)


def holds_text(path: Path) -> bool:
    """Return whether a file is text and no archive of arrays."""
    from isoload.files import open_regular

    with open_regular(path) as file:
        return file.read(2) != b"PK"


def doctor(
    files: Annotated[
        list[Path] | None,
        Argument(
            metavar="[FILE...]",
            help="Placement file, times file or record to describe instead of this machine.",
        ),
    ] = None,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """Check this machine: the libraries, devices and engines that isoload can use, and why it cannot use others.

    With a FILE: describe a placement or a record (layers and their numbering, ranks, model, experts), or a times file.

    Exit code 1 if a variable turns isoload on in an engine (ISOLOAD_SGLANG=1, ISOLOAD_VLLM=1) to which it cannot
    attach.
    """
    from isoload.cli.arguments import check_targets

    check_targets(files or [], force, json)
    if files:
        items = file_items(files)
        write_out(json, [asdict(item) for item in items], lambda console: print_file(items, console))
        return
    items = report()
    write_out(json, [asdict(item) for item in items], lambda console: print_doctor(items, console))
    if any(item.asked and not item.on for item in items):
        raise typer.Exit(1)
