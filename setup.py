"""Builds isoload._C: the torch ops, against libtorch's stable ABI (one binary for every torch >= 2.11)."""

import os
from pathlib import Path

from setuptools import setup

try:
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        "isoload builds against the torch you will run it with: install torch >= 2.11 first, then use "
        "`pip install --no-build-isolation .` (or `make build`)"
    ) from error

SOURCES = sorted(str(path) for path in Path("csrc").rglob("*.cpp"))
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))
TORCH_2_11 = "0x020b000000000000"  # the oldest torch whose stable ABI we compile for

# Integers only need -O3; -ffp-contract=off keeps float planners bit-equal between CPU and CUDA.
COMPILE = ["-O3", "-g0", "-std=c++17", "-Wall", "-Wextra", "-Wno-unused-parameter", "-ffp-contract=off"]
COMPILE += ["-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TORCH_2_11}"]
COMPILE += os.environ.get("ISOLOAD_CXXFLAGS", "").split()

extension = CppExtension(
    "isoload._C",
    SOURCES,
    include_dirs=[str(Path(__file__).parent.resolve() / "csrc")],
    depends=HEADERS,
    extra_compile_args={"cxx": COMPILE},
    # Weak CUDA symbols resolve on a CUDA torch only if the linker keeps its libraries.
    extra_link_args=["-Wl,--no-as-needed"],
    py_limited_api=True,
)

setup(
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=False)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
