"""The project's own trace files: an .npz of the arrays and of ``about``, a JSON object with all other fields."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from isoload.files import MAX_EXPERTS, MAX_NOTES, parse_json, read_text
from isoload.traces.identity import Identity, identity_from_json, identity_to_json
from isoload.traces.record import DIMS, Ints, Trace, check_bytes, read_arrays
from isoload.traces.routes import dense_layers
from isoload.wording import shown

ARRAYS = (*DIMS, "cluster")
ABOUT = "about"  # [] bytes: a JSON object
ARRAY_FILES = tuple(f"{name}.npy" for name in (*ARRAYS, ABOUT))  # what is read of an .npz

# Fields of a Trace that the JSON may set; all its other keys are provenance.
_JSON_FIELDS = {"name": (str, "a string"), "num_experts": (int, "an integer"), "top_k": (int, "an integer")}


def read_npz(path: Path, limit: int) -> dict[str, Any]:
    """Return the fields of the Trace in an .npz, not checked against each other; limit: most bytes of its arrays."""
    arrays, others = read_arrays(path, (*ARRAYS, ABOUT), limit)
    if "counts" not in arrays and "topk_ids" not in arrays:
        names = ", ".join(others) or "none"
        raise ValueError(f"{path}: holds neither counts nor topk_ids, its arrays are {names}")
    fields = {"name": path.stem, "provenance": {}, **_about(path, arrays, limit)}
    provenance = fields["provenance"]
    _drop_dense(fields, arrays)
    if others:
        provenance.setdefault("arrays_not_read", others)
    origin = "counts" if "counts" in arrays else "json"
    if "num_experts" not in fields:
        fields["num_experts"], origin = _num_experts(path, arrays)
    provenance.setdefault("num_experts_from", origin)
    if (cluster := arrays.pop("cluster", None)) is not None:
        fields["cluster"] = _labels(path, cluster)
    return fields | arrays


def _drop_dense(fields: dict[str, Any], arrays: dict[str, Ints]) -> None:
    """Drop the dense layers of topk_ids, as in routes with a row for every hidden layer; numbers stay."""
    ids, identity = arrays.get("topk_ids"), fields.get("identity", Identity())
    if ids is None or ids.dtype.kind not in "iu" or ids.ndim != 3 or identity.numbering == "moe":
        return
    dense = dense_layers(ids)
    layer_ids = fields.get("layer_ids") or tuple(range(len(dense)))
    if not dense.any() or dense.all() or len(layer_ids) != len(dense):
        return
    rows = np.flatnonzero(~dense)
    for key in ("topk_ids", "counts"):
        if key in arrays and arrays[key].ndim == 3 and arrays[key].shape[1] == len(dense):
            arrays[key] = arrays[key][:, rows]
    numbers = tuple(layer_ids[row] for row in rows)
    fields.update(layer_ids=numbers, identity=replace(identity, numbering="model"))
    fields["provenance"]["dense_layers_dropped"] = [layer_ids[row] for row in np.flatnonzero(dense)]


def _labels(path: Path, cluster: npt.NDArray[Any]) -> tuple[str, ...]:
    if cluster.dtype.kind == "U" and cluster.size and cluster.itemsize:
        codes = np.ascontiguousarray(cluster).view(f"{cluster.dtype.byteorder}u4")
        if (wrong := codes[(codes > 0x10FFFF) | (codes >> 11 == 0xD800 >> 11)]).size:
            raise ValueError(f"{path}: cluster must be text, got code point {wrong[0]:#x}")
    return tuple(map(str, cluster.ravel()))


def _num_experts(path: Path, arrays: dict[str, Ints]) -> tuple[int, str]:
    """Return E derived from the arrays alone, and the name of its source."""
    counts, ids = arrays.get("counts"), arrays.get("topk_ids")
    if counts is not None:
        return (counts.shape[-1] if counts.ndim else 0), "counts"
    assert ids is not None
    if ids.dtype.kind not in "iu" or not ids.size:
        return 1, "largest id"  # Trace rejects them
    largest = int(ids.max())
    if largest >= MAX_EXPERTS:
        raise ValueError(f"{path}: topk_ids must be below {MAX_EXPERTS}, got {largest}")
    return largest + 1, "largest id"


def _about(path: Path, arrays: dict[str, npt.NDArray[Any]], limit: int) -> dict[str, Any]:
    """Return the fields in a trace's JSON, which is removed from the arrays, or in an older file's .json."""
    if (note := arrays.pop(ABOUT, None)) is not None:
        if note.dtype.kind != "S" or note.ndim or note.nbytes > MAX_NOTES:
            got = f"{note.dtype} {list(note.shape)}"
            raise ValueError(f"{path}: {ABOUT} must be at most {MAX_NOTES >> 20} MiB of bytes, got {got}")
        fields = _parse_about(f"{path}: {ABOUT}", note.item())
        named = fields["provenance"].pop("arrays", [])
        if not isinstance(named, list) or not set(map(str, named)) <= arrays.keys():
            raise ValueError(f"{path}: must hold the arrays {shown(named)}, got {', '.join(arrays)}")
        return fields
    beside = path.with_suffix(".json")
    if not beside.exists():
        return {}
    check_bytes(beside, beside.stat().st_size, limit)
    return _parse_about(str(beside), read_text(beside, MAX_NOTES).encode())


def _parse_about(path: str, text: bytes) -> dict[str, Any]:
    try:
        known = parse_json(text.decode())
        json.dumps(known, ensure_ascii=False).encode()  # \ud800 is valid JSON, but cannot be printed
    except RecursionError:
        raise ValueError(f"{path}: is nested too deep") from None
    except UnicodeError as error:
        raise ValueError(f"{path}: is not JSON ({error})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(known, dict):
        raise ValueError(f"{path}: must hold one JSON object, got {type(known).__name__}")
    if "experts" in known:
        known.setdefault("num_experts", known.pop("experts"))
    fields: dict[str, Any] = {}
    for key, (kind, wanted) in _JSON_FIELDS.items():
        if key in known:
            fields[key] = known.pop(key)
            if type(fields[key]) is not kind:
                raise ValueError(f"{path}: {key} must be {wanted}, got {shown(fields[key])}")
    layer_ids = known.pop("layer_ids", [])
    if not isinstance(layer_ids, list) or not all(type(i) is int for i in layer_ids):
        raise ValueError(f"{path}: layer_ids must be a list of integers, got {shown(layer_ids)}")
    try:
        identity = _identity(known, layer_ids)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return {**fields, "layer_ids": tuple(layer_ids), "identity": identity, "provenance": known}


def _identity(known: dict[str, Any], layer_ids: list[int]) -> Identity:
    """Return the identity; layers 0..L-1 of older files, without one, may be positions or the model's own numbers."""
    if "identity" in known:
        return identity_from_json(known.pop("identity"))
    if known.get("layers") == "by their place among MoE layers":
        return Identity("moe")
    return Identity("order" if layer_ids in ([], list(range(len(layer_ids)))) else "model")


