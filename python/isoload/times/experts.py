"""Time of the grouped GEMMs of one rank by the copies in its slots, and the shipped tables of constants."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoload.files import parse_json
from isoload.wording import not_one_of

Row = dict[str, Any]
Floats = NDArray[np.float64]
TABLES = ("experts", "exchanges")


@cache
def read(table: str) -> tuple[Row, ...]:
    content = parse_json(resources.files(__package__).joinpath(f"{table}.json").read_text())
    shared = {"table": table, "source": content["source"]}
    return tuple(dict(zip(content["columns"], row, strict=True)) | shared for row in content["rows"])


def available() -> list[Row]:
    """Return the shipped constants, a row for each set: arguments that `load` of ExpertTime (table "experts") and
    AllToAllTime ("exchanges") accepts, the measured version and the errors of its fit.
    """
    return [dict(row) for table in TABLES for row in read(table)]


def select(rows: tuple[Row, ...], **asked: Any) -> tuple[Row, ...]:
    """Return the rows with the requested values (None requests nothing), of which at least one must exist."""
    for name, value in asked.items():
        choices = sorted({row[name] for row in rows})
        if value is not None:
            rows = tuple(row for row in rows if row[name] == value)
        if not rows:
            raise ValueError(not_one_of(name, choices, value))
    return rows


def numbers(name: str, values: Any, least: float = 0.0) -> Floats:
    """Return an array or a tensor on the CPU as float64, if all values are finite and at least `least`."""
    array = np.asarray(values, dtype=np.float64)
    if (wrong := array[~(np.isfinite(array) & (array >= least))]).size:
        raise ValueError(f"{name} must be finite numbers from {least:g} on, got {wrong[0]:g}")
    return array


def kernel_us(
    a: float, b: float, c: float, rho: float, p: float, active: ArrayLike, padded: ArrayLike, rows: ArrayLike
) -> Floats:
    """Return a + ((b active)^p + (c padded)^p)^(1/p) + rho rows, elementwise: launching, reading the weights of the
    slots with copies and multiplying (the longer one hides most of the other), and handling the rank's rows.
    """
    reading, multiplying = b * np.asarray(active, np.float64), c * np.asarray(padded, np.float64)
    longer = np.maximum(reading, multiplying)
    # A power p of large values overflows.
    shorter = np.minimum(reading, multiplying) / np.maximum(longer, 1e-300)
    return np.asarray(a + longer * (1 + shorter**p) ** (1 / p) + rho * np.asarray(rows, np.float64))


def local_bytes(copies: Any, hidden: int, intermediate: int, item_bytes: float = 2.0) -> Floats:
    """Return [...] the bytes of a rank's GEMMs by LLEP's Equation 4: rows, one weight matrix and results of each slot.

    copies: [..., slots]; slots without copies take nothing. hidden, intermediate: widths of a row and of a result.
    """
    counts = numbers("copies", copies)
    weights = (counts > 0).sum(-1) * float(hidden * intermediate)
    return np.asarray(item_bytes * (counts.sum(-1) * (hidden + intermediate) + weights))


@dataclass(frozen=True)
class ExpertTime:
    """Constants of one kernel on one GPU for experts of one shape; from :meth:`load` or your own measurements."""

    gpu: str
    kernel: str  # framework and kernel, as the tables name them; "prefill" and "decode" if they differ
    dtype: str
    hidden: int
    intermediate: int
    a_us: float  # a call
    b_us: float  # the weights of a slot with copies
    c_us: float  # a copy, after each slot's are rounded up to multiples of `tile`
    rho_us: float  # a row that the kernel is given
    p: float  # 1: reading and multiplying add up; large: only the longer one counts
    tile: int = 1
    copies_from: float = 0  # measured range of a rank's copies
    copies_to: float = float("inf")
    fit_error: float | None = None  # mean relative error over the fitted balanced rows
    held_out_error: float | None = None  # median relative error over skewed rows, which were not fitted
    version: str = ""
    source: str = "given"

    def __post_init__(self) -> None:
        for name, least in (("a_us", 0), ("b_us", 0), ("c_us", 0), ("rho_us", 0), ("p", 1), ("tile", 1)):
            numbers(name, getattr(self, name), least)

    @classmethod
    def load(
        cls, gpu: str, kernel: str, *, hidden: int, intermediate: int, dtype: str, experts: int | None = None
    ) -> ExpertTime:
        """Return shipped constants, which :func:`available` lists.

        experts: of the measured model, if several have experts of this shape; by default the one with the best fit.
        """
        selection: dict[str, Any] = {"gpu": gpu, "kernel": kernel, "dtype": dtype}
        selection |= {"hidden": hidden, "intermediate": intermediate, "experts": experts}
        row = min(select(read("experts"), **selection), key=lambda row: row["fit_error"])
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    def seconds(self, copies: Any, rows: Any = None) -> Floats:
        """Return [...] the seconds of a rank.

        Args:
            copies: [..., slots] that each slot of a rank computes, an array or a tensor on the CPU.
            rows: [...] tokens that the rank's kernel gets: those that arrived over an all-to-all, or all of the group's
                if every rank holds all tokens. Default: as many as copies, the largest number.
        """
        counts = numbers("copies", copies)
        num_rows = counts.sum(-1) if rows is None else numbers("rows", rows)
        padded = (np.ceil(counts / self.tile) * self.tile).sum(-1)
        constants = (self.a_us, self.b_us, self.c_us, self.rho_us, self.p)
        return 1e-6 * kernel_us(*constants, (counts > 0).sum(-1), padded, num_rows)

    def extrapolated(self, copies: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return [...] whether a rank has fewer or more copies than were measured, so that its seconds are a guess."""
        total = numbers("copies", copies).sum(-1)
        return np.asarray((total < self.copies_from) | (total > self.copies_to))
