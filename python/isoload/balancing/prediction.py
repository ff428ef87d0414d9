"""Predict the loads of the next MoE layer while this one runs, for policies that declare ``ahead``.

A LoadsPredictor reads the gathered loads of earlier layers or batches, which every rank has. A TokensPredictor reads
each rank's own tokens; the counts of the predicted choices then travel with this layer's loads.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.traces import Trace
from isoload.traces.record import Ints

Reads = Literal["rows", "residual", "choices"]


class Predictor(ABC):
    """Base of predictors, for num_layers MoE layers of num_experts routed experts (None = any number)."""

    num_layers: int
    num_experts: int | None = None

    def describe(self) -> str:
        """Return a text that is the same on all ranks for predictors that predict the same from the same input."""
        return type(self).__name__

    def depth_of(self, layer: int) -> int:
        """Return how many layers directly before a layer are needed to predict it."""
        return 0


class LoadsPredictor(Predictor):
    """Predictor that reads gathered loads: every rank predicts the same, and nothing more travels."""

    @abstractmethod
    def predict(self, layer: int, earlier: Sequence[Tensor]) -> Tensor | None:
        """Return the [R, E] (or [E]) int32 loads predicted for a layer, or None if there is no basis yet. earlier:
        loads of layers layer - 1, layer - 2, .. of this batch, the nearest first."""

    def note(self, layer: int, loads: Tensor) -> None:
        """Record a batch's true loads of a layer, [R, E] (or [E]) int32, for predictors that learn."""


class TokensPredictor(Predictor):
    """Predictor that reads a rank's own tokens one by one; its counts must be gathered.

    `reads` is the input per token, in the layer before: its row [H], the residual [H] before that layer's norm, or its
    choices [n, K] in the layers before, the nearest first.
    """

    reads: Reads

    @abstractmethod
    def choose(self, layer: int, tokens: Tensor) -> Tensor:
        """Return the [T, K] experts that tokens will choose in a layer. ``reads`` defines the form of tokens."""

    def predict(self, layer: int, tokens: Tensor, num_experts: int) -> Tensor:
        return ops.count(self.choose(layer, tokens), num_experts).counts


def tokens_of(trace: Trace) -> Ints:
    """Return the [tokens, L, K] choices of the tokens whose choices are known in all layers."""
    if trace.topk_ids is None:
        raise ValueError(
            f"trace must have per-token choices to fit a predictor, {trace.name} has counts only"
        )
    whole = trace.topk_ids[(trace.topk_ids >= 0).all((1, 2))]
    if not len(whole):
        raise ValueError(
            f"trace must have a token with all choices to fit a predictor, {trace.name} has none"
        )
    return whole


def check_layer(layer: int, num_layers: int) -> None:
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in 0..{num_layers - 1}, got {layer}")


def check_depth(depth: int) -> None:
    if depth < 1:
        raise ValueError(f"depth must be at least 1, got {depth}")


