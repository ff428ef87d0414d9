"""What `place`, `convert` and `doctor FILE` print so that an engine starts from a placement file."""

import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.placement.engine_files import ENGINES, launch_line
from isoload.placement.files import FORMATS, format_of
from isoload.placement.placement import Placement
from isoload.traces import Identity, Trace, write_trace
from support.documents import PLAIN

ROWS = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1], [3, 1, 2, 0, 0, 4, 5, 2]], dtype=torch.int32)
LAYERS = (3, 4)


def made(**given):
    return Placement(
        ROWS, isoload.Topology(2), 6, layer_ids=LAYERS, identity=Identity("model", LAYERS, "tiny"), **given
    )


VLLM = "--tensor-parallel-size 2 --enable-expert-parallel --enable-eplb --eplb-config '{\"num_redundant_experts\": 2}'"
LINES = {
    "isoload": f"ISOLOAD_PLACEMENT=FILE vllm serve MODEL {VLLM}",
    "vllm": f"ISOLOAD_PLACEMENT=FILE vllm serve MODEL {VLLM}",
    "vllm-list": f"ISOLOAD_PLACEMENT=FILE vllm serve MODEL {VLLM}",
    "sglang": "--tp 2 --ep-size 2 --ep-num-redundant-experts 2 --init-expert-location FILE",
    "vllm-ascend": "--tensor-parallel-size 2 --enable-expert-parallel --additional-config "
    '\'{"eplb_config": {"expert_map_path": "FILE"}}\'',
    "tensorrt-llm": "moe_config: {load_balancer: FILE}",
}


@pytest.mark.parametrize("name", FORMATS)
def test_convert_and_doctor_print_the_same_line(name, tmp_path):
    """Of files that do not state their ranks doctor leaves out the options of ranks."""
    isoload.write_placement(made(), tmp_path / "own.json")
    file = str(tmp_path / "made.json")
    run = CliRunner()
    done = run.invoke(app, ["convert", str(tmp_path / "own.json"), "-o", file, "--format", name], env=PLAIN)
    assert done.exit_code == 0, done.output
    line = f"Start {ENGINES[name]}: {LINES[name].replace('FILE', file)}"
    assert line in done.stdout.splitlines(), done.stdout
    told = run.invoke(app, ["doctor", file], env=PLAIN).stdout.splitlines()
    if name not in ("isoload", "vllm-ascend"):
        line = line.replace("--tp 2 --ep-size 2 ", "").replace("--tensor-parallel-size 2 ", "")
    assert line in told
    assert format_of(file) == name
    items = json.loads(run.invoke(app, ["doctor", file, "--json", "-"], env=PLAIN).stdout)
    assert [item["detail"] for item in items if item["name"] == f"Start {ENGINES[name]}"] == [
        line.split(": ", 1)[1]
    ]


def test_place_prints_it_and_json_has_it(tmp_path):
    trace, file = tmp_path / "trace.npz", tmp_path / "a file.json"
    counts = torch.randint(1, 99, (4, 2, 6), generator=torch.Generator().manual_seed(0))
    write_trace(Trace("t", 6, 2, counts=counts.numpy(), layer_ids=LAYERS, identity=Identity("model")), trace)
    words = ["place", str(trace), "-o", str(file), "--ranks", "2", "--slots-per-rank", "4"]
    done = CliRunner().invoke(app, words, env=PLAIN)
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("Start vLLM: ")]
    typed = shlex.split(line.removeprefix("Start vLLM: "))
    assert typed[0] == f"ISOLOAD_PLACEMENT={file}" and json.loads(typed[-1]) == {"num_redundant_experts": 2}
    done = CliRunner().invoke(app, [*words, "--force", "--json", "-"], env=PLAIN)
    start = json.loads(done.stdout)["start"]
    assert start == {"engine": "vLLM", "type": line.removeprefix("Start vLLM: ")}
    words[words.index("-o") + 1] = "/dev/stdout"
    assert "Start vLLM" not in CliRunner().invoke(app, words, env=PLAIN).output, "there is no file to name"


def test_layers_that_are_not_stated_come_first():
    placement = Placement(ROWS, isoload.Topology(2), 6)
    assert launch_line(placement, "isoload", "p.json", 2).startswith(
        "not before the file states which layers"
    )


def test_no_engine_starts_from_slots_that_it_has_no_word_for():
    rows = torch.tensor([[0, 1, 2, -1, 3, 4, 5, -1]], dtype=torch.int32)
    placement = Placement(rows, isoload.Topology(2), 6, spare_slots=1, layer_ids=(0,))
    assert launch_line(placement, "isoload", "p.json", 2) == ""
