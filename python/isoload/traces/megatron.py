"""Router traces of Megatron-Core 0.19 (``--moe-routing-trace-path FOLDER``): the experts of every token.

A rank writes router_trace_rank<number>.jsonl, a line of JSON per step, layer and microbatch: ``top_indices``
[tokens][K]. Layers are numbered from 0 in training, within a pipeline stage, and from 1 in inference, and a file does
not state which: the trace has positions among the MoE layers. Files of several pipeline stages look like those of
data-parallel ranks, so that a recording needs one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isoload.files import MAX_EXPERTS, MAX_LINE, integer_rows, open_regular, parse_line
from isoload.traces.identity import Identity, spans
from isoload.traces.record import Ints, check_bytes
from isoload.traces.sglang import Record, distinct_ranks, join_tokens, whole_passes
from isoload.traces.shadow import note_missing
from isoload.traces.statistics import is_torn
from isoload.wording import shown

STAGE = "pre_dispatch"


class RankTrace(NamedTuple):
    """Content of a rank's file; experts: E if the rank recorded logits, else 0."""

    path: Path
    rank: int
    experts: int
    layers: tuple[int, ...]
    records: list[Record]
    dropped: dict[str, int]


def is_router_trace(path: Path) -> bool:
    with open_regular(path) as file:
        return f'"stage": "{STAGE}"'.encode() in file.read(256)


def read_router_traces(paths: Sequence[Path], limit: int, allow_missing: bool = False) -> dict[str, Any]:
    """Return the fields of the Trace in the files of one recording's ranks, not checked against each other."""
    first_path = paths[0]
    check_bytes(first_path, sum(path.stat().st_size for path in paths), limit)
    traces: dict[int, RankTrace] = {}
    for path in paths:
        trace = _read_rank(path)
        if (other := traces.setdefault(trace.rank, trace)) is not trace:
            raise ValueError(
                f"{path}: holds rank {trace.rank}, as {other.path.name} does: put the files of each recording into a "
                "folder of its own"
            )
    number = 1 + max(traces)
    note_missing(first_path, sorted(set(range(number)) - set(traces)), number, allow_missing)
    first = traces[min(traces)]
    for trace in traces.values():
        if trace.layers != first.layers:
            raise ValueError(
                f"{trace.path}: must have the layers of {first.path.name}, {spans(first.layers)}, got "
                f"{spans(trace.layers)}: files do not state the pipeline stage, so record with one stage"
            )
    records = sorted((r for trace in traces.values() for r in trace.records), key=lambda record: record[:2])
    counted = distinct_ranks(whole_passes(first_path, records))
    fields = join_tokens(counted)
    experts = max(trace.experts for trace in traces.values())
    largest = int(fields["topk_ids"].max(initial=-1))
    if experts and largest >= experts:
        raise ValueError(
            f"{first_path}: top_indices must be in 0..{experts - 1} (logit_shape), got {largest}"
        )
    ranks = sorted({record.rank for record in counted})
    steps = {record.forward_pass for record in counted}
    return fields | {
        "name": first_path.stem if len(paths) == 1 else first_path.parent.name,
        "num_experts": experts or largest + 1,
        "layer_ids": tuple(range(len(first.layers))),
        "identity": Identity("moe"),
        "provenance": {
            "source": "Megatron-Core router trace",
            "num_experts_from": "logit_shape" if experts else "the largest expert number",
            "layers_in_files": list(first.layers),
            "files": [path.name for path in paths],
            "ranks": ranks,
            "ranks_with_a_shared_view": sorted(set(traces) - set(ranks)),
            "incomplete_passes_dropped": len({record.forward_pass for record in records} - steps),
            **{key: sum(trace.dropped[key] for trace in traces.values()) for key in first.dropped},
        },
    }


