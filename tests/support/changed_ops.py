"""The compiled ops from csrc with a file of it changed: of what includes that file, the tested op's sources alone are
compiled again. All others lie in two objects, linked behind them."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

from support.simt_build import all_in_one, sources_of

CSRC = Path(__file__).parents[2] / "csrc"


def compile_one(csrc: Path, source: Path, out: Path) -> Path:
    includes = [f"-I{csrc}", *(f"-isystem{path}" for path in include_paths())]
    flags = [
        "-std=c++17",
        "-O1",
        "-fPIC",
        "-w",
        "-ffp-contract=off",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",
    ]
    subprocess.run(["g++", *flags, *includes, "-c", str(source), "-o", str(out)], check=True, text=True)
    return out


def compile_sources(folder: Path) -> list[Path]:
    """Objects of csrc as it is, the index apart: of what is there twice the linker takes the first that it meets."""
    ops = all_in_one(folder / "all_ops.cpp", sorted((CSRC / "ops").glob("*.cpp")))
    sources = [CSRC / "ops.cpp", ops, CSRC / "placers" / "loops.cpp"]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda path: compile_one(CSRC, path, folder / f"{path.stem}.o"), sources))


def changed_sources(csrc: Path, file: Path, tests: str) -> list[Path]:
    """The sources that include a file, or are it: of these the op's that test_<tests>.py is about, if there are any."""
    including = [path for path in sorted(csrc.rglob("*.cpp")) if file in sources_of(path, (csrc,))]
    assert including, f"no source includes {file}"
    ops = [path for path in including if f"{tests}_".startswith(f"{path.stem}_")]
    longest = max((len(path.stem) for path in ops), default=0)
    return [path for path in ops if len(path.stem) == longest] or including


def link_ops(folder: Path, file: str, tests: str, objects: list[Path]) -> None:
    """The library of ``folder``'s sources, whose ``file`` is changed, in place of the package's there."""
    csrc = folder / "csrc"
    again = changed_sources(csrc, folder / file, tests)
    mine = [compile_one(csrc, path, folder / f"{path.parent.name}.{path.stem}.o") for path in again]
    library = next((folder / "python" / "isoload").glob("_C*.so"))
    linked = [*map(str, [*mine, *objects]), *(f"-L{path}" for path in library_paths())]
    command = ["g++", "-shared", "-Wl,-z,muldefs", *linked, "-ltorch_cpu", "-ltorch", "-lc10"]
    subprocess.run([*command, "-o", str(library)], check=True)
