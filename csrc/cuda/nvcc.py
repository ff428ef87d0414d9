"""The nvcc step of setup.py. Needs no GPU and no CUDA build of torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CUDA = Path(__file__).resolve().parent
CSRC = CUDA.parent
SOURCES = sorted(CUDA.glob("*.cu"))
ARCHITECTURES, NEWEST = ("sm_80", "sm_90", "sm_100"), "compute_100"
FLAGS = [
    "-O3",
    "--fmad=false",
    "-std=c++17",
    "-Xptxas=-v",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    f"-I{CSRC}",
]
ONLY = os.environ.get("ISOLOAD_CUDA_ARCH", "")  # e.g. sm_90: for one GPU, in a fraction of the time
# Code for X.0 runs on every X.y: that for sm_90a or sm_100a would not, and no kernel uses what those have besides.
# Newer GPUs compile the newest one's PTX.
FLAGS += [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in ([ONLY] if ONLY else ARCHITECTURES)]
FLAGS += [] if ONLY else [f"-gencode=arch={NEWEST},code={NEWEST}"]


def find(tool: str = "nvcc") -> str | None:
    """A tool of CUDA where torch's CUDA_HOME is looked for: CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda."""
    homes = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    places = [*(f"{home}/bin" for home in homes), os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    return shutil.which(tool, path=os.pathsep.join(places))


def library_folder(nvcc: str) -> str:
    """Where libcudart_static.a is. nvcc on PATH may be a script elsewhere, so nvcc is asked."""
    said = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", os.devnull, "-o", os.devnull],
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    return re.findall(r'"-L([^"]*/lib(?:64)?)"', said)[0]


def compile_all(nvcc: str, folder: Path) -> list[str]:
    """Compiles every .cu for all architectures into ``folder``; X.txt beside X.o is what ptxas said.

    Objects newer than all sources and headers stay. Those for one architecture have a folder of their own.

    Raises:
        SystemExit: with nvcc's message, if a source does not compile.
    """
    folder = folder / ONLY
    folder.mkdir(parents=True, exist_ok=True)
    found = [*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh")]
    headers = [*(path for path in found if path.parent.name != "placers"), Path(__file__)]
    newest = max(path.stat().st_mtime for path in headers)

    def compile_one(source: Path) -> str:
        out = folder / f"{source.stem}.o"
        if out.exists() and out.stat().st_mtime > max(newest, source.stat().st_mtime):
            return str(out)
        command = [nvcc, *FLAGS, "-c", str(source), "-o", str(out)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise SystemExit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
        out.with_suffix(".txt").write_text(result.stdout + result.stderr)
        return str(out)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(compile_one, SOURCES))
