"""Fuzzed folders of shadow mode: a damaged or changed file is read as it was or refused by name, and nothing else."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import isoload
from isoload.analysis.rank_loads import RankLoads, read_recorded
from isoload.analysis.server import phases
from isoload.traces import Trace, write_trace
from isoload.traces.npz import read_npz
from support.fuzz_cases import FuzzCase, Rng

VALUES: list[Any] = [
    "x",
    "",
    "own",
    "same",
    -1,
    0,
    1,
    2,
    10**9,
    2**70,
    0.5,
    True,
    None,
    [],
    [0, 0],
    [2, 1],
    {},
    "\x1b",
]
FACTS = "rank", "num_ranks", "ranks_per_node", "tokens", "started", "passes", "model", "recorded by"
DTYPES = np.uint8, np.int8, np.uint64, np.float64, np.bool_, np.str_


def check_shadow(case: FuzzCase) -> None:
    rng = np.random.default_rng([case.seed, 7])
    with TemporaryDirectory() as name:
        folder = Path(name)
        save(rng, folder)
        before = read_recorded(folder)
        paths = sorted(folder.iterdir())
        path = paths[int(rng.integers(len(paths)))]
        how = (damage, damage, change_facts, change_arrays, change_members)[int(rng.integers(5))]
        how(rng, path)
        for file in folder.iterdir():  # a damaged file may have become one of another format
            assert file.suffix == ".npz"
        try:
            found = read_recorded(folder)
            phases(found)
        except ValueError as error:
            assert name in str(error) and len(str(error)) < 1000, f"{how.__name__}: {error}"
            return
        if how is damage:
            assert np.array_equal(found.trace.counts, before.trace.counts), "damage was read"


def save(rng: Rng, folder: Path) -> None:
    """The files of one run of one to four ranks, in one or two files each."""
    ranks, size, layers = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
    experts = int(rng.integers(1, ranks * size + 1))
    table = np.stack([rng.permutation(np.arange(ranks * size) % experts) for _ in range(layers)])
    same = bool(rng.random() < 0.3)
    passes = np.unique(rng.integers(1, 50, 4)).tolist()
    labels = rng.choice(["prefill", "decode"], len(passes)).tolist()
    for rank in range(1 if same else ranks):
        copies = rng.integers(0, 300, (len(passes), layers, ranks * size))
        copies[:, 0, 0] += 1
        cut = int(rng.integers(len(passes)))
        for part in (slice(0, cut), slice(cut, None)):
            if passes[part]:
                RankLoads(
                    copies[part], table, tuple(passes[part]), tuple(labels[part]), experts, 1, rank,
                    isoload.Topology(ranks), "same" if same else "own", 1000, "m",
                ).save(folder)  # fmt: skip


def damage(rng: Rng, path: Path) -> None:
    """Other bytes, a torn end, or more of them."""
    data = bytearray(path.read_bytes())
    at = rng.integers(0, len(data), int(rng.integers(1, 9)))
    kind = int(rng.integers(4))
    if kind == 0:
        for i in at:
            data[i] = int(rng.integers(256))
    elif kind == 1:
        del data[int(at[0]) :]
    elif kind == 2:
        data[int(at[0]) : int(at[0])] = rng.bytes(int(rng.integers(1, 50)))
    else:
        for i in at:
            data[i] ^= 1 << int(rng.integers(8))
    path.write_bytes(data)


def change_facts(rng: Rng, path: Path) -> None:
    """Another fact, in a file that is whole."""
    with np.load(path) as archive:
        tables = {key: archive[key] for key in ("slot_copies", "slot_to_expert")}
    trace = Trace(**read_npz(path, 2**20))
    fact, value = str(rng.choice(FACTS)), VALUES[int(rng.integers(len(VALUES)))]
    provenance = {**trace.provenance, fact: value}
    cluster = (
        tuple(rng.choice(["prefill", "other", ""], len(trace.batch_counts())))
        if rng.random() < 0.2
        else trace.cluster
    )
    changed = Trace(
        trace.name,
        trace.num_experts,
        trace.top_k,
        counts=trace.counts,
        cluster=cluster,
        provenance=provenance,
    )
    write_trace(changed, path, **tables)


def change_arrays(rng: Rng, path: Path) -> None:
    """An array of another shape, type or value, or none."""
    with np.load(path) as archive:
        arrays = dict(archive)
    key = str(rng.choice(["slot_copies", "slot_to_expert", "counts", "cluster"]))
    kind, array = int(rng.integers(5)), arrays[key]
    if kind == 0:
        del arrays[key]
    elif kind == 1:
        arrays[key] = array.astype(DTYPES[int(rng.integers(len(DTYPES)))]) if key != "cluster" else array[:0]
    elif kind == 2:
        arrays[key] = array[..., : int(rng.integers(array.shape[-1]))]
    elif kind == 3:
        arrays[key] = array[None] if rng.random() < 0.5 else array[0]
    elif key != "cluster":
        changed = array.astype(np.int64)
        changed.flat[int(rng.integers(array.size))] = int(rng.choice([-1, 2**31, 2**40, 2**62]))
        arrays[key] = changed
    np.savez_compressed(path, **arrays)


def change_members(rng: Rng, path: Path) -> None:
    """A member that is no array, or is there twice, or is compressed or encrypted in a way that nobody reads."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    names = list(members)
    chosen = names[int(rng.integers(len(names)))]
    kind = int(rng.integers(4))
    os.unlink(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_BZIP2 if kind == 0 else zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            if name == chosen and kind == 1:
                data = rng.bytes(int(rng.integers(20)))
            archive.writestr(name, data)
    if kind > 1:
        data = bytearray(path.read_bytes())
        flags = data.rindex(b"PK\x01\x02") + (8 if kind == 2 else 10)  # flags or method of the last member
        data[flags] ^= int(rng.integers(1, 256))
        path.write_bytes(data)
