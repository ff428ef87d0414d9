"""Rows from copies: how many distinct tokens reach a rank, or a node, if the copies of a source are drawn alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def rows_between(sent: NDArray[np.number[Any]], tokens: int, groups: int) -> Floats:
    """[L, R, groups] rows that each source sends to each group of ranks (a rank, or a node).

    A token reaches a group by any of its copies. Which tokens an expert's copies are of is not known from counts: each
    slot's are taken to be any `tokens` of the source with equal chance, and slots apart from each other. A token's
    experts are distinct, so this counts a few rows too few.

    Args:
        sent: [L, R, P] copies that each source sends to each slot.
        tokens: of a source.
        groups: of equal size, over which the P slots lie in order.
    """
    found = np.empty((*sent.shape[:2], groups))
    for layer, of_layer in enumerate(sent):  # one by one: of 256 ranks all slots are large
        # Of a token, that no copy of it goes to the slot.
        missed = np.log1p(-np.minimum(of_layer / tokens, 1 - 1e-12))
        found[layer] = -tokens * np.expm1(missed.reshape(len(of_layer), groups, -1).sum(-1))
    return found