def write_trace(trace: Trace, path: str | Path, **more: Ints) -> None:
    """Write ``path`` (.npz), whole or not at all; more: arrays that :func:`read_trace` does not read."""
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"path must end in .npz, got {str(path)!r}")
    known = {**trace.provenance, "layer_ids": list(trace.layer_ids)}
    known |= {"identity": identity_to_json(trace.identity), "name": trace.name}
    known |= {"num_experts": trace.num_experts, "top_k": trace.top_k}
    arrays: dict[str, Any] = {key: _narrow(a) for key in DIMS if (a := getattr(trace, key)) is not None}
    if trace.cluster is not None:
        arrays["cluster"] = np.array(trace.cluster)
    known["arrays"] = list(arrays)  # zipfile does not detect that damage to its index hides arrays
    try:
        text = json.dumps(known, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"provenance must be JSON values, got {error}") from None
    arrays |= {key: _narrow(array) for key, array in more.items()}
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with new.open("wb") as file:
            np.savez_compressed(file, about=np.array(text.encode()), **arrays)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _narrow(array: Ints) -> Ints:
    """Return the array in the narrowest dtype that holds its values, which are at least -1."""
    signed = (np.int8, np.int16, np.int32, np.int64)
    dtypes = signed if array.min() < 0 else (np.uint8, np.uint16, np.uint32, np.uint64)
    return array.astype(next(dtype for dtype in dtypes if array.max() <= np.iinfo(dtype).max))
