"""SGLang's own resolution of arguments accepts every launch that README and docs show and that advise prints."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial, update_wrapper
from pathlib import Path

import pytest
import torch
from model_configs import make_configs
from sglang.srt.arg_groups import parallel_hook
from sglang.srt.server_args import ServerArgs, prepare_server_args

import isoload
from isoload.analysis.advice import NOW, Candidate, grid
from isoload.analysis.details import flags
from isoload.engines.sglang import HOOKS
from isoload.placement.engine_files import launch_line
from support.documents import launch_words, launches

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
DOCUMENTED = [line for page in PAGES for line in launches(page, "sglang.launch_server")]
LEFT_OUT = "--model-path Qwen/Qwen3-235B-A22B --tp 8 --ep-size 8"  # where a line has an ellipsis
TOPOLOGIES = {"one node": isoload.Topology(8), "two nodes": isoload.Topology(16, 8)}
GATHERED = ("exact", "node")  # which advise offers for the DeepSeek family alone
CANDIDATES = [candidate for candidate in grid(4, nodes=2) if candidate != NOW]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Resolution writes environment variables, which end with the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """In place of the published models, whose files are not here."""
    return make_configs(tmp_path_factory.mktemp("models"))


def resolve(words: list[str], model: Path) -> ServerArgs:
    """Resolve and check arguments as the start of a server for GPUs does, with another model."""
    args = prepare_server_args([*words, "--model-path", str(model), "--device", "cuda"])
    args.resolve_once()
    args.check_server_args()
    return args


@pytest.mark.parametrize("line", DOCUMENTED)
def test_documented_launches_start(line: str, models: dict[str, Path]) -> None:
    words = launch_words(line.replace("…", LEFT_OUT))
    options = words[words.index("sglang.launch_server") + 1 :]
    path = options[options.index("--model-path") + 1]
    named = [name for name in models if path == "MODEL" or name in path]
    assert named, f"no configuration for {path}"
    for name in named:
        args = resolve(options, models[name])
        if (
            "ISOLOAD_RAGGED=pages" not in words
        ):  # `place` prints how a file is loaded, whoever chooses replicas
            assert args.ep_dispatch_algorithm in ("dynamic", "lp"), "isoload attaches to these"
        if "--enable-eplb" in options:
            assert (args.eplb_algorithm == "isoload") != ("ISOLOAD_MODE=shadow" in words)


def test_all_pages_were_read() -> None:
    assert len(DOCUMENTED) >= 5 and sum("ISOLOAD_MODE=shadow" in line for line in DOCUMENTED) == 1


@pytest.mark.parametrize("algorithm", ["static", "lp"])
def test_resolution_refuses_what_would_not_start(algorithm: str, models: dict[str, Path]) -> None:
    """Each replica is chosen per rank there, while all ranks compute all tokens: no all-to-all backend is given."""
    words = (
        f"--tp 8 --ep-size 8 --ep-num-redundant-experts 16 --ep-dispatch-algorithm {algorithm} --enable-eplb"
    )
    with pytest.raises(ValueError, match=f"--ep-dispatch-algorithm {algorithm} picks a different"):
        resolve(words.split(), models["Qwen3"])


ELASTIC = "--tp 8 --ep-size 8 --moe-a2a-backend mooncake --elastic-ep-backend mooncake --enable-eplb"


@pytest.mark.parametrize("hooked", [False, True])
def test_elastic_ranks_are_refused_in_isoloads_own_words(
    hooked: bool, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own assertion names its algorithms alone; other algorithms are resolved as without isoload."""
    error, message = AssertionError, "Elastic EP requires eplb_algorithm"
    if hooked:
        around = update_wrapper(
            partial(HOOKS["handle_elastic_ep"], parallel_hook.handle_elastic_ep),
            parallel_hook.handle_elastic_ep,
        )
        monkeypatch.setattr(parallel_hook, "handle_elastic_ep", around)
        error = ValueError
        message = "--eplb-algorithm isoload must come without --elastic-ep-backend mooncake, .* --eplb-algorithm auto"
    with pytest.raises(error, match=message):
        resolve([*ELASTIC.split(), "--eplb-algorithm", "isoload"], models["Qwen3"])
    resolve(ELASTIC.split(), models["Qwen3"])


@pytest.mark.slow
def test_the_launcher_ends_with_the_sentence(models: dict[str, Path]) -> None:
    """In the process that reads the options, where isoload attaches to nothing else."""
    words = [*ELASTIC.split(), "--device", "cuda", "--eplb-algorithm", "isoload"]
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(models["Qwen3"]), *words]
    path = os.pathsep.join([str(Path(__file__).parent / "harness"), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"ISOLOAD_SGLANG": "1", "PYTHONPATH": path}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode and ended.stderr.strip().splitlines()[-1].startswith(
        "ValueError: --eplb-algorithm isoload must come without --elastic-ep-backend mooncake"
    )


@pytest.mark.parametrize("model", ["DeepSeek-V3", "Qwen3", "gpt-oss"])
@pytest.mark.parametrize("nodes", TOPOLOGIES)
@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.label)
def test_printed_flags_start(candidate: Candidate, nodes: str, model: str, models: dict[str, Path]) -> None:
    """With the ranks, the slots and the all-to-all that advise has modelled."""
    if candidate.split in GATHERED and model != "DeepSeek-V3":
        return
    topology = TOPOLOGIES[nodes]
    place, start = flags("sglang", candidate, topology, 20, "trace.npz")
    assert place.startswith("isoload place ")
    words = launch_words(start)
    args = resolve(words[words.index("MODEL") + 1 :], models[model])
    assert args.moe_a2a_backend == "deepep" and args.init_expert_location == "placement.json"
    assert args.ep_num_redundant_experts == topology.num_ranks * candidate.more
    assert args.tp_size == args.ep_size == topology.num_ranks and args.nnodes == topology.num_nodes


def test_what_place_prints_starts(models: dict[str, Path]) -> None:
    """As printed, without an option for the dispatch: SGLang takes one that suits a start from a file."""
    placement = isoload.place(torch.ones(2, 128), isoload.Topology(8), 18)
    args = resolve(launch_words(launch_line(placement, "sglang", "placement.json", 8)), models["Qwen3"])
    assert args.init_expert_location == "placement.json" and args.ep_num_redundant_experts == 16
    assert args.tp_size == args.ep_size == 8
