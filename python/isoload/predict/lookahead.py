"""Lookahead: the next layer's gate on this layer's rows (Libra, papers/004)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isoload.balancing.prediction import Reads, TokensPredictor, check_layer

Gate = Callable[[Tensor], tuple[Tensor, Tensor]]


class Lookahead(TokensPredictor):
    """Runs a layer's gate ahead of time: hidden states change little from one layer to the next.

    A token is its row [H] as it enters the layer before or, with `norms`, the residual before that layer's norm.

    Args:
        gates: of every layer, rows [T, H] -> expert ids [T, K] and their weights.
        norms: of every layer, rows [T, H] -> [T, H]; None = rows are normed already.
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
