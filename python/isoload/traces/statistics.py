"""Expert statistics of vLLM and TensorRT-LLM.

vLLM writes a line of JSON per step (its pull request 41141, open in November 2026), with the copies that the slots of
all ranks took, ``expert_load`` [L][P], and the experts in these slots, ``p2l_map`` [L][P]. A run may begin with a
header.

TensorRT-LLM writes a folder with meta_info.json and rank<number>.safetensors of every rank, with a tensor of copies per
expert [E] at the key ``<iteration>_<layer>``. An iteration is the sum over ranks, but ranks that agree in every value
share a view, as in :mod:`isoload.traces.sglang`. The trace has the layers of all pipeline stages.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isoload.files import MAX_EXPERTS, MAX_LINE, integer_rows, open_regular, parse_json, parse_line, read_text
from isoload.traces.identity import Identity, spans
from isoload.traces.record import Ints, check_bytes, check_covered, counts_of_slots
from isoload.traces.shadow import note_missing
from isoload.wording import shown

META, STATS = "eplb_load_meta", "eplb_load_stats"
LOAD, MAP, REDUNDANT = "expert_load", "p2l_map", "num_redundant_experts"


def looks_like_json(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_regular(path) as file:
        return file.read(1) == b"{"


class Run(NamedTuple):
    """Records of one run of the engine: a restarted engine appends to the same file."""

    header: dict[str, Any] | None
    steps: dict[int, Ints]  # copies [L, E]


def read_vllm(path: Path, limit: int) -> dict[str, Any]:
    """Return the fields of the Trace in a file of at most limit bytes, not checked against each other.

    A header in the middle begins another run. An incomplete last line, from a killed process, is skipped with a
    warning.
    """
    runs = [Run(None, {})]
    size, torn = 0, 0
    with open_regular(path) as file:
        check_bytes(path, os.fstat(file.fileno()).st_size, limit)
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
            if not line.strip():
                continue
            try:
                if _first_counts(runs) is not None and is_torn(line):
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
            f"{path}: line {torn} is incomplete, as after a killed process; the {len(steps)} steps before it are read",
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
    """Start a run with a header, which must agree with the previous one."""
    _redundant(header)
    last = runs[-1]
    if last.header is None and last.steps:
        raise ValueError(f"{META} must be the first record of a file with headers, it comes after steps")
    if last.header is not None:
        known, new = ({k: v for k, v in head.items() if k != "timestamp"} for head in (last.header, header))
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


def is_torn(line: bytes) -> bool:
    """Return whether a line is the incomplete last one of a killed process, without newline and closing brace."""
    return len(line) < MAX_LINE and not line.endswith(b"\n") and not line.rstrip().endswith(b"}")


def _record(line: bytes) -> dict[str, Any]:
    record = parse_line(line)
    kind = record.get("record_type") if isinstance(record, dict) else record
    if kind not in (META, STATS):
        raise ValueError(f"record_type must be {META} or {STATS}, got {shown(kind)}")
    if record.get("version") != 1:
        raise ValueError(f"version must be 1, got {shown(record.get('version'))}")
    fields: dict[str, Any] = record
    return fields


def _redundant(header: dict[str, Any] | None) -> int | None:
    """Return the number of slots beyond one for each expert, from the run's header."""
    if header is None:
        return None
    number = header.get(REDUNDANT)
    if type(number) is not int or number < 0:
        raise ValueError(f"{REDUNDANT} must be an integer from 0 on, got {shown(number)}")
    return number


def _step(record: dict[str, Any], redundant: int | None, first: Ints | None) -> tuple[int, Ints]:
    """Return the step's number and its copies [L, E]."""
    step = record.get("step")
    if type(step) is not int:
        raise ValueError(f"step must be an integer, got {shown(step)}")
    load = integer_rows(LOAD, record.get(LOAD), least=0)
    slot_to_expert = integer_rows(MAP, record.get(MAP), least=0)
    if load.shape != slot_to_expert.shape:
        raise ValueError(f"{MAP} must be {list(load.shape)} as {LOAD}, got {list(slot_to_expert.shape)}")
    experts = int(slot_to_expert.max()) + 1
    if experts > min(slot_to_expert.shape[1], MAX_EXPERTS):
        raise ValueError(
            f"{MAP} must name at most {slot_to_expert.shape[1]} experts, one per slot, got id {experts - 1}"
        )
    if redundant is not None and experts + redundant != slot_to_expert.shape[1]:
        raise ValueError(
            f"{MAP} must have {experts + redundant} slots ({experts} experts and {REDUNDANT}={redundant}), "
            f"got {slot_to_expert.shape[1]}"
        )
    check_covered(MAP, slot_to_expert, experts)
    if first is not None and first.shape != (len(slot_to_expert), experts):
        raise ValueError(
            f"step {step} must have {len(first)} layers of {first.shape[1]} experts as the first, "
            f"got {len(slot_to_expert)} of {experts}"
        )
    return step, counts_of_slots(slot_to_expert, load, experts)


META_FILE = "meta_info.json"
FILE, KEY = re.compile(r"rank(\d{1,6})\.safetensors"), re.compile(r"(\d{1,9})_(\d{1,9})")


class Stage(NamedTuple):
    """Records of the ranks of one pipeline stage."""

    path: Path  # of its first rank
    iterations: list[int]
    layers: list[int]
    views: dict[bytes, tuple[int, Ints]]  # by digest: the lowest rank, copies [iterations, layers, E]

    def counts(self) -> Ints:
        """Return [iterations, layers, E] copies, summed over the ranks with views of their own."""
        total: Ints = np.sum([view for _, view in self.views.values()], axis=0)
        return total


