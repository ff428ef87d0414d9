"""Files of torch.save: the loads [L, E] that vllm-ascend's script reads, and SGLang's expert distribution recorder's:

* stat (and stat_approx): one file, ``logical_count`` [steps, L, E] or [L, E], summed over ranks. Steps that were never
  filled are dropped; their order is lost once the ring buffer has wrapped.
* per_pass: a file per rank, ``records`` with ``global_physical_count`` [L, P], and ``last_physical_to_logical_map`` [L,
  P]. If experts moved while recording, earlier records are wrong.
* per_token: the same, and in each record ``topk_ids_of_layer`` [L, tokens, 8]: slots, -1 = padding.

A record is one rank's view: of its own tokens, or of its own slots. A forward pass is the sum over ranks (per_token:
their tokens one after the other). But ranks that agree in every record count once, because tensor-parallel attention
routes the same tokens on each. The first and last passes may lack ranks and are dropped. Dense layers are empty and
dropped. Stages of a pipeline have ranks of the same numbers and layers of their own: they count as ranks of one group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from isoload.files import open_regular
from isoload.traces.identity import Identity
from isoload.traces.record import Ints, check_bytes, check_covered, counts_of_slots
from isoload.traces.shadow import RankFile, note_missing
from isoload.wording import shown

_MAP = "last_physical_to_logical_map"
_TENSORS = ("logical_count", _MAP, "global_physical_count", "topk_ids_of_layer")
_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_Dumps = dict[Path, dict[str, Any]]
STAGE = 2**20  # ranks of stage s are numbered from s * STAGE on while a recording is read


def read_dumps(
    dumps: _Dumps, stage_of: Mapping[Path, int] | None = None, allow_missing: bool = False
) -> dict[str, Any]:
    """Return the fields of the Trace in the files of one recording, of one mode; stage_of: pipeline stages."""
    paths = list(dumps)
    mode = mode_of(paths[0], dumps[paths[0]])
    fields = (
        _read_stat(dumps) if mode == "stat" else _read_records(dumps, mode, stage_of or {}, allow_missing)
    )
    name = "topk_ids" if mode == "per_token" else "counts"
    routed = fields[name] >= 0 if mode == "per_token" else fields[name] != 0
    layers = np.flatnonzero(routed.any((0, 2)))
    if not layers.size:
        raise ValueError(f"{paths[0]}: holds no routed token")
    fields |= {
        name: fields[name][:, layers],
        "layer_ids": tuple(layers.tolist()),
        "identity": Identity("model"),
    }
    fields["name"] = paths[0].stem if len(paths) == 1 else paths[0].parent.name
    source = {"source": "SGLang expert distribution recorder", "mode": mode, "files": [p.name for p in paths]}
    fields["provenance"] = source | fields["provenance"]
    return fields


def load_torch(path: Path) -> Any:
    """Return the object that torch.save wrote: a tensor, or an SGLang recorder dump; other objects are rejected."""
    try:
        with open_regular(path) as file:
            value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: torch.load(weights_only=True) refuses it ({reason})") from None
    if not isinstance(value, torch.Tensor | dict):
        raise ValueError(f"{path}: is no SGLang recorder dump, it holds a {type(value).__name__}")
    return value


def rank_file(path: Path, dump: dict[str, Any]) -> RankFile:
    """Describe a dump with records: ranks, passes, and the layers in which tokens were routed."""
    mode, (layers, slots) = mode_of(path, dump), _slot_map(path, dump, (None, None)).shape
    passes: dict[int, set[int]] = {}
    routed: set[int] = set()
    for record in dump["records"]:
        number, rank, _ = _key(path, record)
        passes.setdefault(rank, set()).add(number)
        view = _slots_of(path, record, mode, (layers, slots))
        chosen = view >= 0 if mode == "per_token" else view != 0
        routed |= set(np.flatnonzero(chosen.reshape(layers, -1).any(1)).tolist())
    by_rank = {rank: frozenset(numbers) for rank, numbers in passes.items()}
    return RankFile(path, by_rank, frozenset(routed), ("sglang", mode), (layers, slots))


def read_ascend(path: Path, loads: torch.Tensor, limit: int) -> dict[str, Any]:
    """Return the fields of a Trace of one batch of copies [L, E], whose layers are numbered among the MoE layers."""
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
        "provenance": {"source": "vllm-ascend expert loads", "num_experts_from": "loads"},
        "identity": Identity("moe"),
    }


def num_bytes(dump: dict[str, Any]) -> int:
    """Return the bytes in memory of the tensors that are read: a broadcast tensor takes no space in the file."""
    records = dump.get("records")
    holders = [dump, *(records if isinstance(records, list) else [])]
    tensors = (holder.get(name) for holder in holders if isinstance(holder, dict) for name in _TENSORS)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def mode_of(path: Path, dump: dict[str, Any]) -> str:
    if "logical_count" in dump:
        return "stat"
    records = dump.get("records")
    if not isinstance(records, list) or _MAP not in dump:
        keys = ", ".join(key if isinstance(key, str) else shown(key) for key in dump) or "none"
        raise ValueError(f"{path}: is no SGLang recorder dump, its keys are {keys}")
    if not records:
        raise ValueError(f"{path}: has no records")
    # A per_token record contains global_physical_count as well.
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


def _read_records(
    dumps: _Dumps, mode: str, stage_of: Mapping[Path, int], allow_missing: bool
) -> dict[str, Any]:
    maps: dict[Path, Ints] = {}
    for path, dump in dumps.items():
        maps[path] = _slot_map(path, dump, next(iter(maps.values())).shape if maps else (None, None))
    num_experts = 1 + max(int(slot_map.max()) for slot_map in maps.values())
    records: dict[tuple[int, int, str], Record] = {}
    for path, dump in dumps.items():
        check_covered(f"{path}: {_MAP}", maps[path], num_experts)
        for raw in dump["records"]:
            record = read_record(path, raw, mode, maps[path], num_experts)
            # Ranks of another stage have numbers of their own.
            record = record._replace(rank=record.rank + STAGE * stage_of.get(path, 0))
            if (key := record[:3]) in records:
                raise ValueError(f"{path}: forward pass {key[0]} of rank {key[1]} is recorded twice")
            records[key] = record
    first = next(iter(dumps))
    if mode == "per_pass":
        _check_slots(dumps, allow_missing)
    whole = whole_passes(first, [records[key] for key in sorted(records)])
    kept_records = distinct_ranks(whole)
    ranks, passes = {record.rank for record in kept_records}, {record.forward_pass for record in kept_records}
    provenance = {
        "num_experts_from": _MAP,
        "ranks": sorted({rank % STAGE for rank in ranks}),
        "ranks_with_a_shared_view": sorted(
            {r.rank % STAGE for r in whole} - {rank % STAGE for rank in ranks}
        ),
        "incomplete_passes_dropped": len({record.forward_pass for record in records.values()} - passes),
    }
    fields = sum_passes(kept_records) if mode == "per_pass" else join_tokens(kept_records)
    return {**fields, "num_experts": num_experts, "provenance": provenance}


def _slot_map(path: Path, dump: dict[str, Any], shape: Sequence[int | None]) -> Ints:
    """Return [L, P] logical expert in each slot, at the end of the file."""
    slot_map = integers(path, _MAP, dump[_MAP], shape)
    if not slot_map.size or slot_map.min() < -1:
        got = slot_map.min() if slot_map.size else f"shape {list(slot_map.shape)}"
        raise ValueError(f"{path}: {_MAP} must have an expert in each slot, or -1 (absent), got {got}")
    if (largest := slot_map.max()) >= (slots := slot_map.shape[1]):
        raise ValueError(f"{path}: {_MAP} must name at most {slots} experts, one per slot, got id {largest}")
    return slot_map


def _check_slots(dumps: _Dumps, allow_missing: bool) -> None:
    """Reject per_pass files of only some ranks, if each rank counted only the slots on it (DeepEP): slots that no rank
    counted in any layer or pass belong to a missing rank.
    """
    counted: dict[int, Ints] = {}  # [P] bool by rank
    for dump in dumps.values():
        for record in dump["records"]:
            routed = (record["global_physical_count"] != 0).any(0).numpy()
            counted[record["rank"]] = counted.get(record["rank"], False) | routed
    num_slots, fewest = len(next(iter(counted.values()))), 1 + max(counted)
    blocks = [
        number
        for number in range(fewest, num_slots + 1)
        if number > 1 and num_slots % number == 0
        and all(set(np.flatnonzero(slots) * number // num_slots) <= {rank} for rank, slots in counted.items())
    ]  # fmt: skip
    active = [rank for rank, slots in counted.items() if slots.any()]
    if not blocks or not active:
        return
    missing = sorted(set(range(blocks[-1])) - set(counted))
    note_missing(
        next(iter(dumps)), missing, blocks[-1], allow_missing, ", each of which counted its own slots"
    )


class Record(NamedTuple):
    """One forward pass as one rank recorded it, in logical experts."""

    forward_pass: int
    rank: int
    gatherer: str  # SGLang's gatherer_key = sub-batch of a two-batch pass
    view: Ints  # per_pass: [L, E] copies; per_token: [tokens, L, 8] chosen experts, -1 = padding
    seq_lens: tuple[int, ...] = ()  # per_token: tokens of each sequence, in order


def integers(path: Path, name: str, value: Any, shape: Sequence[int | None]) -> Ints:
    """Return a tensor of a file as int64; None in shape = any size."""
    if not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES:
        got = getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"{path}: {name} must be an integer tensor, got {got}")
    if value.layout != torch.strided or value.is_nested or value.device.type != "cpu":
        kind = (
            "nested" if value.is_nested else value.layout if value.device.type == "cpu" else value.device.type
        )
        raise ValueError(f"{path}: {name} must be a dense tensor with its values, got {kind}")
    if value.dim() != len(shape) or any(w not in (None, g) for w, g in zip(shape, value.shape, strict=True)):
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(f"{path}: {name} must have shape [{wanted}], got {list(value.shape)}")
    return value.resolve_neg().numpy().astype(np.int64)


def read_record(path: Path, raw: dict[str, Any], mode: str, slot_map: Ints, num_experts: int) -> Record:
    """Return a record of a file, whose slots hold the experts of slot_map [L, P]."""
    key, slots = _key(path, raw), _slots_of(path, raw, mode, slot_map.shape)
    if mode == "per_pass":
        absent = slots[slot_map < 0] != 0
        record = Record(*key, counts_of_slots(slot_map, slots, num_experts))
    else:
        experts = slot_map[np.arange(len(slot_map))[:, None, None], slots]
        absent = experts[slots >= 0] < 0
        view = np.where(slots >= 0, experts, -1).transpose(1, 0, 2).astype(np.int32)
        record = Record(*key, view, _sequence_lengths(raw.get("extend_seq_lens"), len(view)))
    if absent.any():
        raise ValueError(f"{path}: must have no copies in absent slots (-1 in {_MAP}), got some")
    return record


def _key(path: Path, raw: dict[str, Any]) -> tuple[int, int, str]:
    """Return forward pass, rank and gatherer of a record."""
    for name in ("forward_pass_id", "rank"):
        if type(raw.get(name)) is not int:
            raise ValueError(f"{path}: {name} of a record must be an integer, got {shown(raw.get(name))}")
    if not 0 <= raw["rank"] < STAGE:
        raise ValueError(f"{path}: rank of a record must be in 0..{STAGE - 1}, got {raw['rank']}")
    gatherer = raw.get("gatherer_key", "")
    if not isinstance(gatherer, str):
        raise ValueError(f"{path}: gatherer_key of a record must be a string, got {shown(gatherer)}")
    return raw["forward_pass_id"], raw["rank"], gatherer


def _sequence_lengths(known: Any, tokens: int) -> tuple[int, ...]:
    """Return tokens of each request of a prefill; a decode step (None) or a padded batch counts as one sequence."""
    valid = isinstance(known, list) and all(type(length) is int and length >= 0 for length in known)
    return tuple(known) if valid and sum(known) == tokens else (tokens,)


def _slots_of(path: Path, raw: dict[str, Any], mode: str, shape: Sequence[int]) -> Ints:
    """Return a record's copies of the slots [L, P] (per_pass), or its chosen slots [L, tokens, 8] (per_token)."""
    layers, num_slots = shape
    key = "topk_ids_of_layer" if mode == "per_token" else "global_physical_count"
    name = f"{key} of forward pass {raw['forward_pass_id']}"
    view = integers(path, name, raw[key], (layers, None, None) if mode == "per_token" else shape)
    if mode == "per_pass" and view.min() < 0:
        raise ValueError(f"{path}: {name} must not be negative, got {view.min()}")
    # A fused shared expert would appear as a slot after the last one.
    if mode == "per_token" and view.size and (view.min() < -1 or view.max() >= num_slots):
        raise ValueError(f"{path}: {name} must be in -1..{num_slots - 1}, got {view.min()}..{view.max()}")
    return view


