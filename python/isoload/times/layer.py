"""What a layer takes when the copies of every slot and the rows of every rank are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from isoload.times.exchanges import AllToAllTime
from isoload.times.experts import ExpertTime
from isoload.times.shipped import Floats, numbers


@dataclass(frozen=True)
class LayerTime:
    """Dispatch, the slowest rank's experts, combine, one after the other.

    dispatch, combine: None where nothing travels, or where the experts' kernel was measured with them (megamoe).
    """

    dispatch: AllToAllTime | None
    experts: ExpertTime
    combine: AllToAllTime | None

    def seconds(self, copies: Any, rows: Any, tokens: Any = 0) -> Floats:
        """[..., 2] from and to what the layer takes.

        Args:
            copies: [..., R, slots of a rank] that each slot computes.
            rows: [..., R] that each rank receives: distinct tokens.
            tokens: [...] that a rank holds before the dispatch, on average.
        """
        found, received = numbers("copies", copies), numbers("rows", rows)
        if found.ndim < 2 or received.shape != found.shape[:-1]:
            shapes = f"{list(received.shape)} beside copies {list(found.shape)}"
            raise ValueError(f"rows must be [..., ranks] and copies [..., ranks, slots], got {shapes}")
        slowest = self.experts.seconds(found, received).max(-1)
        busiest = received.max(-1) / np.maximum(received.mean(-1), 1e-300)
        steps = [
            step.seconds(tokens, np.maximum(busiest, 1)) for step in (self.dispatch, self.combine) if step
        ]
        return np.asarray(sum(steps, np.stack([slowest, slowest], -1)))
