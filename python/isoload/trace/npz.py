"""The project's own trace files: an .npz of the arrays and a .json of everything else, beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from isoload.trace.archives import check_bytes, shown
from isoload.trace.checks import DIMS, MAX_EXPERTS, Ints

if TYPE_CHECKING:
    from isoload.trace import Trace

ARRAYS = (*DIMS, "cluster")
ARRAY_FILES = tuple(f"{name}.npy" for name in ARRAYS)  # what is read of an .npz

# Fields of a Trace that a .json may set; all its other keys are provenance.
_JSON_FIELDS = {"name": (str, "a string"), "num_experts": (int, "an integer"), "top_k": (int, "an integer")}


def read_npz(path: Path, limit: int) -> dict[str, Any]:
    """The fields of the Trace in an .npz and the .json beside it (at most limit bytes of text), not checked against
    each other."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files if key in ARRAYS}
            others = [key for key in archive.files if key not in arrays]
    except Exception as error:
        # damaged bytes surface from zipfile, zlib, tokenize or NumPy, as a dozen types
        raise ValueError(f"{path}: cannot be read as an npz of plain arrays ({str(error)[:200]})") from None
    for key, array in arrays.items():
        if not isinstance(array, np.ndarray):  # NumPy hands over the bytes of a member without a header
            raise ValueError(
                f"{path}: {key}.npy must be an array in NumPy's format, got {len(array)} other bytes"
            )
    if "counts" not in arrays and "topk_ids" not in arrays:
        names = ", ".join(others) or "none"
        raise ValueError(f"{path}: holds neither counts nor topk_ids, its arrays are {names}")
    fields = {"name": path.stem, **_read_json(path.with_suffix(".json"), limit)}
    provenance = fields.setdefault("provenance", {})
    if others:
        provenance.setdefault("arrays_not_read", others)
    if "num_experts" not in fields:
        fields["num_experts"], origin = _num_experts(path, arrays)
    else:
        origin = "counts" if "counts" in arrays else "json"
    provenance.setdefault("num_experts_from", origin)
    if (cluster := arrays.pop("cluster", None)) is not None:
        fields["cluster"] = _labels(path, cluster)
    return fields | arrays


def _labels(path: Path, cluster: npt.NDArray[Any]) -> tuple[str, ...]:
    """cluster [batches] as text."""
    if cluster.dtype.kind == "U" and cluster.size and cluster.itemsize:
        codes = np.ascontiguousarray(cluster).view(f"{cluster.dtype.byteorder}u4")
        if (wrong := codes[(codes > 0x10FFFF) | (codes >> 11 == 0xD800 >> 11)]).size:
            raise ValueError(f"{path}: cluster must be text, got code point {wrong[0]:#x}")
    return tuple(map(str, cluster.ravel()))


def _num_experts(path: Path, arrays: dict[str, Ints]) -> tuple[int, str]:
    """E derived from the arrays alone, and from what."""
    counts, ids = arrays.get("counts"), arrays.get("topk_ids")
    if counts is not None:
        return (counts.shape[-1] if counts.ndim else 0), "counts"
    assert ids is not None
    if ids.dtype.kind not in "iu" or not ids.size:
        return 1, "largest id"  # Trace refuses them
    largest = int(ids.max())
    if largest >= MAX_EXPERTS:
        raise ValueError(f"{path}: topk_ids must be below {MAX_EXPERTS}, got {largest}")
    return largest + 1, "largest id"


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    """The fields that a trace's .json gives; none if there is no such file."""
    if not path.exists():
        return {}
    if not path.is_file():
        raise ValueError(f"{path}: is no regular file")
    check_bytes(path, path.stat().st_size, limit)
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(known, ensure_ascii=False).encode()  # \ud800 is JSON, but no text that could be printed
    except RecursionError:
        raise ValueError(f"{path}: is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error})") from None
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
    return {**fields, "layer_ids": tuple(layer_ids), "provenance": known}


def write_npz(trace: Trace, path: Path) -> None:
    """Writes both files, each array in the narrowest integers that hold it.

    They are written aside and renamed when complete: a crash leaves no half-written file.
    """
    if path.suffix != ".npz":
        raise ValueError(f"path must end in .npz, got {str(path)!r}")
    known = {**trace.provenance, "layer_ids": list(trace.layer_ids)}
    known |= {"name": trace.name, "num_experts": trace.num_experts, "top_k": trace.top_k}
    try:
        text = json.dumps(known, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"provenance must be JSON values, got {error}") from None
    arrays: dict[str, Any] = {key: _narrow(a) for key in DIMS if (a := getattr(trace, key)) is not None}
    if trace.cluster is not None:
        arrays["cluster"] = np.array(trace.cluster)
    new_npz = path.with_name(f".{path.name}.{os.getpid()}")
    new_json = new_npz.with_name(f"{new_npz.name}.json")
    try:
        new_json.write_text(text, encoding="utf-8")
        with new_npz.open("wb") as file:
            np.savez_compressed(file, **arrays)
        new_json.replace(path.with_suffix(".json"))
        new_npz.replace(path)
    finally:
        for leftover in (new_json, new_npz):
            leftover.unlink(missing_ok=True)


def _narrow(array: Ints) -> Ints:
    """Nothing in a trace is below -1."""
    signed = (np.int8, np.int16, np.int32, np.int64)
    dtypes = signed if array.min() < 0 else (np.uint8, np.uint16, np.uint32, np.uint64)
    return array.astype(next(dtype for dtype in dtypes if array.max() <= np.iinfo(dtype).max))
