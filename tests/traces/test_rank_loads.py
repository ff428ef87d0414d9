"""Files of shadow mode: joined by their passes, and refused where they are not of one run, whole or true."""

from __future__ import annotations

import os
import re
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import isoload
from isoload.analysis.rank_loads import RankLoads, read_rank_loads, read_recorded
from isoload.traces import Trace, read_trace, write_trace
from isoload.traces.npz import read_npz

TABLE = np.array([[0, 1, 2, 0], [2, 1, 0, 2], [0, 1, 2, 1]])


def loads(rank: int = 0, passes: tuple[int, ...] = (3, 6), **given: Any) -> RankLoads:
    """Of two ranks and three layers, of which the second routes nothing."""
    copies = np.random.default_rng(rank).integers(0, 9, (len(passes), 3, 4)) * np.array([[[1], [0], [1]]])
    made = RankLoads(
        copies, TABLE, passes, ("decode",) * len(passes), 3, 2, rank, isoload.Topology(2), "own", 1000, "m"
    )
    return replace(made, **given)


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    made = loads(1)
    path = made.save(tmp_path)
    assert path.name == f"rank00001-1000-{os.getpid()}-000000003.npz"
    found = read_rank_loads(path)
    for name in ("slot_copies", "slot_to_expert", "counts"):
        assert np.array_equal(getattr(found, name), getattr(made, name))
    for name in (
        "passes",
        "phases",
        "num_experts",
        "top_k",
        "rank",
        "topology",
        "tokens",
        "started",
        "model",
    ):
        assert getattr(found, name) == getattr(made, name)
    want = [np.bincount(TABLE[2], weights=of[2], minlength=3) for of in made.slot_copies]
    with pytest.warns(UserWarning, match="lacks the files of rank 0 of 2"):
        alone = read_trace(path, allow_missing_ranks=True)
    assert np.array_equal(alone.counts[:, 2], want)


def test_what_all_ranks_have_is_joined(tmp_path: Path) -> None:
    """By number, whatever files the passes lie in; one rank's prefill makes it prefill; dense layers are left out."""
    loads(0, (3, 6)).save(tmp_path)
    late = loads(0, (9,))
    late.save(tmp_path)
    second = loads(1, (6, 9, 12), phases=("decode", "prefill", "decode"))
    second.save(tmp_path)
    loads(0, (3, 9), started=100).save(tmp_path)  # of an earlier run
    found = read_recorded(tmp_path)
    assert found.trace.layer_ids == (0, 2) and found.phases == ("decode", "prefill")
    assert found.left_out == (2, 1) and found.trace.top_k == 2 and found.trace.name == "m"
    assert np.array_equal(found.slot_copies(1), (late.slot_copies[0] + second.slot_copies[1])[[0, 2]])
    assert np.array_equal(found.trace.counts[1], (late.counts[0] + second.counts[1])[[0, 2]])
    assert found.placement(0).layer_ids == (0, 2)


def test_where_ranks_hold_the_same_one_file_is_all(tmp_path: Path) -> None:
    path = loads(tokens="same").save(tmp_path)
    for given in (tmp_path, path):
        assert read_recorded(given).same_tokens and read_recorded(given).trace.num_batches == 2


Write = Callable[[Path], object]


def both(**second: Any) -> Write:
    return lambda folder: (loads(0).save(folder), loads(1, **second).save(folder))


