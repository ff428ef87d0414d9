"""JSON files from anywhere: read without surprises, and lists of integers in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from isoload.trace.archives import shown

MAX_BYTES = 2**28  # a placement of 100 layers with 65536 slots is smaller
Rows = np.ndarray[Any, np.dtype[np.int64]]


def read_text(path: Path) -> str:
    """A file's text.

    Raises:
        ValueError: naming the file: no regular file, too large, not UTF-8.
        OSError: a file that cannot be opened.
    """
    if path.exists() and not path.is_file():  # a pipe would block
        raise ValueError(f"{path}: is no regular file")
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ValueError(f"{path}: must be at most {MAX_BYTES >> 20} MiB, has {size >> 20}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not text ({str(error)[:120]})") from None


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: not JSON, cut off, a key twice, NaN, too deep.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({str(error)[:120]})") from None
    except RecursionError:
        raise ValueError("is nested too deep") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {shown(twice)} must be there once")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def integer_rows(key: str, rows: Any, layers: list[Any] | None = None, least: int = -1) -> Rows:
    """[L, P] int64 from a list of L lists of P integers.

    Args:
        key: for messages.
        rows: the value at the key.
        layers: what to call each layer in messages. Default: its position.
        least: of the integers.

    Raises:
        ValueError: naming key and layer.
    """
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{key} must be a list of layers, got {shown(rows)}")
    names = layers or list(range(len(rows)))
    for name, row in zip(names, rows, strict=True):
        if not isinstance(row, list) or len(row) != len(rows[0]) or not row:
            got = f"{len(row)} entries" if isinstance(row, list) else shown(row)
            wanted = len(rows[0]) if isinstance(rows[0], list) and rows[0] else "some"
            raise ValueError(f"{key} must have {wanted} entries in every layer, layer {name} has {got}")
        if set(map(type, row)) != {int} or min(row) < least or max(row) >= 2**31:
            wrong = next(value for value in row if type(value) is not int or not least <= value < 2**31)
            raise ValueError(f"{key} must be integers from {least} on, layer {name} has {shown(wrong)}")
    return np.array(rows, dtype=np.int64)


def check_keys(found: dict[str, Any], wanted: set[str], what: str = "keys") -> None:
    """Refuses keys that are missing or foreign."""
    for key in sorted(wanted - found.keys()):
        raise ValueError(f"{what} must have {key}, got {shown(sorted(found))}")
    for key in sorted(found.keys() - wanted):
        raise ValueError(f"{what} must be {', '.join(sorted(wanted))}, got {shown(key)} besides")
