"""The package with its CUDA kernels in the place of csrc/cpu: g++ compiles csrc/cuda for one CPU core.

tests/native/one_core/cuda_runtime.h stands in for CUDA. Two lines of csrc/cuda are no C++ and are replaced in
a copy: the declaration of dynamic shared memory and the launch itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch.utils.cpp_extension import include_paths, library_paths

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent

# (file, from here, up to here, what stands there instead)
REPLACED = (
    (
        "cuda/launch.cuh",
        "extern __shared__ uint64_t shared_memory[];",
        "",
        "using one_core::shared_memory;",
    ),
    (
        "cuda/launch.cuh",
        "  int device = 0, bytes = 0;",
        "return bytes - 1024;",
        "  return sizeof(one_core::shared_memory);",
    ),
    (
        "cuda/launch.cuh",
        "  cudaError_t error = cudaSuccess;",
        "return refused(error);",
        "  one_core::launch(kernel, blocks, threads, shared_bytes, Parameters(arguments)...);\n"
        "  return nullptr;",
    ),
    (
        "ops/device.h",
        "#ifdef ISOLOAD_WITH_CUDA\n  if (!like",
        "#endif",
        "  if (const char* error = launch(static_cast<void*>(nullptr))) throw std::runtime_error(error);\n"
        "  return true;",
    ),
)


def build(folder: Path) -> Path:
    """Returns the folder to put on PYTHONPATH."""
    csrc, python = folder / "csrc", folder / "python"
    shutil.copytree(ROOT / "csrc", csrc)
    shutil.copytree(ROOT / "python", python, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name, first, last, instead in REPLACED:
        path = csrc / name
        pattern = re.escape(first) + (".*?" + re.escape(last) if last else "")
        text, found = re.subn(pattern, lambda _, new=instead: new, path.read_text(), flags=re.DOTALL)
        assert found == 1, f"{name}: {first}"
        path.write_text(text)
    sources = [path for path in csrc.rglob("*") if path.suffix in (".cpp", ".cu") and path.name != "cuda.cpp"]
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-DTORCH_TARGET_VERSION=0x020b000000000000"]
    flags += [
        f"-I{TESTS / 'native' / 'one_core'}",
        f"-I{csrc}",
        *(f"-isystem{path}" for path in include_paths()),
    ]

    def compile_one(source: Path) -> str:
        out = str(source) + ".o"
        subprocess.run(["g++", *flags, "-x", "c++", "-c", str(source), "-o", out], check=True)
        return out

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    libraries = [*(f"-L{path}" for path in library_paths()), "-ltorch_cpu", "-ltorch", "-lc10"]
    out = ["-o", str(python / "isoload" / "_C.so")]
    subprocess.run(["g++", "-shared", *objects, *libraries, *out], check=True)
    return python
