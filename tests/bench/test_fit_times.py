"""bench/fit_times.py on made-up tables: the loads it makes again, what it leaves out, and the constants it finds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from isoload.times.experts import kernel_us

pytest.importorskip("scipy")

MADE = (30.0, 8.0, 0.05, 0.004, 2.5)  # a, b, c, rho, p
SHAPE = {"hidden_size": 4096, "inter_size": 1536, "num_experts": 128, "topk": 8}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import fit_times
    from lib import times_kernels, times_loads, times_tables

    return SimpleNamespace(main=fit_times, kernels=times_kernels, loads=times_loads, tables=times_tables)


def timed(loads: np.ndarray[Any, Any], tokens: int) -> float:
    """Milliseconds of the made-up kernel, whose tile is 64."""
    padded = (-(-loads // 64) * 64).sum(-1)
    return float(kernel_us(*MADE, (loads > 0).sum(-1), padded, tokens).mean()) / 1e3


def made_group(bench: SimpleNamespace, slower: float = 1.0) -> Any:
    """Even and skewed rows of 2 to 32 ranks; even ones `slower` times as slow as they should be."""
    rows = []
    for ranks in (2, 4, 8, 16, 32):
        for tokens in (16, 64, 256, 1024, 4096, 16384):
            of = SHAPE | {"num_tokens": tokens, "moe_ep_size": ranks, "moe_tp_size": 1, "moe_dtype": "fp8"}
            of |= {"framework": "SGLang", "kernel_source": "made"}
            even = bench.loads.even_loads(tokens, 128, 8)[: 128 // ranks]
            rows.append(of | {"distribution": "balanced", "latency": slower * timed(even, tokens)})
            skewed = bench.loads.busiest(tokens, 128, 8, ranks, 1.2)
            rows.append(of | {"distribution": "power_law_1.2", "latency": timed(skewed, tokens)})
    (group,) = bench.tables.grouped("h200_sxm", rows, "sglang 1.0")
    return group


def test_even_loads_are_even_and_keep_every_copy(bench: SimpleNamespace) -> None:
    assert (bench.loads.even_loads(4096, 256, 8) == 128).all()
    for tokens, experts, top_k in ((1, 256, 8), (5, 128, 4), (33, 384, 8), (1000, 160, 8)):
        loads = bench.loads.even_loads(tokens, experts, top_k)
        assert loads.sum() == tokens * top_k and loads.max() - loads.min() <= 1
    assert (
        bench.loads.even_rows(128, 128, 8, 8) == 128
    )  # 16 experts a rank are every 16th: every token has one
    assert bench.loads.even_rows(128, 128, 8, 16) == 64
    assert bench.loads.even_rows(128, 128, 8, 2) == 128


def test_drawn_loads_keep_every_copy_and_the_busiest_rank_is_taken(bench: SimpleNamespace) -> None:
    uniform = np.random.default_rng(0).random((6, 256))
    for tokens in (4, 64, 4096):
        loads = bench.loads.power_law(tokens, 8, 1.2, uniform)
        assert (loads.sum(-1) == tokens * 8).all() and loads.min() >= 0
    busy = bench.loads.busiest(4096, 256, 8, 16, 1.2)
    assert busy.shape == (bench.loads.DRAWS, 16) and (busy.sum(-1) > 4096 * 8 / 16).all()
    assert bench.loads.busiest(4096, 256, 8, 16, 0.6).sum() < busy.sum()
    assert bench.loads.seeded(4096, 384, 6, 1.01).sum() == 4096 * 6


def test_rows_of_ranks_are_those_of_the_assignment_token_by_token(bench: SimpleNamespace) -> None:
    rng = np.random.default_rng(1)
    for _ in range(20):
        tokens, ranks = int(rng.integers(3, 40)), 4
        loads = rng.multinomial(tokens * 3, rng.dirichlet(np.ones(8))).clip(max=tokens)
        order = np.argsort(-loads, kind="stable")
        dealt = np.repeat(order, loads[order])
        owners = [set(dealt[t::tokens] // 2) for t in range(tokens)]
        expected = [sum(rank in owner for owner in owners) for rank in range(ranks)]
        assert bench.loads.rank_rows(loads, tokens, ranks).tolist() == expected


def test_constants_of_a_made_kernel_are_found_from_its_even_rows(bench: SimpleNamespace) -> None:
    group = made_group(bench)
    kernel = bench.kernels.Kernel(bench.kernels.fitted(group, "moe_perf"))
    assert "left_out" not in kernel.is_ and kernel.is_["tile"] == 64 and kernel.is_["fit_error"] < 0.01
    assert [kernel.is_[name] for name in bench.kernels.CONSTANTS] == pytest.approx(MADE, rel=0.15)
    bench.kernels.judge(kernel, group)
    errors = np.abs(kernel.held_out)
    assert len(errors) == 5 * 3 and errors[:, 0].max() < 0.02  # from 1024 tokens on
    assert np.median(errors[:, 1]) > 0.2 and np.median(errors[:, 2]) > 0.05  # the rules of thumb are worse
    row = bench.main.held_out("moe_perf", [kernel.close()])
    assert row["met"] and row["rows"] == 15 and "left_out" not in kernel.is_


def test_a_kernel_whose_even_rows_are_slower_is_left_out(bench: SimpleNamespace) -> None:
    found = bench.kernels.fitted(made_group(bench, slower=4.0), "moe_perf")
    assert found["left_out"].startswith("even rows take longer than skewed ones: 0.")


def test_too_few_rows_and_bad_fits_are_left_out(bench: SimpleNamespace) -> None:
    group = made_group(bench)
    few = bench.tables.Group(group.is_, group.rows[:20])
    assert bench.kernels.fitted(few, "moe_perf")["left_out"] == "10 even rows over several ranks"
    rng = np.random.default_rng(0)
    for row in group.rows:
        row["latency"] *= np.exp(rng.normal(0, 0.6 if row["distribution"] == "balanced" else 0))
    assert "mean error of the fit" in bench.kernels.fitted(group, "moe_perf")["left_out"]


def test_a_bad_prediction_is_counted_and_not_shipped(bench: SimpleNamespace) -> None:
    kernel = bench.kernels.Kernel({"kind": "moe_perf"}, [(0.3, 0.1, 0.1)] * 4).close()
    assert kernel.is_["left_out"] == "held-out median: 0.30"
    assert not bench.main.held_out("moe_perf", [kernel])["met"]


def test_the_sign_of_two_distributions_is_judged_where_they_differ(bench: SimpleNamespace) -> None:
    good = bench.kernels.Kernel({}, ratios=[(1.1, 1.1), (0.99, 1.01), (1.3, 1.29)])
    wrong = bench.kernels.Kernel({}, ratios=[(1.1, 1.1), (0.999, 1.05), (1.3, 1.3)])
    assert bench.main.ratios([good])["met"] and bench.main.ratios([good])["wrong_signs"] == 0
    assert not bench.main.ratios([wrong])["met"] and bench.main.ratios([wrong])["wrong_signs"] == 1


def test_the_first_of_several_versions_is_shipped(bench: SimpleNamespace) -> None:
    rows = [
        {"gpu": "a", "v": 1, "left_out": "x"},
        {"gpu": "a", "v": 2},
        {"gpu": "a", "v": 3},
        {"gpu": "b", "v": 4},
    ]
    assert [row["v"] for row in bench.main.newest(rows, ("gpu",))] == [2, 4]


def test_what_is_shipped_otherwise_is_named(bench: SimpleNamespace) -> None:
    from isoload.times import available

    experts = [row for row in available() if row["table"] == "experts"]
    joined = [row for row in available() if row["table"] == "exchanges"]
    assert bench.main.stale(experts, joined) == []
    changed = experts[0] | {"c_us": 2 * experts[0]["c_us"]}
    assert bench.main.stale([changed, *experts[1:]], joined) == [
        " ".join(str(changed[name]) for name in bench.main.WHAT)
    ]
    assert bench.main.stale(experts[1:], joined) == [f"{len(experts) + len(joined)} are shipped"]
    unknown = bench.main.stale([experts[0] | {"gpu": "tpu"}, *experts[1:]], joined)
    assert len(unknown) == 1 and "gpu must be one of" in unknown[0]


def test_without_the_wheel_it_says_what_to_install(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"pip install 'isoload\[times\]'"):
        bench.tables.folder()
