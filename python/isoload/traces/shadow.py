"""Recordings with one file per rank, and the files that a rank of an engine writes in shadow mode (ISOLOAD_RECORD)."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isoload.traces.identity import Identity
from isoload.traces.record import Ints, Trace
from isoload.wording import amount, shown

ALLOW = "--allow-missing-ranks (allow_missing_ranks=True) reads the remaining ranks"


class RankFile(NamedTuple):
    """Content of a file of one rank, rarely of several."""

    path: Path
    passes: dict[int, frozenset[int]]  # {rank: numbers of its forward passes}, at least one
    layers: frozenset[int]  # layers in which its ranks routed a token
    kind: Hashable  # files of different kinds are of different recordings
    shape: tuple[int, ...] = ()  # sizes of the engine: recordings of one shape have the same number of ranks
    ranks: int = 0  # ranks of the group if the file states their number, else 0
    one_run: bool = False  # whether kind names a run, whose files belong together even if they share no pass

    @property
    def first_pass(self) -> int:
        return min(map(min, self.passes.values()))

    @property
    def last_pass(self) -> int:
        return max(map(max, self.passes.values()))


class Recording(NamedTuple):
    """Files of one recording."""

    files: tuple[RankFile, ...]  # one per rank and, where a rank wrote several, in the order of their passes
    stage_of: dict[Path, int]  # pipeline stages have ranks of the same numbers and layers of their own

    def describe(self) -> str:
        stages = len(set(self.stage_of.values()))
        count = "1 rank file" if len(self.files) == 1 else f"{len(self.files)} rank files"
        return f"{count} of one recording" + (f" with {stages} pipeline stages" if stages > 1 else "")


def recordings_of(files: Sequence[RankFile]) -> list[Recording]:
    """Unite the files of each recording, in any order.

    Files of one recording share forward passes, or name their run. If a rank has a pass in two files, they are of two
    pipeline stages (if the layers differ) or of two recordings, which the files' folders then distinguish.
    """
    recordings: list[Recording] = []
    for kind in dict.fromkeys(file.kind for file in files):
        same_kind = sorted((f for f in files if f.kind == kind), key=lambda f: (f.first_pass, f.last_pass))
        groups: list[list[RankFile]] = []
        end = -1
        for file in same_kind:
            if not groups or (file.first_pass > end and not file.one_run):
                groups.append([])
            groups[-1].append(file)
            end = max(end, file.last_pass)
        for group in groups:
            recordings += _split(group)
    return recordings


def _split(group: Sequence[RankFile]) -> list[Recording]:
    whole = _with_stages(group)
    if _repeated(whole) is None:
        return [whole]
    folders = list(dict.fromkeys(file.path.parent for file in group))
    recordings = [_with_stages([file for file in group if file.path.parent == folder]) for folder in folders]
    for recording in recordings:
        if (repeated := _repeated(recording)) is not None:
            path, other_path, rank, number = repeated
            raise ValueError(
                f"{path} and {other_path} both hold forward pass {number} of rank {rank}: they are of two recordings, "
                "put the files of each recording into a folder of its own"
            )
    return recordings


def _with_stages(group: Sequence[RankFile]) -> Recording:
    stages: list[tuple[set[int], list[RankFile]]] = []
    for file in group:
        layers, members = set(file.layers), [file]
        apart = []
        for known, others in stages:
            if known & layers:
                layers, members = layers | known, others + members
            else:
                apart.append((known, others))
        stages = [*apart, (layers, members)]
    stages.sort(key=lambda stage: min(stage[0], default=0))
    routed = [members for layers, members in stages if layers]
    stage_of = {file.path: 0 for file in group}  # also where a rank has no tokens
    stage_of |= {file.path: i for i, members in enumerate(routed) for file in members}
    return Recording(tuple(group), stage_of)


def _repeated(recording: Recording) -> tuple[Path, Path, int, int] | None:
    """Return two files that hold the same pass of the same rank and stage, that rank and that pass."""
    paths: dict[tuple[int, int, int], Path] = {}
    for file in recording.files:
        for rank, passes in file.passes.items():
            for number in sorted(passes):
                key = recording.stage_of[file.path], rank, number
                if key in paths:
                    return paths[key], file.path, rank, number
                paths[key] = file.path
    return None


def check_ranks(recording: Recording, known: Sequence[Recording], allow_missing: bool) -> None:
    """Reject a recording that lacks a rank's file, or warn; known: recordings, of which some may have more ranks."""
    first, present = recording.files[0], {rank for file in recording.files for rank in file.passes}
    alike = [f for other in known for f in other.files if (f.kind, f.shape) == (first.kind, first.shape)]
    number = max(max(file.ranks, 1 + max(file.passes)) for file in alike)
    note_missing(recording.files[0].path, sorted(set(range(number)) - present), number, allow_missing)


def note_missing(path: Path, missing: Sequence[int], number: int, allow_missing: bool, why: str = "") -> None:
    """Reject missing ranks, or warn; path: of a file or folder of the recording."""
    if not missing:
        return
    ranks = "rank " if len(missing) == 1 else "ranks "
    text = (
        f"{path}: the recording lacks the files of {ranks}{shown(list(missing)).strip('[]')} of {number}{why}"
    )
    if not allow_missing:
        raise ValueError(f"{text}: add them, or {ALLOW}")
    warnings.warn(f"{text}; its loads are those of the remaining ranks", stacklevel=2)


