"""One torch thread everywhere, and the tests of the ops a second time on CUDA where there is a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from isoload import ops
from isoload.replica_tables import ReplicaTables
from support.processes import start_autograd

torch.set_num_threads(1)  # two beside a busy process make small operations slower, not faster
start_autograd()

collect_ignore = ["kernels"]  # they need Triton and its interpreter: make kernels-check

OWN_DEVICE = {
    "borrow",
    "device_errors",
    "gather_rows",
    "plan_exact_share_gathered",
}  # their tests hold addresses, or choose the device
# What only the CPU refuses, what calls no op of isoload.ops, and what forks.
ON_CPU_ALONE = re.compile("refuse|one_bad_layer|out_must_be|opcheck|traced|never_waits|of_a_group_agree")


def has_cuda(op: str) -> bool:
    name = f"isoload::{op}"
    return torch.cuda.is_available() and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


def op_tested(path: Path) -> str | None:
    """The op that tests/ops/test_<op>.py, or test_<op>_<part>.py, is about."""
    stem = path.stem.removeprefix("test_") + "_"
    names = [name for name in ops.__all__ if stem.startswith(f"{name}_") and path.parent.name == "ops"]
    op = max(names, key=len, default=None)
    return None if op in OWN_DEVICE else op


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    op = op_tested(Path(metafunc.module.__file__ or ""))
    # --collect-only lists on any machine what a GPU would run
    there = op is not None and (has_cuda(op) or metafunc.config.option.collectonly)
    if there and not ON_CPU_ALONE.search(metafunc.function.__name__):
        both = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
        metafunc.parametrize("device", both, indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a test's ops run. Its tensors stay on the CPU: on CUDA every op gets them moved, and its results back."""
    name: str = getattr(request, "param", "cpu")
    if name != "cpu":
        for op in filter(has_cuda, ops.__all__):
            monkeypatch.setattr(ops, op, elsewhere(getattr(ops, op), name))
    return name


def elsewhere(op: Callable[..., Any], device: str) -> Callable[..., Any]:
    """The op on another device, for arguments and results on the CPU."""

    @wraps(op)
    def run(*args: Any, **options: Any) -> Any:
        there = partial(moved, device=device)
        result = moved(op(*map(there, args), **{k: there(v) for k, v in options.items()}), "cpu")
        if (out := options.get("out")) is not None:
            out.data.copy_(result.data)
            return out
        return result

    return run


def moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, ReplicaTables):
        return replace(value, data=value.data.to(device))
    if isinstance(value, tuple):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value
