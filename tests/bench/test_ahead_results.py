"""docs/results-ahead.md on the results of bench_libra and bench_route: goals that hold, losses that are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = " ".join((ROOT / "docs" / "results-ahead.md").read_text().split())
EIGHT = [("DeepSeek-V2-Lite", 8, "even"), ("gpt-oss-20b", 8, "even"), ("GLM-5.2", 8, "even")]
MORE = [("DeepSeek-V2-Lite", 8, "sequence"), ("gpt-oss-20b", 8, "sequence"), ("GLM-5.2", 32, "even")]
Stream = tuple[str, int, str]


def results(name: str) -> list[dict[str, Any]]:
    lines = (ROOT / "bench" / "results" / f"{name}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


LIBRA, ROUTE = results("bench_libra"), results("bench_route")
CELLS = {
    (r["trace"], r["ranks"], r["deal"], r["policy"], r["spare"], r["predict"]): r
    for r in LIBRA
    if r["table"] == "imbalance"
}


def mean(stream: Stream, policy: str, spare: int, predict: str) -> float:
    found: float = CELLS[(*stream, policy, spare, predict)]["imbalance_mean"]
    return found


@pytest.mark.parametrize("stream", EIGHT)
def test_goals_of_hedge_at_eight_ranks(stream: Stream) -> None:
    for predict in ("perfect", "0.9", "0.8", *(["linear"] if stream[0] != "GLM-5.2" else [])):
        assert mean(stream, "hedge", 2, predict) <= 1.005
    assert mean(stream, "hedge", 2, "0.45") <= 1.02
    for predict in ("perfect", "0.9", "0.8", "0.45"):
        assert mean(stream, "hedge", 4, predict) <= 1.002


@pytest.mark.parametrize("stream", [*EIGHT, *MORE])
def test_two_slots_of_hedge_are_below_eight_of_libra_published(stream: Stream) -> None:
    forecasts = [key[5] for key in CELLS if key[:5] == (*stream, "hedge", 2)]
    assert len(forecasts) >= 11
    for predict in forecasts:
        assert mean(stream, "hedge", 2, predict) < mean(stream, "libra_published", 8, predict)


def test_goals_of_32_ranks_of_linear_and_of_exact_splits() -> None:
    assert mean(("GLM-5.2", 32, "even"), "hedge", 2, "0.45") <= 1.03
    right = [r["accuracy"] for r in LIBRA if r["table"] == "accuracy" and r["predictor"] == "linear"]
    assert len(right) == 2 and min(right) >= 0.65
    for key, row in CELLS.items():
        if key[3] == "hedge":
            assert row["over_bound_max"] == 1


def test_losses_of_fills_are_named() -> None:
    worst = max(mean(stream, "hedge", 2, "0.45 partner") for stream in (*EIGHT, *MORE))
    assert f"two slots at up to {worst:.4f}" in PAGE and worst > 1.02
    for hot in (("W2 hot_rank", 8, "own"), ("W6 rotating_hotspot", 8, "own")):
        ends = [mean(hot, "hedge", 2, "perfect"), mean(hot, "llep", 2, "true loads")]
        assert all(f"end at {x:.3f} where eight of `libra` are level" in PAGE for x in ends)
        assert mean(hot, "libra_published", 8, "perfect") == 1
    for stream in (*EIGHT, *MORE):
        columns = (
            ("eplb static", 8, "calibration"),
            ("eplb static", 2, "calibration"),
            ("none", 8, "true loads"),
        )
        most, some, none = (mean(stream, *column) for column in columns)
        assert most > some > none
    domains = [mean(("GLM-5.2", ranks, "even"), "eplb exact", 2, "calibration") for ranks in (8, 32)]
    assert "they are not: {:.4f} with two slots, {:.4f} on 32 ranks".format(*domains) in PAGE
    ratios = [r["all_gather_mb"] / r["all_to_all_mb"] for r in LIBRA if r["table"] == "traffic"]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} times what an all-to-all" in PAGE
    few, many = (CELLS[(*stream, "hedge", 2, "0.8")]["import_mb"] for stream in (EIGHT[1], MORE[2]))
    assert f"moves {few:.0f} MB to a rank per layer and batch on gpt-oss-20b" in PAGE
    assert f"and {many:.0f} MB on GLM-5.2" in PAGE


def test_figures_without_a_table() -> None:
    right = {(r["trace"], r["fitted"], r["predictor"]): r["accuracy"] for r in LIBRA if "predictor" in r}
    assert f"predicts {right['DeepSeek-V2-Lite', 'all', 'linear']:.3f}" in PAGE
    assert f"token on DeepSeek-V2-Lite and {right['gpt-oss-20b', 'all', 'linear']:.3f} on" in PAGE
    assert f"it is {right['DeepSeek-V2-Lite, law', 'other tasks', 'linear']:.3f}." in PAGE
    for key in CELLS:
        if key[3] == "lina" and key[2] in ("even", "sequence"):
            assert mean(key[:3], "hedge", 2, key[5]) < mean(key[:3], "lina", key[4], key[5]), key


FIRST = {(r["trace"], r["deal"], r["placer"]): r for r in ROUTE if r["policy"] == "grace_sampled"}


def local(part: str, placer: str) -> tuple[float, float, list[float]]:
    """Least and most saved, in per cent, and the imbalances over those of locality first."""
    policy = f"exact:objective=local:tolerance={part}"
    found = [r for r in ROUTE if (r["policy"], r["placer"]) == (policy, placer)]
    saved = [100 * r["saved"] for r in found]
    over = [r["imbalance"] - FIRST[r["trace"], r["deal"], placer]["imbalance"] for r in found]
    return min(saved), max(saved), over


def test_what_local_replicas_save() -> None:
    (least, most, over), (some, _, loose) = local("0.0", "eplb"), local("0.1", "eplb")
    assert f"saves {least:.0f} to {most:.0f} % of those rows at the least peak" in PAGE
    assert f"at least {some:.0f} % at a tolerance of 10 %" in PAGE and max(over + loose) <= 0
    least, most, over = local("0.0", "grace")
    assert f"it saves {least:.0f} to {most:.0f} % at the least peak" in PAGE and max(over) <= 0
    worst = max(x for part in ("0.05", "0.1", "0.2") for x in local(part, "grace")[2])
    assert f"ends {worst:.3f} above locality first on gpt-oss-20b" in PAGE
    grouped = [key for key in FIRST if key[2] == "grace"]
    fewer = [1 - FIRST[key]["rank_rows"] / FIRST[(*key[:2], "eplb")]["rank_rows"] for key in grouped]
    assert f"{100 * min(fewer):.0f} to {100 * max(fewer):.0f} % of the rows that leave a rank" in PAGE


def loads_settings(busy: str = "all") -> dict[tuple[str, str, int, int], dict[str, float]]:
    settings: dict[tuple[str, str, int, int], dict[str, float]] = {}
    for r in results("bench_loads"):
        if r["busy"] != busy:
            continue
        at = (r["trace"], r["dealing"], r["ranks"], r["tokens"])
        settings.setdefault(at, {})[r["protocol"]] = r["mean"]
    return settings


def test_where_own_counts_lose() -> None:
    """docs/own-counts.md names each such setting of bench_loads, with both figures; turned domains are apart."""
    settings = {at: of for at, of in loads_settings().items() if at[1] != "turned"}
    lost = []
    for (trace, dealing, ranks, tokens), of in settings.items():
        least = min(of[name] for name in ("hash", "static", "last step, sampled"))
        if of["own + targets"] > least + 0.0005:
            figures = f"{of['own + targets']:.3f} for {least:.3f}"
            lost.append(f"{trace} {dealing}, {ranks} ranks, {tokens:,} tokens: {figures}")
    page = " ".join((ROOT / "docs" / "own-counts.md").read_text().split())
    assert f"in {len(lost)} of {len(settings)} settings ({'; '.join(lost)})" in page


def test_stale_targets_do_no_harm_to_speak_of() -> None:
    turned = [of for at, of in loads_settings().items() if at[1] == "turned"]
    assert turned and max(of["own + targets"] - of["own"] for of in turned) < 0.0025


@pytest.mark.parametrize("busy", ["half", "turns", "bursts", "one"])
def test_targets_of_idle_ranks_do_no_harm(busy: str) -> None:
    """Never worse than without targets by more than 0.01, in 8 to 64 ranks and 4 to 256 tokens."""
    settings = loads_settings(busy)
    assert {at[2] for at in settings} == {8, 16, 32, 64} and {at[3] for at in settings} == {4, 16, 64, 256}
    assert {at[1] for at in settings} == {"hom", "het"} and len(settings) > 100
    for at, of in settings.items():
        assert of["own + targets"] <= of["own"] + 0.01, at
        assert at[2] == 8 or of["node"] <= of["node, no targets"] + 0.01, at
        assert of["own"] > 1.09 or of["own + targets"] <= 1.10, at


def test_targets_that_count_on_ranks_which_leave_lose_little() -> None:
    """What no rank can know before the next exchange; docs/own-counts.md has the most that is lost."""
    most = {
        busy: max(of["own + targets"] - of["own"] for of in loads_settings(busy).values())
        for busy in ("leave", "half", "turns", "bursts", "one")
    }
    page = " ".join((ROOT / "docs" / "own-counts.md").read_text().split())
    assert f"lose at most {most.pop('leave'):.4f} of this ratio" in page
    assert f"the loss is at most {max(most.values()):.4f}" in page and max(most.values()) < 0.02


def test_how_near_a_split_of_own_copies_is_to_the_least_sum() -> None:
    rows = results("bench_own_split")
    splits, improvable, above = (sum(r[k] for r in rows) for k in ("splits", "improvable", "above_bound"))
    most = max(r["most_above"] for r in rows)
    page = " ".join((ROOT / "docs" / "own-counts.md").read_text().split())
    assert f"{improvable} of {splits:,} splits have an improving move" in page
    assert f"{above} have a peak above the bound of the rank's own copies, by at most {most} copies" in page
