"""Recorded traces: what a clone has, what bench/fetch_traces.py builds, and benches without their files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from isoload.traces import read_trace
from support.processes import run_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "bench" / "traces"
NEEDED = {  # a bench: what selects the tables that need a trace
    "bench_advise": ["--traces", "{}"],
    "bench_craft": ["--traces", "{}"],
    "bench_grace": ["--traces", "{}"],
    "bench_known_routes": ["--traces", "{}"],
    "bench_libra": ["--traces", "{}", "--only", "accuracy", "--no-write"],
    "bench_loads": ["--traces", "{}"],
    "bench_moves": ["--traces", "{}"],
    "bench_near": ["--traces", "{}", "--only", "unseen"],
    "bench_own_split": ["--traces", "{}"],
    "bench_place": ["--traces", "{}"],
    "bench_published": ["--traces", "{}"],
    "bench_rebalance": ["--traces", "{}"],
    "bench_replicas": ["--traces", "{}", "--no-write"],
}
RUN = """
import importlib, importlib.util, json, sys
from unittest.mock import MagicMock
sys.path.insert(0, {bench!r})
if importlib.util.find_spec("highspy") is None:
    sys.modules["highspy"] = MagicMock()
ends = {{}}
for name, words in {needed!r}.items():
    sys.argv = [name, *words]
    try:
        importlib.import_module(name).main()
        ends[name] = "ended without a message"
    except SystemExit as error:
        ends[name] = str(error)
    except Exception as error:
        ends[name] = repr(error)
print(json.dumps(ends))
"""


def test_a_bench_without_its_file_ends_in_one_sentence(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    needed = {name: [word.format(empty) for word in words] for name, words in NEEDED.items()}
    status, said = run_program(RUN.format(bench=str(ROOT / "bench"), needed=needed), tmp_path)
    assert status == 0, said
    ends = json.loads(said.strip().splitlines()[-1])
    sentence = r"no \w+(, \w+)* in --traces: bench/traces has .*, bench/fetch_traces.py builds the others"
    assert {name: end for name, end in ends.items() if not re.fullmatch(sentence, end)} == {}


def test_every_bench_with_traces_is_among_them() -> None:
    """bench_route, bench_balance and bench_fill have the shipped trace; bench_dispatch and bench_stack made routing."""
    sources = {path.stem: path.read_text() for path in (ROOT / "bench").glob("bench_*.py")}
    takes = {name for name, text in sources.items() if re.search(r"add_traces\(|\"--traces\"", text)}
    others = {"bench_route", "bench_balance", "bench_fill", "bench_dispatch", "bench_stack"}
    assert takes - others == set(NEEDED)


def test_traces_of_a_clone_have_a_licence_and_are_small() -> None:
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "bench/traces"]
    paths = [ROOT / name for name in subprocess.check_output(listing, cwd=ROOT, text=True).split()]
    traces = [path for path in paths if path.suffix == ".npz"]
    assert len(traces) == 6 and sum(path.stat().st_size for path in paths) < 5.5e6
    page = (FOLDER / "README.md").read_text()
    for path in traces:
        about = read_trace(path).provenance
        assert about["license"].startswith(("MIT", "Apache-2.0")), path
        assert about["source_commit"][:8] in page and about["source_repo"].removeprefix("https://") in page


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import fetch_traces

    return fetch_traces


def test_sources_are_named_by_commit_and_checksum(
    fetch: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, source in fetch.SOURCES.items():
        assert re.fullmatch(r"[0-9a-f]{40}", source.commit) and re.fullmatch(r"[0-9a-f]{64}", source.checksum)
        ignored = subprocess.run(["git", "check-ignore", "-q", f"bench/traces/{name}.npz"], cwd=ROOT)
        assert ignored.returncode == 0, f"{name} has no licence, so git must ignore it"


def test_a_trace_is_built_from_a_checkout_and_checked(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repository of two workloads, read at its first commit although the file has changed since."""
    git = [
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b.c",
        "-c",
        "commit.gpgsign=false",
    ]
    subprocess.run([*git[:3], "init", "-q"], check=True)
    counts = np.random.default_rng(0).integers(0, 99, (2, 61, 8))
    counts[:, :3] = 0
    (tmp_path / "attachment_ep_statistics").mkdir()
    for label, rows in zip(("one", "two"), counts.astype(float).tolist(), strict=True):
        path = tmp_path / "attachment_ep_statistics" / f"{label}.json"
        path.write_text(json.dumps({"logical_count": rows}))
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "a"], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    path.write_text("{}")
    subprocess.run([*git, "commit", "-qam", "b"], check=True)
    right = fetch.checksum({"counts": counts[:, 3:]})
    source = fetch.Source(
        "a/b", commit, "DeepSeek-V3", 8, 2, lambda file: fetch.dsv3(file) | {"cluster": None}, right
    )
    monkeypatch.setattr(fetch, "DSV3", ("one", "two"))
    monkeypatch.setitem(fetch.SOURCES, "made", source)
    monkeypatch.setattr(sys, "argv", ["x", "made", "--checkout", str(tmp_path), "--to", str(tmp_path)])
    assert fetch.main() == 0
    built = read_trace(tmp_path / "made.npz")
    assert built.counts is not None and np.array_equal(built.counts, counts[:, 3:])
    assert built.layer_ids == tuple(range(3, 61)) and built.provenance["batch_labels"] == ["one", "two"]
    wrong = fetch.Source("a/b", commit, "DeepSeek-V3", 8, 2, source.build, "0" * 64)
    monkeypatch.setitem(fetch.SOURCES, "made", wrong)
    with pytest.raises(SystemExit, match=rf"made must have the checksum 0+, got {right}: it is not written"):
        fetch.build("made", tmp_path)
    with pytest.raises(
        SystemExit, match=r"must be a clone of github.com/a/b with commit .*git show .*one.json failed"
    ):
        fetch.build("made", tmp_path.parent)


def test_a_pickle_that_names_a_function_is_refused(fetch: ModuleType) -> None:
    import io
    import os
    import pickle

    with pytest.raises(pickle.UnpicklingError, match="which is no tensor"):
        fetch.TensorsOnly(io.BytesIO(pickle.dumps(os.getcwd))).load()
