"""The protocol of predictors, and what their fits share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from isoload import ops
from isoload.traces import Trace
from isoload.traces.record import Ints

Reads = Literal["rows", "residual", "choices"]


class Predictor(ABC):
    """Base.

    num_layers   MoE layers of the model
    num_experts  routed experts of each; None = any number
    """

    num_layers: int
    num_experts: int | None = None

    def describe(self) -> str:
        """The same text on all ranks for predictors that predict the same from the same."""
        return type(self).__name__

    def depth_of(self, layer: int) -> int:
        """How many layers right before a layer must be known to predict it."""
        return 0


class LoadsPredictor(Predictor):
    """From gathered loads: every rank predicts the same, and nothing travels."""

    @abstractmethod
    def predict(self, layer: int, earlier: Sequence[Tensor]) -> Tensor | None:
        """[R, E] (or [E]) int32 loads of a layer, from those of earlier ones.

        Args:
            layer: position of the layer that is predicted.
            earlier: loads of layers layer - 1, layer - 2, .. of this batch, the nearest first.

        Returns:
            None where nothing can be said yet.
        """

    def note(self, layer: int, loads: Tensor) -> None:
        """A batch's true loads of a layer, [R, E] (or [E]) int32; for predictors that learn from them."""


class TokensPredictor(Predictor):
    """From a rank's own tokens, one by one: its counts are to be gathered.

    reads  what a token is, in the layer before: its row [H], the residual [H] before that layer's norm, or its choices
           [n, K] in the layers before, the nearest first
    """

    reads: Reads

    @abstractmethod
    def choose(self, layer: int, tokens: Tensor) -> Tensor:
        """[T, K] experts that tokens will choose in a layer; what a token is, says the class."""

    def predict(self, layer: int, tokens: Tensor, num_experts: int) -> Tensor:
        """[E] int32 this rank's row of the predicted loads."""
        return ops.count(self.choose(layer, tokens), num_experts).counts


def tokens_of(trace: Trace) -> Ints:
    """[tokens, L, K] choices of the tokens that have all of theirs.

    Raises:
        ValueError: the trace has none.
    """
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
    """[T, E] 1 where a token chose an expert, from [T, K]."""
    hot = np.zeros((len(topk_ids), num_experts))
    np.put_along_axis(hot, topk_ids.astype(np.int64), 1, axis=1)
    return hot
