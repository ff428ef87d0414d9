"""Reads the files of SGLang's expert distribution recorder (``--expert-distribution-recorder-mode``).

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

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isoload.files.reading import shown
from isoload.trace.archives import check_bytes
from isoload.trace.checks import Ints
from isoload.trace.sglang_records import (
    Key,
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


def read_dump(held: Mapping[Path, Any], limit: int) -> dict[str, Any]:
    """The fields of the Trace in the files of one recording, not checked against each other.

    held: what each file holds. limit: most bytes that the tensors of all files may take.
    """
    paths, dumps = list(held), {path: _dump(path, value) for path, value in held.items()}
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


def _dump(path: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{path}: is no SGLang recorder dump, it holds a {type(value).__name__}")
    return value


def _num_bytes(dump: dict[str, Any]) -> int:
    """Of the tensors that are read, as they unfold: a broadcast one takes no room in the file."""
    records = dump.get("records")
    holders = [
        dump,
        *(record for record in (records if isinstance(records, list) else []) if isinstance(record, dict)),
    ]
    tensors = (holder.get(name) for holder in holders for name in _TENSORS)
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
    records: dict[Key, Record] = {}
    for path, dump in dumps.items():
        _check_covered(path, maps[path], num_experts)
        for raw in dump["records"]:
            record = read_record(path, raw, mode, maps[path], num_experts)
            if record.key in records:
                number, rank, _ = record.key
                raise ValueError(f"{path}: forward pass {number} of rank {rank} is recorded twice")
            records[record.key] = record
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


def _check_covered(path: Path, slot_map: Ints, num_experts: int) -> None:
    for layer, row in enumerate(slot_map):
        if (missing := np.setdiff1d(np.arange(num_experts), row)).size:
            raise ValueError(f"{path}: {_MAP} must hold every expert, layer {layer} lacks {missing[0]}")
