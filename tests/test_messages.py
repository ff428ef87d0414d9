"""The messages that users meet first, word for word: what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.engines.settings import Settings
from isoload.engines.tables import EngineSizes, engine_topology
from isoload.placement.files import read_placement, write_placement
from isoload.traces import Trace
from support import measured_times
from support.documents import PLAIN

TRACE = str(Path(__file__).parent.parent / "examples" / "traces" / "gptoss20b_decode.npz")
TOPOLOGY = isoload.Topology(4)
LOADS = torch.ones(2, 8)


def placed(**options: Any) -> isoload.Placement:
    return isoload.place(LOADS, TOPOLOGY, slots_per_rank=3, **options)


def balancer(**options: Any) -> isoload.Balancer:
    return isoload.Balancer(placed(), 0, group=isoload.LocalGroup(4), **options)


def settings(**variables: str) -> Settings:
    return Settings.read({f"ISOLOAD_{name}": value for name, value in variables.items()})


def layer() -> isoload.MoE:
    dense = isoload.ExpertWeights.random(8, hidden=8, intermediate=4)
    return isoload.MoE(lambda rows: (torch.zeros(len(rows), 1).long(), torch.ones(len(rows), 1)), dense,
                       isoload.LocalTransport(4), placed())  # fmt: skip


SIZES = EngineSizes(58, 256, 32, 16, "--ep-num-redundant-experts {}", True)
PYTHON: dict[str, tuple[Callable[[], Any], str]] = {
    # placing
    "a placer's name": (
        lambda: placed(placer="ebpl"),
        "placer must be one of trivial, eplb, craft, scenario, grace, got 'ebpl'; did you mean eplb?",
    ),
    "too few slots": (
        lambda: isoload.place(LOADS, TOPOLOGY, slots_per_rank=1),
        "slots_per_rank must be at least 2 for 8 experts on 4 live ranks with 0 spare and 0 shared slots, got"
        " 1",
    ),
    "ranks that are no topology": (
        lambda: isoload.place(LOADS, "4", slots_per_rank=3),
        "topology must be a Topology or the number of ranks, got '4'",
    ),
    "nodes that do not divide the ranks": (
        lambda: isoload.Topology(num_ranks=8, ranks_per_node=3),
        "ranks_per_node must divide num_ranks=8, got 3",
    ),
    "speeds of too few ranks": (
        lambda: isoload.Topology(num_ranks=4, speeds=(1.0, 1.0)),
        "speeds must have one entry per rank (4), got 2",
    ),
    "a layer that is not there": (
        lambda: isoload.Balancer(placed(), 2, group=isoload.LocalGroup(4)),
        "layer must be in 0..1, got 2",
    ),
    "a placement with an expert missing": (
        lambda: isoload.Placement(torch.zeros(1, 4).int(), TOPOLOGY, 2),
        "slot_to_expert must hold every expert, layer 0 has no replica of expert 1",
    ),
    "an engine's file with spare slots": (
        lambda: write_placement(placed(spare_slots=1), "p.json", "sglang"),
        "placement must have no spare slots for an engine's file, got 1",
    ),
    "an engine's file without the model's layers": (
        lambda: write_placement(placed(), "p.json", "vllm"),
        "placement does not state which layers of the model its 2 rows are: pass --first-moe-layer N "
        "(DeepSeek-V3: 3) or --model config.json",
    ),
    "a file that is not there": (
        lambda: read_placement("none.json"),
        "[Errno 2] No such file or directory: 'none.json'",
    ),
    # policies
    "a policy's name": (
        lambda: balancer(policy="exat"),
        "policy must be one of none, static, even, dynamic, exact, exact_active, lp, lp_sampled, "
        "shared_local, waterfill, waterfill_sampled, joint, llep, llep_published, spill_cost, libra, "
        "libra_published, hedge, grace, got 'exat'; did you mean exact?",
    ),
    "a policy's option": (
        lambda: isoload.plan(torch.ones(4, 8).int(), placed(), 0, "exact", tolerancy=0.1),
        "option must be one of tolerance, budget, objective for policy exact, got 'tolerancy'; did you mean "
        "tolerance?",
    ),
    "an option's value": (
        lambda: isoload.plan(torch.ones(4, 8).int(), placed(), 0, "exact", tolerance=-1.0),
        "tolerance must be in 0..1000 (relative), got -1.0",
    ),
    "a policy that borrows without spare slots": (
        lambda: balancer(policy="llep"),
        "spare_slots must be at least 1 for policy llep, got 0",
    ),
    "a policy of shared experts without any": (
        lambda: balancer(policy="waterfill"),
        "placement must have shared experts for policy waterfill, got num_shared=0",
    ),
    "sums for a policy that needs sources": (
        lambda: isoload.plan(torch.ones(8).int(), placed(), 0, "exact", objective="local"),
        "loads must be per source rank, [4, 8], for policy exact, got the sum [8]",
    ),
    "a removed policy": (
        lambda: balancer(policy="lp_affine"),
        "policy lp_affine was removed: use policy lp_sampled with method affine, or policy lp",
    ),
    # Balancer and MoE
    "no group": (
        lambda: isoload.Balancer(placed(), 0),
        "group must be given for 4 ranks with tokens of their own: pass LocalGroup or "
        "CollectiveGroup.own(topology), got None",
    ),
    "a group of other ranks": (
        lambda: isoload.Balancer(placed(), 0, group=isoload.LocalGroup(2)),
        "placement must be for the group's 2 ranks, got 4",
    ),
    "own counts with another policy": (
        lambda: balancer(policy="lp", loads="own"),
        "policy must be exact with objective spread for loads='own', got LpPolicy(precision='float32', "
        "tolerance=None, iterations=None): pass loads='gathered' for other policies",
    ),
    "node counts on one node": (
        lambda: balancer(loads="node"),
        "loads must be gathered, because one node has all ranks, got 'node' with ranks_per_node=4",
    ),
    "one tensor for four ranks": (
        lambda: balancer()([torch.zeros(2, 2).long()]),
        "topk_ids must have one tensor per owned rank (4), got 1",
    ),
    "ids that are no matrix": (
        lambda: balancer()([torch.zeros(2).long()] * 4),
        "topk_ids must be [T, K], got [2]",
    ),
    "an id out of range": (
        lambda: balancer()([torch.full((2, 2), 8)] * 4),
        "topk_ids must be in -1..7, got 8",
    ),
    "another placement of other slots": (
        lambda: balancer().load(isoload.place(LOADS, TOPOLOGY, slots_per_rank=4)),
        "placement must have the layer's slots_per_rank=3, got 4",
    ),
    "rows of another width": (
        lambda: layer()([torch.zeros(2, 6)] * 4),
        "x must be [T, 8] torch.float32 as the experts, got [2, 6] torch.float32",
    ),
    "replicas that were not refreshed": (
        lambda: stale(),
        "replicas must be refreshed after the expert Parameters change: call refresh_replicas() on all ranks,"
        " got Parameters that changed since",
    ),
    # traces
    "counts of another shape": (
        lambda: Trace("t", num_experts=4, top_k=1, counts=np.ones((2, 4), int)),
        "counts must be [batches, L, E] and not empty, got shape [2, 4]",
    ),
    "a token that names an expert twice": (
        lambda: Trace("t", num_experts=4, topk_ids=np.zeros((1, 1, 2), np.int32)),
        "topk_ids must not name an expert twice, got [0, 0] (token 0, layer 0): "
        "read_routes(topk_ids, padding='repeat') of isoload.traces masks padding rows",
    ),
    "no trace at a pattern": (
        lambda: isoload.read_trace("nowhere/*.pt"),
        "nowhere/*.pt: no file matches this pattern",
    ),
    # engines at start
    "ISOLOAD_MODE": (
        lambda: settings(MODE="shadw"),
        "ISOLOAD_MODE must be one of on, off, shadow, got 'shadw'; did you mean shadow?",
    ),
    "shadow mode without output": (
        lambda: settings(MODE="shadow"),
        "ISOLOAD_MODE=shadow must come with ISOLOAD_RECORD or ISOLOAD_REPORT_SECONDS, got neither",
    ),
    "a record without shadow mode": (
        lambda: settings(RECORD="."),
        "ISOLOAD_RECORD must come with ISOLOAD_MODE=shadow, got 'on'",
    ),
    "ISOLOAD_POLICY with a borrowing policy": (
        lambda: settings(POLICY="llep"),
        "ISOLOAD_POLICY must not borrow weights without ISOLOAD_SPARE_SLOTS, got 'llep'",
    ),
    "ISOLOAD_LOADS": (
        lambda: settings(LOADS="all"),
        "ISOLOAD_LOADS must be one of gathered, own, node, got 'all'",
    ),
    "ISOLOAD_LOADS with another policy": (
        lambda: settings(LOADS="own", POLICY="lp"),
        "ISOLOAD_POLICY must be exact if ISOLOAD_LOADS is own: other policies need the counts of all ranks "
        "(ISOLOAD_LOADS=gathered), got 'lp'",
    ),
    "ISOLOAD_PLACER that needs tokens": (
        lambda: settings(PLACER="grace"),
        "ISOLOAD_PLACER must place by counts, because an engine records no per-token choices, got 'grace'",
    ),
    "ISOLOAD_REPORT_SECONDS": (
        lambda: settings(REPORT_SECONDS="often"),
        "ISOLOAD_REPORT_SECONDS must be a number of at least 0, got 'often'",
    ),
    "ISOLOAD_STRICT": (lambda: settings(STRICT="yes"), "ISOLOAD_STRICT must be 0 or 1, got 'yes'"),
    "ISOLOAD_REBALANCE": (
        lambda: settings(REBALANCE="gain=0.3"),
        "ISOLOAD_REBALANCE must be gain_ms=NUMBER,move_ms=NUMBER or move_ms=auto, got 'gain=0.3'",
    ),
    "a placement of other layers": (
        lambda: SIZES.check("--init-expert-location p.json", 61, 288),
        "--init-expert-location p.json has 61 layers but the model has 58: isoload place --model config.json "
        "makes a file of the model's layers",
    ),
    "a placement of other slots": (
        lambda: SIZES.check("--init-expert-location p.json", 58, 272),
        "--init-expert-location p.json has 272 slots in each layer but the engine has 288 (256 experts and 32"
        " redundant ones) on 16 expert-parallel ranks: pass --ep-num-redundant-experts 16, or a file made by "
        "isoload place --ranks 16 --slots-per-rank 18",
    ),
}
COMMANDS: dict[str, tuple[str, str]] = {
    "a command's name": ("repaly", "error: No such command 'repaly'. Did you mean 'replay'?"),
    "an option's name": (
        f"replay {TRACE} --rnaks 8",
        "error: No such option: --rnaks (Possible options: --ranks)",
    ),
    "a number out of range": (f"replay {TRACE} --ranks 0", "error: --ranks must be at least 1, got 0"),
    "a policy of replay": (
        f"replay {TRACE} --policies none,exat",
        "error: policy must be one of none, static, even, dynamic, exact, exact_active, lp, lp_sampled, "
        "shared_local, waterfill, waterfill_sampled, joint, llep, llep_published, spill_cost, libra, "
        "libra_published, hedge, grace, got 'exat'; did you mean exact?",
    ),
    "a calibration": (
        f"replay {TRACE} --calibrate firsthalf",
        "error: calibrate must be one of first-half, interleaved, all, leave-one-out, leave-cluster-out, got "
        "'firsthalf'; did you mean first-half?",
    ),
    "slots that cannot hold the experts": (
        f"place {TRACE} -o p.json --ranks 8 --slots-per-rank 3",
        "error: --slots-per-rank must be at least 4 for 32 experts on 8 live ranks with 0 spare and 0 shared "
        "slots, got 3",
    ),
    "a format": (
        f"place {TRACE} -o p.json --ranks 8 --format sg-lang",
        "error: format must be one of isoload, tensorrt-llm, sglang, vllm, vllm-list, vllm-ascend, got "
        "'sg-lang'; did you mean sglang?",
    ),
    "a GPU": (
        f"advise {TRACE} --gpu h20 --model gpt-oss-20b --ranks 8 --tokens-per-rank 64",
        "error: gpu must be one of b200, b300, gb200, gb300, h100, h200 (or --times FILE, which isoload "
        "measure writes), got 'h20'; did you mean h200?",
    ),
    "a model": (
        f"advise {TRACE} --gpu h100 --model gptoss --ranks 8 --tokens-per-rank 64",
        "error: model must be one of deepseek-v3, deepseek-v3.2, kimi-k2, qwen3-235b, qwen3-30b, glm-4.5, "
        "glm-4.6, glm-5, minimax-m2, qwen3-next-80b, gpt-oss-120b, gpt-oss-20b, or a config.json, got "
        "'gptoss'; did you mean gpt-oss-20b?",
    ),
    "no GPU and no times": (
        f"advise {TRACE} --model gpt-oss-20b --ranks 8 --tokens-per-rank 64",
        "error: gpu or times must be given, and not both: --gpu h100 for the shipped times of a GPU, or "
        "--times FILE for times of your GPUs from isoload measure",
    ),
    "no tokens": (
        f"advise {TRACE} --gpu h100 --model gpt-oss-20b --ranks 8",
        "error: --tokens-per-rank must be given, or --prefill-tokens and --decode-tokens for a server that "
        "runs both phases; isoload report takes them from a recording of shadow mode",
    ),
    "experts of another model": (
        f"advise {TRACE} --gpu h100 --model deepseek-v3 --ranks 8 --tokens-per-rank 64",
        "error: model must have the trace's 32 experts and top-4, deepseek-v3 has 256 and top-8",
    ),
    "a file that is not there": ("inspect none.npz", "error: none.npz: No such file or directory"),
    "a folder without shadow files": (
        f"report {Path(TRACE).parent}",
        "error: FOLDER: holds no file that shadow mode wrote (rank00000-*.npz)",
    ),
}


def stale() -> None:
    moe = layer()
    with torch.no_grad():
        next(moe.parameters()).add_(1)
    moe([torch.zeros(2, 8)] * 4)


def message_of(call: Callable[[], Any]) -> str:
    with pytest.raises((ValueError, RuntimeError, OSError)) as raised:
        call()
    return str(raised.value)


@pytest.mark.parametrize("situation", PYTHON)
def test_python(situation: str) -> None:
    call, message = PYTHON[situation]
    assert message_of(call) == message


@pytest.mark.parametrize("situation", COMMANDS)
def test_commands(situation: str) -> None:
    words, message = COMMANDS[situation]
    done = CliRunner().invoke(app, words.split(), env=PLAIN | {"COLUMNS": "400"})
    assert (
        done.exit_code,
        done.stderr.replace(TRACE, "TRACE").replace(str(Path(TRACE).parent), "FOLDER").strip(),
    ) == (2, message)


def test_times_of_other_ranks(tmp_path: Path) -> None:
    path = measured_times.written(tmp_path / "times.json")
    assert message_of(lambda: engine_topology(8, 1, str(path))) == (
        f"ISOLOAD_TIMES={path} has the speeds of 4 ranks but the engine has 8 expert-parallel ranks: run isoload "
        "measure on these ranks, or unset ISOLOAD_TIMES"
    )
