"""The package with its CUDA kernels in the place of csrc/cpu: g++ compiles csrc/cuda for tests/native/simt.

tests/native/simt/machine.h says what that run-time models and what it cannot see. Two places of csrc are no C++, or
call CUDA, and are replaced in a copy. Objects are kept in build/simt by what they are made of.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
RUNTIME = TESTS / "native" / "simt"
CACHE = (ROOT if os.access(ROOT, os.W_OK) else Path(tempfile.gettempdir())) / "build" / "simt"

# (file, from here, up to here, what stands there instead)
REPLACED = (
    (
        "cuda/launch.cuh",
        "extern __shared__ __align__(16) uint64_t shared_memory[];",
        "",
        "constexpr uint64_t* shared_memory = simt::shared_arena.data;",
    ),
    (
        "ops/device.h",
        "#ifdef ISOLOAD_WITH_CUDA\n  if (!like",
        "#endif",
        "  if (const char* error = launch(static_cast<void*>(nullptr))) throw std::runtime_error(error);\n"
        "  return true;",
    ),
)
BASE = ("-std=c++17", "-fPIC", "-w", "-ffp-contract=off", "-DTORCH_TARGET_VERSION=0x020b000000000000")
# -O1 keeps every access that the source has; -g1 is enough for lines and inlined calls.
KERNELS = (*BASE, "-O1", "-g1", "-fsanitize=thread")
RUN_TIME = (*BASE, "-O2", "-U_FORTIFY_SOURCE", "-fvisibility=hidden")  # its longjmp refuses other stacks
HOST = (*BASE, "-O0", "-fvisibility=hidden")


def build(folder: Path, file: str = "", old: str = "", new: str = "") -> Path:
    """Returns the folder to put on PYTHONPATH: the package, its library with csrc/cuda on the run-time.

    With a file of csrc, `old` in it becomes `new` first.
    """
    csrc, python = folder / "csrc", folder / "python"
    shutil.copytree(ROOT / "csrc", csrc)
    if file:
        (csrc / file).write_text((csrc / file).read_text().replace(old, new))
    shutil.copytree(ROOT / "python", python, ignore=shutil.ignore_patterns("_C*.so", "__pycache__"))
    (python / "isoload" / "_C.so").symlink_to(compile_library(csrc))
    return python


def compile_library(csrc: Path) -> Path:
    """Compiles csrc, a copy that may be changed, and links it with the run-time."""
    for name, first, last, instead in REPLACED:
        path = csrc / name
        pattern = re.escape(first) + (".*?" + re.escape(last) if last else "")
        text, found = re.subn(pattern, lambda _, new=instead: new, path.read_text(), flags=re.DOTALL)
        assert found == 1, f"{name}: {first}"
        path.write_text(text)
    jobs = [(path, KERNELS) for path in sorted((csrc / "cuda").glob("*.cu"))]
    jobs += [(path, RUN_TIME) for path in sorted(RUNTIME.glob("*.cpp"))]
    jobs += [
        (all_in_one(csrc / "all_ops.cpp", [csrc / "ops.cpp", *sorted((csrc / "ops").glob("*.cpp"))]), HOST),
        (csrc / "placers" / "loops.cpp", HOST),
    ]
    libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-ltorch", "-lc10"]
    return link(jobs, csrc, [f"-isystem{path}" for path in include_paths()], libraries)


def link(
    jobs: Iterable[tuple[Path, tuple[str, ...]]], csrc: Path, includes: list[str], libraries: list[str]
) -> Path:
    """The library of these sources, each with its flags; what build/simt has is not made again."""
    CACHE.mkdir(parents=True, exist_ok=True)
    folders = (csrc, RUNTIME)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda job: compile_one(*job, folders, includes), jobs))
        out = CACHE / f"{digest(' '.join(sorted(path.name for path in objects)), *libraries)}.so"
        if not out.exists():
            run([*compiler(), "-shared", "-Wl,--no-undefined", *map(str, objects), *libraries], out)
    return out


def compile_one(source: Path, flags: tuple[str, ...], folders: tuple[Path, ...], includes: list[str]) -> Path:
    texts = [f"{path.name} {path.read_text()}" for path in sources_of(source, folders)]
    out = CACHE / f"{digest(torch.__version__, *compiler(), *flags, *texts)}.o"
    if not out.exists():
        paths = [*(f"-I{folder}" for folder in reversed(folders)), *includes]
        paths.append(f"-ffile-prefix-map={folders[0]}=csrc")
        run([*compiler(), *flags, *paths, "-x", "c++", "-c", str(source)], out)
    return out


def sources_of(source: Path, folders: tuple[Path, ...]) -> list[Path]:
    """A file and those of our own that it includes."""
    found = [source]
    for path in found:
        for name in re.findall(r'#include ["<]([\w./]+)[">]', path.read_text()):
            at = next(
                (folder / name for folder in (path.parent, *folders) if (folder / name).is_file()), None
            )
            if at is not None and at not in found:
                found.append(at)
    return found


def all_in_one(path: Path, sources: Iterable[Path]) -> Path:
    """Torch's headers take most of the time to compile an op: once is enough."""
    path.write_text("".join(f'#include "{os.path.relpath(source, path.parent)}"\n' for source in sources))
    return path


def compiler() -> tuple[str, ...]:
    return (os.environ.get("CXX", "g++"),)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def run(command: list[str], out: Path) -> None:
    """Writes `out` whole or not at all."""
    unfinished = out.with_suffix(".unfinished")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    unfinished.rename(out)
