"""vLLM's expert load statistics, a line of JSON per step (its pull request 41141, open in November 2026).

One line at most describes the run (``eplb_load_meta``). Every other one (``eplb_load_stats``) holds the copies that all
ranks' slots took, ``expert_load`` [L][P], and the experts in these slots, ``p2l_map`` [L][P]. Layers are counted among
the MoE layers alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from isoload.files.reading import MAX_EXPERTS, MAX_LINE, integer_rows, open_regular, parse_json, shown
from isoload.trace.archives import check_bytes
from isoload.trace.record import Ints, check_covered, counts_of_slots

META, STATS = "eplb_load_meta", "eplb_load_stats"
LOAD, MAP, REDUNDANT = "expert_load", "p2l_map", "num_redundant_experts"


def looks_like_json(path: Path) -> bool:
    """Whether a file begins as one of lines of JSON objects."""
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(1) == b"{"


def read_vllm(path: Path, limit: int) -> dict[str, Any]:
    """The fields of the Trace in a file of at most limit bytes, not checked against each other."""
    redundant: int | None = None
    steps: dict[int, Ints] = {}
    size = 0
    with open_regular(path) as file:
        check_bytes(path, os.fstat(file.fileno()).st_size, limit)
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
            if not line.strip():
                continue
            try:
                record = _record(line)
                if record["record_type"] == META:
                    redundant = _redundant(record, redundant, steps)
                    continue
                step, counts = _step(record, redundant, next(iter(steps.values()), None))
                if step in steps:
                    raise ValueError(f"step {step} must be there once")
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
            steps[step] = counts
            size += counts.nbytes
            check_bytes(path, size, limit)
    filled = [counts for counts in steps.values() if counts.any()]
    if not filled:
        raise ValueError(f"{path}: holds no {STATS} with copies")
    return {
        "name": path.stem,
        "num_experts": filled[0].shape[1],
        "counts": np.stack(filled),
        "provenance": {
            "source": "vLLM expert load statistics",
            "num_experts_from": MAP,
            "layers": "by their place among MoE layers",
            "empty_steps_dropped": len(steps) - len(filled),
        },
    }


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


def _redundant(record: dict[str, Any], before: int | None, steps: dict[int, Ints]) -> int:
    """Slots beyond one for each expert, as the run's description says."""
    if before is not None or steps:
        raise ValueError(f"{META} must be the first record, got another before")
    number = record.get(REDUNDANT)
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
