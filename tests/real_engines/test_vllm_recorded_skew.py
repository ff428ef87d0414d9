"""vLLM routes by a recorded trace: every token of every layer, in shadow mode too; a file that does not fit is
refused before weights load."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint import make_qwen3_moe
from engine_runs import in_shadow, refused_vllm, run_vllm
from recorded_skew import IN_VLLM, check_report, check_walk, skewed_trace

from isoload.engines.recorded_skew import VLLM_STRATEGY


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    make_qwen3_moe(folder, head_dim=32)
    return folder


def test_tokens_go_where_the_trace_says(checkpoint: Path, tmp_path: Path) -> None:
    path, folder = skewed_trace(tmp_path / "trace.npz"), tmp_path / "record"
    variables = in_shadow("ISOLOAD_VLLM", folder) | {VLLM_STRATEGY: f"isoload:{path}:seed=7"}
    run = run_vllm(checkpoint, tmp_path / "run", variables, **IN_VLLM)
    assert run.lines(
        f"isoload: vLLM routes as {path} does (seed 7), not as its router: tokens have no meaning"
    )
    check_walk(run, path)
    check_report(folder, path)


def test_a_trace_of_another_model_is_refused_at_the_start(checkpoint: Path, tmp_path: Path) -> None:
    path = skewed_trace(tmp_path / "trace.npz", experts=32)
    log = refused_vllm(checkpoint, tmp_path / "run", {VLLM_STRATEGY: f"isoload:{path}"}, **IN_VLLM)
    assert "has 32 experts and 4 per token but the model has 16 and 4: pass a trace of this model" in log
