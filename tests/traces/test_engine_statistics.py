"""Expert statistics of TensorRT-LLM, vLLM and vllm-ascend: what comes back, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import sys

import numpy as np
import pytest
import torch

import isoload
from isoload.traces import read_trace

safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")

STEPS, LAYERS, EXPERTS, SLOTS, RANKS = 4, 3, 6, 8, 2
LAYER_IDS = (3, 4, 7)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 50, shape)


def write_ranks(folder, counts, change=lambda rank, tensors: tensors, meta=None):
    """TensorRT-LLM's folder of counts [ranks, iterations, L, E], from iteration 50 on."""
    folder.mkdir(exist_ok=True)
    meta = {"num_experts": EXPERTS, "num_experts_per_token": 2} if meta is None else meta
    (folder / "meta_info.json").write_text(meta if isinstance(meta, str) else json.dumps(meta))
    for rank, own in enumerate(counts):
        tensors = {
            f"{50 + i}_{layer}": own[i, at] for i in range(len(own)) for at, layer in enumerate(LAYER_IDS)
        }
        safetensors.save_file(change(rank, tensors), folder / f"rank{rank}.safetensors")
    return folder


def test_tensorrt_llm_adds_up_its_ranks(tmp_path):
    counts = drawn(RANKS, STEPS, LAYERS, EXPERTS)
    counts[:, 2] = 0
    folder = write_ranks(tmp_path / "stats", counts)
    safetensors.save_file({"50_3": drawn(9, 2)}, folder / "rank0_raw.safetensors")
    trace = read_trace(folder)
    np.testing.assert_array_equal(trace.counts, counts.sum(0)[[0, 1, 3]])
    assert (trace.name, trace.layer_ids, trace.top_k, trace.num_experts) == ("stats", LAYER_IDS, 2, EXPERTS)
    assert trace.provenance["empty_iterations_dropped"] == 1 and trace.provenance["ranks"] == [0, 1]
    placement = isoload.place(trace, isoload.Topology(2), 4, "scenario")
    assert placement.layer_ids == LAYER_IDS


def test_ranks_of_one_view_count_once(tmp_path):
    counts = drawn(3, STEPS, LAYERS, EXPERTS)
    counts[2] = counts[0]
    trace = read_trace(write_ranks(tmp_path / "stats", counts))
    np.testing.assert_array_equal(trace.counts, counts[:2].sum(0))
    assert trace.provenance["ranks_with_a_shared_view"] == [2]


def edit(key, value, rank=1):
    """Rank 1's tensors with one of them changed; None: without it."""

    def change(where, tensors):
        if where == rank:
            tensors = {k: v for k, v in tensors.items() if k != key}
            tensors |= {} if value is None else {key: value}
        return tensors

    return change


TENSORRT_ERRORS = [
    (
        "rank1.safetensors: 51_4 must be integers [6] (num_experts), got float32 [6]",
        edit("51_4", np.ones(6, "f4")),
    ),
    (
        "rank1.safetensors: 51_4 must be integers [6] (num_experts), got int64 [5]",
        edit("51_4", np.ones(5, int)),
    ),
    ("rank1.safetensors: 51_4 must be in 0..2^53-1, got -1..-1", edit("51_4", -np.ones(6, int))),
    (
        "rank1.safetensors: keys must be <iteration>_<layer>, got '51_4_raw'",
        edit("51_4_raw", np.ones(6, int)),
    ),
    ("rank1.safetensors: iteration 51 of layer 4 must be there once", edit("051_4", np.ones(6, int))),
    (
        "rank1.safetensors: must have every layer in every iteration, it lacks iteration 51 of layer 4",
        edit("51_4", None),
    ),
    (
        "rank1.safetensors: must have every layer in every iteration, it lacks iteration 54 of layer 4",
        edit("54_3", np.ones(6, int)),
    ),
    (
        "rank0.safetensors: must have every layer in every iteration, it lacks iteration 51 of layer 4",
        edit("51_4", None, rank=0),
    ),
    ("rank0.safetensors: holds no tensor", lambda rank, tensors: {}),
    ("stats: holds no iteration with copies", lambda rank, tensors: {k: v * 0 for k, v in tensors.items()}),
]


