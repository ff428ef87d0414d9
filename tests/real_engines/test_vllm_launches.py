"""vLLM's own configuration accepts every launch that README and docs show and that advise prints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_configs import make_configs
from vllm.config import ParallelConfig, parallel
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_cpu import Standing

import isoload
from isoload.analysis.advice import NOW, Candidate, grid
from isoload.analysis.details import VLLM_BACKENDS, flags
from isoload.placement.engine_files import launch_line
from support.documents import launch_words, launches

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
DOCUMENTED = [line for page in PAGES for line in launches(page, "vllm serve")]
LEFT_OUT = (  # where a line has an ellipsis
    "Qwen/Qwen3-235B-A22B --tensor-parallel-size 8 --enable-expert-parallel --eplb-config.num_redundant_experts 16"
)
TOPOLOGIES = {"one node": isoload.Topology(8), "two nodes": isoload.Topology(16, 8)}
CANDIDATES = [candidate for candidate in grid(4, nodes=2) if candidate != NOW]


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM refuses EPLB on a CPU; all that it reads of the platform otherwise is the CPU's."""
    monkeypatch.setattr(
        parallel, "current_platform", Standing(parallel.current_platform, is_xpu=lambda: True)
    )


def configure(words: list[str], model: Path) -> ParallelConfig:
    """Make and check the configuration as the start of a server does, with another model."""
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    options = parser.parse_args([*words, "--model", str(model)])
    return AsyncEngineArgs.from_cli_args(options).create_engine_config().parallel_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In place of the published models, whose files are not here."""
    return make_configs(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("line", DOCUMENTED)
def test_documented_launches_start(line: str, models: dict[str, Path]) -> None:
    words = launch_words(line.replace("…", LEFT_OUT))
    name, *options = words[words.index("serve") + 1 :]
    (model,) = [models[part] for part in models if part in name.replace("MODEL", "Qwen3")]
    made = configure(options, model)
    assert made.enable_eplb and made.enable_expert_parallel and made.eplb_config.num_redundant_experts


@pytest.mark.parametrize("model", ["DeepSeek-V3", "Qwen3", "gpt-oss"])
@pytest.mark.parametrize("nodes", TOPOLOGIES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.label)
def test_printed_flags_start(
    candidate: Candidate, phase: str, nodes: str, model: str, models: dict[str, Path]
) -> None:
    topology = TOPOLOGIES[nodes]
    (start,) = flags("vllm", candidate, topology, 20, "trace.npz", phase)
    words = launch_words(start)
    made = configure(words[words.index("MODEL") + 1 :], models[model])
    assert made.enable_eplb and made.enable_expert_parallel and made.data_parallel_size == topology.num_ranks
    assert made.eplb_config.num_redundant_experts == topology.num_ranks * candidate.more
    assert made.all2all_backend == VLLM_BACKENDS[phase] and made.nnodes == topology.num_nodes


def test_all_pages_were_read() -> None:
    assert len(DOCUMENTED) >= 4


def test_what_place_prints_starts(models: dict[str, Path]) -> None:
    rows = torch.arange(144).remainder(128).expand(2, -1)
    placement = isoload.Placement(rows, isoload.Topology(8), 128, layer_ids=(0, 1))
    variable, *words = launch_words(launch_line(placement, "isoload", "placement.json", 8))
    made = configure(words[words.index("MODEL") + 1 :], models["Qwen3"])
    assert variable == "ISOLOAD_PLACEMENT=placement.json" and made.tensor_parallel_size == 8
    assert made.enable_eplb and made.enable_expert_parallel and made.eplb_config.num_redundant_experts == 16
