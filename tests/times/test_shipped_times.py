"""The files of constants: small, whole, each row once, with its source; and nothing that makes them is needed."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isoload import times
from isoload.times import available
from isoload.times.experts import read

FOLDER = Path(times.__file__).parent
KEYS = {
    "experts": ("gpu", "kernel", "dtype", "hidden", "intermediate", "experts"),
    "exchanges": ("gpu", "kernel", "hidden", "top_k", "ranks", "nodes"),
}


def test_they_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.json")) <= 120_000
    assert {path.stem for path in FOLDER.glob("*.json")} == set(KEYS)


@pytest.mark.parametrize("table", KEYS)
def test_every_row_is_there_once_with_its_version_errors_and_source(table: str) -> None:
    rows = read(table)
    assert len({tuple(row[name] for name in KEYS[table]) for row in rows}) == len(rows) > 100
    for row in rows:
        assert re.fullmatch(r"(sglang|vllm|trtllm) \d+\.\d+\S+", row["version"]), row
        assert row["source"].startswith("aiconfigurator-core 0.12.0 (Apache-2.0)")
        assert 0 < row["fit_error"] <= 0.12 and 0 <= (row.get("held_out_error") or 0) <= 0.15, row
        flat = [x for value in row.values() for x in (value if isinstance(value, list) else [value])]
        assert all(math.isfinite(x) for x in flat if isinstance(x, float)), row


def test_what_is_available_is_a_copy() -> None:
    rows = available()
    assert len(rows) == len(read("experts")) + len(read("exchanges"))
    rows[0]["gpu"] = "changed"
    assert available()[0]["gpu"] != "changed"


def test_the_models_that_are_run_are_there() -> None:
    models = {(row["gpu"], row["model"]) for row in read("experts")}
    for gpu in ("h100", "h200", "b200", "b300", "gb200", "gb300"):
        for model in (
            "deepseek-v3",
            "kimi-k2",
            "qwen3-235b",
            "qwen3-30b",
            "gpt-oss-120b",
            "gpt-oss-20b",
            "glm-5",
        ):
            assert (gpu, model) in models


def test_copies_of_another_gpus_rows_are_not_shipped() -> None:
    over_nodes = {row["gpu"] for row in read("exchanges") if row["nodes"] > 1}
    assert over_nodes == {"h100"}


def test_the_notice_names_the_source_and_its_licence() -> None:
    text = (FOLDER / "NOTICE").read_text()
    for part in ("aiconfigurator", "Apache", "Version 2.0", "NVIDIA"):
        assert part in text


@pytest.mark.slow
def test_nothing_is_needed_but_the_files() -> None:
    for path in FOLDER.glob("*.py"):
        if path.name == "fitting.py":  # imported by isoload measure alone
            continue
        assert not re.search(
            r"^\s*(import|from) (aiconfigurator|pyarrow|scipy|pandas)", path.read_text(), re.M
        ), path
    code = "import sys, isoload.times as t; t.available(); print({'pyarrow', 'scipy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