def whole_passes(path: Path, records: Sequence[Record]) -> list[Record]:
    """Return records without the first and last passes that some rank did not record; a gap in between is an error."""
    ranks = {record.rank for record in records}
    ranks_by_pass: dict[int, set[int]] = {}
    for record in records:
        ranks_by_pass.setdefault(record.forward_pass, set()).add(record.rank)
    whole = [forward_pass for forward_pass in ranks_by_pass if ranks_by_pass[forward_pass] == ranks]
    if not whole:
        raise ValueError(f"{path}: no forward pass is recorded by all of the ranks {sorted(ranks)}")
    for forward_pass in sorted(ranks_by_pass):
        missing = ranks - ranks_by_pass[forward_pass]
        if missing and min(whole) < forward_pass < max(whole):
            raise ValueError(f"{path}: forward pass {forward_pass} has no record of ranks {sorted(missing)}")
    return [record for record in records if ranks_by_pass[record.forward_pass] == ranks]


def distinct_ranks(records: Sequence[Record]) -> list[Record]:
    """Return one rank per view: the lowest of those that agree in every record. Records must be ordered by key."""
    views = {record.rank: blake2b() for record in records}
    for record in records:
        views[record.rank].update(f"{record.forward_pass} {record.gatherer} {record.view.shape}".encode())
        views[record.rank].update(record.view.tobytes())
    lowest: dict[bytes, int] = {}
    for rank in sorted(views):
        lowest.setdefault(views[rank].digest(), rank)
    return [record for record in records if record.rank in lowest.values()]


