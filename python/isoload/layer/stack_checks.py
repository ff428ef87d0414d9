"""What a LibraStack refuses when it is made, and its predictor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from isoload.layer.moe import MoE
from isoload.predict import Last, Lookahead, Predictor


def check_layers(layers: Sequence[MoE]) -> None:
    """Raises ValueError unless layers can share a stack."""
    if not layers:
        raise ValueError("layers must be at least one, got none")


def make_predictor(
    predict: str | Predictor | None, layers: Sequence[MoE], norms: Sequence[nn.Module] | None
) -> Predictor | None:
    if predict == "last":
        return Last(len(layers))
    if predict == "lookahead":
        return Lookahead([layer.gate for layer in layers], norms)
    assert predict is None or isinstance(predict, Predictor)
    return predict
