"""Routes that inference engines return for router replay: expert ids [tokens, layers, K], per request or concatenated.

The buffer of an engine starts as zeros, so a layer in which every token names expert 0 K > 1 times is dense.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from isoload.files import MAX_EXPERTS, MAX_LAYERS
from isoload.traces.identity import EXPERT_KEYS, Identity, moe_layers_of, read_config, spans
from isoload.traces.record import Ints, Trace, repeated_rows
from isoload.wording import amount, not_one_of

DTYPES = (np.uint8, np.int8, np.int16, np.int32, np.int64)


def read_routes(
    routes: Any,
    *,
    first_moe_layer: int | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    num_experts: int | None = None,
    sequence_lengths: Sequence[int] | None = None,
    missing: Literal["first", "last"] | None = None,
    padding: Literal["repeat"] | None = None,
    name: str = "routes",
) -> Trace:
    """Read the routes that an inference engine returned for router replay.

    Args:
        routes: [tokens, L, K] integers, an array or a tensor, of all requests one after the other, or a list of them,
            one per request. L counts all hidden layers of the model or its MoE layers.
        first_moe_layer: number of dense layers before the first MoE layer, after which all layers are MoE layers.
        config: in place of first_moe_layer: the content of the model's config.json, or its path.
        num_experts: routed experts E. None: the config's, else the largest id plus 1.
        sequence_lengths: [sequences] tokens of every sequence. None: one sequence per request of a list; unknown for an
            array.
        missing: which tokens of a sequence have no routes if a request has fewer rows than its sequence has tokens:
            "first" (of the prompt) or "last" (the engine never ran them). These tokens are masked.
        padding: "repeat": mask rows that name an expert twice, as engines fill rows of padding and of tokens without
            routes. None: refuse such rows. Rows of -1 are masked in any case.
        name: name of the trace.

    Returns:
        Trace with topk_ids (masked rows are -1). It has the model's own layer numbers if the layers are stated or dense
        layers are among the rows, and seq_id (the position of the sequence) if the sequences are known.
    """
    if first_moe_layer is not None and config is not None:
        raise ValueError(f"first_moe_layer must come without config, got {first_moe_layer} and a config")
    for option, value, choices in (("padding", padding, ["repeat"]), ("missing", missing, ["first", "last"])):
        if value is not None and value not in choices:
            raise ValueError(not_one_of(option, choices, value))
    ids, seq_id = _tokens(routes, sequence_lengths, missing)
    known = read_config(Path(config)) if isinstance(config, str | Path) else config
    rows, identity = _layers(ids, first_moe_layer, known, padding)
    ids = ids[:, rows]
    layers = identity.moe_layers or rows  # for messages
    masked = 0
    if (repeated := repeated_rows(ids)).any():
        if padding is None:
            token, row = np.argwhere(repeated)[0]
            raise ValueError(
                f"routes must not name an expert twice in a row, got {ids[token, row].tolist()} (token {token}, "
                f"layer {layers[row]}): if these are padding rows, padding='repeat' masks them"
            )
        ids, masked = np.where(repeated[..., None], -1, ids), int(repeated.sum())
    num_experts, origin = _num_experts(ids, num_experts, known)
    low, high = int(ids.min()), int(ids.max())
    if low < -1 or high >= num_experts:
        token, row, _ = np.argwhere((ids < -1) | (ids >= num_experts))[0]
        raise ValueError(
            f"routes must be in -1..{num_experts - 1}, got {ids[token, row].tolist()} (token {token}, "
            f"layer {layers[row]})"
        )
    provenance = {"source": "router replay", "num_experts_from": origin, "rows_masked_as_padding": masked}
    return Trace(
        name,
        num_experts,
        topk_ids=ids,
        seq_id=seq_id,
        layer_ids=identity.moe_layers,
        provenance=provenance,
        identity=identity,
    )


def dense_layers(ids: Ints) -> npt.NDArray[np.bool_]:
    """Return [L] whether a layer of ids [tokens, L, K], K > 1, has rows of zeros and, apart from -1, no others."""
    if ids.shape[2] < 2:
        return np.zeros(ids.shape[1], dtype=bool)
    dense: npt.NDArray[np.bool_] = _constant(ids) & (ids == 0).any((0, 2))
    return dense


def _constant(ids: Ints, any_id: bool = False) -> npt.NDArray[np.bool_]:
    """Return [L] whether all rows of a layer are zeros or -1; any_id: rows may repeat any other id as well."""

    def is_constant(rows: Ints) -> bool:
        first = rows[:, :1]
        return bool(((rows == first).all(-1) & ((first[:, 0] <= 0) | any_id)).all())

    return np.array([is_constant(ids[:, layer]) for layer in range(ids.shape[1])])


def _tokens(
    routes: Any, lengths: Sequence[int] | None, missing: str | None
) -> tuple[npt.NDArray[np.int32], Ints | None]:
    """Return the ids of all tokens, [tokens, L, K] int32, and the sequence of every token, or None if unknown."""
    per_request = isinstance(routes, list | tuple)
    parts = [_array(part) for part in (routes if per_request else [routes])]
    if not parts:
        raise ValueError("routes must have at least one request, got an empty list")
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) > 1:
        raise ValueError(f"routes must have the same layers and K in all requests, got {shapes}")
    if lengths is None:
        if missing is not None:
            raise ValueError(f"missing needs sequence_lengths, got {missing!r} without")
        sizes = [len(part) for part in parts] if per_request else None
    else:
        sizes = [int(length) for length in lengths]
        if sizes and min(sizes) < 0:
            raise ValueError(f"sequence_lengths must not be negative, got {min(sizes)}")
        if per_request:
            parts = _padded(parts, sizes, missing)
        elif missing is not None:
            raise ValueError(f"missing needs a list of requests, got {missing!r} and one array")
    ids = np.concatenate(parts)
    if not ids.size:
        raise ValueError(f"routes must have at least one token, layer and choice, got {list(ids.shape)}")
    if sizes is None:
        return ids, None
    if sum(sizes) != len(ids):
        raise ValueError(
            f"sequence_lengths must add up to the {len(ids)} tokens of the routes, got {sum(sizes)}"
        )
    return ids, np.repeat(np.arange(len(sizes)), sizes)


def _padded(
    parts: list[npt.NDArray[np.int32]], sizes: list[int], missing: str | None
) -> list[npt.NDArray[np.int32]]:
    """Return the rows of every request with rows of -1 for the tokens that have no routes."""
    if len(sizes) != len(parts):
        raise ValueError(
            f"sequence_lengths must have one length per request ({len(parts)}), got {len(sizes)}"
        )
    padded = []
    for request, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        lacks = size - len(part)
        if lacks < 0 or (lacks and missing is None):
            hint = (
                ": pass missing='first' (of the prompt) or 'last' to mask tokens without routes"
                if lacks > 0
                else ""
            )
            raise ValueError(
                f"sequence_lengths must be those of the routes, request {request} has {amount(len(part), 'row')} "
                f"for {amount(size, 'token')}{hint}"
            )
        rows = np.full((lacks, *part.shape[1:]), -1, dtype=np.int32)
        padded.append(np.concatenate([rows, part] if missing == "first" else [part, rows]))
    return padded


def _array(routes: Any) -> npt.NDArray[np.int32]:
    array = np.asarray(routes.detach().cpu() if hasattr(routes, "detach") else routes)
    if array.dtype not in DTYPES or array.ndim != 3:
        raise ValueError(
            "routes must be [tokens, layers, K] of uint8, int16 or int32, or a list of them, "
            f"got {list(array.shape)} {array.dtype}"
        )
    if array.dtype == np.int64 and array.size and not -1 <= array.min() <= array.max() < MAX_EXPERTS:
        raise ValueError(f"routes must be in -1..{MAX_EXPERTS - 1}, got {array.min()}..{array.max()}")
    return array.astype(np.int32)


def _layers(
    ids: Ints, first_moe_layer: int | None, config: Mapping[str, Any] | None, padding: str | None
) -> tuple[list[int], Identity]:
    """Return the rows of ids that are MoE layers, and the model's numbers of these layers as far as they are known."""
    num_rows, top_k = ids.shape[1:]
    constant = _constant(ids, padding is not None and top_k > 1)
    dense = constant & (top_k > 1)
    if dense.all():
        raise ValueError("routes must name experts in some layer, got only zeros, as in dense layers")
    if config is None and first_moe_layer is None:
        rows = np.flatnonzero(~dense).tolist()
        return rows, Identity("model", tuple(rows)) if dense.any() else Identity("order")
    if config is not None:
        moe_layers, num_hidden = moe_layers_of(dict(config)), int(config["num_hidden_layers"])
        if num_rows not in (len(moe_layers), num_hidden):
            raise ValueError(
                f"routes must have a row for each of the model's {num_hidden} layers or {len(moe_layers)} MoE layers, "
                f"got {num_rows}"
            )
        hidden = num_rows == num_hidden
    else:
        assert first_moe_layer is not None
        if not 0 <= first_moe_layer < MAX_LAYERS:
            raise ValueError(f"first_moe_layer must be in 0..{MAX_LAYERS - 1}, got {first_moe_layer}")
        hidden = num_rows > first_moe_layer and bool(constant[:first_moe_layer].all())
        moe_layers = tuple(range(first_moe_layer, num_rows if hidden else first_moe_layer + num_rows))
    rows = list(moe_layers) if hidden else list(range(num_rows))
    others = sorted(set(range(num_rows)) - set(rows))
    stated = f"although the model has MoE layers {spans(moe_layers)}: check first_moe_layer or config"
    for row in rows:
        if dense[row]:
            raise ValueError(
                f"routes must name experts in every MoE layer, row {row} has only zeros, {stated}"
            )
    for row in others:
        if not constant[row]:
            raise ValueError(f"routes must be zero in dense layers, row {row} names experts, {stated}")
    return rows, Identity("model", moe_layers)


def _num_experts(ids: Ints, num_experts: int | None, config: Mapping[str, Any] | None) -> tuple[int, str]:
    if num_experts is not None:
        return num_experts, "num_experts"
    known = None if config is None else next((config[key] for key in EXPERT_KEYS if config.get(key)), None)
    if type(known) is int:
        return known, "config"
    return max(int(ids.max()) + 1, ids.shape[2]), "largest id"
