"""Files that ranks of an engine write in shadow mode (ISOLOAD_RECORD): a trace of the rank's own copies."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from isoload.trace.rank_files import RankFile, Recording
from isoload.traces.identity import Identity
from isoload.traces.record import Ints, Trace
from isoload.wording import amount, shown

RECORDED_BY = "isoload in shadow mode"
ONE_RUN = 300  # seconds within which the processes of one run start to record
ABOUT = {"rank": int, "num_ranks": int, "ranks_per_node": int, "tokens": str, "started": int, "passes": list}
PHASES = ("prefill", "decode")


def is_shadow(trace: Trace) -> bool:
    """Whether a rank wrote the trace in shadow mode."""
    return trace.provenance.get("recorded by") == RECORDED_BY and "rank" in trace.provenance


def check_about(path: Path, trace: Trace) -> None:
    """Refuse a file whose provenance does not describe its counts, by name."""
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
    """Return the passes that every rank recorded, with the copies of all ranks.

    Rows of dense layers, which have no copies, are left out. Where positions among the MoE layers are the only layer
    numbers, every row stays: positions of a stage's layers follow from the rows of the stages before.

    Raises:
        ValueError: no pass is recorded by all ranks.
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
        for number, counts, phase in zip(
            trace.provenance["passes"], trace.counts, trace.cluster, strict=True
        ):
            sums[number] = sums.get(number, np.int64(0)) + counts
            writers[number] = writers.get(number, 0) + 1
            # A pass is of prefill if it is so on any rank.
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
