"""Where the Triton kernels run: the choice, its reasons, and that a CPU never imports Triton."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from isoload import kernels


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    """What is remembered about this machine is forgotten, before and after."""
    remembered = (kernels.why_not, kernels._run_here)
    for function in remembered:
        function.cache_clear()
    yield
    for function in remembered:
        function.cache_clear()


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: Any) -> None:
    """A CUDA device, and a module triton, or None for a machine that cannot import it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setitem(sys.modules, "triton", triton)


class OnCuda:
    """As much of a tensor as is asked."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype, requires_grad: bool = False) -> None:
        self.dtype, self.requires_grad = dtype, requires_grad


@pytest.fixture
def cuda_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "Tensor", OnCuda)


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.why_not() == "torch sees no CUDA device"


def test_an_old_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (7, 5), object())
    assert kernels.why_not() == "they need compute capability 8.0, this device has 7.5"


def test_no_triton_is_said_once(monkeypatch: pytest.MonkeyPatch, cuda_tensors: None) -> None:
    pretend(monkeypatch, (9, 0), None)
    assert "pip install 'isoload[triton]'" in (kernels.why_not() or "")
    rows: Any = OnCuda(torch.float32)
    with pytest.warns(
        UserWarning, match="Triton kernels are off, plain torch computes: Triton cannot be imported"
    ):
        assert not kernels.fit(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels.fit(rows)


def test_what_fits(monkeypatch: pytest.MonkeyPatch, cuda_tensors: None) -> None:
    pretend(monkeypatch, (9, 0), object())
    given: dict[torch.dtype, Any] = {d: OnCuda(d) for d in (*kernels.DTYPES, torch.float64, torch.int64)}
    assert [kernels.fit(t) for t in given.values()] == [True, True, True, False, False]
    assert not kernels.fit(given[torch.float32], given[torch.float64])
    leaf: Any = OnCuda(torch.float32, requires_grad=True)
    assert not kernels.fit(given[torch.float32], leaf)
    with torch.no_grad():  # as inside of a Function
        assert kernels.fit(given[torch.float32], leaf)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not kernels.fit(given[torch.float32])


def test_what_has_no_memory_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_run_here", lambda: True)
    assert not kernels.fit(torch.zeros(1))
    with FakeTensorMode():
        fake = torch.empty(1, device="cuda")
    assert fake.is_cuda and not kernels.fit(fake)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cpu_never_imports_triton() -> None:
    code = """
import sys, torch, isoload
from isoload.weights.compute import run_experts
before = "triton" in sys.modules  # not by us
stack = isoload.ExpertWeights.random(2, 8, 8)
rows = torch.randn(3, 8, requires_grad=True)
y = run_experts(rows, torch.tensor([[0], [1], [-1]]), torch.ones(3, 1), [stack], isoload.weights.experts.SwiGLU())
y.sum().backward()
assert before == ("triton" in sys.modules) and "isoload.kernels.permutation" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
