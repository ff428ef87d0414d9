"""What a page draws of a replay and of a placement is what their figures sum up."""

from __future__ import annotations

import numpy as np
import pytest

import isoload
from isoload.analysis.inspection import inspect_trace, ranks_in_order
from isoload.analysis.judge import even_imbalance, even_loads
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.topology import over_mean
from isoload.traces import Trace

COUNTS = np.random.default_rng(3).integers(1, 400, (4, 2, 16))


def test_tallies_hold_the_loads_and_rows_behind_the_figures() -> None:
    trace = Trace("made", 16, 2, COUNTS)
    found = replay(trace, ReplaySettings(num_ranks=4, ranks_per_node=2, policies=("none", "exact")))
    for row, tally in zip(found.policies, found.tallies, strict=True):
        assert tally.policy == row.policy and len(tally.loads) == found.batches
        assert over_mean(np.stack(tally.loads)).max(-1).mean() == pytest.approx(row.imbalance_mean)
        sent = np.sum(tally.rank_rows, 0)
        away = np.arange(4)[:, None] != np.arange(4)
        other = np.arange(4)[:, None] // 2 != np.arange(4) // 2
        assert (sent[away].sum(), sent[other].sum()) == (row.remote_rank_rows, row.remote_node_rows)
    assert "Tally" not in repr(found)


def test_loads_are_those_of_the_imbalance() -> None:
    placement = isoload.place(COUNTS, isoload.Topology(4), 5, "eplb")
    loads = even_loads(placement, COUNTS)
    assert loads.sum(-1) == pytest.approx(COUNTS.sum(-1))
    assert over_mean(loads).max(-1) == pytest.approx(even_imbalance(placement, COUNTS))
    in_order = ranks_in_order(COUNTS.sum(0), 4)
    rows = inspect_trace(Trace("made", 16, 2, COUNTS), 4)
    assert over_mean(in_order).max(-1) == pytest.approx([row["imbalance"] for row in rows])
    assert (over_mean(np.zeros((2, 4))) == 1).all()