@pytest.mark.parametrize(("message", "change"), TENSORRT_ERRORS)
def test_what_tensorrt_llm_s_reader_refuses(tmp_path, message, change):
    folder = write_ranks(tmp_path / "stats", drawn(RANKS, STEPS, LAYERS, EXPERTS), change)
    with pytest.raises(ValueError) as raised:
        read_trace(folder)
    assert str(raised.value).endswith(message)


META_ERRORS = [
    ("meta_info.json: num_experts must be an integer in 1..65536, got None", {}),
    ("meta_info.json: num_experts must be an integer in 1..65536, got True", {"num_experts": True}),
    (
        "meta_info.json: num_experts_per_token must be an integer in 1..6, got 7",
        {"num_experts": 6, "num_experts_per_token": 7},
    ),
    ("meta_info.json: must hold one JSON object, got [1]", "[1]"),
    ("meta_info.json: is not JSON (Expecting value: line 1 column 1 (char 0))", ""),
    ("meta_info.json: is nested too deep", "[" * 100_000),
]


@pytest.mark.parametrize(("message", "meta"), META_ERRORS)
def test_what_is_refused_of_meta_info(tmp_path, message, meta):
    folder = write_ranks(tmp_path / "stats", drawn(RANKS, STEPS, LAYERS, EXPERTS), meta=meta)
    with pytest.raises(ValueError) as raised:
        read_trace(folder)
    assert str(raised.value).endswith(message)


def cut(folder):
    path = folder / "rank1.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def long_header(folder):
    (folder / "rank1.safetensors").write_bytes((2**62).to_bytes(8, "little") + b"{}")


def half_floats(folder):
    torch_files = pytest.importorskip("safetensors.torch")
    torch_files.save_file({"50_3": torch.ones(6, dtype=torch.bfloat16)}, folder / "rank1.safetensors")


@pytest.mark.parametrize(
    ("message", "damage"),
    [
        ("rank1.safetensors: is no whole safetensors file (", cut),
        ("rank1.safetensors: is no whole safetensors file (", long_header),
        ("rank1.safetensors: ", half_floats),
        (
            "stats: the recording lacks the files of rank 0 of 2: add them, or --allow-missing-ranks",
            lambda folder: (folder / "rank0.safetensors").unlink(),
        ),
        (
            "rank2.safetensors: is no regular file",
            lambda folder: os.mkfifo(folder / "rank2.safetensors"),
        ),
        ("meta_info.json: is no regular file", lambda folder: swap_for_folder(folder / "meta_info.json")),
    ],
)
def test_damaged_folders_are_refused(tmp_path, message, damage):
    folder = write_ranks(tmp_path / "stats", drawn(RANKS, STEPS, LAYERS, EXPERTS))
    damage(folder)
    with pytest.raises(ValueError) as raised:
        read_trace(folder)
    assert message in str(raised.value)


def swap_for_folder(path):
    path.unlink()
    path.mkdir()


def test_a_folder_above_the_limit_and_a_missing_library(tmp_path, monkeypatch):
    folder = write_ranks(tmp_path / "stats", drawn(RANKS, STEPS, LAYERS, EXPERTS))
    with pytest.raises(ValueError, match="stats: unfolds to .* above the limit"):
        read_trace(folder, max_bytes=1000)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"need safetensors: pip install 'isoload\[plan\]'"):
        read_trace(folder)


