"""Trace: recorded routing over many batches, and the checks of its fields.

A trace file may come from anywhere: its members and their sizes are checked before memory is allocated.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isoload.files import MAX_ARRAYS, MAX_EXPERTS, open_regular
from isoload.traces.identity import Identified, Identity
from isoload.wording import amount, nearest, shown

MAX_BYTES_NAME = "ISOLOAD_MAX_TRACE_BYTES"  # environment variable with another limit


def max_bytes(argument: int | None) -> int:
    """Return the limit: the argument, else the environment's, else MAX_ARRAYS."""
    name, value = (
        ("max_bytes", argument) if argument is not None else (MAX_BYTES_NAME, os.environ.get(MAX_BYTES_NAME))
    )
    if value is None:
        return MAX_ARRAYS
    limit = int(value) if isinstance(value, int) or (value.isdecimal() and len(value) < 19) else 0
    if limit < 1:
        raise ValueError(f"{name} must be a positive integer, got {shown(value)}")
    return limit


def check_bytes(what: str | Path, size: int, limit: int) -> None:
    """Reject sizes above the limit, before memory is allocated."""
    if size > limit:
        raise ValueError(
            f"{what}: unfolds to {size / 2**20:.0f} MiB, above the limit of {limit / 2**20:g} MiB: "
            f"{MAX_BYTES_NAME} or read_trace(max_bytes=...) sets another"
        )


def read_members(path: Path) -> list[zipfile.ZipInfo]:
    """Return the members of a zip archive without reading them."""
    with open_regular(path) as file:
        magic = file.read(2)
        if magic != b"PK":
            raise ValueError(f"{path}: " + ("is neither an npz nor a torch file" if magic else "is empty"))
        try:
            with zipfile.ZipFile(file) as archive:
                return archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
            # Damage may look like a future version, or like an offset before the start of the file.
            raise ValueError(f"{path}: is truncated or damaged") from None


def is_npz(path: Path, members: Sequence[zipfile.ZipInfo]) -> bool:
    """Return whether an archive is an npz or a torch file: both are zip archives with different members."""
    names = [member.filename for member in members]
    if any(name.endswith("data.pkl") for name in names):
        return False
    if all(name.endswith(".npy") for name in names):
        return True
    raise ValueError(f"{path}: is neither an npz nor a torch file")


def read_arrays(
    path: Path, names: Collection[str], limit: int
) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    """Return the named arrays of an npz, of at most limit bytes in memory, and the names of its other arrays."""
    members = read_members(path)
    if not is_npz(path, members):
        raise ValueError(f"{path}: is a torch file, not an npz")
    wanted = {f"{name}.npy" for name in names}
    check_bytes(path, sum(member.file_size for member in members if member.filename in wanted), limit)
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files if key in names}
            others = [key for key in archive.files if key not in arrays]
    except Exception as error:
        # Damaged bytes raise from zipfile, zlib, tokenize or NumPy, in a dozen types.
        raise ValueError(f"{path}: cannot be read as an npz of plain arrays ({str(error)[:200]})") from None
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):  # NumPy returns the bytes of a member without a header
            raise ValueError(
                f"{path}: {key}.npy must be an array in NumPy's format, got {len(array)} other bytes"
            )
    return arrays, others


# Part of a published model's name: routed experts E -> K.
MODELS = {
    "gpt-oss": {32: 4, 128: 4},
    "mixtral": {8: 2},
    "olmoe": {64: 8},
    "qwen3": {128: 8, 160: 8, 512: 10},
    "deepseek-v2": {64: 6, 160: 6},
    "deepseek-v3": {256: 8},
    "deepseek-r1": {256: 8},
    "glm-4.5": {128: 8, 160: 8},
    "glm-5": {256: 8},
    "kimi-k2": {384: 8},
}


def model_top_k(model: str, num_experts: int) -> int:
    """Return K of a model with num_experts routed experts; 0: unknown."""
    name = re.sub(r"[\s_]+", "-", model.lower())
    return next((sizes.get(num_experts, 0) for part, sizes in MODELS.items() if part in name), 0)