def read_tensorrt_llm(
    folder: Path, limit: int, wanted: Sequence[Path] | None = None, allow_missing: bool = False
) -> dict[str, Any]:
    """Return the fields of the Trace in a folder, not checked against each other; wanted: some of its files."""
    experts, top_k = _read_meta(folder / META_FILE)
    files = {int(m[1]): path for path in folder.iterdir() if (m := FILE.fullmatch(path.name))}
    names = None if wanted is None else {path.name for path in wanted}
    named = {rank: path for rank, path in files.items() if names is None or path.name in names}
    if not named:
        raise ValueError(f"{folder}: must hold a file rank0.safetensors per rank, got none")
    number = 1 + max(files)
    note_missing(folder, sorted(set(range(number)) - set(named)), number, allow_missing)
    for path in named.values():
        open_regular(path).close()
    check_bytes(folder, sum(path.stat().st_size for path in named.values()), limit)
    stages = _read_stages(named, experts)
    layers = np.array([layer for stage in stages for layer in stage.layers])
    order = layers.argsort()  # the layers of stages may alternate
    counts = np.concatenate([stage.counts() for stage in stages], axis=1)[:, order]
    filled = counts.any((1, 2))
    if not filled.any():
        raise ValueError(f"{folder}: holds no iteration with copies")
    ranks = sorted(rank for stage in stages for rank, _ in stage.views.values())
    return {
        "name": folder.name,
        "num_experts": experts,
        "top_k": top_k,
        "counts": counts[filled],
        "layer_ids": tuple(layers[order].tolist()),
        "identity": Identity("model"),
        "provenance": {
            "source": "TensorRT-LLM expert statistics",
            "num_experts_from": META_FILE,
            "ranks": ranks,
            "ranks_with_a_shared_view": sorted(set(named) - set(ranks)),
            "pipeline_stages": len(stages),
            "empty_iterations_dropped": int((~filled).sum()),
        },
    }


def _read_stages(named: dict[int, Path], experts: int) -> list[Stage]:
    """Return the stages, each with layers of its own; all must have the same iterations."""
    stages: dict[tuple[int, ...], Stage] = {}
    for rank in sorted(named):
        iterations, layers, view = _read_rank(named[rank], experts)
        stage = stages.setdefault(tuple(layers), Stage(named[rank], iterations, layers, {}))
        first = next(iter(stages.values()))
        for iteration in sorted(set(first.iterations) ^ set(iterations)):
            has = "has" if iteration in iterations else "lacks"
            raise ValueError(
                f"{named[rank]}: must have the iterations of {first.path.name}, it {has} iteration {iteration}"
            )
        stage.views.setdefault(blake2b(view.data).digest(), (rank, view))
    by_layer: dict[int, Stage] = {}
    for stage in stages.values():
        for layer in stage.layers:
            if layer in by_layer:
                raise ValueError(
                    f"{stage.path}: must have the layers of {by_layer[layer].path.name}, or layers of its own as a "
                    f"pipeline stage has: both have layer {layer}, of layers {spans(stage.layers)} and "
                    f"{spans(by_layer[layer].layers)}"
                )
            by_layer[layer] = stage
    return list(stages.values())


def _read_meta(path: Path) -> tuple[int, int]:
    """Return num_experts and num_experts_per_token."""
    text = read_text(path)
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError(f"must hold one JSON object, got {shown(content)}")
        experts = _integer(content, "num_experts", MAX_EXPERTS)
        return experts, _integer(content, "num_experts_per_token", experts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _integer(content: dict[str, Any], key: str, limit: int) -> int:
    value = content.get(key)
    if type(value) is not int or not 1 <= value <= limit:
        raise ValueError(f"{key} must be an integer in 1..{limit}, got {shown(value)}")
    return value


def _read_rank(path: Path, experts: int) -> tuple[list[int], list[int], Ints]:
    """Return the iterations and layers of a rank's file, ascending, and its copies [iterations, L, E]."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "TensorRT-LLM's statistics need safetensors: pip install 'isoload[plan]'"
        ) from error
    try:
        with safe_open(path, framework="np") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ValueError(f"{path}: is no whole safetensors file ({str(error)[:120]})") from None
    except (TypeError, AttributeError, KeyError) as error:  # a dtype that NumPy lacks
        raise ValueError(f"{path}: must hold integer tensors ({str(error)[:120]})") from None
    by_place = {}
    for key, tensor in tensors.items():
        if not (match := KEY.fullmatch(key)):
            raise ValueError(f"{path}: keys must be <iteration>_<layer>, got {shown(key)}")
        if tensor.dtype.kind not in "iu" or tensor.shape != (experts,):
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{path}: {key} must be integers [{experts}] (num_experts), got {got}")
        if tensor.min() < 0 or tensor.max() >= 2**53:
            raise ValueError(f"{path}: {key} must be in 0..2^53-1, got {tensor.min()}..{tensor.max()}")
        if (place := (int(match[1]), int(match[2]))) in by_place:
            raise ValueError(f"{path}: iteration {place[0]} of layer {place[1]} must be there once")
        by_place[place] = tensor.astype(np.int64)
    if not by_place:
        raise ValueError(f"{path}: holds no tensor")
    iterations, layers = (sorted({place[axis] for place in by_place}) for axis in (0, 1))
    for place in ((iteration, layer) for iteration in iterations for layer in layers):
        if place not in by_place:
            raise ValueError(
                f"{path}: must have every layer in every iteration, it lacks iteration {place[0]} of layer {place[1]}"
            )
    copies = [[by_place[iteration, layer] for layer in layers] for iteration in iterations]
    return iterations, layers, np.array(copies)
