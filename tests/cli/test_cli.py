"""The command line: what it prints, what it writes, and one red line for everything a user can mend."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.cli.arguments import parse_layers
from isoload.policies import POLICIES
from isoload.traces import Trace, write_trace
from support.documents import PLAIN
from support.measured_times import written

ROOT = Path(__file__).parents[2]
TRACE = "examples/traces/gptoss20b_decode.npz"
SHIPPED = ROOT / TRACE
KEYS = ["trace", "settings", "tokens", "layers", "batches", "policies"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    rng = np.random.default_rng(1)
    ids = rng.permuted(np.tile(np.arange(8), (48, 3, 1)), axis=-1)[..., :2]
    path = tmp_path_factory.mktemp("traces") / "small.npz"
    sizes = np.full(3, 16)
    write_trace(Trace("small", 8, topk_ids=ids, tokens_per_batch=sizes, cluster=("a", "b", "b")), path)
    return str(path)


def run(*args, env=PLAIN):
    return CliRunner().invoke(app, [str(arg) for arg in args], env=env)


def error_of(*args):
    result = run(*args)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr.removeprefix("error: ").rstrip("\n")


def test_replay_prints_a_row_per_policy(trace):
    result = run("replay", trace, "--ranks", 4, "--ranks-per-node", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "small" and "48 tokens in 3 batches" in lines[1] and "4 ranks on 2 nodes" in lines[2]
    assert lines[3] == "unseen: placed for each cluster on all others (1 or 2 batches)"
    assert lines[7].startswith("in order, no replicas ")
    assert [line.split()[0] for line in lines[8:12]] == ["static", "even", "dynamic", "exact"]
    assert lines[11].split()[2] == "0%" and max(map(len, lines)) <= 80
    wide = run("replay", trace, "--ranks", 4, "--ranks-per-node", 2, "--wide").stdout.splitlines()
    assert wide[11].split()[4:6] == ["0%", "0%"] and len(wide[11].split()) == 17
    assert result.stderr == ""


def test_a_policy_that_borrowed_nothing_says_so_under_the_table(trace):
    result = run("replay", trace, "--ranks", 4, "--spare-slots", 1, "--policies", "none,llep")
    said = " ".join(result.stdout.split())
    assert "llep borrowed no expert in any batch: min_chunk is 1024; it would borrow at min_chunk=" in said


def test_json_to_stdout_is_nothing_but_json(trace):
    result = run("replay", trace, "--policies", "none, exact", "--layers", "0,2", "--ranks", 2, "--json", "-")
    found = json.loads(result.stdout)
    assert list(found) == KEYS and found["layers"] == 2 and found["settings"]["layer_ids"] == [0, 2]
    assert [row["policy"] for row in found["policies"]] == ["none", "exact"]
    assert result.stderr == ""


def test_progress_and_colour_are_for_terminals_and_never_in_the_json(trace):
    terminal = {**PLAIN, "FORCE_COLOR": "1"}
    result = run("replay", trace, "--json", "-", env=terminal)
    assert list(json.loads(result.stdout)) == KEYS
    assert "replaying batches" in result.stderr and "3/3" in result.stderr
    assert "\x1b[31merror: " in run("replay", "missing.npz", env=terminal).stderr


def test_json_to_a_file_comes_with_the_table(trace, tmp_path):
    target = tmp_path / "figures.json"
    result = run("replay", trace, "--ranks", 2, "--json", target)
    assert list(json.loads(target.read_text())) == KEYS and os.listdir(tmp_path) == ["figures.json"]
    assert "exact " in result.stdout


def test_every_option_reaches_the_replay(trace):
    options = {
        "num_ranks": 4, "ranks_per_node": 2, "slots_per_rank": 5, "spare_slots": 1, "placer": "trivial",
        "calibrate": "leave-cluster-out", "batch_tokens": 8, "assign": "round-robin", "seed": 9,
    }  # fmt: skip
    flags = [
        part
        for name, value in options.items()
        for part in ("--" + name.removeprefix("num_").replace("_", "-"), value)
    ]
    found = json.loads(run("replay", trace, *flags, "--policies", "even", "--json", "-").stdout)
    assert {name: found["settings"][name] for name in options} == options
    assert found["settings"]["policies"] == ["even"] and found["batches"] == 6


@pytest.mark.parametrize("predict", ["popularity", "linear", "0.5"])
def test_forecasts_reach_the_replay(trace, predict):
    flags = ("--ranks", 2, "--spare-slots", 1, "--policies", "hedge", "--predict", predict, "--json", "-")
    found = json.loads(run("replay", trace, *flags).stdout)
    assert found["settings"]["predict"] == predict and found["policies"][0]["policy"] == "hedge"


@pytest.fixture
def times_file(tmp_path):
    return written(tmp_path / "mine.json")


def test_times_add_a_table(trace, times_file):
    args = ["replay", trace, "--ranks", 4, "--spare-slots", 2]
    args += ["--policies", "none,llep:min_chunk=1,spill_cost,exact"]
    plain, result = run(*args), run(*args, "--times", times_file)
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in plain.stdout.splitlines() if line][:3] == [
        line.split()[0] for line in result.stdout.splitlines() if line
    ][:3]
    lines = result.stdout.splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.endswith("borrowed")) :]
    assert lines[1].split() == ["policy", "experts", "from", "to", "change", "experts"]
    assert [line.split()[0] for line in lines[2:6]] == ["none", "llep:min_chunk=1", "spill_cost", "exact"]
    assert lines[2].split()[4] == "+0.0%" and lines[2].split()[-1] == "0.0" and max(map(len, lines)) <= 80
    assert "experts of the busiest rank, dispatch and combine" in " ".join(lines)
    wide = run(*args, "--times", times_file, "--wide").stdout
    titles = "policy experts from to import from to change experts copies"
    assert titles in [" ".join(line.split()) for line in wide.splitlines()]


def test_times_in_json(trace, times_file):
    args = ["replay", trace, "--ranks", 4, "--policies", "none,exact", "--json", "-"]
    found = json.loads(run(*args, "--times", times_file).stdout)
    assert found["settings"]["times"] == str(times_file) and list(found) == KEYS
    predicted = found["policies"][0]["predicted"]
    for end in ("low", "high"):
        parts = predicted["experts_us"], predicted[f"exchange_us_{end}"], predicted["import_us"]
        assert predicted[f"layer_us_{end}"] == pytest.approx(sum(parts))
    highs = [row["predicted"]["layer_us_high"] for row in found["policies"]]
    assert [row["predicted"]["layer_us_change"] for row in found["policies"]] == [0, highs[1] / highs[0] - 1]
    plain = json.loads(run(*args).stdout)
    assert plain["settings"]["times"] is None and "predicted" not in plain["policies"][0]


def test_notes_below_the_tables_of_policies_that_borrow(trace, times_file):
    args = ["replay", trace, "--ranks", 4, "--spare-slots", 2, "--times", times_file]
    lines = run(*args, "--policies", "llep:min_chunk=1:threshold=1.0").stdout.splitlines()
    assert "Below the bound: policies that borrow have slots that the bound does not count." in lines
    text = " ".join(lines)
    assert re.search(
        r"llep:\S+ a borrowed expert computes \d+ copies, which takes less time than its transfer", text
    )
    assert "a borrow pays from 110 copies, and a rank has 8 in a batch and layer, mean" in text


def test_more_ranks_than_were_measured_are_said_to_be_extrapolated(trace, times_file):
    shown = " ".join(run("replay", trace, "--ranks", 8, "--times", times_file).stdout.split())
    assert "the all-to-all of 8 ranks is extrapolated; measured were 4 ranks." in shown


def test_times_files_that_are_wrong(trace, tmp_path):
    """No byte of one without an end is read; of a large one neither."""
    large = tmp_path / "large.json"
    large.touch()
    os.truncate(large, 2**33)
    for path, why in (("/dev/zero", "is no regular file"), (large, "must be at most 16 MiB, has more")):
        message = error_of("replay", trace, "--times", path)
        assert message == f"times file {path} cannot be read: {path}: {why}"


@pytest.mark.parametrize(
    ("command", "use"),
    [
        (("replay", "run.npz"), "use --times FILE, which isoload measure writes"),
        (("doctor",), "isoload measure prints from how many copies a borrow pays"),
    ],
)
def test_removed_options_are_refused_with_what_to_use(command, use):
    assert error_of(*command, "--cost", "default") == f"--cost was removed: {use}"


def test_inspect(trace):
    result = run("inspect", trace, "--ranks", 4, "--layers", "1-2")
    assert (
        result.exit_code == 0
        and "3 batches, 2 layers, 8 experts; in order, no replicas, on 4 ranks" in result.stdout
    )
    found = json.loads(run("inspect", trace, "--ranks", 4, "--json", "-").stdout)
    assert (found["trace"], found["num_ranks"], len(found["layers"])) == ("small", 4, 3)
    assert len(found["layers"][0]["expert"]["per_batch"]) == 3
    first = found["layers"][0]
    assert 0 <= first["skew"] <= 1 and list(first["on_ranks"]) == ["4", "8"]
    assert all(1 <= cost["least"] <= cost["in_order"] for cost in first["on_ranks"].values())
    wide = run("inspect", trace, "--ranks", 4, "--wide").stdout
    assert "largest share of a rank" in wide and "largest share of a rank" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("given", "model"), [(None, "openai/gpt-oss-20b"), ("4", None), ("GPT-OSS 20B", None)]
)
def test_k_is_given_or_known_by_the_models_name(tmp_path, given, model):
    counts = np.random.default_rng(1).integers(1, 50, (4, 2, 32))
    provenance = {"model": model} if model else {}
    write_trace(Trace("loads", 32, counts=counts, provenance=provenance), tmp_path / "loads.npz")
    options = [] if given is None else ["--top-k", given]
    found = json.loads(run("replay", tmp_path / "loads.npz", *options, "--json", "-").stdout)
    assert found["settings"]["top_k"] == 4 and found["policies"][0]["remote_rank_rows"] > 0
    skewed = json.loads(run("inspect", tmp_path / "loads.npz", *options, "--json", "-").stdout)
    assert skewed["layers"][0]["skew"] is not None


def test_without_k_a_replay_says_what_it_cannot_judge(tmp_path):
    counts = np.random.default_rng(1).integers(1, 50, (4, 2, 32))
    write_trace(Trace("loads", 32, counts=counts), tmp_path / "loads.npz")
    out = " ".join(run("replay", tmp_path / "loads.npz").stdout.split())
    assert "rows leave" not in out and "copies are drawn one by one, rows are not counted (--top-k)." in out
    message = "--top-k must be known where times or --shared-experts count tokens, got none"
    assert error_of("replay", tmp_path / "loads.npz", "--shared-experts", 1) == message


@pytest.mark.slow
def test_doctor():
    result = run("doctor")
    assert result.exit_code == 0 and "isoload ops" in result.stdout


def test_version_and_help():
    assert run("--version").stdout == f"isoload {isoload.__version__}\n"
    for command in ("replay", "inspect", "doctor"):
        assert run(command, "--help").exit_code == 0
        assert command in run("--help").stdout


@pytest.mark.parametrize("text", ["0-3,7", " 0 - 3 , 7 ", "0,1,2-2,3,7"])
def test_layers(text):
    assert parse_layers(text, 8) == [0, 1, 2, 3, 7]


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3,,4", "1-2-3", "1.5"])
def test_layers_that_are_no_numbers(trace, text):
    expected = f"layers must be numbers and ranges such as 0-3,7, got {text!r}"
    assert error_of("replay", trace, f"--layers={text}") == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "1,0-2"], "layers must be distinct and at least one, got '1,0-2'"),
        (["--layers", "2-1"], "layers must be distinct and at least one, got '2-1'"),
        (["--layers", "7"], "layers must be some of 0..2, got '7'"),
        (["--layers", "0-99999999999"], "layers must be some of 0..2, got '0-99999999999'"),
        (["--layers", "9" * 5000], f"layers must be some of 0..2, got '{'9' * 47}...{'9' * 48}'"),
        (["--max-batches", "-1"], "--max-batches must be at least 0, got -1"),
        (["--spare-slots", "1000000"], "--spare-slots must be at most 8, got 1000000"),
        (["--shared-experts", "65"], "--shared-experts must be at most 64, got 65"),
        (
            ["--slots-per-rank", "1000000", "--spare-slots", "2"],
            "--slots-per-rank must be at most 8192 (65536 slots on all of 8 ranks), got 1000000",
        ),
        (
            ["--policies", "spill_cost:min_chunk=1e3", "--spare-slots", "1"],
            "option min_chunk must be of type int, got '1e3'",
        ),
        (
            ["--policies", "exact,best"],
            f"policy must be one of {', '.join(POLICIES)}, got 'best'",
        ),
        (
            ["--predict", "often"],
            "predict must be one of perfect, last, linear, popularity, none or a number in 0..1, got 'often'",
        ),
        (["--policies", ","], "policies must be distinct and at least one, got none at all"),
        (["--ranks", "4", "--ranks-per-node", "3"], "--ranks-per-node must divide --ranks=4, got 3"),
        (["--top-k", "3"], "--top-k must be the record's 2, got '3'"),
        (
            ["--top-k", "DeepSeek-V3"],
            "--top-k must be a number from 1 on, or name a model of 8 experts that is one of gpt-oss, mixtral, olmoe, "
            "qwen3, deepseek-v2, deepseek-v3, deepseek-r1, glm-4.5, glm-5, kimi-k2, got 'DeepSeek-V3'",
        ),
        (
            ["--json", "no-such-folder/x"],
            "json must be a file in an existing folder or -, got 'no-such-folder/x'",
        ),
    ],
)
def test_one_line_per_error(trace, options, message):
    assert error_of("replay", trace, *options) == message


def test_files_that_are_not_there_or_no_traces(tmp_path):
    missing, foreign = tmp_path / "missing.npz", tmp_path / "foreign.npz"
    foreign.write_text("hello")
    for command in ("replay", "inspect"):
        assert error_of(command, missing) == f"{missing}: No such file or directory"
        assert str(foreign) in error_of(command, foreign)


def test_bugs_keep_their_traceback(trace, monkeypatch):
    def broken(*_):
        raise RuntimeError("routed slots do not meet the quota")

    monkeypatch.setattr("isoload.analysis.simulate.replay", broken)
    assert isinstance(run("replay", trace).exception, RuntimeError)


@pytest.mark.slow
def test_module_and_shipped_trace():
    command = [sys.executable, "-m", "isoload", "replay", SHIPPED, "--layers", "0-2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "" and "openai/gpt-oss-20b" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_module_names_itself(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["__main__.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("isoload", run_name="__main__")
    assert "Usage: isoload" in capsys.readouterr().out


def test_the_committed_replay_is_todays():
    """By the command that bench/README.md gives; planning times aside."""
    said = re.search(r"`isoload (replay [^`]+) --json FILE`", (ROOT / "bench" / "README.md").read_text())[1]
    words = [str(SHIPPED) if word == TRACE else word for word in said.split()]  # whose path may have a space
    found = json.loads(run(*words, "--json", "-").stdout)
    committed = json.loads((ROOT / "bench" / "results" / "replay_gptoss20b.json").read_text())
    for row in found["policies"]:
        assert len(row.pop("by_batch")["imbalance"]) == found["batches"]
    for row in (*found["policies"], *committed["policies"]):
        assert set(row.pop("plan_us")) == {"median", "batched"}
    assert found == committed
