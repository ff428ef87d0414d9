"""bench/serving on SGLang itself: its parsers take every flag, and cells run end to end over two CPU processes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint import make_qwen3_moe, make_tokenizer
from engine_runs import HARNESS, environment, free_port
from load_generator import serving
from sglang.srt.server_args import ServerArgs

sys.path.append(str(Path(__file__).parents[2] / "bench"))
sys.path.append(str(Path(__file__).parents[2] / "bench" / "serving"))
import matrix
import rates
import rectangle

ON_CPU = (
    "--device cpu --dtype float32 --disable-cuda-graph --attention-backend torch_native --sampling-backend pytorch "
    "--grammar-backend none --mem-fraction-static 0.2 --max-total-tokens 2048 --max-running-requests 4 "
    "--context-length 256 --deepep-mode normal --skip-server-warmup"
)
RATE = 8


@pytest.mark.parametrize("script", [matrix, rates], ids=["matrix", "rates"])
def test_sglangs_parsers_take_all_flags(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for prompts in ([], ["--prompts", "a.jsonl", "--record-prompts", "b.jsonl"]):
        monkeypatch.setattr(sys, "argv", ["script", "--dry-run", *prompts])
        assert script.main() == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    launches, loads = (
        [line[line.index(module) + 1 :] for line in lines if module in line]
        for module in ("sglang.launch_server", "sglang.bench_serving")
    )
    assert len(launches) >= 10 and len(loads) > len(launches)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    for flags in launches:
        assert parser.parse_args(flags).ep_size == 8
    taken: list[argparse.Namespace] = []
    monkeypatch.setattr(serving, "run_benchmark", taken.append)
    for flags in loads:
        monkeypatch.setattr(sys, "argv", ["bench_serving", *flags])
        serving.cli_main()
    assert len(taken) == len(loads) and {of.dataset_name for of in taken} == {"random-ids", "openai"}
    with pytest.raises(SystemExit):
        parser.parse_args([*launches[0], "--enable-deepep-waterfill"])  # the blog's, which is no longer there
    with pytest.raises(SystemExit):
        monkeypatch.setattr(sys, "argv", ["bench_serving", *loads[0], "--no-such-flag"])
        serving.cli_main()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of rates.py's results, and its rows by cell: experts are counted, then placed and served."""
    if not os.environ.get("TEST_SERVING"):
        pytest.skip("starts an engine's server twice, minutes on two cores: make test-serving")
    folder = tmp_path_factory.mktemp("serving")
    make_qwen3_moe(folder / "model")
    make_tokenizer(folder / "model")
    variables = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "ENGINE_RECORD": ""}
    command = [sys.executable, rates.__file__, "--model", str(folder / "model"), "--gpus", "2"]
    command += ["--only", "record", "isoload", "--engine-args", ON_CPU, "--limit", "600"]
    command += ["--rates", str(RATE), "--seconds", "2", "--tokens", "24", "--new", "4"]
    command += ["--generator", f"{sys.executable} {HARNESS / 'load_generator.py'}"]
    command += ["--port", str(free_port()), "--results", str(folder), "--work", str(folder / "work")]
    given = environment(folder, "sglang.srt.plugins", "cpu_engine", variables)
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    rows = [json.loads(line) for line in (folder / "serving_rates.jsonl").read_text().splitlines()]
    assert done.returncode == 0, f"{[row['error'] for row in rows]}\n{done.stderr[-2000:]}"
    return folder, {row["cell"]: row for row in rows}


def test_cells_run_end_to_end(served: tuple[Path, dict[str, Any]]) -> None:
    folder, rows = served
    assert list(rows) == ["record", "isoload"]
    (load,) = rows["isoload"]["loads"]
    requests = 2 * RATE
    assert load["load"] == f"rate {RATE}" and load["completed"] == requests
    assert load["total_input_tokens"] == 24 * requests and load["total_output_tokens"] == 4 * requests
    assert 0 < load["median_ttft_ms"] < load["mean_e2e_latency_ms"]
    assert all(row["cache_tokens"] > 0 and row["sglang"] for row in rows.values())
    picture = (folder / "serving_rates.svg").read_text()
    assert picture.count("<path") == 1 and "isoload" in picture


def test_the_engine_had_what_the_row_says(served: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = served
    log = (folder / "work" / "isoload.log").read_text()
    assert "--ep-dispatch-algorithm dynamic (loads own" in log and "policy exact on 3 of 3 layers" in log
    assert "init_expert_location from init_by_eplb" in log
    counted = torch.load(folder / "work" / "expert_counts.pt", weights_only=True)["logical_count"]
    assert counted.shape[1:] == (3, 16) and int(counted.sum()) >= 3 * 4 * 24 * 2 * RATE


def test_crafts_rectangle_is_made_of_what_was_counted(
    served: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command that cell craft2 runs ahead of the engine."""
    folder, _ = served
    counts, out = folder / "work" / "expert_counts.pt", folder / "craft2.json"
    words = ["rectangle.py", str(counts), "--ranks", "2", "--replicas", "2", "--output", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    rectangle.main()
    table = json.loads(out.read_text())["physical_to_logical_map"]
    assert [len(row) for row in table] == [18] * 3 and all(set(row) == set(range(16)) for row in table)
