"""The demo runs real processes on real routing and agrees with the dense layer."""

import json

import pytest
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.cli.demo import run_demo
from isoload.replay.simulate import DEFAULT_POLICIES


def test_demo_reports_every_policy():
    done = CliRunner().invoke(app, ["demo", "--json", "-"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["policies"]
    assert [row["policy"] for row in rows] == list(DEFAULT_POLICIES)
    for row in rows:
        assert set(row) == {
            "policy",
            "max_abs_diff",
            "busiest_rank_rows",
            "busiest_rank_cpu_ms",
            "bytes_sent",
            "plan_us",
        }
        assert 0 <= row["max_abs_diff"] < 1e-5
        assert row["bytes_sent"] > 0 and row["plan_us"] > 0 and row["busiest_rank_cpu_ms"] > 0
    by_policy = {row["policy"]: row["busiest_rank_rows"] for row in rows}
    assert by_policy["exact"] < by_policy["none"]


def test_demo_refuses_traces_without_tokens(tmp_path):
    trace = isoload.read_trace("examples/traces/gptoss20b_decode.npz")
    counts_only = isoload.Trace("counts", trace.num_experts, trace.top_k, counts=trace.counts)
    isoload.write_trace(counts_only, tmp_path / "counts.npz")
    with pytest.raises(ValueError, match="trace must hold per-token choices, counts has counts only"):
        run_demo(tmp_path / "counts.npz", 2, 0)


def test_demo_names_the_layers_there_are():
    done = CliRunner().invoke(app, ["demo", "--layer", "24"])
    assert done.exit_code == 2
    assert "layers must be some of 0..23, got [24]" in done.output


def test_a_rank_that_fails_is_named(monkeypatch):
    monkeypatch.setattr("isoload.cli.demo.HIDDEN", 0)  # forked ranks see it too
    with pytest.raises(RuntimeError, match=r"rank \d failed: ZeroDivisionError"):
        run_demo(None, 2, 0)
