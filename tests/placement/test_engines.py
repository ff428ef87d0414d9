"""Engines' placement files: what they hold, there and back, and what they cannot hold or must not."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import isoload
from isoload.cli.app import app
from isoload.placement.files import FORMATS

ENGINES = [name for name in FORMATS if name != "isoload"]
TOPOLOGY = isoload.Topology(4)
COUNTS = np.random.default_rng(0).integers(1, 99, (2, 6))


def made(**arguments):
    trace = isoload.traces.Trace("t", 6, counts=COUNTS[None], layer_ids=(1, 3))
    placement = isoload.place(trace, TOPOLOGY, **{"slots_per_rank": 3, "placer": "scenario", **arguments})
    return placement.with_moe_layers(moe_layers=(1, 3))


@pytest.mark.parametrize("name", ENGINES)
def test_slots_come_back(name, tmp_path):
    placement = made(num_shared=1, slots_per_rank=4)
    isoload.write_placement(placement, tmp_path / "p.json", name)
    found = isoload.read_placement(tmp_path / "p.json", TOPOLOGY)
    routed = placement.slot_to_expert.view(2, 4, 4)[:, :, :3].reshape(2, 12)
    rows = [1, 3] if name == "sglang" else [0, 1]
    assert found.layer_ids == ((1, 3) if name == "tensorrt-llm" else tuple(range(len(found.layer_ids))))
    assert torch.equal(found.slot_to_expert[rows], routed)
    assert found.num_experts == 6 and found.num_shared == 0
    assert (tmp_path / "p.json").read_text().count("\n") == (5 if name == "tensorrt-llm" else 1)


def test_sglang_has_every_layer_and_no_other_key(tmp_path):
    """Its dense layers hold every expert, and any other key would be an unknown argument."""
    isoload.write_placement(made(), tmp_path / "p.json", "sglang")
    content = json.loads((tmp_path / "p.json").read_text())
    assert list(content) == ["physical_to_logical_map"] and len(content["physical_to_logical_map"]) == 4
    for dense in (0, 2):
        assert content["physical_to_logical_map"][dense] == [i % 6 for i in range(12)]


def test_vllm_has_its_record(tmp_path):
    isoload.write_placement(made(), tmp_path / "p", "vllm")
    content = json.loads((tmp_path / "p").read_text())
    slots = made().slot_to_expert.tolist()
    assert content == {
        "record_type": "eplb_initial_mapping", "version": 1, "num_redundant_experts": 6, "num_slots": 12,
        "initial_global_assignments": {"0": slots[0], "1": slots[1]},
    }  # fmt: skip
    isoload.write_placement(made(), tmp_path / "p", "vllm-list")
    assert json.loads((tmp_path / "p").read_text()) == slots


def test_vllm_ascend_has_its_devices(tmp_path):
    isoload.write_placement(made(), tmp_path / "p", "vllm-ascend")
    content = json.loads((tmp_path / "p").read_text())
    first = made().slot_to_expert[0].tolist()
    assert content["moe_layer_count"] == 2 and [layer["layer_id"] for layer in content["layer_list"]] == [
        0,
        1,
    ]
    devices = content["layer_list"][0]["device_list"]
    assert devices == [{"device_id": r, "device_expert": first[3 * r : 3 * r + 3]} for r in range(4)]
    assert isoload.read_placement(tmp_path / "p").topology == TOPOLOGY, "it says how many ranks there are"


def test_tensorrt_llm_has_three_keys_and_a_line_per_layer(tmp_path):
    isoload.write_placement(made(), tmp_path / "p", "tensorrt-llm")
    first, second = made().slot_to_expert.tolist()
    text = f"num_slots: 12\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n  1: {first}\n  3: {second}\n"
    assert (tmp_path / "p").read_text() == text
    read = pytest.importorskip("yaml").safe_load(
        text
    )  # with which TensorRT-LLM reads, and then takes these types
    assert read == {
        "num_slots": 12,
        "layer_updates_per_iter": 0,
        "initial_global_assignments": {1: first, 3: second},
    }


YAML = "num_slots: 4\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n"
WRONG_YAML = {
    "line 4 must be a key and a number, or a layer and its list, got '  3:'": YAML + "  3:\n  - 0\n",
    "line 1 must be a key and a number, or a layer and its list, got 'num_slots: !!python": "num_slots: !!python/x 4",
    "line 2: num_slots must be there once": "num_slots: 4\nnum_slots: 4\n",
    "line 5: 3 must be there once": YAML + "  3: [0, 1, 2, 3]\n  3: [0, 1, 2, 3]\n",
    "line 4 must have a list of integers, got '[0, 1, ,]'": YAML + "  3: [0, 1, ,]\n",
    "keys must have layer_updates_per_iter": "num_slots: 4\ninitial_global_assignments:\n  3: [0, 1, 2, 3]\n",
    "keys must be initial_global_assignments, layer_updates_per_iter, num_slots, got also 'x'": YAML
    + "  3: [0, 1]\nx: 1\n",
    "num_slots must be 3, got 4": YAML + "  3: [0, 1, 2]\n",
    "is no placement file": "num_slots: 4\n",
}


@pytest.mark.parametrize("message", WRONG_YAML)
def test_refused_yaml(message, tmp_path):
    (tmp_path / "p").write_text(WRONG_YAML[message])
    with pytest.raises(ValueError, match="^" + re.escape(f"{tmp_path}/p: {message}")):
        isoload.read_placement(tmp_path / "p", TOPOLOGY)


CANNOT = {
    "placement must have no spare slots for an engine's file, got 1": lambda: made(spare_slots=1),
    "placement must have all ranks alive for an engine's file, got 1 dead": lambda: isoload.place(
        COUNTS, isoload.Topology(4, alive=(True, True, False, True)), 3
    ),
    "placement must have no absent slots for an engine's file, layer 3 is ragged": lambda: made(
        slots_per_rank=None, placer="craft", replicas=1
    ),
}


@pytest.mark.parametrize("message", CANNOT)
@pytest.mark.parametrize("name", ENGINES)
def test_what_an_engines_file_cannot_hold(message, name, tmp_path):
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.write_placement(CANNOT[message](), tmp_path / "p.json", name)
    assert list(tmp_path.iterdir()) == []


def test_vllm_ascend_refuses_an_expert_twice_on_a_rank(tmp_path):
    twice = isoload.Placement(torch.tensor([[0, 0, 1, 2]]), isoload.Topology(2), 3).with_moe_layers(7)
    message = "^an expert must be once on a rank for vllm-ascend, which layer 0, rank 0 violates$"
    with pytest.raises(ValueError, match=message):
        isoload.write_placement(twice, tmp_path / "p", "vllm-ascend")


def ascend(**changes):
    layer = {"layer_id": 0, "device_count": 1, "device_list": [{"device_id": 0, "device_expert": [0, 1]}]}
    return {"moe_layer_count": 1, "layer_list": [layer | changes]}


VLLM = {
    "record_type": "eplb_initial_mapping", "version": 1, "num_redundant_experts": 2, "num_slots": 4,
    "initial_global_assignments": {"0": [0, 1, 0, 1]},
}  # fmt: skip
WRONG = [
    ("keys must be physical_to_logical_map, got also 'rank'", {"physical_to_logical_map": [[0]], "rank": 0}),
    ("physical_to_logical_map must be a list of layers, got 3", {"physical_to_logical_map": 3}),
    ("physical_to_logical_map must have a multiple of 4 (ranks) slots", {"physical_to_logical_map": [[0, 1]]}),
    ("slot_to_expert must hold every expert, layer 0 has no replica", {"physical_to_logical_map": [[0, 2, 2, 0]]}),
    ("num_experts must be at most the 4 slots of a layer, got 134217728",
     {"physical_to_logical_map": [[0, 1, 2, 2**27 - 1]]}),
    ("version must be 1, got 2", VLLM | {"version": 2}),
    ("num_slots must be 4, got 5", VLLM | {"num_slots": 5}),
    ("num_redundant_experts must be 2, got 0", VLLM | {"num_redundant_experts": 0}),
    ("initial_global_assignments must have layers 0, 1, ..., got [3]",
     VLLM | {"initial_global_assignments": {"3": [0, 1, 0, 1]}}),
    ("initial_global_assignments must have layer numbers as keys, got 'x'",
     VLLM | {"initial_global_assignments": {"x": [0, 1, 0, 1]}}),
    ("initial_global_assignments must be an object of layers, got []", VLLM | {"initial_global_assignments": []}),
    ("the list must have 4 entries in every layer, layer 1 has 3", [[0, 1, 0, 1], [0, 1, 0]]),
    ("layer_list must have moe_layer_count=2 layers", ascend() | {"moe_layer_count": 2}),
    ("device_list must be a list of devices, not so in layer 0", ascend(device_list=[])),
    ("layer_id and device_count must be 0 and 1, not so in layer 0", ascend(layer_id=1)),
    ("device_id must be 0, 1, ... in layer 0", ascend(device_list=[{"device_id": 1, "device_expert": [0]}])),
    ("device_expert must be lists of one length, not so in layer 0", ascend(device_list=[{"device_id": 0}])),
    ("device_count must be 4, got 1", ascend()),
]  # fmt: skip


@pytest.mark.parametrize(("message", "content"), WRONG)
def test_refused_files(message, content, tmp_path):
    (tmp_path / "p").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="^" + re.escape(f"{tmp_path}/p: {message}")):
        isoload.read_placement(tmp_path / "p", TOPOLOGY)


def test_ranks_must_be_said_where_the_file_does_not(tmp_path):
    isoload.write_placement(made(), tmp_path / "p.json", "sglang")
    with pytest.raises(ValueError, match="p.json: topology must be given: SGLang's file does not state"):
        isoload.read_placement(tmp_path / "p.json")


@pytest.mark.parametrize("name", ["p.pt", "p.yaml", "p"])
def test_names_that_sglang_does_not_open(name, tmp_path):
    """It takes a .pt for a torch file, and what is no .json either for the JSON itself."""
    message = f"path must end in .json for format sglang, got {str(tmp_path / name)!r}"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.write_placement(made(), tmp_path / name, "sglang")
    assert list(tmp_path.iterdir()) == []


def test_convert(tmp_path):
    isoload.write_placement(made(), tmp_path / "own")

    def run(*args):
        return CliRunner().invoke(app, ["convert", *map(str, args)])

    p, q = tmp_path / "p.json", tmp_path / "q"
    done = run(tmp_path / "own", "-o", p, "--format", "sglang")
    assert "".join(done.stdout.split()) == "".join(
        f"{p}: 2 layers, 6 experts, 3 slots on each of 4 ranks, format sglang Start SGLang: --tp 4 --ep-size 4 "
        f"--ep-num-redundant-experts 6 --init-expert-location {p}".split()
    )
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 4, "interleave_moe_layer_step": 2}')
    back = run(p, "-o", q, "--format", "vllm", "--ranks", 4, "--model", tmp_path / "config.json")
    assert back.exit_code == 0, back.stderr
    found = isoload.read_placement(q, TOPOLOGY)
    assert torch.equal(found.slot_to_expert, made().slot_to_expert)
    for how, message in (
        ([p], f"{p}: --ranks must be given: SGLang's file does not state the number of ranks"),
        ([tmp_path / "own", "--ranks", 8], f"ranks must be 4 with placement {tmp_path / 'own'}, got 8"),
    ):
        failed = run(*how, "-o", tmp_path / "r", "--format", "vllm")
        assert (failed.exit_code, failed.stderr) == (2, f"error: {message}\n")
    assert not (tmp_path / "r").exists()
