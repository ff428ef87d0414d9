"""One torch thread everywhere, and the tests of the ops a second time on CUDA where there is a GPU."""

from __future__ import annotations

import gc
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from isoload import ops
from isoload.ops.library import call
from support.processes import start_autograd

torch.set_num_threads(1)  # two beside a busy process make small operations slower, not faster
start_autograd()

# make kernels-check runs the one with Triton and its interpreter, make docs the other on the built site.
collect_ignore = ["kernels", "site"]

OWN_DEVICE = {"borrow", "device_errors"}  # their tests hold addresses, or choose the device
# What only the CPU refuses, what calls no op of isoload.ops, and what forks.
ON_CPU_ALONE = re.compile(
    "refuse|opcheck|traced|never_waits|of_a_group_agree"
    "|there_are_|unknown_field|aligned_views|best_visited_is|hardly_a_path"
)


# Every wrapper calls its op by this name, however a test came by the wrapper.
WRAPPERS = [of for name, of in sys.modules.items() if name.startswith("isoload.ops.") and hasattr(of, "call")]
THERE = pytest.StashKey["Elsewhere"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-gpu",
        action="store_true",
        help="run the tests of the ops on CUDA up to their first call there, on any machine",
    )


def pytest_collection_finish() -> None:
    """Modules and thousands of tests stay to the end: no collection needs to visit them, nor a fork's to copy them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test's product of parameters `make test` runs as few cases as hold every value; the others are slow.

    Values that a parametrize gives together count as one. Where cases add as much, the one with the rarest values runs.
    """
    tests = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests[item.parent, item.function].append(item)
    for cases in tests.values():
        values = {case: frozenset(enumerate(case.callspec._idlist)) for case in cases}
        unseen, counts = set().union(*values.values()), Counter[tuple[int, str]]()
        while unseen:
            best = max(cases, key=lambda c: (len(values[c] & unseen), -sum(counts[v] for v in values[c])))
            cases.remove(best)
            unseen -= values[best]
            counts.update(values[best])
        for case in cases:
            case.add_marker(pytest.mark.slow)


def has_cuda(op: str) -> bool:
    name = f"isoload::{op}"
    return torch.cuda.is_available() and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")


def op_tested(path: Path) -> str | None:
    """The op that tests/ops/test_<op>.py, or test_<op>_<part>.py, is about; any of test_every_op.py."""
    if path.stem == "test_every_op":
        return "count"
    stem = path.stem.removeprefix("test_") + "_"
    names = [name for name in ops.__all__ if stem.startswith(f"{name}_") and path.parent.name == "ops"]
    op = max(names, key=len, default=None)
    return None if op in OWN_DEVICE else op


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    op, option = op_tested(Path(metafunc.module.__file__ or "")), metafunc.config.option
    # --collect-only lists on any machine what a GPU would run
    there = op is not None and (has_cuda(op) or option.collectonly or option.without_gpu)
    if there and not ON_CPU_ALONE.search(metafunc.function.__name__):
        both = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
        metafunc.parametrize("device", both, indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where a test's ops run. Its tensors stay on the CPU: on CUDA every op gets them moved, and its results back."""
    name: str = getattr(request, "param", "cpu")
    if name != "cpu":
        there = Elsewhere(name, request.config.option.without_gpu)
        request.node.stash[THERE] = there
        for module in WRAPPERS:
            monkeypatch.setattr(module, "call", there)
    return name


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """A test's run on CUDA that has passed must have been there."""
    there = pyfuncitem.stash.get(THERE, None)
    try:
        result = yield
    except CameToTheDevice:
        return True
    assert there is None or there.calls > 0, "a run on CUDA that makes no call there"
    return result


class CameToTheDevice(BaseException):
    """Ends a run without a GPU: neither a test nor pytest.raises takes it for an Exception."""


class Elsewhere:
    """Calls an op on another device, for arguments and results on the CPU."""

    def __init__(self, device: str, is_absent: bool) -> None:
        self.device, self.is_absent, self.calls = device, is_absent, 0

    def __call__(self, op: Any, *args: Any) -> Any:
        if self.is_absent:
            raise CameToTheDevice
        self.calls += 1
        there = tree_map_only(Tensor, lambda x: x.to(self.device), args)
        result = call(op, *there)
        for argument, mine, theirs in zip(op._schema.arguments, args, there, strict=True):
            if argument.alias_info is not None and argument.alias_info.is_write and mine is not None:
                mine.copy_(theirs)
        return tree_map_only(Tensor, Tensor.cpu, result)
