"""Ranks that differ in what was not agreed at construction: every rank raises, naming the fact, before rows travel."""

from __future__ import annotations

import re

import pytest
import torch

import isoload
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport
from isoload.weights.experts import ClampedGLU
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
            first.balancer.prepare_load(isoload.place(counts, setup.topology, slots_per_rank=8))()
        first(rows)
    elif what == "dtype":
        first(rows.bfloat16() if odd else rows)
    elif what == "dtype under autocast":
        with torch.autocast("cpu", torch.bfloat16):
            first(rows.bfloat16() if odd else rows)
    elif what == "dimensions":
        first(rows[None] if odd else rows)
    elif what == "nothing":
        first(None if odd else rows)  # type: ignore[arg-type]
    elif what == "two":
        first([rows, rows] if odd else rows)


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


@pytest.mark.parametrize("what", ["dtype", "layer"])
def test_nothing_gathered_and_nothing_read_still_names_rank_and_stage(what: str) -> None:
    """Regression: with max_tokens_per_rank and nothing gathered, all that ended it was the group's timeout."""
    outcomes = rank_outcomes(run_alone, RANKS, what, group_timeout=10.0)
    if what == "dtype":
        assert FITS in str(outcomes[1].error)
        assert "ValueError: rank 1 failed in stage count" in str(outcomes[0].error)
        return
    for outcome in outcomes:
        assert "ValueError: layer must be the same on all ranks, got 0 on rank 0 and 1 on rank 1" in str(
            outcome.error
        )


def run_alone(rank: int, what: str) -> None:
    """Layers below min_tokens in tier (c)."""
    setup = make_setup(RANKS, slots=8)
    transport = CollectiveTransport(setup.topology, max_tokens_per_rank=32)
    layers = [MoE(setup.gate, setup.dense, transport, setup.placement, n, min_tokens=99) for n in (0, 1)]
    for layer in layers:
        layer(setup.rows[rank])
        assert layer.last_plan is None
    if what == "dtype":
        layers[0](setup.rows[rank].bfloat16() if rank else setup.rows[rank])
    else:
        layers[rank](setup.rows[rank])


def dispatch_alone(rank: int) -> None:
    transport = CollectiveTransport(isoload.Topology(RANKS), max_tokens_per_rank=4)
    slots, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.bfloat16 if rank else torch.float32):
        transport.dispatcher.dispatch([torch.ones(1, 8, dtype=dtype)], [slots], [weights], 1)


def test_a_dtype_that_changes_on_one_rank_is_named_without_a_layer() -> None:
    """Regression: both dtypes had been agreed on before, so nothing was compared."""
    for outcome in rank_outcomes(dispatch_alone, RANKS, group_timeout=10.0):
        assert "dtype of x must be the same on all ranks, got torch.float32 on rank 0" in str(outcome.error)


def other_call(rank: int, what: str) -> None:
    setup = make_setup(RANKS, slots=8)
    layer = MoE(setup.gate, setup.dense, CollectiveTransport(setup.topology), setup.placement)
    y = layer(setup.rows[rank])
    if rank == 0:
        layer(setup.rows[rank])
    elif what == "load_placement":
        layer.load_placement(isoload.place(torch.ones(2, 11), setup.topology, slots_per_rank=8))
    elif what == "refresh_replicas":
        layer.refresh_replicas()
    elif what == "backward":
        y.sum().backward()
    else:
        MoE(setup.gate, setup.dense, layer.transport, setup.placement)


@pytest.mark.parametrize(
    ("what", "stage"),
    [
        ("load_placement", "placement agreement"),
        ("refresh_replicas", "refresh"),
        ("backward", "combine backward"),
        ("construction", "construction"),
    ],
)
def test_a_rank_that_makes_another_call_is_named(what: str, stage: str) -> None:
    """Regression: exchanges of other sizes met, which gloo ends by SIGABRT, an error without a stage, or never."""
    for outcome in rank_outcomes(other_call, RANKS, what, group_timeout=10.0):
        message = f"stage must be the same on all ranks, got gather on rank 0 and {stage} on rank 1: all"
        assert message in str(outcome.error), outcome


FITS = "x must be [T, 8] torch.float64 as the experts, got [0, 8] torch.bfloat16: pass compute_dtype=torch.bfloat16"


@pytest.mark.parametrize("capacity", [None, 32])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("dimensions", "x must be [T, H]"),
        ("dtype", FITS),
        ("dtype under autocast", FITS),
        ("nothing", "'NoneType' object has no attribute 'dim'"),
        ("two", "topk_ids must have one tensor per owned rank (1), got 2"),
    ],
)
def test_rows_that_do_not_fit_stop_all_ranks(what: str, message: str, capacity: int | None) -> None:
    outcomes = rank_outcomes(run, RANKS, what, capacity, group_timeout=10.0)
    assert message in str(outcomes[1].error)
    assert "rank 1 failed in stage count" in str(outcomes[0].error)
