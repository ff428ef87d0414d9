"""isoload measure: designs, fits that recover known constants, kernels that are refused, and a run on two ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isoload.analysis import measuring
from isoload.analysis.measuring import Machine, expert_designs, isoload_experts, local_slots, make_machine
from isoload.analysis.models import Model, measured_layer
from isoload.cli.processes import run_ranks
from isoload.times import Times, load
from isoload.times.experts import kernel_us
from isoload.topology import Topology
from isoload.transport.deep_ep import transport as packages
from support.deep_ep_double import EPBuffer
from support.processes import run_ranks as ranks_of_tests

GIB = 2.0**30
MODEL = Model("tiny", 32, 16, 8, 2, 2, "float32", 64)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points, each called a few times."""
    monkeypatch.setattr(measuring, "COPIES", (1, 4, 16))
    monkeypatch.setattr(measuring, "TOKENS", (1, 8, 32))
    monkeypatch.setattr(measuring, "SAMPLE_SECONDS", 0.0)
    torch.set_num_threads(1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(1, 4))
def test_rows_have_the_loads_and_no_slot_twice(loads: list[int], per_row: int) -> None:
    slots = local_slots(loads, per_row)
    assert torch.bincount(slots[slots >= 0].long(), minlength=len(loads)).tolist() == loads
    for row in slots.tolist():
        present = [slot for slot in row if slot >= 0]
        assert len(present) == len(set(present))


def test_the_fit_finds_the_constants_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times by the model of :func:`kernel_us`, with one percent of noise: even and skewed points come back."""
    constants, draw = (60.0, 8.0, 0.06, 0.004, 2.0), np.random.default_rng(0)
    machine = make_machine(MODEL, GIB)

    def us_of(call: Callable[..., Tensor], device: torch.device) -> float:
        rows, ids, _ = call.__defaults__  # type: ignore[misc]
        loads = torch.bincount(ids[ids >= 0].long(), minlength=machine.slots).numpy()
        us = kernel_us(*constants, (loads > 0).sum(), loads.sum(), len(rows))
        return float(us * (1 + 0.01 * draw.standard_normal()))

    monkeypatch.setattr(measuring, "median_us", us_of)
    monkeypatch.setattr(measuring, "COPIES", (1, 16, 256, 1024))
    points = list(measuring.time_experts(machine, list(expert_designs(machine)), lambda: None))
    experts = measuring.fit_experts(machine, points)
    assert experts.held_out_error is not None and experts.held_out_error < 0.02
    assert experts.fit_error is not None and experts.fit_error < 0.02
    assert (experts.copies_from, experts.copies_to) == (1, 8 * 1024)
    for loads in ([9] * 8, [700, 0, 0, 5, 0, 0, 0, 1]):
        wanted = kernel_us(*constants, np.count_nonzero(loads), sum(loads), sum(loads))
        assert 1e6 * experts.seconds(loads) == pytest.approx(wanted, rel=0.05)


def test_a_series_that_became_slow_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "COPIES", (1, 4, 16))
    monkeypatch.setattr(measuring, "median_us", lambda call, device: 2e6)
    machine = make_machine(MODEL, GIB)
    points = list(measuring.time_experts(machine, list(expert_designs(machine)), lambda: None))
    even = {(int((p.loads > 0).sum()), p.loads.sum() / p.rows) for p in points if not p.held_out}
    assert len([p for p in points if not p.held_out]) == len(even)


def bad_shape(rows: Tensor, *_: Tensor) -> Tensor:
    return rows[:, :-1]


def not_a_number(rows: Tensor, *_: Tensor) -> Tensor:
    return rows * float("nan")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (bad_shape, r"kernel mine must return \[1, 32\], a row for each row that it is given, got \[1, 31\]"),
        (not_a_number, "kernel mine must return finite values"),
        (lambda *_: None, "got NoneType"),
    ],
)
def test_kernels_that_compute_nothing_are_refused(small: None, kernel: Any, message: str) -> None:
    machine = make_machine(MODEL, GIB, kernel=kernel, kernel_name="mine")
    with pytest.raises(ValueError, match=message):
        measuring.measure(machine)


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="dtype must be one of bfloat16, float32, float16, .* got fp8_block"):
        make_machine(Model("tiny", 32, 16, 8, 2, 2, "fp8_block", 64), GIB)
    with pytest.raises(ValueError, match=r"memory must hold two experts of tiny, .* got 0\.00 GiB"):
        make_machine(MODEL, 1000.0)


def test_few_slots_where_memory_is_small() -> None:
    machine = make_machine(MODEL, 6 * MODEL.expert_bytes)
    assert isinstance(machine, Machine) and machine.slots == 3


def test_one_rank_writes_what_advise_reads(small: None, tmp_path: Path) -> None:
    times = measuring.measure(make_machine(MODEL, GIB))
    assert times.dispatch is None and times.move_us is None and times.speeds == (1.0,)
    assert set(times.plan_us) == {"exact", "own"} and min(times.plan_us.values()) > 0
    path = tmp_path / "times.json"
    from isoload.files import write_json

    write_json(times.to_json(), str(path))
    assert load(path).experts.hidden == 32
    with pytest.raises(
        ValueError, match="are of experts 32 x 16 float32, and wide has 64 x 16 float32: run isoload"
    ):
        measured_layer(load(path), Model("wide", 64, 16, 8, 2, 2, "float32", 64), Topology(1))


def half_of_the_ranks_fail(
    rows: Tensor, slots: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor
) -> Tensor:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise RuntimeError("no such kernel on this GPU")
    return isoload_experts(rows, slots, weights, gate_up, down)


def test_two_ranks_measure_their_exchange(small: None) -> None:
    def body(rank: int, alive: Callable[[], None]) -> Times:
        torch.set_num_threads(1)
        return measuring.measure(make_machine(MODEL, GIB))

    first, second = run_ranks(body, 2, 100.0)
    assert first.dispatch is not None and first.combine is not None and first.move_us > 0
    assert first.to_json()["exchange"] == second.to_json()["exchange"] and first.speeds == second.speeds
    assert [point[0] for point in first.points["exchange"]] == [1, 8, 32]


DOUBLE = """__version__ = '2.5'
from support.deep_ep_double import EPBuffer as Double
class EPBuffer(Double):
    def __init__(self, group, **options):
        if FAILING == group.rank():
            raise AssertionError("NVLink is not there\\nat line 5")
        super().__init__(group, **options)
