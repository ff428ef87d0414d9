"""Seconds of dispatch and combine: the range between even routing and all ranks as busy as the busiest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from isoload.times import AllToAllTime, available
from isoload.times.exchanges import Curve

SHIPPED = [row for row in available() if row["table"] == "exchanges"]
ASKED: dict[str, Any] = {"gpu": "h200", "kernel": "sglang_deepep_normal", "step": "dispatch"}
ASKED |= {"hidden": 7168, "top_k": 8, "ranks": 8}


def test_a_curve_starts_at_a_call_and_ends_at_its_slope() -> None:
    curve = Curve(30.0, 0.1, 2.0)
    assert curve(np.array([0.0, 300.0, 1e9])) == pytest.approx([30, 30 * 2**0.5, 1e8])
    assert (np.diff(curve(np.geomspace(1, 1e7, 200))) >= 0).all()


def test_even_routing_has_one_answer_and_a_busy_rank_a_range() -> None:
    time = AllToAllTime.load(**ASKED)
    assert time.measured and time.note == "" and time.low == time.high
    even = time.seconds(4096)
    assert even.shape == (2,) and even[0] == even[1]
    low, high = time.seconds(4096, 1.5)
    assert (low, high) == (even[0], time.seconds(4096 * 1.5)[0])


def test_batches_lead_and_tensors_are_taken() -> None:
    time, tokens = AllToAllTime.load(**ASKED), np.array([[1, 128, 4096]] * 2)
    found = time.seconds(torch.from_numpy(tokens), np.array([[1.0], [1.3]]))
    assert found.shape == (2, 3, 2) and found.dtype == np.float64
    assert found[1, 2].tolist() == time.seconds(4096, 1.3).tolist()
    assert time.extrapolated([128, 10**6]).tolist() == [False, True]


def test_dispatch_of_h200_as_it_was_measured() -> None:
    """Rows of SGLang 0.5.12, 7168 wide, top-8, 20 SMs: tokens of a rank, microseconds."""
    for tokens, us in ((64, 39), (512, 100), (4096, 494), (32768, 3887)):
        assert 1e6 * AllToAllTime.load(**ASKED).seconds(tokens)[0] == pytest.approx(us, rel=0.1)


def test_over_nodes_without_rows_it_is_a_range_only() -> None:
    """H200's own rows over nodes were copies of H100's: from within a node to what H100 takes."""
    time, inside = AllToAllTime.load(**ASKED | {"ranks": 16, "nodes": 2}), AllToAllTime.load(**ASKED)
    h100 = AllToAllTime.load(**ASKED | {"gpu": "h100", "ranks": 16, "nodes": 2})
    assert not time.measured and time.note == "h100, 16 ranks on 2 nodes, rows of 7168, top-8"
    assert h100.measured and h100.nodes == 2
    assert time.seconds(4096).tolist() == [inside.seconds(4096)[0], h100.seconds(4096)[1]]
    narrow = AllToAllTime.load(**ASKED | {"hidden": 4096, "ranks": 24, "nodes": 3})
    assert narrow.note.startswith("h100, 32 ranks on 4 nodes, rows of 7168")
    assert (narrow.seconds([1, 4096], 1.2)[:, 0] < narrow.seconds([1, 4096], 1.2)[:, 1]).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"gpu": "mi300"}, "gpu must be one of b200, b300, gb200, gb300, h100, h200, got 'mi300'"),
        ({"kernel": "nccl"}, "kernel must be one of .*sglang_deepep_normal, .*, got 'nccl'"),
        ({"step": "both"}, "step must be one of dispatch, combine, got 'both'"),
        ({"hidden": 5120}, "hidden must be one of 2048, 4096, 6144, 7168, got 5120"),
        ({"top_k": 4}, "top_k must be one of 8, got 4"),
        ({"ranks": 4}, "ranks must be one of 8, got 4"),
        ({"ranks": 8, "nodes": 2}, "ranks must be one of 8, got 4"),
        ({"nodes": 3}, "nodes must divide ranks 8, got 3"),
        ({"nodes": 0}, "nodes must divide ranks 8, got 0"),
        ({"ranks": 72, "nodes": 9}, "nodes must be from 1 to 8 for kernel sglang_deepep_normal, got 9"),
    ],
)
def test_unknown_ones_are_refused_with_the_choices(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        AllToAllTime.load(**ASKED | wrong)


def test_tokens_and_the_busiest_are_checked() -> None:
    time = AllToAllTime.load(**ASKED)
    with pytest.raises(ValueError, match="^tokens must be finite numbers from 0 on, got -1$"):
        time.seconds(-1)
    with pytest.raises(ValueError, match=r"^busiest must be finite numbers from 1 on, got 0\.9$"):
        time.seconds(1, 0.9)
    with pytest.raises(ValueError, match="^tokens must be finite"):
        time.extrapolated(float("nan"))


@pytest.mark.parametrize(
    "row", SHIPPED, ids=lambda row: "-".join(str(row[n]) for n in ("gpu", "kernel", "hidden", "ranks"))
)
@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_every_shipped_exchange_loads_and_grows(row: dict[str, Any], step: str) -> None:
    names = ("gpu", "kernel", "hidden", "top_k", "ranks", "nodes")
    time = AllToAllTime.load(step=step, **{name: row[name] for name in names})
    seconds = time.seconds(np.geomspace(1, row["tokens_to"], 50), 1.1)
    assert time.measured and (np.diff(seconds, axis=0) >= 0).all() and 1e-6 < seconds[0, 0] < 1e-3
