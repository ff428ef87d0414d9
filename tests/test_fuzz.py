"""Ten seconds of `make fuzz` with fixed seeds, and that its checks see what they are for."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isoload.policies.plan import Plan
from support import fuzz
from support.fuzz_cases import draw_case
from support.fuzz_ranks import NAMED, draw_loss
from support.sweeps import slow

ROOT = Path(__file__).parents[1]
FIRST = 1000  # never run out before the time does


def test_two_seconds() -> None:
    said: list[str] = []
    assert fuzz.run_seeds(itertools.count(FIRST), 2.0, said.append) == [], "\n".join(said)
    assert "layer ok" in said[-1] and "plan ok" in said[-1]


@pytest.mark.parametrize("how", ["none", "kill", pytest.param("stop", marks=pytest.mark.slow)])
def test_processes(how: str) -> None:
    """The first seed whose victim, if it has one, is lost in the first few exchanges."""
    seed = next(
        s for s in itertools.count() if (d := draw_loss(draw_case(s, 2, 4))).how == how and d.entry < 20
    )
    assert fuzz.run_case(seed, "ranks") == "ok"


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        ("inference", 20),
        ("columns", 40),
        ("failures", 1),
        ("speeds", 8),
        ("orders", 8),
        ("own", 8),
        ("records", 40),
        ("shadow", 100),
    ],
)
def test_what_else_is_drawn(kind: str, cases: int) -> None:
    said: list[str] = []
    assert fuzz.run_seeds(range(FIRST, FIRST + cases), 60.0, said.append, kind) == [], "\n".join(said)
    assert f"{kind} ok" in said[-1]


def test_a_seed_is_a_case() -> None:
    assert str(draw_case(7)) == str(draw_case(7)) != str(draw_case(8))
    for a, b in zip(draw_case(7).ids, draw_case(7).ids, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fault", ["quota", *slow("peak", "bound")])
def test_a_wrong_plan_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Plan.__init__

    def wrong(plan: Plan, *args: object, **fields: object) -> None:
        made(plan, *args, **fields)  # type: ignore[arg-type]
        given = getattr(plan, fault)
        if given is not None:
            object.__setattr__(plan, fault, given + 1)

    monkeypatch.setattr(Plan, "__init__", wrong)
    said: list[str] = []
    failed = fuzz.run_seeds(range(FIRST, FIRST + 40), 60.0, said.append, "plan")
    assert len(failed) > 10
    assert all(
        f"SEED={seed}" in text or f"--seed {seed}" in text for seed, text in zip(failed, said, strict=False)
    )


def test_a_wrong_output_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from isoload.transport.row_dispatcher import RowDispatcher

    combine = RowDispatcher.combine
    monkeypatch.setattr(RowDispatcher, "combine", lambda *args: [y * 1.0001 for y in combine(*args)])
    assert len(fuzz.run_seeds(range(FIRST, FIRST + 10), 60.0, lambda _: None, "layer")) > 3


def test_a_rank_that_names_no_stage_is_seen() -> None:
    assert NAMED.match("RuntimeError: stage combine backward failed on rank 0: Connection closed by peer")
    assert NAMED.match(
        "ValueError: rank 1 failed in stage count, so all ranks stop; see the error of that rank"
    )
    assert not NAMED.match("RuntimeError: Connection closed by peer") and not NAMED.match("None")


@pytest.mark.slow
def test_the_command_prints_its_seed_and_ends_in_time() -> None:
    command = [sys.executable, "tests/fuzz.py", "--first", "0", "--seconds", "1", "--kind", "plan"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("seeds 0, 1, ...\nplan ok: "), (
        done.stdout + done.stderr
    )