def sum_passes(records: Sequence[Record]) -> dict[str, Any]:
    """Return ``counts`` of the forward passes in order; passes without a routed token are dropped."""
    passes: dict[int, Ints] = {}
    for record in records:
        passes[record.forward_pass] = passes.get(record.forward_pass, np.int64(0)) + record.view
    counts = np.stack(list(passes.values()))
    return {"counts": counts[counts.any((1, 2))]}


def join_tokens(records: Sequence[Record]) -> dict[str, Any]:
    """Return ``topk_ids`` in the order of passes, then ranks; padding and unused columns of the 8 are dropped."""
    width = max(record.view.shape[2] for record in records)
    views = [
        np.pad(r.view, ((0, 0), (0, 0), (0, width - r.view.shape[2])), constant_values=-1) for r in records
    ]
    topk_ids = np.concatenate(views)
    forward_pass = np.repeat([r.forward_pass for r in records], [len(r.view) for r in records])
    seq_lens = [length for record in records for length in record.seq_lens]
    seq_id = np.repeat(np.arange(len(seq_lens)), seq_lens)
    used = topk_ids >= 0
    token, column = used.any((1, 2)), used.any((0, 1))
    return {
        "topk_ids": topk_ids[token][:, :, column],
        "seq_id": seq_id[token],
        "tokens_per_batch": np.unique(forward_pass[token], return_counts=True)[1],
    }
