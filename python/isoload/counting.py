"""The first stage of the fast clock: how many copies this rank sends to each logical expert."""

from __future__ import annotations

from torch import Tensor

from isoload import ops


def count(topk_ids: Tensor, num_experts: int) -> Tensor:
    """[E] int32 copies per logical expert in topk_ids [T, K] (int32 or int64; -1 = masked, not counted).

    All-gather it over the ranks to get loads [R, E].

    Raises:
        ValueError: an id outside -1..E-1, or another dtype.
    """
    return ops.count(topk_ids, num_experts)
