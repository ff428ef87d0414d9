"""What the run-time of tests/native/simt found out, in a process that has its library loaded.

Places are code offsets there; here they become functions and lines.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TEAM = "cuda/block_team.cuh"


@dataclass(frozen=True)
class Frame:
    """A function and the line in it: of the code itself, or of a call that leads there, inlined or not."""

    function: str
    file: str  # from csrc on
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Finding:
    kind: str  # race, uninitialised, bounds, copy, early, stuck
    text: str
    kernel: str
    frames: tuple[Frame, ...]  # innermost first
    other: tuple[Frame, ...]  # of the access that raced with it

    def __str__(self) -> str:
        places = [" < ".join(map(str, frames)) for frames in (self.frames, self.other) if frames]
        return f"{self.kind} in {self.kernel}: {self.text}\n    " + "\n    ".join(places)


@dataclass(frozen=True)
class Barrier:
    """One that lanes came to by one way of calls; a barrier of the source has several."""

    number: int
    kernel: str
    frames: tuple[Frame, ...]

    @property
    def place(self) -> str:
        """Its line in the source: that of a team's sync() or alone(), or the kernel's own."""
        return str(next(frame for frame in self.frames if not is_callers(frame)))


def is_callers(frame: Frame) -> bool:
    """Of the team's methods that are a barrier of whoever calls them."""
    return frame.file == TEAM and re.search(r"::(sync|alone)\b", frame.function) is not None


class Runtime:
    """The run-time inside a library that tests/support/simt_build.py made."""

    def __init__(self, library: Path) -> None:
        self.library = library.resolve()
        self._calls = ctypes.CDLL(str(self.library))
        for name in ("findings", "barriers"):
            getattr(self._calls, f"simt_{name}").restype = ctypes.c_char_p
        for name in ("launches", "early_launches", "memsets", "most_shared_bytes"):
            getattr(self._calls, f"simt_{name}").restype = ctypes.c_uint64
        self._frames: dict[str, tuple[Frame, ...]] = {"0": ()}
        self._kernels: dict[str, str] = {}

    @property
    def launches(self) -> int:
        return int(self._calls.simt_launches())

    @property
    def early_launches(self) -> int:
        """Those of kernels that start before the one ahead of them has ended."""
        return int(self._calls.simt_early_launches())

    @property
    def memsets(self) -> int:
        return int(self._calls.simt_memsets())

    @property
    def most_shared_bytes(self) -> int:
        """Of dynamic shared memory, that a launch has asked for since the last limit was set."""
        return int(self._calls.simt_most_shared_bytes())

    def limit_shared(self, limit: int) -> None:
        """From now on the bytes that a block may have, up to the 227 KB of the first: what the GPU says of itself."""
        self._calls.simt_limit_shared(ctypes.c_int64(limit))

    def seed(self, seed: int) -> None:
        """Lanes run in an order drawn with this seed; 0: by their number."""
        self._calls.simt_seed(ctypes.c_uint64(seed))

    def watch(self, races: bool = True, barriers: bool = False) -> None:
        self._calls.simt_watch(races, barriers)

    def tell(self, descriptor: int) -> None:
        """Writes the line of every new finding to this file at once: for a process that may not live on."""
        self._calls.simt_tell(descriptor)

    def skip(self, number: int) -> None:
        """From now on this barrier is passed as if it were not there. watch(barriers=True) must be on."""
        self._calls.simt_skip_barrier(ctypes.c_uint64(number))

    def take_findings(self) -> list[Finding]:
        """Those since the last call."""
        lines = self._calls.simt_findings().decode()
        self._calls.simt_forget_findings()
        return self.findings_in(lines)

    def findings_in(self, lines: str) -> list[Finding]:
        rows = [line.split("|") for line in lines.splitlines()]
        self._find(place for row in rows for place in row[3:])
        return [
            Finding(kind, text, self._kernel(kernel), self._frames[here], self._frames[there])
            for kind, text, kernel, here, there in rows
        ]

    def take_barriers(self) -> list[Barrier]:
        """Those that lanes came to since the last call, while watch(barriers=True) was on."""
        rows = [line.split("|") for line in self._calls.simt_barriers().decode().splitlines()]
        self._find(place for row in rows for place in row[2:])
        return [
            Barrier(int(number), self._kernel(kernel), sum((self._frames[place] for place in places), ()))
            for number, kernel, *places in rows
        ]

    def _kernel(self, offset: str) -> str:
        """The name of the kernel that begins there, without namespaces and arguments."""
        if offset not in self._kernels:
            (frames,) = self._ask([offset]) if offset != "0" else ((),)
            name = frames[-1].function if frames else ""
            name = re.sub(r"\(anonymous namespace\)::|isoload::|cuda::|^void ", "", name)
            self._kernels[offset] = name.split("(")[0]
        return self._kernels[offset]

    def _find(self, places: Iterable[str]) -> None:
        """Functions and lines of all at once: a return address is that of the instruction behind the call."""
        new = sorted({place for place in places if place not in self._frames})
        found = self._ask([f"{int(place, 16) - 1:x}" for place in new])
        self._frames.update(zip(new, found, strict=True))

    def _ask(self, offsets: list[str]) -> list[tuple[Frame, ...]]:
        if not offsets:
            return []
        command = ["addr2line", "-e", str(self.library), "-i", "-f", "-C", "-a", *offsets]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [frames_in(block.splitlines()[1:]) for block in re.split(r"^(?=0x)", said, flags=re.M)[1:]]


def frames_in(lines: list[str]) -> tuple[Frame, ...]:
    """Those of addr2line's pairs that lie in csrc, or among the probes."""
    frames = []
    for function, place in zip(lines[::2], lines[1::2], strict=True):
        file, _, line = place.split(" (discriminator")[0].rpartition(":")  # a path may hold spaces
        if line.isdigit() and ("csrc/" in file or file.endswith("probes.cu")):
            frames.append(Frame(function, file.split("csrc/")[-1], int(line)))
    return tuple(frames)