RECORDED_BY = "isoload in shadow mode"
ONE_RUN = 300  # seconds within which the processes of one run start to record
ABOUT = {"rank": int, "num_ranks": int, "ranks_per_node": int, "tokens": str, "started": int, "passes": list}
PHASES = ("prefill", "decode")


def is_shadow(trace: Trace) -> bool:
    return trace.provenance.get("recorded by") == RECORDED_BY and "rank" in trace.provenance


def check_about(path: Path, trace: Trace) -> None:
    """Reject a file whose provenance does not describe its counts."""
    about, batches = trace.provenance, trace.num_batches
    for key, kind in ABOUT.items():
        if type(about.get(key)) is not kind:
            raise ValueError(f"{path}: {key} must be of type {kind.__name__}, got {shown(about.get(key))}")
    if about["tokens"] not in ("own", "same"):
        raise ValueError(f"{path}: tokens must be own or same, got {shown(about['tokens'])}")
    if not 0 <= about["rank"] < about["num_ranks"]:
        raise ValueError(f"{path}: rank must be in 0..{about['num_ranks'] - 1}, got {about['rank']}")
    if type(model := about.get("model", "")) is not str:
        raise ValueError(f"{path}: model must be of type str, got {shown(model)}")
    passes = about["passes"]
    integers = len(passes) == batches and all(type(number) is int for number in passes)
    if not integers or sorted(set(passes)) != passes:
        raise ValueError(f"{path}: passes must be {batches} ascending integers, got {shown(passes)}")
    if trace.counts is None or trace.cluster is None:
        raise ValueError(f"{path}: must hold counts and the phase of each pass (cluster)")
    if wrong := sorted(set(trace.cluster) - set(PHASES)):
        raise ValueError(f"{path}: cluster must be {' or '.join(PHASES)}, got {shown(wrong[0])}")


def rank_file(path: Path, trace: Trace, runs: list[int]) -> RankFile:
    """Describe a checked file; runs: seconds at which the known runs started, to which its own is added."""
    about = trace.provenance
    started = about["started"]
    run = next((known for known in runs if abs(known - started) <= ONE_RUN), started)
    if run not in runs:
        runs.append(run)
    routed = np.flatnonzero(trace.batch_counts().any((0, 2)))
    kind = ("shadow", run, about["num_ranks"], about["tokens"], trace.num_experts, trace.layer_ids)
    ranks = about["num_ranks"] if about["tokens"] == "own" else 0
    passes = {about["rank"]: frozenset(about["passes"])}
    return RankFile(path, passes, frozenset(routed.tolist()), kind, ranks=ranks, one_run=True)


def dense_rows_dropped(identity: Identity) -> Identity:
    """Return the identity of the rows that routed copies: SGLang has rows for dense layers, which route none."""
    return replace(identity, numbering="model") if identity.numbering == "hidden" else identity


def sum_ranks(recording: Recording, traces: dict[Path, Trace]) -> Trace:
    """Return the passes that every rank recorded, with the copies of all ranks, and without the rows of dense layers.

    Where layers are positions among the MoE layers, every row stays: the next stage's positions count them.
    """
    files = recording.files
    first = traces[files[0].path]
    sums: dict[int, Ints] = {}
    writers: dict[int, int] = {}
    phases: dict[int, str] = {}
    sources = {(recording.stage_of[file.path], rank) for file in files for rank in file.passes}
    for file in files:
        trace = traces[file.path]
        assert trace.counts is not None and trace.cluster is not None
        passes = zip(trace.provenance["passes"], trace.counts, trace.cluster, strict=True)
        for number, counts, phase in passes:
            sums[number] = sums.get(number, np.int64(0)) + counts
            writers[number] = writers.get(number, 0) + 1
            # A pass is of prefill if it is prefill on any rank.
            phases[number] = "prefill" if "prefill" in (phase, phases.get(number)) else "decode"
    whole = sorted(number for number in sums if writers[number] == len(sources))
    if not whole:
        raise ValueError(f"{files[0].path}: ranks must have recorded passes of the same numbers, got none")
    if len(whole) < len(sums):
        left = amount(len(sums) - len(whole), "pass", "passes")
        warnings.warn(
            f"{files[0].path.parent}: {left} of {len(sums)} left out, which not every rank recorded",
            stacklevel=2,
        )
    counts = np.stack([sums[number] for number in whole])
    routed = np.flatnonzero(counts.any((0, 2)))
    if len(routed) and first.identity.numbering != "hidden":
        routed = np.arange(counts.shape[1])
    if not len(routed):
        raise ValueError(f"{files[0].path}: must hold a pass with copies, got none")
    provenance: dict[str, Any] = {
        "recorded by": RECORDED_BY,
        "source": RECORDED_BY,
        "files": [file.path.name for file in files],
        "ranks": sorted({rank for _, rank in sources}),
        "incomplete_passes_dropped": len(sums) - len(whole),
    }
    return Trace(
        first.identity.model or files[0].path.parent.name,
        first.num_experts,
        first.top_k,
        counts=counts[:, routed],
        cluster=tuple(phases[number] for number in whole),
        layer_ids=tuple(first.layer_ids[row] for row in routed),
        provenance=provenance,
        identity=dense_rows_dropped(first.identity),
    )
