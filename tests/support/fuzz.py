"""The driver of the fuzz: what one seed does, and seeds until the time is over."""

from __future__ import annotations

import re
import resource
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable

import torch

from support.fuzz_cases import FuzzCase, draw_case
from support.fuzz_faults import check_columns, check_failures, check_inference
from support.fuzz_lasting import check_checkpoints, check_copies, check_frozen
from support.fuzz_layers import check_layer
from support.fuzz_own import check_own
from support.fuzz_placing import check_orders, check_speeds
from support.fuzz_plans import check_plans
from support.fuzz_ranks import check_ranks
from support.fuzz_records import check_records
from support.fuzz_shadow import check_shadow

KINDS: dict[str, Callable[[FuzzCase], None]] = {
    "plan": check_plans,
    "layer": check_layer,
    "ranks": check_ranks,
    "inference": check_inference,
    "columns": check_columns,
    "failures": check_failures,
    "speeds": check_speeds,
    "orders": check_orders,
    "frozen": check_frozen,
    "checkpoints": check_checkpoints,
    "copies": check_copies,
    "own": check_own,
    "records": check_records,
    "shadow": check_shadow,
}
# The last digits of seeds that run neither a plan nor a layer; processes take seconds.
RARE = {
    **{99: "ranks", 49: "failures"},
    **dict.fromkeys((9, 29, 59, 79), "inference"),
    **dict.fromkeys((19, 39, 69, 89), "columns"),
    **dict.fromkeys((88, 98), "speeds"),
    **dict.fromkeys((87, 97), "orders"),
    **dict.fromkeys((6, 36, 66), "frozen"),
    **dict.fromkeys((16, 46, 76), "checkpoints"),
    **dict.fromkeys((26, 56, 86), "copies"),
    **dict.fromkeys((5, 35, 65), "own"),
    **dict.fromkeys((4, 34, 64), "records"),
    **dict.fromkeys((15, 45, 75), "shadow"),
}
PROCESSES = ("ranks", "failures")
MAX_GROWTH = 2**20  # KiB of memory, over a whole run
# What a policy may say of a placement it is not made for. Everything else that is raised is a finding.
REFUSALS = (
    r"num_shared must be at most \d+ for policy \w+, got \d+",
    r"topology must have all ranks alive for policy waterfill_sampled",
)


def kind_of(seed: int) -> str:
    """Of ten seeds six plan and three run a layer."""
    return RARE.get(seed % 100, "plan" if seed % 10 < 6 else "layer")


def run_case(seed: int, kind: str | None = None) -> str:
    """ "ok" or "refused"; whatever else a case raises comes through."""
    kind = kind or kind_of(seed)
    case = draw_case(seed, *((2, 4) if kind in PROCESSES else (1, 6)))
    try:
        KINDS[kind](case)
    except Exception as error:
        if refused(error):
            return "refused"
        error.add_note(f"seed {seed}, {kind}: {case}")
        raise
    return "ok"


def refused(error: Exception) -> bool:
    """Whether the policy said that it is not for this placement; processes say so on every rank."""
    text = str(error) if isinstance(error, ValueError | AssertionError) else ""
    return any(re.search(rf"(^|ValueError: ){rule}", text) for rule in REFUSALS)


def run_seeds(
    seeds: Iterable[int], seconds: float, say: Callable[[str], None], kind: str | None = None
) -> list[int]:
    """The seeds that failed; stops after so many seconds, between cases."""
    torch.set_num_threads(1)
    end, before = time.monotonic() + seconds, memory()
    done: Counter[str] = Counter()
    failed: list[int] = []
    for seed in seeds:
        if time.monotonic() >= end:
            break
        try:
            result = run_case(seed, kind)
        except Exception:
            result = "FAILED"
            failed.append(seed)
            again = f"python tests/fuzz.py --seed {seed} --kind {kind}" if kind else f"make fuzz SEED={seed}"
            say(f"failed, again by {again}\n{traceback.format_exc()}")
        done[f"{kind or kind_of(seed)} {result}"] += 1
    say(", ".join(f"{name}: {number}" for name, number in sorted(done.items())))
    if (grown := memory() - before) > MAX_GROWTH:
        raise MemoryError(f"memory grew by {grown // 1024} MiB")
    return failed


def memory() -> int:
    """KiB, at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