def vllm_lines(meta=True, **changes):
    """A meta record and STEPS records of drawn loads on drawn maps; and the counts that they mean."""
    rng = np.random.default_rng(3)
    counts, records = np.zeros((STEPS, LAYERS, EXPERTS), int), []
    if meta:
        records.append(
            {"record_type": "eplb_load_meta", "version": 1, "num_redundant_experts": SLOTS - EXPERTS}
        )
    for step in range(STEPS):
        maps = np.stack([rng.permutation([*range(EXPERTS), 0, 5]) for _ in range(LAYERS)])
        load = rng.integers(0, 90, (LAYERS, SLOTS))
        for layer, slot in np.ndindex(LAYERS, SLOTS):
            counts[step, layer, maps[layer, slot]] += load[layer, slot]
        records.append(
            {
                "record_type": "eplb_load_stats",
                "version": 1,
                "step": 10 * step,
                "num_ranks": 2,
                "expert_load": load.tolist(),
                "p2l_map": maps.tolist(),
            }
        )
    for key, value in changes.items():
        records[-1][key] = value(records[-1][key]) if callable(value) else value
    return records, counts


def write_lines(path, records):
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return path


@pytest.mark.parametrize("meta", [True, False])
def test_vllm_s_slots_become_experts(tmp_path, meta):
    records, counts = vllm_lines(meta)
    trace = read_trace(write_lines(tmp_path / "run.jsonl", records))
    np.testing.assert_array_equal(trace.counts, counts)
    assert trace.name == "run" and trace.layer_ids == (0, 1, 2)


def test_vllm_s_empty_steps_are_dropped(tmp_path):
    records, counts = vllm_lines(expert_load=[[0] * SLOTS] * LAYERS)
    trace = read_trace(write_lines(tmp_path / "run.jsonl", records))
    np.testing.assert_array_equal(trace.counts, counts[:-1])
    assert trace.provenance["empty_steps_dropped"] == 1


def changed(at, value):
    def change(rows):
        rows = [list(row) for row in rows]
        rows[at[0]][at[1]] = value
        return rows

    return change


VLLM_ERRORS = [
    ("version must be 1, got 2", {"version": 2}),
    ("step must be an integer, got None", {"step": None}),
    ("step 20 must be there once in a run", {"step": 20}),
    ("record_type must be eplb_load_meta or eplb_load_stats, got 'other'", {"record_type": "other"}),
    ("num_redundant_experts must be an integer from 0 on, got None", {"record_type": "eplb_load_meta"}),
    ("expert_load must be integers from 0 on, layer 1 has -4", {"expert_load": changed((1, 2), -4)}),
    ("expert_load must be integers from 0 on, layer 2 has 1.5", {"expert_load": changed((2, 2), 1.5)}),
    ("expert_load must be integers from 0 on, layer 2 has True", {"expert_load": changed((2, 2), True)}),
    ("expert_load must be a list of layers, got None", {"expert_load": None}),
    (
        "expert_load must have 8 entries in every layer, layer 2 has 7 entries",
        {"expert_load": lambda r: [*r[:2], r[2][1:]]},
    ),
    ("p2l_map must be [3, 8] as expert_load, got [2, 8]", {"p2l_map": lambda rows: rows[:2]}),
    ("p2l_map must be integers from 0 on, layer 0 has -1", {"p2l_map": changed((0, 0), -1)}),
    ("p2l_map must name at most 8 experts, one per slot, got id 8", {"p2l_map": changed((0, 0), 8)}),
    (
        "p2l_map must hold every expert, layer 1 lacks 3",
        {"p2l_map": [[0, 1, 2, 3, 4, 5, 0, 1], [0, 1, 2, 0, 4, 5, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1]]},
    ),
    (
        "p2l_map must have 9 slots (7 experts and num_redundant_experts=2), got 8",
        {"p2l_map": [[0, 1, 2, 3, 4, 5, 6, 1]] * 3},
    ),
    (
        "step 30 must have 3 layers of 6 experts as the first, got 2 of 6",
        {"p2l_map": lambda rows: rows[:2], "expert_load": lambda rows: rows[:2]},
    ),
]


