"""Builds isoload._C: the torch ops, against libtorch's stable ABI, and the offline placers' loops. It calls nothing of
Python: one binary serves every Python and every torch >= 2.11.

With nvcc and a CUDA build of torch the CUDA ops are built in. ISOLOAD_CUDA=1 builds them on any torch, 0 never;
ISOLOAD_CUDA_ARCH=sm_90 for one GPU only. ISOLOAD_OPS=in-place: `build_ext --inplace` has built them already.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from pathlib import Path
from typing import Any

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        "isoload builds against torch, which is not here: run `pip install .`, which finds or fetches it, or install "
        "torch >= 2.11 before `--no-build-isolation`"
    ) from error

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "csrc" / "cuda"))
import nvcc  # noqa: E402

TORCH_2_11 = "0x020b000000000000"  # the oldest torch whose stable ABI we compile for

# Integers only need -O3; -ffp-contract=off keeps float planners bit-equal between CPU and CUDA.
COMPILE = ["-O3", "-g0", "-std=c++17", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off"]
COMPILE += ["-pthread", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TORCH_2_11}"]
COMPILE += os.environ.get("ISOLOAD_CXXFLAGS", "").split()


def find_nvcc() -> str | None:
    """nvcc, if the CUDA ops are to be built."""
    asked = os.environ.get("ISOLOAD_CUDA", "")
    compiler = nvcc.find()
    if asked == "1" and compiler is None:
        raise SystemExit("ISOLOAD_CUDA=1 needs nvcc: set CUDA_HOME, or PATH")
    return compiler if asked == "1" or (asked == "" and torch.version.cuda) else None


NVCC = find_nvcc()


END = "\r" if sys.stdout.isatty() else "\n"


class Build(BuildExtension.with_options(use_ninja=False)):
    """nvcc first: its objects are linked in like any other. Then the C++ sources, MAX_JOBS at a time."""

    def build_extensions(self) -> None:
        if NVCC:
            ops.extra_objects += nvcc.compile_all(NVCC, ROOT / "build" / "cuda")
        compiler, jobs = self.compiler, []
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)) as pool:

            def start(*source: Any) -> None:  # a copy: torch changes the command around each source
                jobs.append(pool.submit(type(compiler)._compile, copy(compiler), *source))

            def compile_all(*sources: Any, **how: Any) -> list[str]:
                objects = type(compiler).compile(compiler, *sources, **how)
                for done, job in enumerate(jobs, 1):
                    job.result()  # raises what the compiler refused
                    print(f"isoload: {done} of {len(jobs)} files compiled", end=END, flush=True)
                return objects

            compiler._compile, compiler.compile = start, compile_all
            super().build_extensions()


def find_sources(*kinds: str) -> list[str]:
    return sorted(str(path) for kind in kinds for path in Path("csrc").rglob(kind))


ops = CppExtension(
    "isoload._C",
    find_sources("*.cpp"),
    include_dirs=[str(ROOT / "csrc")],
    depends=find_sources("*.h", "*.cu", "*.cuh"),
    define_macros=[("ISOLOAD_WITH_CUDA", None)] if NVCC else [],
    extra_compile_args={"cxx": COMPILE},
    # Named again, behind the flag: only libtorch brings libtorch_cuda, where the weak symbols of ops/device.h are, and
    # the linker drops it where nothing in it is used.
    extra_link_args=["-pthread", "-Wl,--no-as-needed", "-ltorch"],
    py_limited_api=True,
)
if NVCC:  # the runtime is linked in: a CPU torch brings none, and loads the library all the same
    ops.library_dirs.append(nvcc.library_folder(NVCC))
    ops.libraries += ["cudart_static", "dl", "rt", "pthread"]

setup(
    ext_modules=[] if os.environ.get("ISOLOAD_OPS") == "in-place" else [ops],
    cmdclass={"build_ext": Build},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
