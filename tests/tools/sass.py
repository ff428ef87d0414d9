"""What the compiler made of the kernels on the way of a batch, read from their machine code (SASS). Needs no GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import ptxas  # first: it finds nvcc in csrc/cuda

import nvcc  # isort: skip

# Loads on their way, at least: all that a lane asks for.
AHEAD = dict.fromkeys(("count_numbered", "route_numbered", "route_columns"), 8)
# No pointer that may lead anywhere.
IN_SHARED = re.compile(r"plan_(exact(_share)?|joint|fill)_fetched|plan_lp<\d,true")
BETWEEN = re.compile("route_columns")  # blocks that leave words for each other: a fence ahead, one behind
# Not before a kernel's wait for the one ahead of it: global memory, the start of the next kernel, other ways on.
BEHIND_WAIT = re.compile(
    r"(LD|ST|ATOM)G?[. ]|LDGSTS|RED|CCTL|UBLK|UTMA|PREEXIT|BAR|BRA|BRX|JMP|JMX|CALL|RET|EXIT"
)
WAITS_FROM = 90  # of the compute capability
WEIGHTS = re.compile("borrow")  # written: until they have ended, no other kernel starts
NO_DIVISION = re.compile(
    r"plan_(exact|active|joint|waterfill|fill)|top_up|share|replica_tables"
    r"|route_(columns|shared(_few)?)<"
)


class Code(NamedTuple):
    """One kernel on one architecture: its instructions in order, without their predicates; what it may call."""

    kernel: str
    architecture: str
    instructions: list[str]
    subroutines: tuple[str, ...] = ()


def find(compiler: str) -> str | None:
    """cuobjdump beside nvcc, else of PATH, else the one that Triton brings into an environment of this checkout."""
    beside = Path(nvcc.library_folder(compiler)).resolve().parents[2] / "bin" / "cuobjdump"
    tritons = sorted(nvcc.CSRC.parent.glob(".venv*/lib/*/site-packages/triton/backends/nvidia/bin/cuobjdump"))
    found = [str(path) for path in (beside, *tritons) if path.exists()]
    return found[0] if beside.exists() else shutil.which("cuobjdump") or next(iter(found), None)


def disassemble(cuobjdump: str, objects: list[Path]) -> list[Code]:
    found: list[Code] = []
    for path in objects:
        done = subprocess.run([cuobjdump, "-sass", str(path)], capture_output=True, text=True, check=True)
        own = subroutines(cuobjdump, path)
        found += [c._replace(subroutines=own.get((c.architecture, c.kernel), ())) for c in read(done.stdout)]
    names = ptxas.short_names([c.kernel for c in found])
    return [c._replace(kernel=name) for c, name in zip(found, names, strict=True)]


def subroutines(cuobjdump: str, path: Path) -> dict[tuple[str, str], tuple[str, ...]]:
    """Of an object's kernels, by architecture and mangled name: functions of the compiler's own in their sections."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [cuobjdump, "-xelf", "all", str(path.resolve())], cwd=folder, capture_output=True, check=True
        )
        for cubin in Path(folder).glob("*.cubin"):
            architecture = cubin.suffixes[-2].removeprefix(".")
            command = ["readelf", "--symbols", "--wide", str(cubin)]
            symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for kernel, own in in_sections(symbols).items():
                found[architecture, kernel] = own
    return found


def in_sections(symbols: str) -> dict[str, tuple[str, ...]]:
    """Kernels of a readelf --symbols, with the compiler's functions in their sections."""
    sections: dict[str, list[str]] = {}
    for section, name in re.findall(r" FUNC .*? (\d+) (\S+)$", symbols, re.M):
        sections.setdefault(section, []).append(name)
    return {
        name: tuple(n.rpartition("$")[2] for n in names if n.startswith("$"))
        for names in sections.values()
        for name in names
        if not name.startswith("$")
    }


def read(listing: str) -> list[Code]:
    """The kernels of one cuobjdump -sass, by their mangled names."""
    found = []
    for architecture, text in re.findall(
        r"code for (\w+)\n(.*?)(?=\ncode for|\n\tcode for|\Z)", listing, re.S
    ):
        for name, body in re.findall(r"Function : (\w+)\n(.*?)(?=\n\s*Function : |\Z)", text, re.S):
            lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;", body)
            found.append(Code(name, architecture, lines))
    return found


def loads_in_flight(instructions: list[str]) -> int:
    """The most loads from global memory that are asked for before anything is done with one of them."""
    most = 0
    waiting: list[set[str]] = []  # the registers of each
    for line in instructions:
        load = re.match(r"LDG(\S*) R(\d+),(.*)", line)
        used = re.findall(r"\bR\d+\b", load.group(3) if load else line)
        if set(used) & set().union(*waiting) or line.startswith(("BAR", "BRA", "EXIT")):
            waiting = []
        if load:
            words = 4 if ".128" in load.group(1) else 2 if ".64" in load.group(1) else 1
            waiting.append({f"R{int(load.group(2)) + word}" for word in range(words)})
        most = max(most, len(waiting))
    return most


def divisions(instructions: list[str]) -> int:
    """How many reciprocals: one begins every division of integers or floats."""
    return sum(line.startswith("MUFU.RCP") for line in instructions)


def before_wait(instructions: list[str]) -> str:
    """What a kernel does too early for one that starts before the kernel ahead has ended: see early_start.cuh."""
    for line in instructions:
        if line.startswith("ACQBULK"):
            return ""
        if BEHIND_WAIT.match(line):
            return line
    return "its end"


def faults(codes: list[Code]) -> list[str]:
    found = []
    for code in codes:
        of = f"{code.kernel} on {code.architecture}"
        wanted = AHEAD.get(code.kernel.split("<")[0], 0)
        if (ahead := loads_in_flight(code.instructions)) < wanted:
            found.append(f"{of} has {ahead} loads on their way at once, not {wanted}")
        fences = sum(line.startswith("MEMBAR.SC.GPU") for line in code.instructions)
        if BETWEEN.match(code.kernel) and fences < 2:
            found.append(f"{of} has {fences} fences between its blocks, not 2")
        if NO_DIVISION.match(code.kernel):
            found += [f"{of} calls {n}" for n in code.subroutines if re.search(r"_(div|rem)_[su]64$", n)]
        starts_early = int(re.findall(r"\d+", code.architecture)[0]) >= WAITS_FROM
        if starts_early and (line := before_wait(code.instructions)):
            found.append(f"{of} comes to {line} before it waits for the kernel ahead")
        if WEIGHTS.match(code.kernel) and "PREEXIT" in code.instructions:
            found.append(f"{of} lets the next kernel start before it has ended")
        anywhere = [line for line in code.instructions if re.match(r"(LD|ST|ATOM)(\.| )", line)]
        if IN_SHARED.match(code.kernel) and anywhere:
            found.append(f"{of} has {len(anywhere)} accesses by pointers of any memory, as {anywhere[0]}")
    return found
