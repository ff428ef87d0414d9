"""What the grouped GEMMs of one rank take, by the copies in its slots."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from isoload.times.shipped import Floats, numbers, read, select


def kernel_us(
    a: float, b: float, c: float, rho: float, p: float, active: ArrayLike, padded: ArrayLike, rows: ArrayLike
) -> Floats:
    """a + ((b active)^p + (c padded)^p)^(1/p) + rho rows, elementwise: launching, reading the weights of the slots
    that have copies and multiplying (whichever is longer hides most of the other), and handling the rank's rows."""
    reading, multiplying = b * np.asarray(active, np.float64), c * np.asarray(padded, np.float64)
    longer = np.maximum(reading, multiplying)
    # A power of p of what is large overflows.
    shorter = np.minimum(reading, multiplying) / np.maximum(longer, 1e-300)
    return np.asarray(a + longer * (1 + shorter**p) ** (1 / p) + rho * np.asarray(rows, np.float64))


@dataclass(frozen=True)
class ExpertTime:
    """Constants of one kernel on one GPU for experts of one shape. Made by :meth:`load`, or from one's own measures.

    kernel: framework and kernel, as the measured tables name them; "prefill" and "decode" where they differ.
    tokens, version, source: the range of a rank's copies that was measured, and with what.
    fit_error: mean relative error over the balanced rows that the constants were fitted to.
    held_out_error: median relative error over the skewed rows, which they were not; None where there were none.
    """

    gpu: str
    kernel: str
    dtype: str
    hidden: int
    intermediate: int
    a_us: float  # a call
    b_us: float  # the weights of a slot with copies
    c_us: float  # a copy, after each slot's are rounded up to multiples of `tile`
    rho_us: float  # a row that the kernel is given
    p: float  # 1: reading and multiplying add up; large: the longer one counts alone
    tile: int = 1
    copies_from: float = 0
    copies_to: float = float("inf")
    fit_error: float | None = None
    held_out_error: float | None = None
    version: str = ""
    source: str = "given"

    def __post_init__(self) -> None:
        for name, least in (("a_us", 0), ("b_us", 0), ("c_us", 0), ("rho_us", 0), ("p", 1), ("tile", 1)):
            numbers(name, getattr(self, name), least)

    @classmethod
    def load(
        cls, gpu: str, kernel: str, *, hidden: int, intermediate: int, dtype: str, experts: int | None = None
    ) -> ExpertTime:
        """Shipped constants; :func:`available` lists them.

        experts: of the model that was measured, where several have experts of this shape (their constants hardly
        differ); by default the one that was fitted best.

        Raises:
            ValueError: naming the argument and what it may be.
        """
        asked: dict[str, Any] = {"gpu": gpu, "kernel": kernel, "dtype": dtype}
        asked |= {"hidden": hidden, "intermediate": intermediate, "experts": experts}
        row = min(select(read("experts"), **asked), key=lambda row: row["fit_error"])
        return cls(**{field.name: row[field.name] for field in fields(cls)})

    def seconds(self, copies: Any, rows: Any = None) -> Floats:
        """[...] what a rank takes.

        Args:
            copies: [..., slots] that each slot of a rank computes, an array or a tensor on the CPU.
            rows: [...] tokens that the rank's kernel is given: those that arrived over an all-to-all; all of the
                group's where every rank holds all tokens. By default as many as copies, which is the most.
        """
        found = numbers("copies", copies)
        given = found.sum(-1) if rows is None else numbers("rows", rows)
        padded = (np.ceil(found / self.tile) * self.tile).sum(-1)
        constants = (self.a_us, self.b_us, self.c_us, self.rho_us, self.p)
        return 1e-6 * kernel_us(*constants, (found > 0).sum(-1), padded, given)

    def extrapolated(self, copies: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[...] whether a rank has fewer or more copies than were measured, so that its seconds are a guess."""
        total = numbers("copies", copies).sum(-1)
        return np.asarray((total < self.copies_from) | (total > self.copies_to))
