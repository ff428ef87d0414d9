"""Linear: the last layers' loads times an integer matrix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from isoload.balancing.prediction import LoadsPredictor, check_depth, check_layer, multi_hot, tokens_of
from isoload.traces import Trace

UNIT = 2**16  # a weight of 1
MOST = 2**5 * UNIT  # below 2^31 copies times this every sum stays below 2^53: exact in float64, in any order


class Linear(LoadsPredictor):
    """Loads of a layer as a linear function of those of the last MoE layers, made by :func:`fit`.

    Sums and single sources alike: the function is linear. Its products are exact integers in float64, so every rank and
    device predicts the same bits.

    Args:
        weights: for every layer [n, E, E] integers (float64) in 1/65536: row d says what a copy of expert i in layer
            ``layer - 1 - d`` adds to expert j; n = 0 for layers that cannot be predicted. At most 32 in size.
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
        """Its weights on a device; itself if they are there."""
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
        """[T, K] the experts with the highest scores of each token, from its choices [T, n, K], the nearest first."""
        matrices = self.weights[layer]
        hot = [
            torch.from_numpy(multi_hot(earlier[:, d].numpy(), self.num_experts)) for d in range(len(matrices))
        ]
        return (torch.cat(hot, dim=1) @ matrices.flatten(0, 1)).topk(top_k, dim=1).indices


def fit(trace: Trace, depth: int = 2, ridge: float = 1.0) -> Linear:
    """A Linear of the layers before, by ridge regression on per-token choices.

    Args:
        trace: with per-token choices; tokens without all of theirs are left out.
        depth: how many layers before; the first ones have fewer.
        ridge: added to the diagonal of the normal equations, in tokens.

    Raises:
        ValueError: naming the argument, the rule and the value.
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
