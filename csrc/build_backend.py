"""setuptools' build hooks, which pip calls, with torch in their sight.

Build isolation hides the environment's packages. The torch that is installed there is found all the same; where there
is none, pip fetches one for the build. Which one makes no difference: the ops use libtorch's stable ABI.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import setuptools
from setuptools.build_meta import *  # noqa: F403

TORCH, SETUPTOOLS = "torch>=2.11", 77  # as in pyproject.toml

if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
    raise SystemExit(
        f"isoload is built by setuptools >= {SETUPTOOLS}, here is {setuptools.__version__}: run `pip install .`, which "
        "fetches it, or upgrade it before `--no-build-isolation`"
    )
compiler = shlex.split(os.environ.get("CXX") or "g++")[0]
if shutil.which(compiler) is None:
    raise SystemExit(
        f"isoload compiles C++, and there is no {compiler}: install g++ (`apt install g++`), or set CXX"
    )
sys.path += [path for name in ("purelib", "platlib") if (path := sysconfig.get_path(name)) not in sys.path]


def needed(_: Any = None) -> list[str]:
    """What is missing beside the requirements of pyproject.toml."""
    try:
        found = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return [TORCH]
    return [] if [int(part) for part in found] >= [2, 11] else [TORCH]


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = needed
