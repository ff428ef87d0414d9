"""Charts that the pages of several commands have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isoload.report import charts, figure

MOST = 96  # columns of batches in a heat map
MEAN = "Max/mean rank load, mean over batches; 1 is even."
ROWS = "A row is a token's vector that travels once to each rank where it has an expert."


def over_mean(loads: Any) -> Any:
    """Loads [..., R] over the mean of the ranks; 1 where there are none."""
    mean = np.asarray(loads, dtype=np.float64).mean(-1, keepdims=True)
    return np.where(mean > 0, loads / np.maximum(mean, 1e-300), 1.0)


def lines(
    title: str,
    said: str,
    series: Mapping[str, Any],
    at: Sequence[int],
    x: str = "layer",
    y: str = "max/mean rank load",
    best: str = "",
) -> str:
    """[n] of each name, over as many numbers."""
    rows = [(n, *(f"{of[i]:.3f}" for of in series.values())) for i, n in enumerate(at)]
    spec = charts.by_number({name: list(map(float, of)) for name, of in series.items()}, at, x, y, best)
    return figure(title, said, spec, (x, *series), rows)


def heat(title: str, said: str, values: Any, layers: Sequence[int], across: str = "rank") -> str:
    """[L, n] of what is 1 where ranks are even."""
    header = "layer", *(f"{across} {i}" for i in range(values.shape[1]))
    rows = [(layer, *(f"{value:.2f}" for value in row)) for layer, row in zip(layers, values, strict=True)]
    return figure(title, said, charts.heat(values, layers, across, "layer"), header, rows)


def rank_heats(name: str, loads: Any, layers: Sequence[int]) -> list[str]:
    """Loads [B, L, R], mean over batches, and the worst of them."""
    ratio, said = over_mean(loads), "Load of each rank over the mean of all ranks, "
    return [
        heat(f"Rank loads, {name}", f"{said}mean over batches.", ratio.mean(0), layers),
        heat(f"Rank loads, {name}, worst batch", f"{said}the most in any batch.", ratio.max(0), layers),
    ]


def batch_heat(imbalance: Any, layers: Sequence[int]) -> str:
    """Max/mean rank load [L, B]; of many batches, neighbours are one column."""
    batches = imbalance.shape[1]
    parts = np.array_split(imbalance, min(batches, MOST), axis=1)
    size = f", mean of up to {-(-batches // MOST)} neighbours" if batches > MOST else ""
    means = np.stack([part.mean(1) for part in parts], 1)
    said = f"Max/mean rank load of each layer and batch{size}."
    return heat("Imbalance over time", said, means, layers, "batch" if not size else "part")


def sending_heat(name: str, sent: Any) -> str:
    """[R, R] rows that each rank sends to each."""
    share = np.asarray(sent, dtype=np.float64) / max(float(np.mean(sent)), 1e-300)
    ranks = range(len(share))
    header = "from", *(f"to {i}" for i in ranks)
    values = [(i, *(f"{value:.2f}" for value in row)) for i, row in enumerate(share)]
    said = "Rows from a rank (down) to a rank (across) over the mean of all pairs; all layers and batches."
    spec = charts.heat(share, ranks, "to rank", "from rank")
    return figure(f"Rows between ranks, {name}", said, spec, header, values)


def leaving(title: str, said: str, parts: Mapping[str, tuple[float, float]]) -> str:
    """By name, the parts that leave their rank and their node."""
    nodes = any(node > 0 for _, node in parts.values())
    found: dict[str, dict[str, float]] = {
        name: {
            "own rank": 1 - rank,
            **({"own node": rank - node, "other nodes": node} if nodes else {"other ranks": rank}),
        }
        for name, (rank, node) in parts.items()
    }
    header = "", *next(iter(found.values()))
    rows = [(name, *(f"{100 * x:.1f} %" for x in of.values())) for name, of in found.items()]
    return figure(title, said, charts.shares(found), header, rows)
