"""vLLM's expert load statistics, a line of JSON per step (its pull request 41141, open in November 2026).

A run may begin with a line that describes it (``eplb_load_meta``). Every other line (``eplb_load_stats``) holds the
copies that all ranks' slots took, ``expert_load`` [L][P], and the experts in these slots, ``p2l_map`` [L][P]. Layers
are counted among the MoE layers alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isoload.files.reading import MAX_EXPERTS, MAX_LINE, integer_rows, open_regular, parse_json
from isoload.trace.archives import check_bytes
from isoload.traces.identity import Identity
from isoload.traces.record import Ints, check_covered, counts_of_slots
from isoload.wording import shown

META, STATS = "eplb_load_meta", "eplb_load_stats"
LOAD, MAP, REDUNDANT = "expert_load", "p2l_map", "num_redundant_experts"


def looks_like_json(path: Path) -> bool:
    """Whether a file begins as one of lines of JSON objects."""
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(1) == b"{"


class Run(NamedTuple):
    """What one run of the engine wrote: a restarted one appends to the same file."""

    header: dict[str, Any] | None
    steps: dict[int, Ints]  # copies [L, E]


def read_vllm(path: Path, limit: int) -> dict[str, Any]:
    """Return the fields of the Trace in a file of at most limit bytes, not checked against each other.

    A header in the middle begins another run of the same model, whose steps are batches like those before. A last line
    that a killed process did not end is left out with a warning; any other damaged line is an error.
    """
    runs = [Run(None, {})]
    size, torn = 0, 0
    with open_regular(path) as file:
        check_bytes(path, os.fstat(file.fileno()).st_size, limit)
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
            if not line.strip():
                continue
            try:
                if _first_counts(runs) is not None and _is_torn(line):
                    torn = number
                    break
                record = _record(line)
                if record["record_type"] == META:
                    _begin_run(runs, record)
                    continue
                run = runs[-1]
                step, counts = _step(record, _redundant(run.header), _first_counts(runs))
                if step in run.steps:
                    raise ValueError(f"step {step} must be there once in a run")
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
            run.steps[step] = counts
            size += counts.nbytes
            check_bytes(path, size, limit)
    steps = [counts for run in runs for counts in run.steps.values()]
    filled = [counts for counts in steps if counts.any()]
    if not filled:
        raise ValueError(f"{path}: holds no {STATS} with copies")
    if torn:
        warnings.warn(
            f"{path}: line {torn} is torn, as by a process that was killed; the {len(steps)} steps before it are read",
            stacklevel=2,
        )
    return {
        "name": path.stem,
        "num_experts": filled[0].shape[1],
        "counts": np.stack(filled),
        "identity": Identity("moe"),
        "provenance": {
            "source": "vLLM expert load statistics",
            "num_experts_from": MAP,
            "runs": len([run for run in runs if run.steps]),
            "torn_lines_dropped": int(torn > 0),
            "empty_steps_dropped": len(steps) - len(filled),
        },
    }


def _begin_run(runs: list[Run], header: dict[str, Any]) -> None:
    """Starts a run with a header, which must agree with the one before."""
    _redundant(header)
    last = runs[-1]
    if last.header is None and last.steps:
        raise ValueError(f"{META} must be the first record of a file with headers, it comes after steps")
    if last.header is not None:
        known, new = ({k: v for k, v in of.items() if k != "timestamp"} for of in (last.header, header))
        if known != new:
            raise ValueError(
                f"{META} must agree with the run before, of which this file holds {len(last.steps)} steps: "
                f"{shown(known)} there, {shown(new)} here; give each model's record a file of its own"
            )
    if last.header is None:
        runs.pop()
    runs.append(Run(header, {}))


def _first_counts(runs: Sequence[Run]) -> Ints | None:
    return next((counts for run in runs for counts in run.steps.values()), None)


def _is_torn(line: bytes) -> bool:
    """Whether a line is the beginning of a record: the file's last, without its newline and without a closing brace."""
    return len(line) < MAX_LINE and not line.endswith(b"\n") and not line.rstrip().endswith(b"}")


def _record(line: bytes) -> dict[str, Any]:
    if len(line) == MAX_LINE:
        raise ValueError(f"must have less than {MAX_LINE >> 20} MiB")
    try:
        record = parse_json(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"is not text ({str(error)[:120]})") from None
    kind = record.get("record_type") if isinstance(record, dict) else record
    if kind not in (META, STATS):
        raise ValueError(f"record_type must be {META} or {STATS}, got {shown(kind)}")
    if record.get("version") != 1:
        raise ValueError(f"version must be 1, got {shown(record.get('version'))}")
    found: dict[str, Any] = record
    return found


def _redundant(header: dict[str, Any] | None) -> int | None:
    """Slots beyond one for each expert, as the run's header has them."""
    if header is None:
        return None
    number = header.get(REDUNDANT)
    if type(number) is not int or number < 0:
        raise ValueError(f"{REDUNDANT} must be an integer from 0 on, got {shown(number)}")
    return number


def _step(record: dict[str, Any], redundant: int | None, first: Ints | None) -> tuple[int, Ints]:
    """The step's number and its copies [L, E]."""
    step = record.get("step")
    if type(step) is not int:
        raise ValueError(f"step must be an integer, got {shown(step)}")
    load = integer_rows(LOAD, record.get(LOAD), least=0)
    held = integer_rows(MAP, record.get(MAP), least=0)
    if load.shape != held.shape:
        raise ValueError(f"{MAP} must be {list(load.shape)} as {LOAD}, got {list(held.shape)}")
    experts = int(held.max()) + 1
    if experts > min(held.shape[1], MAX_EXPERTS):
        raise ValueError(
            f"{MAP} must name at most {held.shape[1]} experts, one per slot, got id {experts - 1}"
        )
    if redundant is not None and experts + redundant != held.shape[1]:
        raise ValueError(
            f"{MAP} must have {experts + redundant} slots, {redundant} ({REDUNDANT}) more than experts, "
            f"got {held.shape[1]}"
        )
    check_covered(MAP, held, experts)
    if first is not None and first.shape != (len(held), experts):
        raise ValueError(
            f"step {step} must have {len(first)} layers of {first.shape[1]} experts as the first, "
            f"got {len(held)} of {experts}"
        )
    return step, counts_of_slots(held, load, experts)