def multi_hot(topk_ids: Ints, num_experts: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Return [T, E] with 1 where a token chose an expert, from [T, K]."""
    hot = np.zeros((len(topk_ids), num_experts))
    np.put_along_axis(hot, topk_ids.astype(np.int64), 1, axis=1)
    return hot


UNIT = 2**16  # a weight of 1
MOST = 2**5 * UNIT  # copies x weights sum to less than 2^53: exact in float64, in any order


class Linear(LoadsPredictor):
    """Predicts the loads of a layer as a linear function of those of the MoE layers before it; see :func:`fit`.

    The function applies to sums and to single sources. Its products are exact integers in float64, so every rank
    predicts the same bits. weights are, for every layer, [n, E, E] integers (float64) in 1/65536, at most 32 in size:
    row d holds what a copy of expert i in layer ``layer - 1 - d`` adds to expert j; n = 0 for layers that cannot be
    predicted.
    """

    num_experts: int

    def __init__(self, weights: Sequence[Tensor]) -> None:
        if not weights:
            raise ValueError("weights must be of at least one layer, got none")
        self.num_experts = weights[0].shape[-1]
        for layer, matrix in enumerate(weights):
            wanted = [len(matrix), self.num_experts, self.num_experts]
            if list(matrix.shape) != wanted or matrix.dtype != torch.float64:
                raise ValueError(
                    f"weights must be float64 {wanted} in layer {layer}, got {matrix.dtype} {list(matrix.shape)}"
                )
            if bool((matrix != matrix.round()).any()) or (
                matrix.numel() and float(matrix.abs().max()) > MOST
            ):
                raise ValueError(
                    f"weights must be integers of at most {MOST} in size, those of layer {layer} are not"
                )
        self.weights = list(weights)
        self.num_layers = len(self.weights)

    def describe(self) -> str:
        digest = hashlib.sha256()
        for matrix in self.weights:
            digest.update(matrix.cpu().contiguous().numpy().tobytes())
        return f"Linear of weights {digest.hexdigest()[:16]}"

    def depth_of(self, layer: int) -> int:
        return len(self.weights[layer])

    def to(self, device: torch.device | str) -> Linear:
        moved = [matrix.to(device) for matrix in self.weights]
        return self if all(a is b for a, b in zip(moved, self.weights, strict=True)) else Linear(moved)

    def predict(self, layer: int, earlier: Sequence[Tensor]) -> Tensor | None:
        check_layer(layer, self.num_layers)
        matrices = self.weights[layer]
        if not len(matrices):
            return None
        if len(earlier) < len(matrices):
            raise ValueError(
                f"earlier must hold the loads of {len(matrices)} layers for layer {layer}, got {len(earlier)}"
            )
        for loads in earlier[: len(matrices)]:
            if loads.shape[-1] != self.num_experts or loads.dtype != torch.int32:
                raise ValueError(
                    f"earlier must be int32 loads of {self.num_experts} experts, got {loads.dtype} {list(loads.shape)}"
                )
        near = torch.cat([loads.double() for loads in earlier[: len(matrices)]], dim=-1)
        copies = near @ matrices.flatten(0, 1)
        return torch.floor(copies / UNIT + 0.5).clamp_(min=0).to(torch.int32)

    def choose(self, layer: int, earlier: Tensor, top_k: int) -> Tensor:
        """Return the [T, K] experts with the highest scores, from each token's choices [T, n, K], the nearest first."""
        matrices = self.weights[layer]
        hot = [
            torch.from_numpy(multi_hot(earlier[:, d].numpy(), self.num_experts)) for d in range(len(matrices))
        ]
        return (torch.cat(hot, dim=1) @ matrices.flatten(0, 1)).topk(top_k, dim=1).indices


def fit(trace: Trace, depth: int = 2, ridge: float = 1.0) -> Linear:
    """Fit a Linear predictor by ridge regression on a trace's per-token choices.

    Args:
        trace: with per-token choices; tokens that lack a choice in some layer are skipped.
        depth: number of layers before the predicted one that are read; the first layers have fewer.
        ridge: added to the diagonal of the normal equations, in tokens.
    """
    check_depth(depth)
    if ridge <= 0:
        raise ValueError(f"ridge must be above 0, got {ridge}")
    chosen, num_experts = tokens_of(trace), trace.num_experts
    hot = [multi_hot(chosen[:, layer], num_experts) for layer in range(trace.num_layers)]
    weights = [torch.zeros(0, num_experts, num_experts, dtype=torch.float64)]
    for layer in range(1, trace.num_layers):
        near = np.concatenate([hot[layer - 1 - d] for d in range(min(depth, layer))], axis=1)
        normal = near.T @ near + ridge * np.eye(near.shape[1])
        solved = np.linalg.solve(normal, near.T @ hot[layer])
        whole = np.clip(np.rint(solved * UNIT), -MOST, MOST)
        weights.append(torch.from_numpy(whole).view(-1, num_experts, num_experts))
    return Linear(weights)


class Last(LoadsPredictor):
    """Predicts a layer's loads of the previous batch. The first layer has no other forecast."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._seen: list[Tensor | None] = [None] * num_layers

    def note(self, layer: int, loads: Tensor) -> None:
        """Record a batch's loads of a layer. The tensor is stored without a copy, so it must not be written later."""
        check_layer(layer, len(self._seen))
        self._seen[layer] = loads

    def predict(self, layer: int, earlier: Sequence[Tensor] = ()) -> Tensor | None:
        check_layer(layer, len(self._seen))
        return self._seen[layer]


Gate = Callable[[Tensor], tuple[Tensor, Tensor]]


class Lookahead(TokensPredictor):
    """Runs a layer's gate ahead of time, because hidden states change little from one layer to the next (Libra).

    gates have, for every layer, rows [T, H] -> expert ids [T, K] and their weights. `norms`: of every layer, rows [T,
    H] -> [T, H], for the residual before that layer's norm; None = a token's input is its row as it enters the layer
    before.
    """

    def __init__(
        self, gates: Sequence[Gate], norms: Sequence[Callable[[Tensor], Tensor]] | None = None
    ) -> None:
        if norms is not None and len(norms) != len(gates):
            raise ValueError(f"norms must be as many as gates, {len(gates)}, got {len(norms)}")
        self.gates, self.norms = list(gates), None if norms is None else list(norms)
        self.num_layers = len(self.gates)
        self.reads: Reads = "rows" if norms is None else "residual"

    @torch.no_grad()
    def choose(self, layer: int, tokens: Tensor) -> Tensor:
        check_layer(layer, len(self.gates))
        rows = tokens if self.norms is None else self.norms[layer](tokens)
        return self.gates[layer](rows)[0]
