"""Per-rank records of SGLang's recorder: from slots to logical experts, from ranks to forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from isoload.files.reading import shown
from isoload.trace.checks import Ints, counts_of_slots

_DTYPES = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class Record(NamedTuple):
    """One forward pass as one rank recorded it, in logical experts."""

    forward_pass: int
    rank: int
    gatherer: str  # SGLang's gatherer_key = sub-batch of a two-batch pass
    view: Ints  # per_pass: [L, E] copies; per_token: [tokens, L, 8] chosen experts, -1 = padding
    seq_lens: tuple[int, ...] = ()  # per_token: tokens of each sequence, in order


def integers(path: Path, name: str, value: Any, shape: Sequence[int | None]) -> Ints:
    """A tensor of a file as int64; None in shape = any size."""
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
    """A record of a file, whose slots hold the experts of slot_map [L, P]."""
    for name in ("forward_pass_id", "rank"):
        if type(raw.get(name)) is not int:
            raise ValueError(f"{path}: {name} of a record must be an integer, got {shown(raw.get(name))}")
    gatherer = raw.get("gatherer_key", "")
    if not isinstance(gatherer, str):
        raise ValueError(f"{path}: gatherer_key of a record must be a string, got {shown(gatherer)}")
    key = raw["forward_pass_id"], raw["rank"], gatherer
    if mode == "per_pass":
        return Record(*key, _logical_counts(path, raw, slot_map, num_experts))
    chosen = _logical_ids(path, raw, slot_map)
    return Record(*key, chosen, _sequence_lengths(raw.get("extend_seq_lens"), len(chosen)))


def _sequence_lengths(known: Any, tokens: int) -> tuple[int, ...]:
    """Tokens of each request of a prefill; a decode step (None) or a padded batch counts as one sequence."""
    valid = isinstance(known, list) and all(type(length) is int and length >= 0 for length in known)
    return tuple(known) if valid and sum(known) == tokens else (tokens,)


def _logical_counts(path: Path, raw: dict[str, Any], slot_map: Ints, num_experts: int) -> Ints:
    """[L, E] copies, summed over an expert's slots."""
    name = f"global_physical_count of forward pass {raw['forward_pass_id']}"
    copies = integers(path, name, raw["global_physical_count"], slot_map.shape)
    if copies.min() < 0:
        raise ValueError(f"{path}: {name} must not be negative, got {copies.min()}")
    return counts_of_slots(slot_map, copies, num_experts)


def _logical_ids(path: Path, raw: dict[str, Any], slot_map: Ints) -> Ints:
    """[tokens, L, 8] experts, -1 = padding."""
    name = f"topk_ids_of_layer of forward pass {raw['forward_pass_id']}"
    layers, num_slots = slot_map.shape
    slots = integers(path, name, raw["topk_ids_of_layer"], (layers, None, None))
    # A fused shared expert would show as a slot past the last one.
    if slots.size and (slots.min() < -1 or slots.max() >= num_slots):
        raise ValueError(f"{path}: {name} must be in -1..{num_slots - 1}, got {slots.min()}..{slots.max()}")
    layer = np.arange(layers)[:, None, None]
    ids: Ints = np.where(slots >= 0, slot_map[layer, slots], -1).transpose(1, 0, 2).astype(np.int32)
    return ids


def whole_passes(path: Path, records: Sequence[Record]) -> list[Record]:
    """Without the first and last passes that some rank did not record; a gap in between is an error."""
    ranks = {record.rank for record in records}
    seen: dict[int, set[int]] = {}
    for record in records:
        seen.setdefault(record.forward_pass, set()).add(record.rank)
    whole = [forward_pass for forward_pass in seen if seen[forward_pass] == ranks]
    if not whole:
        raise ValueError(f"{path}: no forward pass is recorded by all of the ranks {sorted(ranks)}")
    for forward_pass in sorted(seen):
        missing = ranks - seen[forward_pass]
        if missing and min(whole) < forward_pass < max(whole):
            raise ValueError(f"{path}: forward pass {forward_pass} has no record of ranks {sorted(missing)}")
    return [record for record in records if seen[record.forward_pass] == ranks]


def distinct_ranks(records: Sequence[Record]) -> list[Record]:
    """One rank per view: the lowest of those that agree in every record. Records come ordered by key."""
    views = {record.rank: blake2b() for record in records}
    for record in records:
        views[record.rank].update(f"{record.forward_pass} {record.gatherer} {record.view.shape}".encode())
        views[record.rank].update(record.view.tobytes())
    lowest: dict[bytes, int] = {}
    for rank in sorted(views):
        lowest.setdefault(views[rank].digest(), rank)
    return [record for record in records if record.rank in lowest.values()]


def sum_passes(records: Sequence[Record]) -> dict[str, Any]:
    """``counts`` of the forward passes in order; passes without a routed token are dropped."""
    passes: dict[int, Ints] = {}
    for record in records:
        passes[record.forward_pass] = passes.get(record.forward_pass, np.int64(0)) + record.view
    counts = np.stack(list(passes.values()))
    return {"counts": counts[counts.any((1, 2))]}


def join_tokens(records: Sequence[Record]) -> dict[str, Any]:
    """``topk_ids`` in the order of passes, then ranks; padding and unused columns of the 8 are dropped."""
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