BAD: dict[str, tuple[Write, str]] = {
    "empty": (lambda folder: None, "holds no file that shadow mode wrote (rank00000-*.npz)"),
    "a rank is missing": (lambda folder: loads(1).save(folder), "must hold files of all 2 ranks, lacks those of 0"),
    "other passes": (both(passes=(4, 8)), "ranks must have recorded passes of the same numbers, got none"),
    "other experts": (
        both(slot_to_expert=TABLE[:, ::-1]),
        "experts must be in the same slots on all ranks, in pass 3 they are not",
    ),
    "other ranks": (both(topology=isoload.Topology(2, 1)), "of the same ranks, tokens, experts and slots"),
    "two engines": (
        lambda folder: (both()(folder), loads(1, started=1001).save(folder)),
        "must hold each pass of a rank once, pass 3 of rank 1 occurs twice: two engines, two pipeline stages, or a",
    ),
    "no copies": (
        lambda folder: loads(tokens="same", slot_copies=np.zeros((2, 3, 4), int)).save(folder),
        "must hold a pass with copies, got none",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_folders_that_are_refused(tmp_path: Path, name: str) -> None:
    write, said = BAD[name]
    write(tmp_path)
    with pytest.raises(ValueError, match=re.escape(said)):
        read_recorded(tmp_path)


def rewritten(path: Path, about: dict[str, Any], **arrays: Any) -> Path:
    """A file with some of its provenance and arrays replaced; None: without."""
    trace = Trace(**read_npz(path, 2**30))
    with np.load(path) as archive:
        held = {name: archive[name] for name in ("slot_copies", "slot_to_expert")}
    held = {name: array for name, array in (held | arrays).items() if array is not None}
    write_trace(replace(trace, provenance={**trace.provenance, **about}), path, **held)
    return path


DAMAGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another program": ({"recorded by": "x"}, {}, "must be a file that shadow mode wrote (ISOLOAD_RECORD)"),
    "a type": ({"rank": "0"}, {}, "rank must be of type int, got '0'"),
    "no copies": ({}, {"slot_copies": None}, "slot_copies must be [batches, L, P] and slot_to_expert [L, P]"),
    "a shape": ({}, {"slot_to_expert": TABLE[:2]}, "slot_copies must be [batches, L, P] and slot_to_expert"),
    "an expert": (
        {},
        {"slot_to_expert": TABLE + 1},
        "slot_to_expert must be in 0..2 or -1 (absent), slot_copies not negative",
    ),
    "copies in an absent slot": (
        {},
        {"slot_to_expert": TABLE - (TABLE == 0)},
        "slot_copies must be 0 in absent slots (slot_to_expert -1)",
    ),
    "another table": ({}, {"slot_to_expert": TABLE[:, ::-1]}, "counts must be those of slot_copies"),
    "passes": ({"passes": [3]}, {}, "passes must be 2 ascending integers, got [3]"),
    "more passes": ({"passes": [3, 3, 6]}, {}, "passes must be 2 ascending integers, got [3, 3, 6]"),
    "a pass twice": ({"passes": [3, 3]}, {}, "passes must be 2 ascending integers, got [3, 3]"),
    "tokens": ({"tokens": "x"}, {}, "tokens must be own or same, got 'x'"),
    "a rank": ({"rank": 2}, {}, "rank must be in 0..1, got 2"),
    "a negative rank": ({"rank": -1}, {}, "rank must be in 0..1, got -1"),
    "ranks": ({"num_ranks": 10**9}, {}, "num_ranks must be an integer in 1..1024, got 1000000000"),
    "nodes": ({"ranks_per_node": 3}, {}, "ranks_per_node must divide"),
    "slots": (
        {"num_ranks": 3, "ranks_per_node": 3},
        {},
        "slot_to_expert must be [3, P], P a multiple of 3 ranks, got [3, 4]",
    ),
    "a model": ({"model": 7}, {}, "model must be of type str, got 7"),
    "copies": (
        {},
        {"slot_copies": np.full((2, 3, 4), 2**31)},
        "slot_copies must be below 2^31, got 2147483648",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_files_that_are_refused(tmp_path: Path, name: str) -> None:
    about, arrays, said = DAMAGED[name]
    path = rewritten(loads().save(tmp_path), about, **arrays)
    with pytest.raises(ValueError, match=re.escape(f"{path}: {said}")):
        read_rank_loads(path)


def test_a_phase_that_is_none_is_refused(tmp_path: Path) -> None:
    path = loads(phases=("decode", "other")).save(tmp_path)
    with pytest.raises(
        ValueError, match=re.escape(f"{path}: cluster must be prefill or decode, got 'other'")
    ):
        read_rank_loads(path)


def test_a_table_without_an_expert_is_refused_with_the_folder(tmp_path: Path) -> None:
    lacking = np.where(TABLE == 1, 0, TABLE)
    for rank in (0, 1):
        loads(rank, slot_to_expert=lacking).save(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}: ")):
        read_recorded(tmp_path)


@pytest.mark.parametrize("name", ["slot_copies", "slot_to_expert", "counts"])
def test_a_small_file_that_unfolds_to_gigabytes_takes_no_memory(tmp_path: Path, name: str) -> None:
    """2.8 MB of zeros took 2.9 GiB before the file was refused."""
    path = loads(tokens="same").save(tmp_path)
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (2, 3, 500000000), }"
    with zipfile.ZipFile(path) as archive:
        members = {of: archive.read(of) for of in archive.namelist() if of != f"{name}.npy"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for of, data in members.items():
            archive.writestr(of, data)
        archive.writestr(f"{name}.npy", header.ljust(127) + b"\n" + bytes(2**10))
    data = path.read_bytes()  # the directory states 3 GB, as if they were there
    at = data.rindex(b"PK\x01\x02") + 24
    path.write_bytes(data[:at] + (3 * 10**9).to_bytes(4, "little") + data[at + 4 :])
    for given in (path, tmp_path):
        tracemalloc.start()
        try:
            with pytest.raises(ValueError) as raised:
                read_recorded(given)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert most < 2**22
        assert f"{given}: unfolds to 2861 MiB, above the limit of 1024 MiB" in str(raised.value)


def test_another_trace_is_none(tmp_path: Path) -> None:
    write_trace(Trace("t", 3, counts=np.ones((1, 1, 3), int)), tmp_path / "rank0-0.npz")
    with pytest.raises(ValueError, match="must be a file that shadow mode wrote"):
        read_recorded(tmp_path)
