"""Ranks that differ in what was not agreed at construction: every rank raises, naming the fact, before rows travel."""

from __future__ import annotations

import re

import pytest
import torch

import isoload
from isoload.experts.weights import ClampedGLU
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport
from support.processes import rank_outcomes
from support.small_layer import make_setup

RANKS = 2


def run(rank: int, what: str, capacity: int | None) -> None:
    setup = make_setup(RANKS, slots=8)
    transport = CollectiveTransport(setup.topology, max_tokens_per_rank=capacity)
    odd = rank == 1

    def layer(**how: object) -> MoE:
        return MoE(setup.gate, setup.dense, transport, setup.placement, **how)

    if what == "activation":
        layer(activation=ClampedGLU() if odd else None)
    first, second = layer(), layer()
    rows = setup.rows[rank]
    first(rows)
    if what == "order":
        second(rows) if odd else first(rows)
    elif what == "policy":
        first.policy = isoload.POLICIES["even" if odd else "exact"]()
        first(rows)
    elif what == "placement":
        counts = torch.arange(11).roll(3).expand(1, -1) + 1
        if odd:  # as if only this rank had loaded it: load_placement itself is collective
            first.balancer.settle(isoload.place(counts, setup.topology, slots_per_rank=8))
        first(rows)
    elif what == "dtype":
        first(rows.bfloat16() if odd else rows)
    elif what == "dtype under autocast":
        with torch.autocast("cpu", torch.bfloat16):
            first(rows.bfloat16() if odd else rows)
    elif what == "dimensions":
        first(rows[None] if odd else rows)


@pytest.mark.parametrize("capacity", [None, 32])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("activation", r"activation must be the same on all ranks, got SwiGLU\(\) on rank 0 and ClampedGLU"),
        ("order", "batch number must be the same on all ranks, got 2 on rank 0 and 1 on rank 1"),
        ("policy", "checksum of policy must be the same on all ranks"),
        ("placement", "checksum of placement must be the same on all ranks"),
    ],
)
def test_all_ranks_name_the_fact(what: str, message: str, capacity: int | None) -> None:
    outcomes = rank_outcomes(run, RANKS, what, capacity, group_timeout=10.0)
    for outcome in outcomes:
        assert outcome.error is not None
        last = outcome.error.strip().splitlines()[-1]
        assert last.startswith("ValueError: "), outcome.error
        assert re.search(message, last), last


FITS = "x must be [T, 8] torch.float64 as the experts, whose weights autocast leaves alone, got [0, 8] torch.bfloat16"


@pytest.mark.parametrize("capacity", [None, 32])
@pytest.mark.parametrize(
    ("what", "message"),
    [("dimensions", "x must be [T, H]"), ("dtype", FITS), ("dtype under autocast", FITS)],
)
def test_rows_that_do_not_fit_stop_all_ranks(what: str, message: str, capacity: int | None) -> None:
    outcomes = rank_outcomes(run, RANKS, what, capacity, group_timeout=10.0)
    assert message in str(outcomes[1].error)
    assert "rank 1 failed in stage count" in str(outcomes[0].error)
