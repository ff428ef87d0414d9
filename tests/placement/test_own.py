"""isoload's own placement files: every field comes back, and what is refused names file, key and layer."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import isoload
from isoload.placement import files as own


def made(num_shared=1, **fields):
    topology = isoload.Topology(
        4, 2, speeds=(1, 1, 2, 0.5), alive=(True, True, False, True), bandwidths=(300, 50.5)
    )
    counts = np.random.default_rng(0).integers(1, 99, (3, 2, 7))
    placement = isoload.place(counts, topology, 6, "scenario", spare_slots=1, num_shared=num_shared)
    return replace(placement, **fields)


def same(a, b):
    assert own.to_json(a) == own.to_json(b)
    assert a.topology == b.topology and a.provenance == b.provenance


def test_every_field_comes_back(tmp_path):
    weight = torch.rand(2, 24, generator=torch.Generator().manual_seed(0))
    ragged = made(layer_ids=(3, 9), replica_weight=weight)
    home = ragged.home_slot.clone()
    replicated = next(e for e in range(7) if (ragged.slot_to_expert[0] == e).sum() > 1)
    home[0, replicated] = (ragged.slot_to_expert[0] == replicated).nonzero()[-1]
    ragged = replace(ragged, home_slot=home)
    path = tmp_path / "plan.json"
    isoload.write_placement(ragged, path)
    found = isoload.read_placement(path)
    same(found, ragged)
    assert torch.equal(found.replica_weight, weight) and found.provenance["placer"] == "scenario"
    assert set(json.loads(path.read_text())) == own.KEYS


def test_a_topology_of_the_same_ranks_replaces_the_files(tmp_path):
    isoload.write_placement(made(num_shared=0), tmp_path / "plan.json")
    other = isoload.Topology(4)
    assert isoload.read_placement(tmp_path / "plan.json", other).topology == other
    with pytest.raises(ValueError, match=r"plan.json: num_ranks must be 5, got 4$"):
        isoload.read_placement(tmp_path / "plan.json", isoload.Topology(5))
    dead = isoload.Topology(4, alive=(False, True, True, True))
    with pytest.raises(ValueError, match=r"plan.json: slot_to_expert must be -1 on ranks that are not alive"):
        isoload.read_placement(tmp_path / "plan.json", dead)


def test_unknown_formats_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"^format must be one of isoload.*, got 'yaml'$"):
        isoload.write_placement(made(), tmp_path / "plan.json", "yaml")
    with pytest.raises(ValueError, match="^Out of range float values"):
        isoload.write_placement(made(provenance={"x": float("nan")}), tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def without(key):
    return lambda content: content.pop(key)


def with_value(key, value):
    return lambda content: content.update({key: value})


def topology(key, value):
    return lambda content: content["topology"].update({key: value})


ROWS = [[0, 1, -1], [0, 1]]
REFUSED = {
    "keys must have home_slot, got ['format', ": without("home_slot"),
    "keys must be format, home_slot, ": with_value("physical_to_logical_map", []),
    "version 3 is read by isoload 0.1.0 or newer, this isoload 0.1.0 reads versions 1 and 2: install the": (
        with_value("version", 3)
    ),
    "version must be 1 or 2, got '2'": with_value("version", "2"),
    "num_experts must be an integer, got 8.0": with_value("num_experts", 8.0),
    "spare_slots must be an integer, got True": with_value("spare_slots", True),
    "provenance must be an object, got []": with_value("provenance", []),
    "layer_ids must be a list of integers from 0 on, got [0, -1]": with_value("layer_ids", [0, -1]),
    "layer_ids must have 2 entries, got 0": with_value("layer_ids", []),
    "layer_ids must be distinct, got [4, 4]": with_value("layer_ids", [4, 4]),
    "slot_to_expert must be a list of layers, got 5": with_value("slot_to_expert", 5),
    "slot_to_expert must have 3 entries in every layer, layer 1 has 2": with_value("slot_to_expert", ROWS),
    "slot_to_expert must be integers from -1 on, layer 0 has '1'": with_value("slot_to_expert", [["1"]] * 2),
    "slot_to_expert must be integers from -1 on, layer 0 has 4294967296": with_value(
        "slot_to_expert", [[2**32]] * 2
    ),
    "slot_to_expert must hold every expert, layer 0 has no replica": with_value(
        "slot_to_expert", [[0] * 24] * 2
    ),
    "home_slot must be [2, 8], got [2, 1]": with_value("home_slot", [[0], [0]]),
    "num_experts must be at most the 24 slots of a layer, got 134217728": with_value("num_experts", 2**27),
    "topology speeds must be null or a list of numbers, got [1000": topology("speeds", [10**400] * 4),
    "topology bandwidths must be null or a list of numbers, got [1000": topology("bandwidths", [10**400] * 2),
    "replica_weight must have 24 numbers in every layer, not so layer 0": with_value(
        "replica_weight", [[10**400] * 24] * 2
    ),
    "topology must be an object, got None": with_value("topology", None),
    "topology must have alive, got ": lambda content: content["topology"].pop("alive"),
    "topology num_ranks must be an integer from 1 on, got '4'": topology("num_ranks", "4"),
    "topology alive must be null or a list of true or false, got [1, 1]": topology("alive", [1, 1]),
    "ranks_per_node must divide num_ranks=4, got 3": topology("ranks_per_node", 3),
    "replica_weight must be null or a list of layers, got 1": with_value("replica_weight", 1),
    "replica_weight must have 1 numbers in every layer, not so layer 1": with_value(
        "replica_weight", [[1], ["a"]]
    ),
    "replica_weight must be finite and not negative": with_value("replica_weight", [[-1] * 24] * 2),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused_fields(tmp_path, message):
    content = own.to_json(made())
    REFUSED[message](content)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: {message}")):
        isoload.read_placement(path)


TEXTS = {
    "": "is not JSON (",
    "\xff": "is not text (",
    '{"format": "isoload-placement", ': "is not JSON (",
    '{"a": 1, "a": 2}': "key 'a' must be there once",
    '{"format": NaN}': "NaN is no number of JSON",
    "[" * 100000: "is nested too deep",
    '{"physical": []}': "is no placement file; formats are isoload, tensorrt-llm",
    "[]": "is no placement file; formats are isoload, tensorrt-llm",
}


@pytest.mark.parametrize("text", TEXTS)
def test_refused_files(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: {TEXTS[text]}")):
        isoload.read_placement(path)


def test_cut_files_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    isoload.write_placement(made(), path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 2, max(1, len(whole) // 40)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            isoload.read_placement(path)
    with pytest.raises(ValueError, match="is no regular file"):
        isoload.read_placement(tmp_path)
    with pytest.raises(FileNotFoundError):
        isoload.read_placement(tmp_path / "missing.json")
