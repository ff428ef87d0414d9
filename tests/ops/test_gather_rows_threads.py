"""gather_rows on threads, a few lanes per rank: no race under ThreadSanitizer, and any part of its order is needed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support import native_build
from support.native_build import CSRC, THREAD

PROGRAM = Path(__file__).parents[1] / "native" / "gathering.cpp"
ALGORITHM, MEMORY = "algorithms/gather_rows.h", "system_memory.h"


def build(source_dir: Path, folder: Path) -> Path:
    native_build.need(THREAD)
    return native_build.build(source_dir, folder / "gathering", THREAD, PROGRAM)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CSRC, tmp_path_factory.mktemp("gathering"))


@pytest.mark.parametrize("numbers", [(3, 2, 1000), (5, 1, 500), (2, 5, 300)])
def test_without_a_race(numbers: tuple[int, int, int], program: Path) -> None:
    """Ranks, lanes, rounds."""
    outcome = native_build.run_arguments(program, numbers, 60)
    assert outcome.code == 0, outcome.text
    assert outcome.counts == {"rounds": numbers[2], "wrong": 0, "late": 0}


# file, what is there, what instead
FAULTS = {
    "number without release": (MEMORY, "value, __ATOMIC_RELEASE", "value, __ATOMIC_RELAXED"),
    "number read without acquire": (MEMORY, "word, __ATOMIC_ACQUIRE", "word, __ATOMIC_RELAXED"),
    "number before the whole row": (ALGORITHM, "team.sync();  // the number", "// the number"),
    "places for one round": (ALGORITHM, "int64_t(round & 1)", "int64_t(0)"),
    "waits for the ranks above": (ALGORITHM, "r != in.rank && load", "r > in.rank && load"),
    "rows read before all have come": (ALGORITHM, "static_cast<int>(team.max(late))", "late"),
    "any number will do": (ALGORITHM, "load_acquire(number) != round", "load_acquire(number) == 0"),
    "the round never advances": (ALGORITHM, "= static_cast<int32_t>(round);", "= static_cast<int32_t>(round) - 1;"),
    "rows at the wrong places": (ALGORITHM, "(boards[r]), round, rank)", "(boards[r]), round, r)"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_noticed(name: str, tmp_path: Path) -> None:
    file, old, new = FAULTS[name]
    source_dir = tmp_path / "csrc"
    shutil.copytree(CSRC, source_dir)
    text = (source_dir / file).read_text()
    assert text.count(old) == 1, f"{file} must hold exactly once: {old}"
    (source_dir / file).write_text(text.replace(old, new))
    outcome = native_build.run_arguments(build(source_dir, tmp_path), (3, 3, 400), 8)
    assert outcome.code != 0, outcome.text  # a race, a wrong row, or ranks that wait for ever
