"""Trace files: round trips, and what is said about files that are not traces."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from isoload.traces import Trace, read_trace, write_trace
from support.sample_traces import ARRAYS, COUNTS, IDS, assert_same, token_trace


@pytest.mark.parametrize(
    "trace",
    [
        token_trace(seed=1),
        token_trace(seed=2, num_experts=300, tokens_per_batch=np.array([30, 7])),
        Trace("c", 5, 2, COUNTS * 10**12, cluster=("books", "näive"), layer_ids=(7, 3, 5)),
        Trace("full", 5, 4, COUNTS * 40, tokens_per_batch=np.array([200, 255])),
        token_trace(counts=COUNTS, tokens_per_batch=np.array([11, 13]), provenance={"model": "m", "n": [1]}),
    ],
    ids=["tokens", "wide", "counts", "full", "both"],
)
def test_round_trip(tmp_path, trace):
    path = tmp_path / "trace.npz"
    write_trace(trace, path)
    back = read_trace(path)
    assert_same(back, trace)
    assert {key: back.provenance[key] for key in trace.provenance} == trace.provenance
    write_trace(back, path)
    again = read_trace(str(path))
    assert_same(again, trace)
    assert again.provenance == back.provenance
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace.npz"]


def test_a_json_beside_is_read_where_the_npz_says_nothing(tmp_path):
    """As the files of before are; beside an npz that says all it is somebody else's."""
    np.savez(tmp_path / "t.npz", counts=COUNTS)
    (tmp_path / "t.json").write_text('{"top_k": 3, "model": "m", "layer_ids": [4, 5, 9]}')
    old = read_trace(tmp_path / "t.npz")
    assert (old.top_k, old.layer_ids, old.provenance["model"]) == (3, (4, 5, 9), "m")
    write_trace(old, tmp_path / "t.npz")
    (tmp_path / "t.json").write_text("a plan")
    new = read_trace(tmp_path / "t.npz")
    assert (new.top_k, new.layer_ids, new.provenance) == (old.top_k, old.layer_ids, old.provenance)


def test_files_are_narrow(tmp_path):
    write_trace(token_trace(counts=COUNTS, seed=3), tmp_path / "t.npz")
    with np.load(tmp_path / "t.npz") as archive:
        assert {key: archive[key].dtype for key in archive.files} == {
            "counts": np.uint8,
            "topk_ids": np.int8,
            "seq_id": np.uint8,
            "about": archive["about"].dtype,
        }
        assert json.loads(archive["about"].item())["top_k"] == 2


def test_a_failed_write_leaves_the_old_files(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    write_trace(token_trace(seed=4), path)
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}

    def half(file, **arrays):
        file.write(b"PK\x03\x04")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", half)
    with pytest.raises(OSError, match="no space left"):
        write_trace(token_trace(seed=5, layers=1), path)
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_write_errors(tmp_path):
    with pytest.raises(ValueError, match=r"path must end in \.npz, got '.*t\.zip'"):
        write_trace(token_trace(), tmp_path / "t.zip")
    for value in (np.zeros(2), float("nan")):
        with pytest.raises(ValueError, match="provenance must be JSON values, got "):
            write_trace(token_trace(provenance={"x": value}), tmp_path / "t.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arrays", "known", "num_experts", "origin"),
    [
        ({"counts": COUNTS}, None, 5, "counts"),
        ({"counts": COUNTS, "topk_ids": IDS}, {"experts": 5}, 5, "counts"),
        ({"topk_ids": IDS}, {"num_experts": 9}, 9, "json"),
        ({"topk_ids": IDS}, {"experts": 8}, 8, "json"),
        ({"topk_ids": IDS}, None, 2, "largest id"),
    ],
)
def test_where_num_experts_comes_from(tmp_path, arrays, known, num_experts, origin):
    np.savez(tmp_path / "t.npz", **arrays)
    if known:
        (tmp_path / "t.json").write_text(json.dumps(known))
    trace = read_trace(tmp_path / "t.npz")
    assert (trace.name, trace.num_experts, trace.provenance["num_experts_from"]) == ("t", num_experts, origin)


def test_other_arrays_are_named(tmp_path):
    np.savez(tmp_path / "t.npz", counts=COUNTS, phase=np.zeros(3), coact_pairs=np.zeros(2))
    assert read_trace(tmp_path / "t.npz").provenance["arrays_not_read"] == ["phase", "coact_pairs"]


