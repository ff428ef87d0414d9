"""PathTable: the experts that tokens of the same path chose before (Lina, Li et al., 2023), for comparison.

A forecast of batches by it, and how often predictors are right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isoload.analysis.batches import Batches, Fold, SourceBatch
from isoload.analysis.prediction import Forecast, calibration_tokens
from isoload.balancing.prediction import Linear, TokensPredictor, check_depth, check_layer, tokens_of
from isoload.traces import Trace
from isoload.traces.record import Ints


@dataclass(frozen=True, eq=False)
class LayerTable:
    """Sorted paths [N] int64, the K experts that followed each most often [N, K], and those of all tokens [K]."""

    paths: Ints
    followed: Ints
    popular: Ints


class PathTable(TokensPredictor):
    """Made by :func:`tabulate`. A token is its choices [n, K] in the layers before, the nearest first.

    Its path are the first experts of up to `depth` layers. A path that the table lacks gets the layer's most popular
    experts.
    """

    reads = "choices"
    num_experts: int

    def __init__(self, tables: list[LayerTable], depth: int, num_experts: int) -> None:
        self.tables, self.depth, self.num_experts = tables, depth, num_experts
        self.num_layers = len(tables)

    def depth_of(self, layer: int) -> int:
        return min(self.depth, layer)

    def choose(self, layer: int, tokens: Tensor) -> Tensor:
        """[T, K] experts; -1 for a token without choices (-1) in the layer before."""
        check_layer(layer, len(self.tables))
        depth = self.depth_of(layer)
        if tokens.dim() != 3 or tokens.shape[1] < depth:
            raise ValueError(
                f"tokens must be [T, at least {depth}, K] for layer {layer}, got {list(tokens.shape)}"
            )
        table, near = self.tables[layer], tokens[:, :depth].numpy()
        mine = path_of(near, self.num_experts)
        at = np.searchsorted(table.paths, mine).clip(max=len(table.paths) - 1)
        # A path through -1 has the number of another one.
        known = (table.paths[at] == mine) & (near[:, :, 0] >= 0).all(1)
        chosen = np.where(known[:, None], table.followed[at], table.popular)
        if depth:
            chosen = np.where((near[:, :1] < 0).all(-1), -1, chosen)
        return torch.from_numpy(chosen.astype(np.int32))


def tabulate(trace: Trace, depth: int = 4) -> PathTable:
    """The table of a trace with per-token choices, of paths through up to `depth` layers.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    check_depth(depth)
    if trace.num_experts**depth > 2**62:
        raise ValueError(f"depth must be so small that num_experts ** depth is at most 2^62, got {depth}")
    chosen = tokens_of(trace)
    tables = []
    for layer in range(trace.num_layers):
        near = chosen[:, max(0, layer - depth) : layer][:, ::-1]
        paths, index = np.unique(path_of(near, trace.num_experts), return_inverse=True)
        tables.append(
            LayerTable(paths, *most_frequent(chosen[:, layer], index, len(paths), trace.num_experts))
        )
    return PathTable(tables, depth, trace.num_experts)


def path_of(near: Ints, num_experts: int) -> Ints:
    """[T] int64 a number for the first experts of [T, n, K]."""
    path = np.zeros(len(near), dtype=np.int64)
    for layer in range(near.shape[1]):
        path = path * num_experts + near[:, layer, 0]
    return path


def most_frequent(chosen: Ints, index: Ints, num_paths: int, num_experts: int) -> tuple[Ints, Ints]:
    """[N, K] per path and [K] in all the most frequent experts, the lowest of equals; fewer seen: the popular ones."""
    top_k = chosen.shape[1]
    counts = np.bincount(chosen.ravel(), minlength=num_experts)
    rank = np.argsort(np.argsort(-counts, kind="stable"))  # 0 = most popular
    popular = np.argsort(rank)[:top_k]
    followed = np.empty((num_paths, top_k), dtype=np.int64)
    order = np.argsort(index, kind="stable")
    ends = np.cumsum(np.bincount(index, minlength=num_paths))
    for path, rows in enumerate(np.split(chosen[order], ends[:-1])):
        seen = np.bincount(rows.ravel(), minlength=num_experts)
        followed[path] = np.lexsort((rank, -seen))[:top_k]
    return followed, popular


class PathForecast(Forecast):
    """Loads by a table of the fold's calibration batches; the first layer's are those of the batch before."""

    def __init__(self, trace: Trace, batches: Batches, fold: Fold, seed: int, depth: int = 4) -> None:
        super().__init__("last", trace, batches, fold, seed)
        self.table = tabulate(calibration_tokens("path", trace, batches, fold), depth)

    def _predict(self, layer: int, routed: Tensor, batch: SourceBatch) -> Tensor | None:
        if layer == 0:
            return super()._predict(layer, routed, batch)
        earlier = range(layer - 1, max(0, layer - self.table.depth) - 1, -1)
        rows = []
        for rank in range(batch.num_ranks):
            near = torch.stack([batch.on_rank(before, rank) for before in earlier], dim=1)
            rows.append(self.table.predict(layer, near, self.table.num_experts))
        return torch.stack(rows)


def accuracy(predictor: Linear | PathTable, trace: Trace) -> list[float]:
    """For layers 1.., the part of the true choices of a trace's tokens that are among the K predicted."""
    chosen = tokens_of(trace)
    parts = []
    for layer in range(1, trace.num_layers):
        near = torch.from_numpy(np.ascontiguousarray(chosen[:, :layer][:, ::-1]))
        if isinstance(predictor, Linear):
            guessed = predictor.choose(layer, near, chosen.shape[-1])
        else:
            guessed = predictor.choose(layer, near)
        hits = (torch.from_numpy(chosen[:, layer])[:, :, None] == guessed[:, None, :]).any(-1)
        parts.append(float(hits.double().mean()))
    return parts
