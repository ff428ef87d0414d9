"""The compiled ops from csrc with a file of it changed: only what includes that file is compiled again."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

ROOT = Path(__file__).parents[2]


def compile_one(csrc: Path, source: str, out: Path) -> Path:
    """One file of csrc into an object, beside which a .d names all that it includes."""
    includes = [f"-I{csrc}", *(f"-isystem{path}" for path in include_paths())]
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    subprocess.run(
        ["g++", *flags, "-MMD", *includes, "-c", str(csrc / source), "-o", str(out)], check=True, text=True
    )
    return out


def compile_sources(folder: Path) -> dict[str, Path]:
    """The object of every file of csrc as it is."""
    csrc = ROOT / "csrc"
    sources = [str(path.relative_to(csrc)) for path in sorted(csrc.rglob("*.cpp"))]
    outs = [folder / f"{source.replace('/', '.')}.o" for source in sources]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(sources, pool.map(compile_one, [csrc] * len(sources), sources, outs), strict=True))


def link_ops(file: str, folder: Path, objects: dict[str, Path]) -> None:
    """The library of ``folder``'s sources, whose ``file`` is changed, in place of the package's there."""
    touched = str(ROOT / file).replace(" ", "\\ ")  # as in a Makefile
    mine = [name for name, out in objects.items() if touched in out.with_suffix(".d").read_text()]
    assert mine, f"no source includes {file}"
    again = {name: compile_one(folder / "csrc", name, folder / objects[name].name) for name in mine}
    library = next((folder / "python" / "isoload").glob("_C*.so"))
    linked = [str(out) for out in (objects | again).values()]
    paths = [f"-L{path}" for path in library_paths()]
    command = ["g++", "-shared", *linked, *paths, "-ltorch_cpu", "-ltorch", "-lc10", "-o", str(library)]
    subprocess.run(command, check=True)
