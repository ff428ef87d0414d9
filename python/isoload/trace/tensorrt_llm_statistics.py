"""TensorRT-LLM's expert statistics: a folder with meta_info.json and, of every rank, rank<number>.safetensors.

A rank's file has a tensor of copies per expert [E] for every iteration and layer, at the key ``<iteration>_<layer>``;
layers have the model's own numbers. An iteration is the sum over ranks, but ranks that agree in all of it share a view
(without attention data parallelism each routes the same tokens): they count once, as in
:mod:`isoload.traces.sglang`. Ranks of a pipeline stage have the stage's layers alone; the trace has those of all
stages. Files of other names, such as rank0_raw.safetensors, are not read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isoload.files.reading import MAX_EXPERTS, open_regular, parse_json, read_text
from isoload.trace.archives import check_bytes
from isoload.trace.rank_files import note_missing
from isoload.traces.identity import Identity, spans
from isoload.traces.record import Ints
from isoload.wording import shown

META_FILE = "meta_info.json"
FILE, KEY = re.compile(r"rank(\d{1,6})\.safetensors"), re.compile(r"(\d{1,9})_(\d{1,9})")


class Stage(NamedTuple):
    """What the ranks of one pipeline stage recorded."""

    path: Path  # of its first rank
    iterations: list[int]
    layers: list[int]
    views: dict[bytes, tuple[int, Ints]]  # by digest: the lowest rank, copies [iterations, layers, E]

    def counts(self) -> Ints:
        """[iterations, layers, E] copies, summed over the ranks with views of their own."""
        total: Ints = np.sum([view for _, view in self.views.values()], axis=0)
        return total


def read_tensorrt_llm(
    folder: Path, limit: int, wanted: Sequence[Path] | None = None, allow_missing: bool = False
) -> dict[str, Any]:
    """Return the fields of the Trace in a folder, not checked against each other.

    Args:
        folder: with meta_info.json.
        limit: most bytes of the ranks' files.
        wanted: files of ranks that were named one by one; None: all of the folder.
        allow_missing: whether to warn in place of raising where the file of a rank is missing.

    Raises:
        ValueError: naming the file, or the rank that is missing.
        ImportError: safetensors is missing (pip install "isoload[plan]").
    """
    experts, top_k = _read_meta(folder / META_FILE)
    files = {int(m[1]): path for path in folder.iterdir() if (m := FILE.fullmatch(path.name))}
    names = None if wanted is None else {path.name for path in wanted}
    named = {rank: path for rank, path in files.items() if names is None or path.name in names}
    if not named:
        raise ValueError(f"{folder}: must hold rank0.safetensors and so on, got none")
    number = 1 + max(files)
    note_missing(folder, sorted(set(range(number)) - set(named)), number, allow_missing)
    for path in named.values():
        open_regular(path).close()
    check_bytes(folder, sum(path.stat().st_size for path in named.values()), limit)
    stages = _read_stages(named, experts)
    layers = np.array([layer for stage in stages for layer in stage.layers])
    order = layers.argsort()  # a stage may have layers before and after those of another
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
    """The stages, each with layers of its own; all must have the same iterations."""
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
    seen: dict[int, Stage] = {}
    for stage in stages.values():
        for layer in stage.layers:
            if layer in seen:
                raise ValueError(
                    f"{stage.path}: must have the layers of {seen[layer].path.name}, or layers of its own as a "
                    f"pipeline stage has: both have layer {layer}, of layers {spans(stage.layers)} and "
                    f"{spans(seen[layer].layers)}"
                )
            seen[layer] = stage
    return list(stages.values())


def _read_meta(path: Path) -> tuple[int, int]:
    """num_experts and num_experts_per_token."""
    text = read_text(path)
    try:
        content = parse_json(text)
        if not isinstance(content, dict):
            raise ValueError(f"must hold one JSON object, got {shown(content)}")
        experts = _integer(content, "num_experts", MAX_EXPERTS)
        return experts, _integer(content, "num_experts_per_token", experts)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _integer(content: dict[str, Any], key: str, most: int) -> int:
    value = content.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{key} must be an integer in 1..{most}, got {shown(value)}")
    return value


def _read_rank(path: Path, experts: int) -> tuple[list[int], list[int], Ints]:
    """The iterations and layers of a rank's file, ascending, and its copies [iterations, L, E]."""
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
    found = {}
    for key, tensor in tensors.items():
        if not (match := KEY.fullmatch(key)):
            raise ValueError(f"{path}: keys must be <iteration>_<layer>, got {shown(key)}")
        if tensor.dtype.kind not in "iu" or tensor.shape != (experts,):
            got = f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{path}: {key} must be integers [{experts}] (num_experts), got {got}")
        if tensor.min() < 0 or tensor.max() >= 2**53:
            raise ValueError(f"{path}: {key} must be in 0..2^53-1, got {tensor.min()}..{tensor.max()}")
        if (place := (int(match[1]), int(match[2]))) in found:
            raise ValueError(f"{path}: iteration {place[0]} of layer {place[1]} must be there once")
        found[place] = tensor.astype(np.int64)
    if not found:
        raise ValueError(f"{path}: holds no tensor")
    iterations, layers = (sorted({place[axis] for place in found}) for axis in (0, 1))
    for place in ((iteration, layer) for iteration in iterations for layer in layers):
        if place not in found:
            raise ValueError(
                f"{path}: must have every layer in every iteration, it lacks iteration {place[0]} of layer {place[1]}"
            )
    copies = [[found[iteration, layer] for layer in layers] for iteration in iterations]
    return iterations, layers, np.array(copies)
