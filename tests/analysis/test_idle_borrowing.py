"""A policy that borrowed nothing is said to have, with the option that kept it from it and a value that would not."""

from __future__ import annotations

import re

import numpy as np
import pytest

from isoload.analysis.simulate import Replay, ReplaySettings, replay
from isoload.traces import Trace

RANKS, EXPERTS = 4, 8


def replayed(policy: str, hot: int = 300) -> Replay:
    """One expert has `hot` copies more than the others' 100, in two batches and layers; experts are in order."""
    ids = np.concatenate([np.zeros(hot, dtype=int), np.repeat(np.arange(EXPERTS), 100)])
    sizes = np.full(2, len(ids))
    trace = Trace(
        "t", EXPERTS, topk_ids=np.tile(ids, 2)[:, None, None].repeat(2, axis=1), tokens_per_batch=sizes
    )
    settings = ReplaySettings(
        RANKS, slots_per_rank=3, spare_slots=1, placer="trivial", calibrate="all", policies=("none", policy)
    )
    return replay(trace, settings)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("llep", ["min_chunk"]),
        ("llep:min_chunk=1:threshold=3", ["threshold"]),
        ("llep:threshold=3", ["min_chunk", "threshold"]),
        ("llep:measure=expert:threshold=6:min_chunk=9", ["threshold"]),
    ],
)
def test_the_options_and_the_values_at_which_it_borrows_are_named(policy: str, options: list[str]) -> None:
    found = replayed(policy)
    none, row = found.policies
    assert row.imbalance_max == none.imbalance_max  # the rows are equal
    (note,) = found.notes
    assert note.startswith(f"{policy} borrowed no expert in any batch: ")
    values = dict(re.findall(r"at (\w+)=([\d.]+) or less", note))
    assert list(values) == options
    changed = ":".join(part for part in policy.split(":") if part.partition("=")[0] not in values)
    at = ":".join([changed, *(f"{name}={value}" for name, value in values.items())])
    assert replayed(at).notes == () and replayed(at).policies[1].imbalance_max < none.imbalance_max
    for name, value in values.items():
        more = values | {name: str(int(value) + 1) if name == "min_chunk" else f"{float(value) + 0.01:.2f}"}
        above = ":".join([changed, *(f"{option}={of}" for option, of in more.items())])
        assert len(replayed(above).notes) == 1


@pytest.mark.parametrize("policy", ["llep:min_chunk=1", "llep_published", "hedge", "exact"])
def test_a_policy_that_borrows_or_never_would_has_no_note(policy: str) -> None:
    assert replayed(policy).notes == ()


def test_even_ranks_need_no_note() -> None:
    assert replayed("llep", hot=0).notes == ()
