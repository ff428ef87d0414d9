"""What a dispatch leaves behind, and what a transport counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from isoload.transport.rows import RowMap


@dataclass(frozen=True, eq=False)
class Handle:
    """What combine needs of a dispatch: the rank's row map, and the link by which gradients find their way back."""

    row_map: RowMap
    link: Tensor


@dataclass(frozen=True, eq=False)
class Received:
    """What one rank got: a row per (token, this rank), in order of source rank, then token.

    rows     [N, H]        in the dtype of x
    slots    [N, K] int64  local slot 0..S-1 of the token's copies; -1 = absent (that copy went elsewhere)
    weights  [N, K]        gate weights in the dtype they were given in, 0 where slots is -1
    handle                 for combine

    With ``max_tokens_per_rank=C``, N = R * C: the rows of source s start at s * C, and those with all slots -1 are
    padding.
    """

    rows: Tensor
    slots: Tensor
    weights: Tensor
    handle: Handle


@dataclass
class Traffic:
    """What this process handed to the exchanges since the transport was made.

    rows        [R, R] int64  rows dispatched, source x destination; only the process's own sources are filled
    bytes                     by stage; padding and what a rank sends to itself count, too
    host_syncs                times the host waited for values that an exchange brought
    """

    rows: Tensor
    bytes: Counter[str] = field(default_factory=Counter)
    host_syncs: int = 0


def num_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; unlike ``nbytes`` also while torch.compile traces symbolic sizes."""
    return tensor.numel() * tensor.itemsize