def with_top_k(trace: Trace, model: str | None = None) -> Trace:
    """Return the trace with its own K, else that of model (a number or a name), else of the model that it names."""
    if model is None:
        known = model_top_k(str(trace.provenance.get("model")), trace.num_experts)
        return replace(trace, top_k=trace.top_k or known)
    number = model.isdecimal() and len(model) < 9
    top_k = int(model) if number else model_top_k(model, trace.num_experts)
    if not top_k:
        other = "" if any(part in model.lower() for part in MODELS) else nearest(model, MODELS)
        raise ValueError(
            f"top_k must be a number from 1 on, or name a model of {trace.num_experts} experts that is one of "
            f"{', '.join(MODELS)}, got {shown(model)}{other}"
        )
    if trace.top_k not in (0, top_k):
        raise ValueError(f"top_k must be the record's {trace.top_k}, got {shown(model)}")
    return replace(trace, top_k=top_k)


Ints = npt.NDArray[np.integer[Any]]

MAX_SUM = 2**53  # copies and tokens of a whole trace: exact in a float64, and no product of them overflows

DIMS = {
    "counts": "[batches, L, E]",
    "topk_ids": "[tokens, L, K]",
    "tokens_per_batch": "[batches]",
    "seq_id": "[tokens]",
}


@dataclass(frozen=True, eq=False)
class Trace(Identified):
    """Loads, per-token choices or both, of L layers and E logical experts. A host record, validated at construction.

    ``counts`` and ``topk_ids`` may describe different tokens (a long run, and the choices of a part of it), unless
    ``tokens_per_batch`` adds up to the number of tokens.

    Args:
        name: its name in tables.
        num_experts: E.
        top_k: K, experts per token; 0 = unknown. Default: the width of topk_ids.
        counts: [batches, L, E] int64 copies.
        topk_ids: [tokens, L, K] int32 logical experts, none twice; -1 = absent. In the order of the run.
        tokens_per_batch: [batches] int64 tokens of each batch of counts; without counts: consecutive cuts of topk_ids.
        seq_id: [tokens] int64, equal for tokens of one sequence (or forward pass): they have one source rank.
        cluster: [batches] label; batches of one label are near-copies or of one domain.
        layer_ids: [L] numbers of the layers, distinct. Default: 0..L-1.
        provenance: model, source, licence and other facts: JSON values.
        identity: meaning of layer_ids. Default: the model's own numbers if layer_ids are given, else unknown.
    """

    name: str
    num_experts: int
    top_k: int = 0
    counts: Ints | None = None
    topk_ids: Ints | None = None
    tokens_per_batch: Ints | None = None
    seq_id: Ints | None = None
    cluster: tuple[str, ...] | None = None
    layer_ids: tuple[int, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)
    identity: Identity = None  # type: ignore[assignment]  # filled in below

    def __post_init__(self) -> None:
        counts_shape: tuple[int, ...] = getattr(self.counts, "shape", ())
        ids_shape: tuple[int, ...] = getattr(self.topk_ids, "shape", ())
        if self.identity is None:
            object.__setattr__(self, "identity", Identity("model" if self.layer_ids else "order"))
        if not self.layer_ids and len(shape := counts_shape or ids_shape) == 3:
            object.__setattr__(self, "layer_ids", tuple(range(shape[1])))
        if not self.top_k and len(ids_shape) == 3:
            object.__setattr__(self, "top_k", ids_shape[2])
        if errors := trace_errors(self):
            raise ValueError("; ".join(errors))
        for name in DIMS:
            if (array := getattr(self, name)) is not None:
                dtype = np.int32 if name == "topk_ids" else np.int64
                object.__setattr__(self, name, np.ascontiguousarray(array, dtype=dtype))

    @property
    def has_tokens(self) -> bool:
        """Whether per-token choices are known."""
        return self.topk_ids is not None

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def num_batches(self) -> int:
        """Number of batches of :meth:`batch_counts`; tokens without known batches are one batch."""
        batches = self.tokens_per_batch if self.counts is None else self.counts
        return 1 if batches is None else len(batches)

    def batch_counts(self) -> Ints:
        """Return [batches, L, E] int64 copies: ``counts`` if recorded, else counted from ``topk_ids``."""
        if self.counts is not None:
            return self.counts
        assert self.topk_ids is not None
        cuts = [len(self.topk_ids)] if self.tokens_per_batch is None else self.tokens_per_batch
        size = 8 * len(cuts) * self.num_layers * self.num_experts
        check_bytes("counts of topk_ids", size, max_bytes(None))
        return count_batches(self.topk_ids, cuts, self.num_experts)

    def __repr__(self) -> str:
        parts = [
            shown(self.name),
            amount(self.num_batches, "batch", "batches"),
            amount(self.num_layers, "layer"),
            amount(self.num_experts, "expert"),
            f"top-{self.top_k}" if self.top_k else "top-k unknown",
            "counts alone" if self.topk_ids is None else amount(len(self.topk_ids), "token"),
        ]
        return f"Trace({', '.join(parts)})"

    def select_layers(self, layers: Sequence[int]) -> Trace:
        """Return the trace of some layers, by position (not by the model's layer number)."""
        picked = list(layers)
        if not picked or not all(0 <= layer < self.num_layers for layer in picked):
            raise ValueError(f"layers must be some of 0..{self.num_layers - 1}, got {picked}")
        return replace(
            self,
            counts=None if self.counts is None else self.counts[:, picked],
            topk_ids=None if self.topk_ids is None else self.topk_ids[:, picked],
            layer_ids=tuple(self.layer_ids[layer] for layer in picked),
        )


