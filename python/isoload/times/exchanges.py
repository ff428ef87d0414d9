"""What dispatch or combine takes, by the tokens of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from isoload.times.shipped import Floats, Row, numbers, read, select
from isoload.wording import not_one_of

STEPS = ("dispatch", "combine")


class Curve(NamedTuple):
    """(a^q + (s tokens)^q)^(1/q) microseconds: a call, however small, and a token of each rank."""

    a_us: float
    s_us: float
    q: float

    def __call__(self, tokens: Floats) -> Floats:
        large = np.maximum(self.s_us * tokens / self.a_us, 1e-12)
        return np.asarray(
            self.a_us * np.maximum(large, 1) * (1 + np.minimum(large, 1 / large) ** self.q) ** (1 / self.q)
        )


@dataclass(frozen=True)
class AllToAllTime:
    """One step, dispatch or combine, of an all-to-all among `ranks` on `nodes`.

    The tables hold even routing alone: what a busier rank costs is unknown. So times are ranges, from what even rows
    take (`low`: links are not the limit, or the slow rank overlaps) to what as many rows on every rank as on the
    busiest would take (`high`).

    measured: whether the tables have these ranks, nodes and rows. If not, `low` is the exchange inside of one node and
    `high` the nearest measured one over as many nodes or more, with tokens at least as long; `note` is its setting.
    """

    gpu: str
    kernel: str
    step: str
    ranks: int
    nodes: int
    low: Curve
    high: Curve
    tokens_to: float = float("inf")
    fit_error: float | None = None
    measured: bool = True
    note: str = ""
    source: str = "given"

    @classmethod
    def load(
        cls, gpu: str, kernel: str, step: str, *, hidden: int, top_k: int, ranks: int, nodes: int = 1
    ) -> AllToAllTime:
        """Shipped constants; :func:`available` lists them.

        Raises:
            ValueError: naming the argument and what it may be.
        """
        if step not in STEPS:
            raise ValueError(not_one_of("step", STEPS, step))
        if nodes < 1 or ranks % nodes:
            raise ValueError(f"nodes must divide ranks {ranks}, got {nodes}")
        table = read("exchanges")
        rows = select(select(table, gpu=gpu, kernel=kernel), hidden=hidden, top_k=top_k)
        exact = [row for row in rows if (row["ranks"], row["nodes"]) == (ranks, nodes)]
        if exact or nodes == 1:
            (row, *_) = exact or select(tuple(row for row in rows if row["nodes"] == 1), ranks=ranks)
            return cls._of(row, row, step, ranks, nodes)
        inside = select(tuple(row for row in rows if row["nodes"] == 1), ranks=ranks // nodes)
        wide = [row for row in table if row["kernel"] == kernel and row["nodes"] > 1]
        fitting = [
            row for row in wide if row["nodes"] >= nodes and row["hidden"] >= hidden and row["top_k"] >= top_k
        ]
        if not fitting:
            most = max((row["nodes"] for row in wide), default=1)
            raise ValueError(f"nodes must be from 1 to {most} for kernel {kernel}, got {nodes}")
        nearest = min(fitting, key=lambda row: (row["gpu"] != gpu, row["nodes"], row["hidden"], row["top_k"]))
        return cls._of(inside[0], nearest, step, ranks, nodes)

    @classmethod
    def _of(cls, low: Row, high: Row, step: str, ranks: int, nodes: int) -> AllToAllTime:
        setting = "{gpu}, {ranks} ranks on {nodes} nodes, rows of {hidden}, top-{top_k}"
        note = "" if low is high else setting.format(**high)
        of = low["gpu"], low["kernel"], step, ranks, nodes, Curve(*low[step]), Curve(*high[step])
        tokens_to, error = min(low["tokens_to"], high["tokens_to"]), max(low["fit_error"], high["fit_error"])
        return cls(*of, tokens_to, error, low is high, note, low["source"])

    def seconds(self, tokens: Any, busiest: Any = 1.0) -> Floats:
        """[..., 2] from and to what the step takes.

        Args:
            tokens: [...] that a rank holds, on average.
            busiest: [...] rows of the busiest rank over the mean, at least 1.
        """
        mean, factor = numbers("tokens", tokens), numbers("busiest", busiest, least=1.0)
        low, high = np.broadcast_arrays(self.low(mean), self.high(mean * factor))
        return 1e-6 * np.stack([np.minimum(low, high), high], -1)

    def extrapolated(self, tokens: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[...] whether ranks hold more tokens than were measured."""
        return np.asarray(numbers("tokens", tokens) > self.tokens_to)
