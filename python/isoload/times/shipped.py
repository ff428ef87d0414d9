"""The constants beside this file: one JSON object per table, its columns and its rows."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoload.files.reading import parse_json
from isoload.wording import not_one_of

Row = dict[str, Any]
Floats = NDArray[np.float64]
TABLES = ("experts", "exchanges")


@cache
def read(table: str) -> tuple[Row, ...]:
    """The rows of a table, each with the table's source."""
    found = parse_json(resources.files(__package__).joinpath(f"{table}.json").read_text())
    shared = {"table": table, "source": found["source"]}
    return tuple(dict(zip(found["columns"], row, strict=True)) | shared for row in found["rows"])


def available() -> list[Row]:
    """What is shipped, a row for each set of constants: what `load` of ExpertTime (table "experts") and AllToAllTime
    ("exchanges") may be asked for, the version it was measured with and the errors of its fit."""
    return [dict(row) for table in TABLES for row in read(table)]


def select(rows: tuple[Row, ...], **asked: Any) -> tuple[Row, ...]:
    """The rows that have what is asked for, in their order; None asks for nothing.

    Raises:
        ValueError: naming the first argument that no row has beside those before it, and what it may be.
    """
    for name, value in asked.items():
        choices = sorted({row[name] for row in rows})
        if value is not None:
            rows = tuple(row for row in rows if row[name] == value)
        if not rows:
            raise ValueError(not_one_of(name, choices, value))
    return rows


def numbers(name: str, values: Any, least: float = 0.0) -> Floats:
    """An array or a tensor on the CPU as float64.

    Raises:
        ValueError: a value that is not finite, or less than `least`.
    """
    found = np.asarray(values, dtype=np.float64)
    if (wrong := found[~(np.isfinite(found) & (found >= least))]).size:
        raise ValueError(f"{name} must be finite numbers from {least:g} on, got {wrong[0]:g}")
    return found
