"""Find the recordings in a list of paths by the files' contents, and join recordings into one trace.

A recording is one file, or one file per rank, in any order. Different recordings are batches of the same layers, or
layers of the stages of a pipeline. A missing rank and a file that is given twice are rejected.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoload.files import open_regular
from isoload.traces import sglang, shadow
from isoload.traces.identity import joined, matching_rows
from isoload.traces.megatron import is_router_trace, read_router_traces
from isoload.traces.npz import ARRAY_FILES, read_npz
from isoload.traces.record import Ints, Trace, check_bytes, is_npz, read_members
from isoload.traces.record import max_bytes as byte_limit
from isoload.traces.shadow import RankFile, check_ranks, recordings_of
from isoload.traces.statistics import FILE as TENSORRT_FILE
from isoload.traces.statistics import META_FILE, looks_like_json, read_tensorrt_llm, read_vllm
from isoload.wording import amount


def same_layers(first: Trace, other: Trace) -> Trace:
    """Return the other trace, of the same model and layers, with the layers in the order and numbering of the first."""
    names = f"trace {first.name}", f"trace {other.name}"
    if first.num_experts != other.num_experts:
        raise ValueError(
            f"num_experts must agree in all traces, {first.name} has {first.num_experts}, "
            f"{other.name} {other.num_experts}"
        )
    rows = matching_rows(first.identity, first.layer_ids, names[0], other.identity, other.layer_ids, names[1])
    if len(rows) < other.num_layers:
        raise ValueError(
            f"layers must agree in all traces, {names[0]} has {first.identity.describe(first.layer_ids)}, "
            f"{names[1]} has {other.identity.describe(other.layer_ids)}"
        )
    identity = joined(first.identity, other.identity, *names)
    return replace(other.select_layers(rows), layer_ids=first.layer_ids, identity=identity)


def join_batches(traces: Sequence[Trace], name: str) -> Trace:
    """Return the batches of all traces as one, each recording a cluster of its own; tokens stay if all have them."""
    first = traces[0]
    if len(traces) == 1:
        return first
    known = sorted({trace.top_k for trace in traces} - {0})
    if len(known) > 1:
        raise ValueError(f"top_k must agree in all traces, got {known}")
    parts = [first, *(same_layers(first, trace) for trace in traces[1:])]
    identity = first.identity
    for part in parts[1:]:
        identity = joined(identity, part.identity, f"trace {first.name}", f"trace {part.name}")
    fields: dict[str, Any] = {"counts": np.concatenate([part.batch_counts() for part in parts])}
    tokens = [_tokens_per_batch(part) for part in parts]
    if all(batches is not None for batches in tokens):
        fields["tokens_per_batch"] = np.concatenate([batches for batches in tokens if batches is not None])
    if all(part.topk_ids is not None and part.topk_ids.shape[2] == first.top_k for part in parts):
        fields["topk_ids"] = np.concatenate([part.topk_ids for part in parts if part.topk_ids is not None])
        fields["seq_id"] = _sequences(parts)
    labels = [part.cluster or [str(number)] * part.num_batches for number, part in enumerate(parts)]
    return Trace(
        name,
        first.num_experts,
        known[0] if known else 0,
        cluster=tuple(label for batches in labels for label in batches),
        layer_ids=first.layer_ids,
        provenance={"recordings": [{"name": part.name, **part.provenance} for part in parts]},
        identity=identity,
        **fields,
    )


def _tokens_per_batch(trace: Trace) -> Ints | None:
    if trace.tokens_per_batch is None and trace.counts is None and trace.topk_ids is not None:
        return np.array([len(trace.topk_ids)])
    return trace.tokens_per_batch


def _sequences(parts: Sequence[Trace]) -> Ints | None:
    """Return [tokens] sequence numbers, distinct in distinct traces; None if some trace has none."""
    joined_ids, start = [], 0
    for part in parts:
        if part.seq_id is None:
            return None
        joined_ids.append(part.seq_id - part.seq_id.min() + start)
        start = int(joined_ids[-1].max()) + 1
    return np.concatenate(joined_ids)


def join_stages(traces: Sequence[Trace], name: str) -> Trace:
    """Return the layers of all stages of a pipeline, in its order, as one trace of the same batches."""
    first = traces[0]
    for trace in traces[1:]:
        for what in ("num_experts", "num_batches"):
            value, other_value = getattr(first, what), getattr(trace, what)
            if value != other_value:
                raise ValueError(
                    f"{what} must agree in all stages, {first.name} has {value}, {trace.name} has {other_value}: "
                    "give the files of one recording, one file per stage"
                )
        joined(first.identity, trace.identity, f"trace {first.name}", f"trace {trace.name}")
    counts = np.concatenate([trace.batch_counts() for trace in traces], axis=1)
    layers = np.arange(counts.shape[1])
    for trace in traces:
        if trace.identity.numbering != "model" and trace.layer_ids != tuple(range(trace.num_layers)):
            raise ValueError(
                f"a stage must have a row for each of its MoE layers, trace {trace.name} has "
                f"{trace.identity.describe(trace.layer_ids)}"
            )
    if first.identity.numbering == "model":
        numbers = np.array([layer for trace in traces for layer in trace.layer_ids])
        order = numbers.argsort()
        counts, layers = counts[:, order], numbers[order]
    return Trace(
        name,
        first.num_experts,
        first.top_k,
        counts=counts,
        layer_ids=tuple(layers.tolist()),
        provenance={**first.provenance, "stages": [trace.name for trace in traces]},
        identity=first.identity,
    )


Paths = str | Path | Sequence[str | Path]
SUFFIXES = (".pt", ".npz", ".jsonl")  # files of a folder that are read, in addition to TensorRT-LLM's
MOST_LAYERS = 512  # of a trace that does not state its layers
READ_AS = "read as"  # key of a trace's provenance: how its files were read, in words


def read_trace(
    path: Paths,
    *,
    stages: bool = False,
    same_layers: bool = False,
    allow_missing_ranks: bool = False,
    max_bytes: int | None = None,
) -> Trace:
    """Read a trace; the contents of files decide their kind, not their names. Recordings become batches of one trace.

    Args:
        path: a file, a folder, a pattern such as ``dump/*.pt``, or a list of these. A file is one of

            * an .npz of arrays named as the fields of :class:`Trace`, and ``about``: name, top_k, num_experts,
              layer_ids, identity and provenance as JSON; if it is missing, a .json of the same stem may hold them;
            * an .npz that a rank wrote in shadow mode (``ISOLOAD_RECORD``);
            * an SGLang recorder dump (:mod:`isoload.traces.sglang`), one file for each rank;
            * TensorRT-LLM's expert statistics, one for each rank, or vLLM's (:mod:`isoload.traces.statistics`);
            * Megatron-Core's router trace (:mod:`isoload.traces.megatron`), one for each rank;
            * a .pt of one tensor [L, E], the loads that vllm-ascend's offline script reads.
        stages: files whose layers are numbered from 0 are stages of one pipeline, in the given order.
        same_layers: files whose layers are numbered from 0 are recordings of the same layers.
        allow_missing_ranks: a recording that lacks the file of a rank is read with a warning.
        max_bytes: largest size of a recording's arrays in memory: a small archive may hold gigabytes of zeros. Default:
            the environment's ISOLOAD_MAX_TRACE_BYTES, else 2^30 (1 GiB).

    Raises:
        ValueError: names the file, the error in it, and the option that helps.
        ImportError: TensorRT-LLM's statistics without safetensors.
    """
    traces = read_recordings(
        path,
        stages=stages,
        same_layers=same_layers,
        allow_missing_ranks=allow_missing_ranks,
        max_bytes=max_bytes,
    )
    for trace in traces:
        check_layers(trace)
    return joined_trace(traces)


def check_layers(
    trace: Trace, advice: str = "a file of a model with so many layers states layer_ids"
) -> None:
    """Reject a trace of arrays with more layers than any model has: probably its axes are in another order."""
    if trace.num_layers <= MOST_LAYERS or trace.identity.numbering != "order":
        return
    name, array = ("topk_ids", trace.topk_ids) if trace.topk_ids is not None else ("counts", trace.counts)
    assert array is not None
    first, layers, last = array.shape
    unit, end = ("tokens", f"top-{last}") if name == "topk_ids" else ("batches", f"{last} experts")
    raise ValueError(
        f"{trace.name}: {name} {list(array.shape)} means {first} {unit} of {layers} layers, {end}; with the first two "
        f"axes in the other order it means {layers} {unit} of {first} layers: write it as [{unit}, layers, ...] "
        f"({advice})"
    )


def joined_trace(traces: Sequence[Trace]) -> Trace:
    if len(traces) == 1:
        return traces[0]
    whole = join_batches(traces, f"{traces[0].name} and {len(traces) - 1} more")
    whole.provenance[READ_AS] = f"{len(traces)} recordings"
    return whole


def read_recordings(
    path: Paths,
    *,
    stages: bool = False,
    same_layers: bool = False,
    allow_missing_ranks: bool = False,
    max_bytes: int | None = None,
) -> list[Trace]:
    """Read each recording as a trace of its own, in the given order; arguments and errors as :func:`read_trace`."""
    limit = byte_limit(max_bytes)
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise ValueError("path must name a file, got an empty list")
    files, folders = _expand(paths)
    _check_twice(files)
    traces = list(_read_files(files, limit, allow_missing_ranks))
    for folder, wanted in folders.items():
        fields = read_tensorrt_llm(folder, limit, wanted or None, allow_missing_ranks)
        traces.append((folder, _trace(folder, fields)))
    order = [*files, *folders]
    traces.sort(key=lambda item: order.index(item[0]))
    return _united([trace for _, trace in traces], stages, same_layers)


def _expand(paths: Sequence[str | Path]) -> tuple[list[Path], dict[Path, list[Path]]]:
    """Return files, and TensorRT-LLM's folders with the rank files that were named one by one (none: all of them)."""
    files: list[Path] = []
    folders: dict[Path, list[Path]] = {}
    for name in paths:
        path = Path(name)
        if glob.has_magic(str(name)) and not path.exists():
            matches = sorted(map(Path, glob.glob(str(name))))
            if not matches:
                raise ValueError(f"{name}: no file matches this pattern")
        else:
            matches = [path]
        for match in matches:
            if (match / META_FILE).exists():
                if match in folders:
                    raise ValueError(f"{match}: the folder is given twice")
                folders[match] = []
            elif (TENSORRT_FILE.fullmatch(match.name) or match.name == META_FILE) and match.is_file():
                if not (match.parent / META_FILE).exists():
                    raise ValueError(f"{match}: must lie in one folder with {META_FILE}")
                members = folders.setdefault(match.parent, [])
                if match in members:
                    raise ValueError(f"{match}: the file is given twice")
                members.append(match)
            elif match.is_dir():
                inside = sorted(file for file in match.iterdir() if file.suffix in SUFFIXES)
                if not inside:
                    raise ValueError(f"{match}: holds no {', '.join(SUFFIXES)} files, nor {META_FILE}")
                files += inside
            else:
                files.append(match)
    return files, folders


def _check_twice(files: Sequence[Path]) -> None:
    known: dict[bytes, Path] = {}
    for path in files:
        content = blake2b()
        with open_regular(path) as file:
            while chunk := file.read(2**20):
                content.update(chunk)
        if (digest := content.digest()) in known:
            raise ValueError(f"{path}: holds the same bytes as {known[digest]}, give each file once")
        known[digest] = path


def _read_files(files: Sequence[Path], limit: int, allow_missing: bool) -> Iterator[tuple[Path, Trace]]:
    """Yield each recording's trace, with the first of its files."""
    dumps: dict[Path, dict[str, Any]] = {}
    shadows: dict[Path, Trace] = {}
    members = {path: read_members(path) for path in files if not looks_like_json(path)}
    archives = [path for path in members if not is_npz(path, members[path])]
    if archives:
        size = sum(member.file_size for path in archives for member in members[path])
        check_bytes(_shown(archives), size, limit)
    routers: dict[Path, list[Path]] = {}  # by folder
    for path in files:
        if path not in members and is_router_trace(path):
            routers.setdefault(path.parent, []).append(path)
        elif path not in members:
            yield path, _trace(path, read_vllm(path, limit))
        elif path in archives:
            value = sglang.load_torch(path)
            if isinstance(value, torch.Tensor):
                yield path, _trace(path, sglang.read_ascend(path, value, limit))
            else:
                dumps[path] = value
        else:
            read = [member for member in members[path] if member.filename in ARRAY_FILES]
            check_bytes(path, sum(member.file_size for member in read), limit)
            trace = _trace(path, read_npz(path, limit))
            if shadow.is_shadow(trace):
                shadow.check_about(path, trace)
                shadows[path] = trace
            else:
                yield path, trace
    for paths in routers.values():
        trace = _trace(paths[0], read_router_traces(paths, limit, allow_missing))
        trace.provenance[READ_AS] = f"{amount(len(paths), 'rank file')} of one recording"
        yield paths[0], trace
    if dumps:
        check_bytes(_shown(list(dumps)), sum(map(sglang.num_bytes, dumps.values())), limit)
    yield from _read_ranks(dumps, shadows, allow_missing)


def _read_ranks(
    dumps: dict[Path, dict[str, Any]], shadows: dict[Path, Trace], allow_missing: bool
) -> Iterator[tuple[Path, Trace]]:
    """Yield recordings of one file for each rank; SGLang's stat mode has one file for all ranks."""
    described: list[RankFile] = []
    for path, dump in dumps.items():
        if sglang.mode_of(path, dump) == "stat":
            yield path, _trace(path, sglang.read_dumps({path: dump}))
        else:
            described.append(sglang.rank_file(path, dump))
    runs: list[int] = []
    described += [shadow.rank_file(path, trace, runs) for path, trace in shadows.items()]
    recordings = recordings_of(described)
    order = [*dumps, *shadows]
    for recording in recordings:
        check_ranks(recording, recordings, allow_missing)
        paths = sorted((file.path for file in recording.files), key=order.index)
        if paths[0] in shadows:
            trace = shadow.sum_ranks(recording, shadows)
        else:
            contents = {path: dumps[path] for path in paths}
            trace = _trace(paths[0], sglang.read_dumps(contents, recording.stage_of, allow_missing))
        trace.provenance[READ_AS] = recording.describe()
        yield paths[0], trace


def _trace(path: Path, fields: dict[str, Any]) -> Trace:
    try:
        return Trace(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _shown(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _united(traces: list[Trace], stages: bool, same_layers: bool) -> list[Trace]:
    """Return traces of pipeline stages as one, if layer numbers or the caller state that they are stages."""
    vague = [trace for trace in traces if trace.identity.numbering == "moe" and "source" in trace.provenance]
    if stages and same_layers:
        raise ValueError("stages and same_layers exclude each other, got both")
    if (stages or same_layers) and len(vague) < 2:
        option = "stages" if stages else "same_layers"
        raise ValueError(
            f"{option} needs several recordings whose layers are numbered from 0 (vLLM, vllm-ascend, Megatron-Core), "
            f"got {len(vague)}"
        )
    if len(vague) > 1 and not (stages or same_layers):
        names = ", ".join(trace.name for trace in vague[:4])
        raise ValueError(
            f"{names}: these files number their MoE layers from 0, so that they may be recordings of the same layers "
            "or stages of a pipeline: pass --same-layers or --stages (same_layers=True or stages=True; stages in the "
            "order given)"
        )
    if stages:
        others = [trace for trace in traces if all(trace is not stage for stage in vague)]
        return [_stage_trace(vague), *others]
    by_layers: dict[tuple[int, ...], list[Trace]] = {}
    for trace in traces:
        by_layers.setdefault(trace.layer_ids, []).append(trace)
    numbered = all(trace.identity.numbering == "model" for trace in traces)
    distinct = len({layer for layers in by_layers for layer in layers}) == sum(map(len, by_layers))
    if not numbered or not distinct or len(by_layers) == 1:
        return traces
    if len({len(group) for group in by_layers.values()}) > 1:
        names = ", ".join(f"{group[0].name}: {len(group)}" for group in by_layers.values())
        raise ValueError(f"pipeline stages must have the same number of recordings, got {names}")
    return [_stage_trace(group) for group in zip(*by_layers.values(), strict=True)]


def _stage_trace(stages: Sequence[Trace]) -> Trace:
    whole = join_stages(stages, stages[0].name)
    whole.provenance[READ_AS] = f"{len(stages)} pipeline stages of one recording"
    return whole
