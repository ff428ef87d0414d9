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
        """[..., 2] from and to what the layer takes; arguments as those of :meth:`parts`."""
        experts, dispatch, combine = self.parts(copies, rows, tokens)
        return np.asarray(experts.max(-1)[..., None] + dispatch + combine)

    def parts(self, copies: Any, rows: Any, tokens: Any = 0) -> tuple[Floats, Floats, Floats]:
        """[..., R] what each rank's experts take; [..., 2] from and to what dispatch takes, and combine.

        Args:
            copies: [..., R, slots of a rank] that each slot computes.
            rows: [..., R] that each rank receives: distinct tokens.
            tokens: [...] that a rank holds before the dispatch, on average.
        """
        found, received = numbers("copies", copies), numbers("rows", rows)
        if found.ndim < 2 or received.shape != found.shape[:-1]:
            shapes = f"{list(received.shape)} beside copies {list(found.shape)}"
            raise ValueError(f"rows must be [..., ranks] and copies [..., ranks, slots], got {shapes}")
        experts = self.experts.seconds(found, received)
        busiest = np.maximum(received.max(-1) / np.maximum(received.mean(-1), 1e-300), 1)
        none = np.zeros((*busiest.shape, 2))
        dispatch, combine = (
            step.seconds(tokens, busiest) if step else none for step in (self.dispatch, self.combine)
        )
        return experts, dispatch, combine
