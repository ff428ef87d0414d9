"""Last: the previous batch's loads of the layer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from isoload.balancing.prediction import LoadsPredictor, check_layer


class Last(LoadsPredictor):
    """What the layer's loads were in the batch before; the first layer's only forecast, too.

    Args:
        num_layers: MoE layers.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self._seen: list[Tensor | None] = [None] * num_layers

    def note(self, layer: int, loads: Tensor) -> None:
        """A batch's loads of a layer; kept as they are, so they must not be written later."""
        check_layer(layer, len(self._seen))
        self._seen[layer] = loads

    def predict(self, layer: int, earlier: Sequence[Tensor] = ()) -> Tensor | None:
        check_layer(layer, len(self._seen))
        return self._seen[layer]
