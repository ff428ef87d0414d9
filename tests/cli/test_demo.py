"""The demo runs real processes on real routing and agrees with the dense layer."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

import isoload
from isoload.analysis.judge import exact_imbalance
from isoload.analysis.simulate import BASELINE, DEFAULT_POLICIES
from isoload.cli import demo
from isoload.cli.app import app
from isoload.cli.demo import SHIPPED
from support.sample_traces import token_trace

ROOT = Path(__file__).parents[2]


def run_demo(trace, ranks, layer, stall_seconds=60.0):
    return demo.run_demo(trace, ranks, layer, stall_seconds)


@pytest.mark.slow
def test_demo_reports_every_policy():
    done = CliRunner().invoke(app, ["demo", "--json", "-"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["policies"]
    assert [row["policy"] for row in rows] == list(DEFAULT_POLICIES)
    for row in rows:
        assert set(row) == {
            "policy",
            "max_abs_diff",
            "busiest_rank_copies",
            "imbalance",
            "bytes_sent",
        }
        assert 0 <= row["max_abs_diff"] < 1e-5
        assert row["bytes_sent"] > 0 and row["imbalance"] >= 1
    by_policy = {row["policy"]: row["busiest_rank_copies"] for row in rows}
    assert by_policy["exact"] < by_policy[BASELINE]


def test_the_demo_counts_copies_and_compares_with_the_dense_layer(monkeypatch):
    """Copies are those of the plans, and no time is shown."""
    monkeypatch.setattr(
        "isoload.analysis.simulate.DEFAULT_POLICIES", (BASELINE, "exact")
    )  # forked ranks see it
    done = CliRunner().invoke(app, ["demo", "--ranks", "2"])
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "Every policy's output equals the dense layer's up to rounding in float32" in text
    assert "CPU ms" not in text and "µs" not in text
    trace = isoload.read_trace(SHIPPED).select_layers([12])
    counts = trace.batch_counts()
    exact = exact_imbalance(isoload.place(counts[:7], 2, 17), counts[7:])
    assert f"exact {(exact * counts[7:].sum(2) / 2).mean():.1f} {exact.mean():.3f} " in text
    halves = counts[7:, 0].reshape(7, 2, 16).sum(2)
    assert f"no replicas {halves.max(1).mean():.1f} " in text


def test_an_output_that_differs_from_the_dense_layers_is_a_bug(monkeypatch):
    class Wrong(isoload.MoE):
        def forward(self, *rows):
            return super().forward(*rows) + 0.1

    monkeypatch.setattr("isoload.layer.moe.MoE", Wrong)
    monkeypatch.setattr("isoload.analysis.simulate.DEFAULT_POLICIES", ("exact",))
    with pytest.raises(RuntimeError, match="output of policy exact differs from the dense layer's: a bug"):
        run_demo(None, 2, 12)


def test_demo_refuses_traces_without_tokens(tmp_path):
    trace = isoload.read_trace(SHIPPED)
    counts_only = isoload.traces.Trace("counts", trace.num_experts, trace.top_k, counts=trace.counts)
    isoload.traces.write_trace(counts_only, tmp_path / "counts.npz")
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


def test_demo_bounds_its_processes_and_its_patience():
    with pytest.raises(ValueError, match=r"ranks must be in 1\.\.32 \(processes\), got 1000"):
        run_demo(None, 1000, 0)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="stall_seconds must be above 0 and at most 86400, got "):
            run_demo(None, 2, 0, seconds)


def test_demo_needs_batches_to_place_by(tmp_path):
    isoload.traces.write_trace(token_trace(), tmp_path / "one.npz")
    with pytest.raises(
        ValueError, match=r"trace must have at least 2 batches \(one to place by\), tokens has one"
    ):
        run_demo(tmp_path / "one.npz", 2, 0)


def stats():
    """{process: (state, parent)} of all there are."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ends while we look
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            found[int(path.parent.name)] = state, int(parent)
    return found


def children_of(pid):
    return [child for child, (_, parent) in stats().items() if parent == pid]


def started(command, **how):
    """A demo in a process group of its own, with its ranks, once these are there."""
    process = subprocess.Popen(
        [sys.executable, "-m", "isoload", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
        **how,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while (
        len(ranks := children_of(process.pid)) < 2 and process.poll() is None and time.monotonic() < deadline
    ):
        time.sleep(0.02)
    return process, ranks


def alive(pid):
    return stats().get(pid, ("Z", 0))[0] != "Z"


@pytest.mark.slow
def test_ctrl_c_is_quiet():
    """As a terminal sends it, to the whole group: one line, exit code 130, no process left."""
    process, ranks = started(["demo", "--ranks", "2"])
    os.kill(max(ranks), signal.SIGSTOP)  # so that it cannot end before
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    assert ranks and not any(map(alive, ranks))


@pytest.mark.slow
def test_ranks_end_when_the_demo_is_killed():
    process, ranks = started(["demo", "--ranks", "2"])
    process.kill()
    out, err = process.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(map(alive, ranks)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ranks and not any(map(alive, ranks)) and "Traceback" not in err


@pytest.mark.slow
def test_a_stalled_rank_ends_the_demo():
    process, ranks = started(["demo", "--ranks", "2", "--stall-seconds", "2"])
    os.kill(max(ranks), signal.SIGSTOP)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and out == ""
    # Stopped while it holds the lock of the store's file, it stalls the other too, and both are named.
    assert re.fullmatch(r"error: (rank|ranks 0,) 1 stalled: no batch ended within 2 s\n", err)
    assert not any(map(alive, ranks))


@pytest.mark.slow
def test_the_demo_runs_from_a_wheels_files(tmp_path):
    """What setuptools puts into a wheel, elsewhere than the repository; the compiled ops are copied beside it."""
    build = tmp_path / "build"
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(build)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    traces = build / "isoload" / "shipped_traces"
    assert sorted(path.name for path in traces.iterdir()) == [
        f"gptoss20b_decode.{kind}" for kind in ("json", "npz")
    ]
    assert not traces.is_symlink() and not any(path.is_symlink() for path in traces.iterdir())
    for ops in (ROOT / "python" / "isoload").glob("_C*.so"):
        shutil.copy(ops, build / "isoload")
    code = f"import sys; sys.path.insert(0, {str(build)!r}); sys.argv[1:] = ['demo', '--ranks', '2', '--json', '-']"
    code += f"; import isoload.cli.demo as d; assert d.SHIPPED.is_relative_to({str(build)!r}), d.SHIPPED"
    code += "; import isoload.analysis.simulate as s; s.DEFAULT_POLICIES = ('exact',)"
    code += "; from isoload.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [row["policy"] for row in json.loads(done.stdout)["policies"]] == ["exact"]
