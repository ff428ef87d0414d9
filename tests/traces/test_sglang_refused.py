"""SGLang recorder dumps that are refused, a test per message."""

import numpy as np
import pytest
import torch

from isoload.traces import read_trace
from support.sglang_recording import LAYERS, Recording, without


@pytest.fixture
def recording(tmp_path):
    return Recording(seed=11, folder=tmp_path)


def edit(**changes):
    """Replaces keys of rank 1's dump, or of its first record."""

    def change(rank, dump):
        if rank == 1:
            for key, value in changes.items():
                inner = dump["records"][0] if key in dump["records"][0] else dump
                inner[key] = value(inner[key]) if callable(value) else value
        return dump

    return change


def without_tokens(records):
    return [{key: value for key, value in record.items() if "topk" not in key} for record in records]


def uncovered(slot_map):
    return torch.where((slot_map == 2) & (torch.arange(LAYERS)[:, None] == 4), 1, slot_map)


def without_a_replica(slot_map):
    slots = slot_map.clone()
    for row in slots:
        row[next(p for p in range(len(row)) if (row == row[p]).sum() > 1)] = -1
    return slots


def clear(dump_map):
    return torch.zeros_like(dump_map) - 1


PER_PASS_ERRORS = {
    "recorder_1.pt: has no records": edit(records=[]),
    "recorder_1.pt: is no SGLang recorder dump, its keys are records, last_physical_to_logical_map": edit(
        records=None
    ),
    "recorder_1.pt: is no SGLang recorder dump, it holds a list": lambda rank, dump: (
        [] if rank == 1 else dump
    ),
    "recorder_1.pt: records must hold topk_ids_of_layer or global_physical_count, not all do": edit(
        records=lambda records: [*records, {"forward_pass_id": 12}]
    ),
    "recorder_1.pt: last_physical_to_logical_map must be an integer tensor, got torch.float32": edit(
        last_physical_to_logical_map=lambda slot_map: slot_map.float()
    ),
    "recorder_1.pt: global_physical_count of forward pass 7 must have shape [5, 11], got [5, 12]": edit(
        last_physical_to_logical_map=lambda slot_map: slot_map[:, 1:]
    ),
    "recorder_1.pt: last_physical_to_logical_map must have an expert in each slot, or -1 (absent), got -2": edit(
        last_physical_to_logical_map=lambda slot_map: clear(slot_map) - 1
    ),
    "recorder_1.pt: must have no copies in absent slots (-1 in last_physical_to_logical_map), got some": edit(
        last_physical_to_logical_map=without_a_replica
    ),
    "recorder_1.pt: last_physical_to_logical_map must hold every expert, layer 4 lacks 2": edit(
        last_physical_to_logical_map=uncovered
    ),
    "recorder_1.pt: global_physical_count of forward pass 7 must have shape [5, 12], got [5, 13]": edit(
        global_physical_count=torch.ones(5, 13, dtype=torch.int32)
    ),
    "recorder_1.pt: global_physical_count of forward pass 7 must not be negative, got -1": edit(
        global_physical_count=clear
    ),
    "recorder_1.pt: forward_pass_id of a record must be an integer, got 'x'": edit(forward_pass_id="x"),
    "recorder_1.pt: rank of a record must be an integer, got None": edit(rank=None),
    "recorder_1.pt: forward pass 8 of rank 1 is recorded twice": edit(forward_pass_id=8),
    "recorder_0.pt: forward pass 8 has no record of ranks [0, 2]": without((8, 0), (8, 2)),
    "recorder_0.pt: no forward pass is recorded by all of the ranks [0, 1, 2]": without(
        (7, 0), (8, 0), (9, 1), (11, 2)
    ),
}
PER_TOKEN_ERRORS = {
    "recorder_1.pt: topk_ids_of_layer of forward pass 7 must have shape [5, any, any], got [4, 2, 8]": edit(
        topk_ids_of_layer=torch.zeros(4, 2, 8, dtype=torch.int32)
    ),
    "recorder_1.pt: topk_ids_of_layer of forward pass 7 must be in -1..11, got -1..12": edit(
        topk_ids_of_layer=lambda slots: torch.where(slots == slots.max(), 12, slots)
    ),
    "recorder_0.pt: the recording lacks the files of rank 1 of 3: add them, or --allow-missing-ranks "
    "(allow_missing_ranks=True) reads the remaining ranks": edit(records=without_tokens),
}


@pytest.mark.parametrize("message", [*PER_PASS_ERRORS, *PER_TOKEN_ERRORS])
def test_refused_records(recording, message):
    if message in PER_PASS_ERRORS:
        recording.save(recording.own_tokens, PER_PASS_ERRORS[message])
    else:
        recording.save(None, PER_TOKEN_ERRORS[message])
    with pytest.raises(ValueError) as raised:
        read_trace(recording.folder)
    assert str(raised.value) == f"{recording.folder}/{message}"


def numpy_inside(path):
    torch.save({"logical_count": np.ones(3)}, path)


def cut_short(path):
    torch.save({"logical_count": torch.ones(2000)}, path)
    path.write_bytes(path.read_bytes()[:-100])


STAT_ERRORS = {
    "is truncated or damaged": cut_short,
    "torch.load(weights_only=True) refuses it": numpy_inside,
    "is no SGLang recorder dump, its keys are a, 3": lambda p: torch.save({"a": 1, 3: 2}, p),
    "logical_count must be an integer tensor, got torch.float32": lambda p: torch.save(
        {"logical_count": torch.ones(2, 3)}, p
    ),
    "logical_count must be an integer tensor, got list": lambda p: torch.save({"logical_count": [1]}, p),
    "logical_count must have shape [any, any, any], got [3]": lambda p: torch.save(
        {"logical_count": torch.arange(3)}, p
    ),
    "holds no routed token": lambda p: torch.save(
        {"logical_count": torch.zeros(4, 3, 2, dtype=torch.int32)}, p
    ),
    "counts must not be negative, got -1": lambda p: torch.save({"logical_count": -torch.eye(3).long()}, p),
}


@pytest.mark.parametrize("message", STAT_ERRORS)
def test_refused_files(tmp_path, message):
    path = tmp_path / "dump.pt"
    STAT_ERRORS[message](path)
    with pytest.raises(ValueError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}: {message}")


def test_stat_dumps_of_different_models(tmp_path):
    for name, experts in (("a", 4), ("b", 5)):
        torch.save({"logical_count": torch.ones(2, 3, experts, dtype=torch.int32)}, tmp_path / f"{name}.pt")
    with pytest.raises(ValueError, match="num_experts must agree in all traces, a has 4, b 5"):
        read_trace(tmp_path)


def test_a_recording_of_idle_ranks(recording):
    recording.slots = {key: slots[:, :0] for key, slots in recording.slots.items()}
    for view in (None, recording.own_tokens):
        recording.save(view)
        with pytest.raises(ValueError, match=r"recorder_0\.pt: holds no routed token"):
            read_trace(recording.folder)