"""


@pytest.mark.parametrize(
    ("dtype", "hidden", "failing", "deep_ep"),
    [
        ("bfloat16", 256, None, "EPBuffer of deep_ep_fake 2.5"),
        ("bfloat16", 256, 1, "not timed: rank 1: AssertionError: NVLink is not there"),
        (
            "bfloat16",
            32,
            None,
            "not timed: ValueError: hidden must be a multiple of 256 for DeepEP's EPBuffer, got 32",
        ),
        ("float32", 256, None, "not timed: it sends rows of bfloat16, and --dtype is float32"),
        ("bfloat16", 256, "absent", "not timed: ValueError: DeepEP must be installed with EPBuffer or"),
        ("bfloat16", 256, "on cpu", "not timed: the ranks are on cpu"),
    ],
)
def test_deep_ep_is_timed_if_it_starts_on_every_rank(
    small: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    hidden: int,
    failing: Any,
    deep_ep: str,
) -> None:
    """Over a double of EPBuffer, whose calls are counted; else isoload's exchange is timed, with the reason."""
    if failing != "absent":
        (tmp_path / "deep_ep_fake").mkdir()
        (tmp_path / "deep_ep_fake" / "__init__.py").write_text(f"FAILING = {failing!r}\n{DOUBLE}")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(packages, "MODULES", ("deep_ep_fake",))
    if failing != "on cpu":
        monkeypatch.setattr(measuring, "DEEP_EP_DEVICES", ("cpu",))

    def body(rank: int) -> tuple[Times, list[int]]:
        calls, dispatch = list[int](), EPBuffer.dispatch

        @functools.wraps(dispatch)
        def counted(self: EPBuffer, x: Tensor, *args: Any, **options: Any) -> Any:
            calls.append(len(x))
            return dispatch(self, x, *args, **options)

        EPBuffer.dispatch = counted
        return measuring.measure(make_machine(Model("tiny", hidden, 16, 8, 2, 2, dtype, 64), GIB)), calls

    for times, calls in ranks_of_tests(body, 2):
        timed = not deep_ep.startswith("not timed")
        assert times.software["deep_ep"].startswith(deep_ep), times.software
        assert times.dispatch.kernel == times.combine.kernel == ("deep_ep" if timed else "isoload")
        assert calls == ([1] + [1] * 10 + [8] * 10 + [32] * 10 if timed else [])
        assert times.to_json()["exchange"]["kernel"] == times.dispatch.kernel


def test_a_rank_that_fails_ends_all(small: None) -> None:
    def body(rank: int, alive: Callable[[], None]) -> str:
        try:
            measuring.measure(make_machine(MODEL, GIB, kernel=half_of_the_ranks_fail, kernel_name="mine"))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run_ranks(body, 2, 100.0)
    assert "rank 1" in first and "no such kernel" in first and second.startswith("RuntimeError")
