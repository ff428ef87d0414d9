"""Files of torch.save: an SGLang recorder's dump, or the loads [L, E] that vllm-ascend's offline script reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from isoload.files.reading import open_regular
from isoload.trace.archives import check_bytes
from isoload.trace.sglang_dump import read_dump
from isoload.trace.sglang_records import integers


def read_torch(paths: Sequence[Path], limit: int) -> dict[str, Any]:
    """The fields of the Trace in the files of one recording, not checked against each other.

    limit: most bytes that the tensors of all files may take.
    """
    held = {path: _load(path) for path in paths}
    only = held[paths[0]]
    if len(paths) == 1 and isinstance(only, torch.Tensor):
        return _read_ascend(paths[0], only, limit)
    return read_dump(held, limit)


def _load(path: Path) -> Any:
    try:
        with open_regular(path) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: torch.load(weights_only=True) refuses it ({reason})") from None


def _read_ascend(path: Path, loads: torch.Tensor, limit: int) -> dict[str, Any]:
    """One batch of copies [L, E]; layers are counted among the MoE layers alone."""
    check_bytes(path, 8 * loads.numel(), limit)
    if loads.layout == torch.strided and not loads.is_nested and loads.is_floating_point():
        whole = loads.double()
        if not ((whole >= 0) & (whole < 2**53) & (whole == whole.floor())).all():
            raise ValueError(f"{path}: loads [L, E] must be whole numbers from 0 on, got others")
        loads = whole.long()
    counts = integers(path, "loads", loads, (None, None))
    for layer in (counts < 0).any(1).nonzero()[0].tolist():
        raise ValueError(f"{path}: loads must not be negative, got {counts[layer].min()} in layer {layer}")
    return {
        "name": path.stem,
        "num_experts": counts.shape[1],
        "counts": counts[None],
        "provenance": {
            "source": "vllm-ascend expert loads",
            "num_experts_from": "loads",
            "layers": "by their place among MoE layers",
        },
    }