def count_batches(topk_ids: Ints, tokens_per_batch: Ints | Sequence[int], num_experts: int) -> Ints:
    """Return [batches, L, E] int64 copies of ids [tokens, L, K] cut into consecutive batches; -1 is not counted."""
    layers = topk_ids.shape[1]
    # One bincount for all layers: key = layer * E + expert.
    first_key = np.arange(layers)[:, None] * num_experts
    counts = np.zeros((len(tokens_per_batch), layers, num_experts), dtype=np.int64)
    for b, end in enumerate(np.cumsum(tokens_per_batch)):
        ids = topk_ids[end - tokens_per_batch[b] : end].astype(np.int64, copy=False)
        keys = (ids + first_key)[ids >= 0]
        counts[b] = np.bincount(keys, minlength=layers * num_experts).reshape(layers, num_experts)
    return counts


def repeated_rows(ids: Ints) -> npt.NDArray[np.bool_]:
    """Return [tokens, L] whether a row of ids [tokens, L, K] names an expert twice; -1 may repeat."""
    repeated = np.zeros(ids.shape[:2], dtype=bool)
    for layer in range(ids.shape[1]):  # a copy of all ids would need as much memory again
        ordered = np.sort(ids[:, layer], axis=-1)
        repeated[:, layer] = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(-1)
    return repeated


def counts_of_slots(slot_map: Ints, copies: Ints, num_experts: int) -> Ints:
    """Return [L, E] int64 copies of experts, from copies [L, P] of the slots that hold them; absent slots: -1."""
    counts = np.zeros((len(slot_map), num_experts + 1), dtype=np.int64)
    np.add.at(counts, (np.arange(len(slot_map))[:, None], slot_map), copies)
    return counts[:, :num_experts]


def check_covered(key: str, slot_map: Ints, num_experts: int) -> None:
    """Raise ValueError if slots [L, P] lack an expert in some layer; key: for messages."""
    for layer, row in enumerate(slot_map):
        if (missing := np.setdiff1d(np.arange(num_experts), row)).size:
            raise ValueError(f"{key} must hold every expert, layer {layer} lacks {missing[0]}")


def trace_errors(trace: Trace) -> list[str]:
    """Return the errors of a trace, one sentence each; empty if there are none."""
    if trace.counts is None and trace.topk_ids is None:
        return ["counts or topk_ids must be given, got neither"]
    for step in (_array_errors, _shape_errors, _range_errors, _sum_errors):
        if errors := list(step(trace)):  # each step may rely on the steps before it
            return errors
    return []


def _array_errors(trace: Trace) -> Iterator[str]:
    for name, dims in DIMS.items():
        array = getattr(trace, name)
        if array is None:
            continue
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
            got = getattr(array, "dtype", type(array).__name__)
            yield f"{name} must be a NumPy array of integers, got {got}"
        elif array.ndim != dims.count(",") + 1 or 0 in array.shape:
            yield f"{name} must be {dims} and not empty, got shape {list(array.shape)}"


