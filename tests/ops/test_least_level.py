"""Costs of ranks with unequal speeds: exact quotients without a division of integers, and the least level at which
there is room, against plain halving. Through plan_exact and plan_waterfill, whose bounds they are."""

from __future__ import annotations

import subprocess
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from isoload import ops
from support import native_build
from support.sweeps import slow

MAX_COPIES = 2**31 - 1
MAX_TICKS = 2**20

copies = st.integers(0, MAX_COPIES) | st.integers(0, 100) | st.integers(MAX_COPIES - 100, MAX_COPIES)
tick = (
    st.integers(1, MAX_TICKS)
    | st.integers(900, 1300)
    | st.sampled_from([1, 2, 3, 1024, MAX_TICKS - 1, MAX_TICKS])
)
speeds = st.lists(tick, min_size=1, max_size=24) | st.lists(st.integers(900, 1300), min_size=60, max_size=70)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [("-O2",), *slow((("-O3", "-march=native", "-ffp-contract=fast"),))], ids=" ".join
)
def test_quotients_are_those_of_integers(tmp_path: Path, flags: Sequence[str]) -> None:
    native_build.need(flags)
    source = native_build.TESTS / "native" / "quotients.cpp"
    program = native_build.build(native_build.CSRC, tmp_path / "quotients", flags, source)
    done = subprocess.run([program, "60000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) > 200_000


def halved(ticks: Sequence[int], wanted: int, base: Sequence[int] = (), limits: Sequence[int] = ()) -> int:
    """The least level, not below what the ranks carry, that has room for ``wanted`` copies more."""
    base, limits = base or [0] * len(ticks), limits or [MAX_COPIES] * len(ticks)
    low = max(t * b for t, b in zip(ticks, base, strict=True))

    def room(level: int) -> int:
        return sum(min(level // t - b, most) for t, b, most in zip(ticks, base, limits, strict=True))

    return low + bisect_left(range(2**53), wanted, key=lambda more: room(low + more))


@settings(max_examples=50, deadline=None)
@given(speeds, st.integers(0, 3), copies)
@example([1] + [MAX_TICKS] * 20, 0, MAX_COPIES)
@example([MAX_TICKS] * 3, 2, MAX_COPIES)
@example([1024] * 16, 0, 4096 * 8 * 16)
def test_smallest_peak_is_what_halving_finds(ticks: list[int], idle: int, load: int) -> None:
    """One expert everywhere but on idle ranks: what they leave the others is certified as a bound of its own."""
    ranks = len(ticks)
    slots = torch.tensor([0] * ranks + [1] * idle, dtype=torch.int32)
    loads = torch.tensor([load, 0], dtype=torch.int32)
    of_all = torch.tensor(ticks + [7] * idle, dtype=torch.int32)
    split = ops.plan_exact(loads, ops.replica_tables(slots, ranks + idle, 2), ticks=of_all)
    assert split.bound.item() == split.peak.item() == halved(ticks, load)


@st.composite
def pourings(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Ticks, routed copies, tokens and limits (or none), of the same ranks."""
    ticks = draw(speeds)
    n, most = len(ticks), MAX_COPIES // (2 * len(ticks))
    some = st.integers(0, most) | st.integers(0, 1000)
    base, tokens, spare = (draw(st.lists(some, min_size=n, max_size=n)) for _ in range(3))
    limits = [min(t + s, MAX_COPIES) for t, s in zip(tokens, spare, strict=True)]
    order = draw(st.permutations(limits))
    return ticks, base, tokens, draw(st.sampled_from([[], list(order)]))


@settings(max_examples=40, deadline=None)
@given(pourings(), st.booleans())
def test_level_of_a_pouring_is_what_halving_finds(
    drawn: tuple[list[int], list[int], list[int], list[int]], equal: bool
) -> None:
    ticks, base, tokens, limits = drawn
    found = ops.plan_waterfill(
        torch.diag(torch.tensor(base, dtype=torch.int32)),
        torch.tensor(tokens, dtype=torch.int32),
        ticks=None if equal else torch.tensor(ticks, dtype=torch.int32),
        limits=torch.tensor(limits, dtype=torch.int32) if limits else None,
    )
    assert found.bound.item() == halved([1] * len(ticks) if equal else ticks, sum(tokens), base, limits)
