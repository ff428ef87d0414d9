"""RankLoads: copies that one rank sent by an engine's own choice of replicas, pass by pass; all ranks' files joined.

A rank writes ``rank00003-1764140000-4711-000000064.npz`` (rank, start and number of its process, first pass): a trace
of its counts, the copies of each slot and the table of the slots.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoload.placement.placement import Placement
from isoload.topology import Topology
from isoload.traces import Trace
from isoload.traces.identity import Identity
from isoload.traces.npz import read_npz, write_trace
from isoload.traces.record import Ints, check_bytes, counts_of_slots, max_bytes, read_arrays, read_members
from isoload.traces.shadow import ONE_RUN, RECORDED_BY, check_about, dense_rows_dropped

MAX_COPIES = 2**31  # of a slot in a batch: counts are int32
TABLES = ("slot_copies", "slot_to_expert")


@dataclass(frozen=True, eq=False)
class RankLoads:
    """B recorded passes of one rank, between which no expert moved."""

    slot_copies: Ints  # [B, L, P] copies that this rank sent to each slot
    slot_to_expert: Ints  # [L, P]
    passes: tuple[int, ...]  # [B] numbers of the passes, the same on all ranks, ascending
    phases: tuple[str, ...]  # [B] "prefill" or "decode", on this rank
    num_experts: int
    top_k: int
    rank: int
    topology: Topology
    tokens: str  # "own": of this rank only; "same": of all ranks, which hold the same
    started: int  # seconds since 1970
    model: str = ""
    identity: Identity = field(default_factory=Identity)

    @property
    def counts(self) -> Ints:
        """[B, L, E] copies of experts."""
        table, experts = self.slot_to_expert, self.num_experts
        return np.stack([counts_of_slots(table, copies, experts) for copies in self.slot_copies])

    def save(self, folder: str | Path) -> Path:
        """Write the file, which appears whole or not at all."""
        about = {"recorded by": RECORDED_BY, "model": self.model, "rank": self.rank}
        about |= {name: getattr(self.topology, name) for name in ("num_ranks", "ranks_per_node")}
        about |= {"tokens": self.tokens, "started": self.started, "passes": list(self.passes)}
        name = f"rank{self.rank:05d}-{self.started}-{os.getpid()}-{self.passes[0]:09d}"
        fields: dict[str, Any] = {"cluster": self.phases, "provenance": about, "identity": self.identity}
        path = Path(folder, f"{name}.npz")
        trace = Trace(name, self.num_experts, self.top_k, self.counts, **fields)
        write_trace(trace, path, **{table: getattr(self, table) for table in TABLES})
        return path


def read_rank_loads(path: Path) -> RankLoads:
    limit = max_bytes(None)
    fields = read_npz(path, limit)
    arrays, _ = read_arrays(path, TABLES, limit)
    try:
        trace = Trace(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    about, phases = trace.provenance, trace.cluster or ()
    if about.get("recorded by") != RECORDED_BY:
        raise ValueError(f"{path}: must be a file that shadow mode wrote (ISOLOAD_RECORD)")
    check_about(path, trace)
    try:
        topology = Topology(about["num_ranks"], about["ranks_per_node"])
        copies, table = _check_tables(trace, topology, *map(arrays.get, TABLES))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return RankLoads(
        copies, table, tuple(about["passes"]), phases, trace.num_experts, trace.top_k, about["rank"], topology,
        about["tokens"], about["started"], about.get("model", ""), trace.identity,
    )  # fmt: skip


def _check_tables(
    trace: Trace, topology: Topology, copies: Ints | None, table: Ints | None
) -> tuple[Ints, Ints]:
    """Return slot_copies [B, L, P] and slot_to_expert [L, P] if they agree with each other and with the counts."""
    assert trace.counts is not None
    batches = len(trace.counts)
    if copies is None or table is None or copies.ndim != 3 or copies.shape != (batches, *table.shape):
        raise ValueError("slot_copies must be [batches, L, P] and slot_to_expert [L, P]")
    layers, slots = table.shape
    if layers != trace.num_layers or not slots or slots % topology.num_ranks:
        raise ValueError(
            f"slot_to_expert must be [{trace.num_layers}, P], P a multiple of {topology.num_ranks} ranks, got "
            f"{list(table.shape)}"
        )
    kinds = {copies.dtype.kind, table.dtype.kind}
    if not kinds <= {"i", "u"} or table.min() < -1 or table.max() >= trace.num_experts or copies.min() < 0:
        raise ValueError(
            f"slot_to_expert must be in 0..{trace.num_experts - 1} or -1 (absent), slot_copies not negative"
        )
    if np.any(copies[:, table < 0]):
        raise ValueError("slot_copies must be 0 in absent slots (slot_to_expert -1)")
    if copies.max() >= MAX_COPIES:
        raise ValueError(f"slot_copies must be below 2^31, got {copies.max()}")
    table = table.astype(np.int64)
    for of_slots, of_experts in zip(copies, trace.counts, strict=True):
        if not np.array_equal(counts_of_slots(table, of_slots, trace.num_experts), of_experts):
            raise ValueError("counts must be those of slot_copies")
    return copies, table


@dataclass(frozen=True, eq=False)
class Recorded:
    """The B passes that every rank of a run recorded."""

    trace: Trace  # counts of all ranks, by phase (`cluster`), without layers that routed no copy
    sent: tuple[Ints, ...]  # by source rank [B, L, P]; one source if all ranks hold the same tokens
    tables: tuple[Ints, ...]  # [L, P] expert in each slot, one per placement during the run
    table_of: Ints  # [B] index of each pass's table
    topology: Topology  # of the engine
    left_out: tuple[int, int]  # passes that not every rank recorded, and files of earlier runs

    @property
    def phases(self) -> tuple[str, ...]:
        assert self.trace.cluster is not None
        return self.trace.cluster

    @property
    def same_tokens(self) -> bool:
        """Whether all ranks hold the same tokens, so that no rank is the source of any."""
        return len(self.sent) < self.topology.num_ranks

    def slot_copies(self, batch: int) -> Ints:
        """Return [L, P] copies of all ranks."""
        return np.asarray(np.stack([of_rank[batch] for of_rank in self.sent]).sum(0, dtype=np.int64))

    def placement(self, batch: int) -> Placement:
        table = torch.from_numpy(self.tables[self.table_of[batch]].astype(np.int32))
        return Placement(
            table,
            self.topology,
            self.trace.num_experts,
            layer_ids=self.trace.layer_ids,
            identity=self.trace.identity,
        )


def read_recorded(path: str | Path) -> Recorded:
    """Join a folder's files by the numbers of their passes, or read one file of ranks that hold the same tokens.

    If the folder has several runs, the last is read. A pass is of prefill if it is prefill on any rank.
    """
    source = Path(path)
    paths = sorted(source.glob("rank*-*.npz")) if source.is_dir() else [source]
    if not paths:
        raise ValueError(f"{source}: holds no file that shadow mode wrote (rank00000-*.npz)")
    # All files are in memory at once.
    check_bytes(source, sum(member.file_size for p in paths for member in read_members(p)), max_bytes(None))
    files = [read_rank_loads(p) for p in paths]
    last = max(file.started for file in files)
    newest = [file for file in files if last - file.started <= ONE_RUN]
    first = newest[0]
    shapes = {(file.topology, file.tokens, file.num_experts, file.slot_to_expert.shape) for file in newest}
    if len(shapes) > 1:
        raise ValueError(f"{source}: files of one run must be of the same ranks, tokens, experts and slots")
    sources = range(first.topology.num_ranks) if first.tokens == "own" else [newest[0].rank]
    by_rank = [_by_pass(source, [file for file in newest if file.rank == rank]) for rank in sources]
    if missing := [rank for rank, passes in zip(sources, by_rank, strict=True) if not passes]:
        raise ValueError(
            f"{source}: must hold files of all {len(by_rank)} ranks, lacks those of {missing[0]}"
        )
    common = sorted(set.intersection(*map(set, by_rank)))
    if not common:
        raise ValueError(f"{source}: ranks must have recorded passes of the same numbers, got none")
    left = len(set.union(*map(set, by_rank))) - len(common), len(files) - len(newest)
    return _join(source, first, [[passes[number] for number in common] for passes in by_rank], left)


def _by_pass(path: Path, files: Sequence[RankLoads]) -> dict[int, tuple[RankLoads, int]]:
    places: dict[int, tuple[RankLoads, int]] = {}
    for file in files:
        for i, number in enumerate(file.passes):
            if number in places:
                raise ValueError(
                    f"{path}: must hold each pass of a rank once, pass {number} of rank {file.rank} occurs twice: "
                    f"two engines, two pipeline stages, or a restart within {ONE_RUN} s"
                )
            places[number] = file, i
    return places


def _join(
    path: Path, first: RankLoads, by_rank: list[list[tuple[RankLoads, int]]], left: tuple[int, int]
) -> Recorded:
    tables: dict[bytes, Ints] = {}
    table_of, phases = [], []
    for at in zip(*by_rank, strict=True):
        known = {np.ascontiguousarray(file.slot_to_expert, dtype=np.int32).tobytes() for file, _ in at}
        if len(known) > 1:
            number = at[0][0].passes[at[0][1]]
            raise ValueError(
                f"{path}: experts must be in the same slots on all ranks, in pass {number} they are not"
            )
        key = known.pop()
        tables.setdefault(key, at[0][0].slot_to_expert)
        table_of.append(list(tables).index(key))
        phases.append("prefill" if any(file.phases[i] == "prefill" for file, i in at) else "decode")
    sent = [np.stack([file.slot_copies[i] for file, i in passes]) for passes in by_rank]
    routed = np.flatnonzero(np.any([copies.any((0, 2)) for copies in sent], axis=0))
    if not len(routed):
        raise ValueError(f"{path}: must hold a pass with copies, got none")
    sent = [copies[:, routed] for copies in sent]
    slot_tables = [table[routed] for table in tables.values()]
    counts = [
        sum(counts_of_slots(slot_tables[index], of_rank[b], first.num_experts) for of_rank in sent)
        for b, index in enumerate(table_of)
    ]
    trace = Trace(
        first.model or path.stem, first.num_experts, first.top_k, np.stack(counts), cluster=tuple(phases),
        layer_ids=tuple(map(int, routed)), provenance={"recorded by": RECORDED_BY, "model": first.model},
        identity=dense_rows_dropped(first.identity),
    )  # fmt: skip
    recorded = Recorded(trace, tuple(sent), tuple(slot_tables), np.array(table_of), first.topology, left)
    try:
        for table in range(len(slot_tables)):
            recorded.placement(table_of.index(table))
    except ValueError as error:  # a table without some expert
        raise ValueError(f"{path}: {error}") from None
    return recorded