def _shape_errors(trace: Trace) -> Iterator[str]:
    if trace.num_experts < 1:
        yield f"num_experts must be at least 1, got {trace.num_experts}"
    elif trace.num_experts > MAX_EXPERTS:
        yield f"num_experts must be at most {MAX_EXPERTS}, got {trace.num_experts}"
    elif not 0 <= trace.top_k <= trace.num_experts:
        yield f"top_k must be in 0..{trace.num_experts} (num_experts), got {trace.top_k}"
    if len(set(trace.layer_ids)) != len(trace.layer_ids):
        yield f"layer_ids must be distinct, got {shown(list(trace.layer_ids))}"
    elif not all(0 <= layer < 2**31 for layer in trace.layer_ids):
        yield f"layer_ids must be in 0..2^31-1, got {shown(list(trace.layer_ids))}"
    if trace.seq_id is not None and trace.topk_ids is None:
        yield "seq_id must come with topk_ids, got none"
    layers, batches, ids = len(trace.layer_ids), trace.num_batches, trace.topk_ids
    shapes: dict[str, tuple[int | None, ...]] = {
        "counts": (None, layers, trace.num_experts),
        "topk_ids": (None, layers, trace.top_k or None),
        "tokens_per_batch": (batches,),
        "cluster": (batches,),
    } | ({} if ids is None else {"seq_id": (len(ids),)})
    for name, shape in shapes.items():
        value = getattr(trace, name)
        if value is None:
            continue
        if any(want not in (None, got) for want, got in zip(shape, np.shape(value), strict=True)):
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            yield f"{name} must have shape [{wanted}], got {list(np.shape(value))}"


def _range_errors(trace: Trace) -> Iterator[str]:
    for name in ("counts", "tokens_per_batch"):
        array = getattr(trace, name)
        if array is not None and array.min() < 0:
            yield f"{name} must not be negative, got {array.min()}"
        elif array is not None and (total := float(array.sum(dtype=np.float64))) >= MAX_SUM:
            yield f"{name} must add up to less than 2^53, got {total:g}"
    ids = trace.topk_ids
    if ids is None:
        return
    if int(ids.min()) < -1 or int(ids.max()) >= trace.num_experts:
        yield f"topk_ids must be in -1..{trace.num_experts - 1}, got {ids.min()}..{ids.max()}"
    if (repeated := repeated_rows(ids)).any():
        layer = int(repeated.any(0).argmax())
        token = int(repeated[:, layer].argmax())
        chosen = ids[token, layer].tolist()
        yield (
            f"topk_ids must not name an expert twice, got {chosen} (token {token}, layer {layer}): "
            "read_routes(topk_ids, padding='repeat') of isoload.traces masks padding rows"
        )


def _sum_errors(trace: Trace) -> Iterator[str]:
    counts, ids, tokens = trace.counts, trace.topk_ids, trace.tokens_per_batch
    if tokens is None:
        return
    tokens = tokens.astype(np.int64)  # files hold narrow integers, in which tokens * top_k would overflow
    same_tokens = ids is not None and int(tokens.sum()) == len(ids)
    if counts is None and ids is not None and not same_tokens:
        yield f"tokens_per_batch must sum to the {len(ids)} tokens of topk_ids, got {tokens.sum()}"
    if counts is not None and trace.top_k:
        excess = counts.sum(-1) > tokens[:, None] * trace.top_k
        if excess.any():
            b, layer = np.argwhere(excess)[0]
            limit, got = tokens[b] * trace.top_k, counts[b, layer].sum()
            yield (
                f"counts must sum to at most tokens_per_batch * top_k = {limit}, "
                f"got {got} (batch {b}, layer {layer})"
            )
    if counts is not None and ids is not None and same_tokens:
        wrong = (count_batches(ids, tokens, trace.num_experts) != counts).any((1, 2))
        if wrong.any():
            yield f"counts must be those of topk_ids, got others in batch {wrong.argmax()}"
