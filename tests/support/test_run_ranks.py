"""Forked processes say what they raised, and run autograd whatever their parent did."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.native_build import CXX
from support.processes import run_program

# What a CUDA build of torch registers where there is no GPU.
NO_GPU = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct NoGpu : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 0; }
} guard;
c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
"""
FORKS = """
import ctypes, sys, torch
ctypes.CDLL(sys.argv[1])
from pathlib import Path
from torch._subclasses.fake_tensor import FakeTensorMode
from support.processes import run_program, start_autograd
if sys.argv[2] == "started": start_autograd()
FakeTensorMode().__enter__().__exit__(None, None, None)
start_autograd()
print(run_program("from support.processes import start_autograd; start_autograd()", Path()))
"""


def test_a_forked_program_tells_its_error(tmp_path: Path) -> None:
    assert run_program("print(open('written', 'w').close())", tmp_path) == (0, "None\n")
    assert (tmp_path / "written").exists()
    status, said = run_program("print('so far')\nraise SystemExit(3)", tmp_path)
    assert status != 0 and "so far" in said and "SystemExit: 3" in said


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU autograd has threads, which forks lack")
@pytest.mark.parametrize("how", ["started", "not started"])
def test_forks_run_autograd_beside_fake_tensors_of_a_cuda_build(how: str, tmp_path: Path) -> None:
    folder, library = Path(torch.__file__).parent, tmp_path / "guard.so"
    command = [CXX, "-std=c++20", "-shared", "-fPIC", f"-I{folder / 'include'}", "-xc++", "-"]
    subprocess.run(
        [*command, f"-L{folder / 'lib'}", "-lc10", "-o", library], input=NO_GPU, text=True, check=True
    )
    program = [sys.executable, "-c", FORKS, library, how]
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(program, cwd=tests, capture_output=True, text=True, check=True)
    assert ("combination with fork-based multiprocessing" in done.stdout) == (how != "started"), done.stdout
