"""Charts that the pages of several commands have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isoload.report import charts, figure

MEAN = "Mean over batches; 1 is even."


def layer_lines(
    series: Mapping[str, Any], layers: Sequence[int], what: str = "max/mean rank load", said: str = MEAN
) -> str:
    """[L] of each name, over the layers' numbers."""
    rows = [(layer, *(f"{of[i]:.3f}" for of in series.values())) for i, layer in enumerate(layers)]
    spec = charts.by_layer({name: list(map(float, of)) for name, of in series.items()}, layers, "layer", what)
    return figure("Imbalance by layer", said, spec, ("layer", *series), rows)


def rank_heat(title: str, said: str, values: Any, layers: Sequence[int], across: str = "rank") -> str:
    """[L, R] of what is 1 where ranks are even."""
    header = "layer", *(f"{across} {i}" for i in range(values.shape[1]))
    rows = [(layer, *(f"{value:.2f}" for value in row)) for layer, row in zip(layers, values, strict=True)]
    return figure(title, said, charts.heat(values, layers, across, "layer"), header, rows)


def sending_heat(title: str, rows: Any) -> str:
    """[..., R, R] rows that each rank sends to each."""
    sent = np.asarray(rows, dtype=np.float64).reshape(-1, *rows.shape[-2:]).sum(0)
    share = sent / max(sent.mean(), 1e-300)
    ranks = range(len(share))
    header = "from", *(f"to {i}" for i in ranks)
    values = [(i, *(f"{value:.2f}" for value in row)) for i, row in enumerate(share)]
    said = "Rows from a rank (down) to a rank (across) over the mean of all pairs; all layers and batches."
    return figure(title, said, charts.heat(share, ranks, "to rank", "from rank"), header, values)


def row_shares(parts: charts.Stacked) -> str:
    """Of all rows, where they go."""
    kept = {name: {part: x for part, x in of.items()} for name, of in parts.items()}
    header = "", *next(iter(kept.values()))
    rows = [(name, *(f"{100 * x:.1f} %" for x in of.values())) for name, of in kept.items()]
    said = "A row is a token's vector that travels once to each rank where it has an expert."
    return figure("Where rows go", said, charts.shares(kept), header, rows)
