"""Seconds of dispatch and combine: the range between even routing and all ranks as busy as the busiest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from isoload.times import AllToAllTime, available, exchanges
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
        ({"nodes": 3}, "nodes must be in 1..128 and divide ranks 8, got 3"),
        ({"nodes": 0}, "nodes must be in 1..128 and divide ranks 8, got 0"),
        ({"ranks": 129, "nodes": 129}, "nodes must be in 1..128 and divide ranks 129, got 129"),
        (
            {"ranks": 320},
            "ranks_per_node must be at most 72, the largest NVLink domain, got 320: pass the number of GPUs that share "
            "NVLink, such as 8",
        ),
        (
            {"gpu": "h200", "kernel": "trtllm_deepep_ht_bfloat16", "ranks": 16, "nodes": 2},
            "nodes must be 1 for kernel trtllm_deepep_ht_bfloat16, which was not measured between nodes, got 2",
        ),
    ],
)
def test_unknown_ones_are_refused_with_the_choices(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        AllToAllTime.load(**ASKED | wrong)


@pytest.mark.parametrize("kernel", ["sglang_deepep_normal", "sglang_deepep_low_latency", "vllm_deepep_ht"])
@pytest.mark.parametrize(
    ("ranks", "nodes"),
    [
        (1, 1),
        (2, 1),
        (3, 1),
        (5, 1),
        (6, 1),
        (12, 2),
        (72, 1),
        (72, 9),
        (144, 2),
        (320, 40),
        (1024, 128),
        (4, 4),
    ],
)
def test_any_size_has_times_and_names_what_was_measured(kernel: str, ranks: int, nodes: int) -> None:
    for gpu in ("h100", "h200", "b200"):
        for step in ("dispatch", "combine"):
            asked = ASKED | {"gpu": gpu, "kernel": kernel, "step": step}
            time, inside = (
                AllToAllTime.load(**asked | {"ranks": ranks, "nodes": nodes}),
                AllToAllTime.load(**asked),
            )
            assert not time.measured and time.extrapolated_from
            seconds = time.seconds([1, 64, 1024], 1.1)
            assert (seconds[:, 0] <= seconds[:, 1]).all() and (np.diff(seconds, axis=0) >= 0).all()
            # No faster than inside of one node. A B200's high end over nodes was measured on H100s, which need 4 % less
            # for one token than B200s inside of a node.
            if nodes > 1 and ranks // nodes >= 8:
                assert (seconds[:, 1] >= 0.95 * inside.seconds([1, 64, 1024], 1.1)[:, 1]).all()


@pytest.mark.parametrize("kernel", ["trtllm_NVLinkTwoSided_bfloat16", "trtllm_NVLinkOneSided_nvfp4"])
@pytest.mark.parametrize("step", ["dispatch", "combine"])
def test_more_ranks_of_one_domain_are_within_the_range_that_fewer_give(kernel: str, step: str) -> None:
    """The tables have 16, 32 and 64 ranks of GB200: predicted from the rows of 8, or from those of 16 and 32."""
    rows = {row["ranks"]: row for row in SHIPPED if row["kernel"] == kernel}
    tokens = np.array([64.0, 1024, 8192])
    for fewer, more in ((8, 16), (8, 32), (8, 64), (16, 32), (16, 64)):
        if more in rows:
            _, (low, high) = exchanges._inside((rows[fewer],), step, more)
            measured = Curve(*rows[more][step])(tokens)
            assert (low(tokens) <= 1.01 * measured).all() and (measured <= 1.01 * high(tokens)).all()


def test_beyond_the_measured_nodes_a_range_starts_at_the_last_and_grows() -> None:
    h100 = ASKED | {"gpu": "h100"}
    last = AllToAllTime.load(**h100 | {"ranks": 64, "nodes": 8})
    before = last
    for nodes in (9, 16, 40, 128):
        time = AllToAllTime.load(**h100 | {"ranks": 8 * nodes, "nodes": nodes})
        assert time.extrapolated_from == "8 to 64 ranks on 1 to 8 nodes" and time.low == last.low
        assert time.seconds(512)[1] > before.seconds(512)[1]
        before = time
    # A token has eight rows at most, however many nodes there are.
    assert before.high.s_us <= last.high.s_us * 8 / exchanges.rows_leaving("deepep", 8, 8)


def test_vllm_over_nodes_is_its_own_time_and_what_nodes_add_to_sglang() -> None:
    vllm, sglang = (
        ASKED | {"gpu": "h100", "kernel": name} for name in ("vllm_deepep_ht", "sglang_deepep_normal")
    )
    wide = {"ranks": 16, "nodes": 2}
    more = AllToAllTime.load(**sglang | wide).high.a_us - AllToAllTime.load(**sglang).high.a_us
    time = AllToAllTime.load(**vllm | wide)
    assert time.high.a_us == pytest.approx(AllToAllTime.load(**vllm).high.a_us + more)
    assert time.note == "h100, 16 ranks on 2 nodes, rows of 7168, top-8, under sglang_deepep_normal"


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


def test_tokens_follow_the_rows_between_nodes_on_several_nodes_alone() -> None:
    low, high = Curve(10.0, 1.0, 2.0), Curve(20.0, 3.0, 2.0)
    across = AllToAllTime("gpu", "k", "dispatch", 16, 2, low, high)
    found = across.seconds(100, 1.5, 0.8)
    assert found == pytest.approx([1e-6 * float(low(np.float64(80))), 1e-6 * float(high(np.float64(120)))])
    guessed = replace(across, measured=False).seconds(100, 1.5, 0.8)  # its low end is inside of a node
    assert guessed == pytest.approx([1e-6 * float(low(np.float64(100))), found[1]])
    inside = replace(across, nodes=1)
    assert (inside.seconds(100, 1.5, 0.8) == inside.seconds(100, 1.5)).all()
    with pytest.raises(ValueError, match="crossing must be finite numbers from 0 on, got -1"):
        across.seconds(100, 1.5, -1.0)
