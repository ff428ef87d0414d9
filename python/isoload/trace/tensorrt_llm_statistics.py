"""TensorRT-LLM's expert statistics: a folder with meta_info.json and, of every rank, rank<number>.safetensors.

A rank's file has a tensor of copies per expert [E] for every iteration and layer, at the key ``<iteration>_<layer>``;
layers have the model's own numbers. An iteration is the sum over ranks, but ranks that agree in all of it share a view
(without attention data parallelism each routes the same tokens): they count once, as in
:mod:`isoload.trace.sglang_dump`. Files of other names, such as rank0_raw.safetensors, are not read.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from isoload.files.reading import MAX_EXPERTS, open_regular, parse_json, read_text, shown
from isoload.trace.archives import check_bytes
from isoload.trace.record import Ints

META = "meta_info.json"
FILE, KEY = re.compile(r"rank(\d{1,6})\.safetensors"), re.compile(r"(\d{1,9})_(\d{1,9})")
Grid = list[tuple[int, int]]  # (iteration, layer), ascending


def read_tensorrt_llm(folder: Path, limit: int) -> dict[str, Any]:
    """The fields of the Trace in a folder whose files have at most limit bytes, not checked against each other.

    Raises:
        ImportError: safetensors is missing (pip install "isoload[plan]").
    """
    experts, top_k = _read_meta(folder / META)
    named = {int(m[1]): path for path in folder.iterdir() if (m := FILE.fullmatch(path.name))}
    if sorted(named) != list(range(len(named))) or not named:
        got = ", ".join(str(path.name) for _, path in sorted(named.items())) or "none"
        raise ValueError(f"{folder}: must hold rank0.safetensors and so on without a gap, got {got}")
    for path in named.values():
        open_regular(path).close()
    check_bytes(folder, sum(path.stat().st_size for path in named.values()), limit)
    grid: Grid | None = None
    views: dict[bytes, tuple[int, Ints]] = {}
    for rank in sorted(named):
        grid, view = _read_rank(named[rank], experts, grid)
        views.setdefault(blake2b(view.data).digest(), (rank, view))
    assert grid is not None
    layers = sorted({layer for _, layer in grid})
    counts = np.sum([view for _, view in views.values()], axis=0).reshape(-1, len(layers), experts)
    filled = counts.any((1, 2))
    if not filled.any():
        raise ValueError(f"{folder}: holds no iteration with copies")
    kept = [rank for rank, _ in views.values()]
    return {
        "name": folder.name,
        "num_experts": experts,
        "top_k": top_k,
        "counts": counts[filled],
        "layer_ids": tuple(layers),
        "provenance": {
            "source": "TensorRT-LLM expert statistics",
            "num_experts_from": META,
            "ranks": kept,
            "ranks_with_a_shared_view": sorted(set(named) - set(kept)),
            "empty_iterations_dropped": int((~filled).sum()),
        },
    }


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


def _read_rank(path: Path, experts: int, wanted: Grid | None) -> tuple[Grid, Ints]:
    """The iterations and layers of a rank's file, and its copies [iterations * L, E]; as of the ranks before."""
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
    grid = sorted(found)
    _check_grid(path, grid, wanted)
    return grid, np.stack([found[place] for place in grid])


def _check_grid(path: Path, grid: Grid, wanted: Grid | None) -> None:
    """Every iteration has every layer, and the same ones on every rank."""
    if not grid:
        raise ValueError(f"{path}: holds no tensor")
    whole = [
        (i, layer) for i in sorted({i for i, _ in grid}) for layer in sorted({layer for _, layer in grid})
    ]
    for iteration, layer in sorted(set(wanted or whole) ^ set(grid)):
        has = "has" if (iteration, layer) in grid else "lacks"
        rule = "every layer in every iteration" if wanted is None else "the iterations and layers of rank0"
        raise ValueError(f"{path}: must have {rule}, it {has} iteration {iteration} of layer {layer}")