def write_file(path, data):
    path.write_bytes(data)


def write_npz(path, known=None, **arrays):
    np.savez(path, **arrays)
    if known is not None:
        path.with_suffix(".json").write_text(known)


def write_damaged(path):
    np.savez(path, counts=COUNTS)
    data = bytearray(path.read_bytes())
    data[200] ^= 255
    path.write_bytes(data)


BAD_FILES = {
    "t.npz: is empty": lambda p: write_file(p, b""),
    "t.npz: is neither an npz nor a torch file": lambda p: write_file(p, b"a,b\n1,2\n"),
    "t.npz: is truncated or damaged": lambda p: (
        write_npz(p, counts=COUNTS),
        write_file(p, p.read_bytes()[:-40]),
    ),
    "t.npz: cannot be read as an npz of plain arrays (Bad CRC-32": write_damaged,
    "t.npz: cannot be read as an npz of plain arrays (Object arrays": lambda p: write_npz(
        p, counts=np.array([{}])
    ),
    "t.npz: holds neither counts nor topk_ids, its arrays are a, b": lambda p: write_npz(p, a=COUNTS, b=IDS),
    "t.npz: counts must be [batches, L, E]": lambda p: write_npz(p, counts=COUNTS[0]),
    "t.npz: counts must have shape [any, 3, 6]": lambda p: write_npz(p, '{"num_experts": 6}', counts=COUNTS),
    "t.npz: topk_ids must be a NumPy array of integers, got <U1": lambda p: write_npz(
        p, topk_ids=np.full((2, 1, 1), "a")
    ),
    "t.json: is not JSON": lambda p: write_npz(p, '{"top_k": ', counts=COUNTS),
    "t.json: must hold one JSON object, got list": lambda p: write_npz(p, "[1]", counts=COUNTS),
    "t.json: top_k must be an integer, got 2.0": lambda p: write_npz(p, '{"top_k": 2.0}', counts=COUNTS),
    "t.json: name must be a string, got 7": lambda p: write_npz(p, '{"name": 7}', counts=COUNTS),
    "t.json: layer_ids must be a list of integers, got ['a']": lambda p: write_npz(
        p, '{"layer_ids": ["a"]}', counts=COUNTS
    ),
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_bad_files(tmp_path, message):
    BAD_FILES[message](tmp_path / "t.npz")
    with pytest.raises(ValueError) as raised:
        read_trace(tmp_path / "t.npz")
    assert str(raised.value).startswith(f"{tmp_path}/{message}")


def test_bad_paths(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "absent.npz")
    with pytest.raises(ValueError, match=r"holds no \.pt, \.npz, \.jsonl files"):
        read_trace(tmp_path)
    with pytest.raises(ValueError, match=r"a\.pt: holds the same bytes as .*a\.pt, give each file once"):
        torch.save({"logical_count": torch.ones(1, 1, 2, dtype=torch.int32)}, tmp_path / "a.pt")
        read_trace([tmp_path / "a.pt", tmp_path / "a.pt"])
    with pytest.raises(ValueError, match="path must name a file, got an empty list"):
        read_trace([])
    write_trace(token_trace(), tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a\.npz: holds the same bytes as .*a\.npz, give each file once"):
        read_trace([tmp_path / "a.npz", tmp_path / "a.npz"])


def test_damage_anywhere(tmp_path):
    """A file cut short or with three wrong bytes is read right or refused; nothing else is raised."""
    path, rng = tmp_path / "t.npz", np.random.default_rng(5)
    trace = token_trace(seed=6, counts=COUNTS)
    write_trace(trace, path)
    whole, refused = path.read_bytes(), 0
    for cut in range(0, len(whole), 37):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"t\.npz: is "):
            read_trace(path)
    for _ in range(300):
        damaged = bytearray(whole)
        for position in rng.integers(len(whole), size=3):
            damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            back = read_trace(path)
        except ValueError as error:
            assert str(error).startswith(f"{path}: ")
            refused += 1
        else:
            lost = {name: getattr(trace, name) for name in ARRAYS if getattr(back, name) is None}
            if any(array is not None for array in lost.values()):
                assert back.provenance["arrays_not_read"]  # its name was hit: no longer one of ours
            if "arrays_not_read" in back.provenance:  # or about's was: its name is the file's
                lost["name"] = trace.name
            assert_same(replace(back, **lost), trace)
    assert refused > 150
