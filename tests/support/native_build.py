"""Builds and runs tests/native/teams.cpp: the planners on ThreadTeam, with or without a sanitizer."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CSRC = TESTS.parent / "csrc"
PROGRAM = TESTS / "native" / "teams.cpp"
CXX = os.environ.get("CXX", "g++")
BASE_FLAGS = ("-std=c++20", "-pthread", "-Wall", "-Wextra", "-Wno-unused-parameter")
THREAD = ("-O1", "-g", "-fsanitize=thread")
ADDRESS = ("-Og", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
PLAIN = ("-O2",)


@dataclass(frozen=True)
class Outcome:
    """What a run of the program said. ``counts`` holds the numbers of its summary line, by their words."""

    code: int
    text: str
    counts: dict[str, int]


def build(source_dir: Path, out: Path, flags: Sequence[str], program: Path = PROGRAM) -> Path:
    """Compiles a program against ``source_dir`` (csrc or a changed copy of it) into the file ``out``.

    Raises:
        RuntimeError: with the compiler's message, if the sources do not compile.
    """
    command = [CXX, *BASE_FLAGS, *flags, f"-I{source_dir}", str(program), "-o", str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return out


def run(program: Path, threads: int, instances: int, seed: int, room: int, timeout: float = 300) -> Outcome:
    """Runs the program; see its first lines for the arguments. A team that hangs is an outcome with code -1."""
    return run_arguments(program, (threads, instances, seed, room), timeout)


def run_arguments(program: Path, numbers: Sequence[int], timeout: float = 300) -> Outcome:
    """As :func:`run`, of any program that ends with such a line."""
    arguments = [str(program), *map(str, numbers)]
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    try:
        result = subprocess.run(
            [*launcher(), *arguments], capture_output=True, text=True, timeout=timeout, env=environment
        )
    except subprocess.TimeoutExpired:
        return Outcome(-1, f"{' '.join(arguments[1:])}: the lanes still wait after {timeout} s", {})
    summary = re.findall(r"(\d+) (\w+)", result.stdout)
    return Outcome(result.returncode, result.stdout + result.stderr, {word: int(n) for n, word in summary})


def need(flags: Sequence[str]) -> None:
    """Skips the test, with the reason, where programs built with these flags cannot be built or started."""
    if reason := _obstacle(tuple(flags)):
        pytest.skip(reason)


@functools.cache
def launcher() -> tuple[str, ...]:
    """A prefix that fixes the address space: ThreadSanitizer cannot start under some kernels' randomisation."""
    setarch = shutil.which("setarch")
    if setarch and subprocess.run([setarch, "-R", "true"], capture_output=True).returncode == 0:
        return (setarch, "-R")
    return ()


@functools.cache
def _obstacle(flags: tuple[str, ...]) -> str:
    if shutil.which(CXX) is None:
        return f"no C++ compiler: {CXX} is not on the path"
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text("#include <barrier>\nint main() { std::barrier<>(1).arrive_and_wait(); }\n")
        command = [CXX, *BASE_FLAGS, *flags, str(source), "-o", str(program)]
        for step in (command, [*launcher(), str(program)]):
            result = subprocess.run(step, capture_output=True, text=True)
            if result.returncode:
                message = (result.stderr.strip() or f"exit code {result.returncode}").splitlines()[0]
                return f"{' '.join(flags)} does not work here: {message}"
    return ""
