"""The planners give one lane and many lanes the same bits, without a race or undefined behaviour."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import native_build
from support.native_build import ADDRESS, CSRC, PLAIN, THREAD, Outcome
from support.sweeps import slow

pytestmark = pytest.mark.slow  # three builds of all planners

# Every part of the solver must have had work, or the runs prove nothing about it.
WORK = (
    "refused",
    "augmented",
    "raised",
    "cut",
    "converged",
    "poured",
    "moved",
    "rerouted",
    "lent",
    "sought",
    "full",
    "topped",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teams")


@pytest.fixture(scope="module")
def thread_program(folder: Path) -> Path:
    native_build.need(THREAD)
    return native_build.build(CSRC, folder / "thread", THREAD)


def assert_agree(outcome: Outcome, instances: int) -> None:
    assert outcome.code == 0, outcome.text
    assert outcome.counts["instances"] == instances
    assert all(outcome.counts[word] > 0 for word in WORK), outcome.text


@pytest.mark.parametrize("instances", [60, *slow(200)])
def test_eight_lanes_without_a_race(instances: int, thread_program: Path) -> None:
    """As the mutants of test_mutants.py run it."""
    assert_agree(native_build.run(thread_program, threads=8, instances=instances, seed=1, room=64), instances)


def test_more_lanes_than_ranks_without_a_race(thread_program: Path) -> None:
    assert_agree(native_build.run(thread_program, threads=32, instances=60, seed=2, room=32), 60)


@pytest.mark.parametrize("instances", [150, *slow(2000)])
def test_eight_lanes_give_the_same_bits(instances: int, folder: Path) -> None:
    native_build.need(PLAIN)
    program = native_build.build(CSRC, folder / "plain", PLAIN)
    for threads, seed, room in ((8, 3, 32), (1, 4, 300)):
        assert_agree(native_build.run(program, threads, instances, seed, room), instances)


@pytest.mark.parametrize("instances", [40, *slow(300)])
def test_memory_and_arithmetic_are_sound(instances: int, folder: Path) -> None:
    native_build.need(ADDRESS)
    program = native_build.build(CSRC, folder / "address", ADDRESS)
    assert_agree(native_build.run(program, threads=4, instances=instances, seed=5, room=64), instances)
