"""Files of torch.save: the loads [L, E] that vllm-ascend's offline script reads, and those of SGLang's expert
distribution recorder (``--expert-distribution-recorder-mode``).

=========  ==========================================================================================
stat       one file (stat_approx too): ``logical_count`` [steps, L, E] or [L, E], summed over ranks.
           Steps of the ring buffer that were never filled are zero and dropped; the order of steps is
           lost once the ring has wrapped
per_pass   a file per rank: ``records`` with ``global_physical_count`` [L, P], and
           ``last_physical_to_logical_map`` [L, P]
per_token  the same, and in each record ``topk_ids_of_layer`` [L, tokens, 8]: slots, -1 = padding
=========  ==========================================================================================

The files leave three things open. They are read so:

* The map is the last one. If experts moved while recording, earlier records are wrong and nothing shows it.
* A record is one rank's view: of its own tokens, or of its own slots. A forward pass is the sum over ranks,
  as SGLang sums them itself (per_token: their tokens one after the other). But ranks that agree in every
  record share a view, since tensor-parallel attention routes the same tokens on each: they count once.
* Ranks start and stop one after the other, so the first and last passes may lack some: these are dropped.

L counts dense layers too. They are empty and dropped; the other layers keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoload.files.reading import open_regular, shown
from isoload.trace.archives import check_bytes
from isoload.trace.checks import Ints, check_covered
from isoload.trace.sglang_records import (
    Record,
    distinct_ranks,
    integers,
    join_tokens,
    read_record,
    sum_passes,
    whole_passes,
)

_MAP = "last_physical_to_logical_map"
_TENSORS = ("logical_count", _MAP, "global_physical_count", "topk_ids_of_layer")
_Dumps = dict[Path, dict[str, Any]]


def read_torch(paths: Sequence[Path], limit: int) -> dict[str, Any]:
    """The fields of the Trace in the files of one recording, not checked against each other.

    limit: most bytes that the tensors of all files may take.
    """
    dumps = {path: _load(path) for path in paths}
    if len(paths) == 1 and isinstance(only := dumps[paths[0]], torch.Tensor):
        return _read_ascend(paths[0], only, limit)
    for path, value in dumps.items():
        if not isinstance(value, dict):
            raise ValueError(f"{path}: is no SGLang recorder dump, it holds a {type(value).__name__}")
    check_bytes(paths[0], sum(map(_num_bytes, dumps.values())), limit)
    modes = {path: _mode(path, dump) for path, dump in dumps.items()}
    mode = modes[paths[0]]
    for path in paths:
        if modes[path] != mode:
            raise ValueError(f"{path}: is a {modes[path]} dump, but {paths[0].name} is a {mode} dump")
    fields = _read_stat(dumps) if mode == "stat" else _read_records(dumps, mode)
    name = "topk_ids" if mode == "per_token" else "counts"
    routed = fields[name] >= 0 if mode == "per_token" else fields[name] != 0
    layers = np.flatnonzero(routed.any((0, 2)))
    if not layers.size:
        raise ValueError(f"{paths[0]}: holds no routed token")
    fields |= {name: fields[name][:, layers], "layer_ids": tuple(layers.tolist())}
    fields["name"] = paths[0].stem if len(paths) == 1 else paths[0].parent.name
    source = {"source": "SGLang expert distribution recorder", "mode": mode, "files": [p.name for p in paths]}
    fields["provenance"] = source | fields["provenance"]
    return fields


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


def _num_bytes(dump: dict[str, Any]) -> int:
    """Of the tensors that are read, as they unfold: a broadcast one takes no room in the file."""
    records = dump.get("records")
    holders = [dump, *(records if isinstance(records, list) else [])]
    tensors = (holder.get(name) for holder in holders if isinstance(holder, dict) for name in _TENSORS)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _mode(path: Path, dump: dict[str, Any]) -> str:
    if "logical_count" in dump:
        return "stat"
    records = dump.get("records")
    if not isinstance(records, list) or _MAP not in dump:
        keys = ", ".join(key if isinstance(key, str) else shown(key) for key in dump) or "none"
        raise ValueError(f"{path}: is no SGLang recorder dump, its keys are {keys}")
    if not records:
        raise ValueError(f"{path}: has no records")
    # A per_token record carries global_physical_count as well.
    for mode, key in (("per_token", "topk_ids_of_layer"), ("per_pass", "global_physical_count")):
        if all(isinstance(record, dict) and key in record for record in records):
            return mode
    raise ValueError(f"{path}: records must hold topk_ids_of_layer or global_physical_count, not all do")


def _read_stat(dumps: _Dumps) -> dict[str, Any]:
    steps: list[Ints] = []
    for path, dump in dumps.items():
        count = dump["logical_count"]
        shape = steps[0].shape[1:] if steps else (None, None)
        if isinstance(count, torch.Tensor) and count.dim() == 2:
            steps.append(integers(path, "logical_count", count, shape)[None])
        else:
            steps.append(integers(path, "logical_count", count, (None, *shape)))
    counts = np.concatenate(steps)
    filled = counts.any((1, 2))
    return {
        "counts": counts[filled],
        "num_experts": counts.shape[2],
        "provenance": {"num_experts_from": "counts", "empty_steps_dropped": int((~filled).sum())},
    }


def _read_records(dumps: _Dumps, mode: str) -> dict[str, Any]:
    maps = _slot_maps(dumps)
    num_experts = 1 + max(int(slot_map.max()) for slot_map in maps.values())
    records: dict[tuple[int, int, str], Record] = {}
    for path, dump in dumps.items():
        check_covered(f"{path}: {_MAP}", maps[path], num_experts)
        for raw in dump["records"]:
            record = read_record(path, raw, mode, maps[path], num_experts)
            if (key := record[:3]) in records:
                raise ValueError(f"{path}: forward pass {key[0]} of rank {key[1]} is recorded twice")
            records[key] = record
    first = next(iter(dumps))
    whole = whole_passes(first, [records[key] for key in sorted(records)])
    kept = distinct_ranks(whole)
    ranks, passes = {record.rank for record in kept}, {record.forward_pass for record in kept}
    provenance = {
        "num_experts_from": _MAP,
        "ranks": sorted(ranks),
        "ranks_with_a_shared_view": sorted({record.rank for record in whole} - ranks),
        "incomplete_passes_dropped": len({record.forward_pass for record in records.values()} - passes),
    }
    fields = sum_passes(kept) if mode == "per_pass" else join_tokens(kept)
    return {**fields, "num_experts": num_experts, "provenance": provenance}


def _slot_maps(dumps: _Dumps) -> dict[Path, Ints]:
    """[L, P] logical expert in each slot, as each file ends."""
    maps: dict[Path, Ints] = {}
    shape: tuple[int | None, ...] = (None, None)
    for path, dump in dumps.items():
        maps[path] = integers(path, _MAP, dump[_MAP], shape)
        shape = maps[path].shape
        if not maps[path].size or maps[path].min() < 0:
            got = maps[path].min() if maps[path].size else f"shape {list(shape)}"
            raise ValueError(f"{path}: {_MAP} must name an expert in every slot, got {got}")
        if (largest := maps[path].max()) >= (slots := maps[path].shape[1]):
            raise ValueError(
                f"{path}: {_MAP} must name at most {slots} experts, one per slot, got id {largest}"
            )
    return maps