@pytest.mark.parametrize(("message", "changes"), VLLM_ERRORS)
def test_what_vllm_s_reader_refuses(tmp_path, message, changes):
    path = write_lines(tmp_path / "run.jsonl", vllm_lines(**changes)[0])
    with pytest.raises(ValueError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}: line 5: {message}")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (
            "line 1: num_redundant_experts must be an integer from 0 on, got None",
            '{"record_type": "eplb_load_meta", "version": 1}',
        ),
        ("line 1: is not JSON (", '{"record_type": "eplb_load_st'),
        ("line 1: is nested too deep", '{"a":' * 100_000),
        ("line 1: key 'version' must be there once", '{"version": 1, "version": 1}'),
        ("line 1: NaN is no number of JSON", '{"step": NaN}'),
        (
            "holds no eplb_load_stats with copies",
            '{"record_type": "eplb_load_meta", "version": 1, "num_redundant_experts": 0}',
        ),
    ],
)
def test_other_lines_are_refused(tmp_path, message, text):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}: {message}")


def test_lines_that_are_no_text_or_above_the_limit_are_refused(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "run.jsonl", vllm_lines()[0])
    with pytest.raises(ValueError, match="run.jsonl: unfolds to .* above the limit"):
        read_trace(path, max_bytes=300)
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match=r"run.jsonl: line 1: is not text \("):
        read_trace(path)
    for module in ("isoload.files", "isoload.traces.statistics"):
        monkeypatch.setattr(f"{module}.MAX_LINE", 20)
    path.write_text('{"record_type": "eplb_load_stats"}')
    with pytest.raises(ValueError, match="run.jsonl: line 1: must have less than"):
        read_trace(path)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16])
def test_vllm_ascend_s_loads_are_one_batch(tmp_path, dtype):
    loads = torch.from_numpy(drawn(LAYERS, EXPERTS))
    torch.save(loads.to(dtype), tmp_path / "heat.pt")
    trace = read_trace(tmp_path / "heat.pt")
    np.testing.assert_array_equal(trace.counts, loads[None])
    assert trace.name == "heat" and trace.layer_ids == (0, 1, 2)


class Trap:
    """A pickle that would write a file if it were run."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.parametrize(
    ("message", "held"),
    [
        ("heat.pt: loads [L, E] must be whole numbers from 0 on, got others", torch.full((2, 3), 0.5)),
        ("heat.pt: loads [L, E] must be whole numbers from 0 on, got others", torch.full((2, 3), torch.nan)),
        ("heat.pt: loads must not be negative, got -2 in layer 1", torch.tensor([[1, 2], [3, -2]])),
        ("heat.pt: loads must have shape [any, any], got [6]", torch.arange(6)),
        ("heat.pt: loads must be an integer tensor, got torch.bool", torch.ones(2, 3) > 0),
        (
            "heat.pt: loads must be a dense tensor with its values, got torch.sparse_coo",
            torch.eye(3).int().to_sparse(),
        ),
        ("heat.pt: counts must be [batches, L, E] and not empty, got shape [1, 0, 3]", torch.ones(0, 3)),
        ("heat.pt: is no SGLang recorder dump, it holds a list", [1]),
        ("heat.pt: unfolds to 8000000 MiB", torch.ones(1, 1).expand(10**6, 2**20)),
    ],
)
def test_what_vllm_ascend_s_reader_refuses(tmp_path, message, held):
    torch.save(held, tmp_path / "heat.pt")
    with pytest.raises(ValueError) as raised:
        read_trace(tmp_path / "heat.pt")
    assert message in str(raised.value)


def test_no_pickle_is_run(tmp_path):
    for name, write in (
        ("heat.pt", lambda path: torch.save(Trap(tmp_path / "sprung"), path)),
        ("run.jsonl", lambda path: path.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))),
    ):
        write(tmp_path / name)
        with pytest.raises(ValueError, match=name):
            read_trace(tmp_path / name)
    folder = write_ranks(tmp_path / "stats", drawn(RANKS, STEPS, LAYERS, EXPERTS))
    (folder / "rank1.safetensors").write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises(ValueError, match=r"rank1\.safetensors: is no whole safetensors file"):
        read_trace(folder)
    assert not (tmp_path / "sprung").exists()