def _read_rank(path: Path) -> RankTrace:
    parts: dict[int, dict[int, list[Ints]]] = {}  # by step and layer: [tokens, K] of every microbatch
    ranks, experts = set[int](), 0
    dropped = {"mtp_records_dropped": 0, "recomputed_records_dropped": 0, "torn_lines_dropped": 0}
    with open_regular(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
            if parts and is_torn(line):
                dropped["torn_lines_dropped"] = 1
                break
            try:
                record = _record(line)
                ranks.add(_whole(record, "rank"))
                if len(ranks) > 1:
                    raise ValueError(f"rank must be that of the lines before, got {record['rank']}")
                ids = _choices(record)
                experts = max(experts, _experts(record))
            except ValueError as error:
                raise ValueError(f"{path}: line {number}: {error}") from None
            if record.get("block") == "mtp":
                dropped["mtp_records_dropped"] += 1
                continue
            step, layer = _whole(record, "step"), _whole(record, "layer")
            parts.setdefault(step, {}).setdefault(layer, []).append(ids)
    if dropped["torn_lines_dropped"] and parts:
        parts.popitem()  # the step of the incomplete line
    if not parts:
        raise ValueError(f"{path}: holds no step of the decoder's layers")
    (rank,), layers = ranks, tuple(sorted(next(iter(parts.values()))))
    records = []
    for step, by_layer in parts.items():
        dropped["recomputed_records_dropped"] += _drop_recomputed(by_layer)
        records.append(_step(path, step, rank, layers, by_layer))
    return RankTrace(path, rank, experts, layers, records, dropped)


def _record(line: bytes) -> dict[str, Any]:
    record = parse_line(line)
    if not isinstance(record, dict) or record.get("stage") != STAGE:
        raise ValueError(f"stage must be {STAGE}, got {shown(record)}")
    return record


def _whole(record: dict[str, Any], key: str) -> int:
    value = record.get(key)
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{key} must be an integer from 0 on, got {shown(value)}")
    return value


def _choices(record: dict[str, Any]) -> Ints:
    """Return [tokens, K] int32 experts of a line."""
    tokens, top_k, rows = _whole(record, "num_tokens"), _whole(record, "topk"), record.get("top_indices")
    _whole(record, "step"), _whole(record, "layer")
    ids = integer_rows("top_indices", rows) if rows != [] else np.zeros((0, top_k), np.int64)
    if ids.shape != (tokens, top_k):
        raise ValueError(f"top_indices must be [{tokens}, {top_k}] (num_tokens, topk), got {list(ids.shape)}")
    if ids.size and ids.max() >= MAX_EXPERTS:
        raise ValueError(f"top_indices must be below {MAX_EXPERTS}, got {ids.max()}")
    return ids.astype(np.int32)


def _experts(record: dict[str, Any]) -> int:
    """Return E of a line with logits, else 0."""
    if "logit_shape" not in record:
        return 0
    shape = record["logit_shape"]
    experts = shape[-1] if isinstance(shape, list) and shape else None
    if type(experts) is not int or not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"logit_shape must end with 1..{MAX_EXPERTS} experts, got {shown(shape)}")
    return experts


def _drop_recomputed(by_layer: dict[int, list[Ints]]) -> int:
    """Drop the second of each two equal microbatches, if all are such pairs, and return the number of dropped records:
    activation recomputation runs a router again in the backward pass, directly after the microbatch's forward.
    """
    pairs = [pair for parts in by_layer.values() for pair in zip(parts[::2], parts[1::2], strict=False)]
    odd = any(len(parts) % 2 for parts in by_layer.values())
    if odd or not all(np.array_equal(*pair) for pair in pairs) or not any(pair[0].size for pair in pairs):
        return 0
    for parts in by_layer.values():
        del parts[1::2]
    return len(pairs)


def _step(
    path: Path, step: int, rank: int, layers: tuple[int, ...], by_layer: dict[int, list[Ints]]
) -> Record:
    """Return a step as one record, whose microbatches are its sequences."""
    if tuple(sorted(by_layer)) != layers:
        raise ValueError(
            f"{path}: step {step} must have the layers of the first step, {spans(layers)}, got "
            f"{spans(sorted(by_layer))}"
        )
    shapes = [[ids.shape for ids in by_layer[layer]] for layer in layers]
    for layer, shape in zip(layers, shapes, strict=True):
        if shape != shapes[0]:
            raise ValueError(
                f"{path}: step {step} must have the same tokens in every layer, layer {layers[0]} has "
                f"{list(map(list, shapes[0]))}, layer {layer} has {list(map(list, shape))}"
            )
    view = np.stack([np.concatenate(by_layer[layer]) for layer in layers], axis=1)
    return Record(step, rank, "", view, tuple(shape[0] for shape in shapes[0]))
