"""GatheredTokens: the tokens of all ranks on every rank, by one all-gather in place of a dispatch.

Every rank takes what a dispatch would have brought it, once it has found the slots of all ranks' copies. combine is the
RowDispatcher's with max_tokens_per_rank: the rows lie where its own dispatch would have put them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from isoload.ops import number_rows, pack_rows
from isoload.ops.results import PackedRows, RowLayout
from isoload.transport.agreement import DTYPES
from isoload.transport.dispatcher import Received
from isoload.transport.group import Group
from isoload.transport.row_dispatcher import RowHandle
from isoload.transport.rows import RowMap, pack, unpack

FACTS = ("hidden size of x", "dtype of x", "top-k", "dtype of weights")


@dataclass(frozen=True, eq=False)
class GatheredTokens:
    """Of all ranks, C each; rows behind a rank's own tokens are zeros, and chose nothing.

    rows     [R][C, H]
    ids      [R][C, K] int64  experts, -1 = none
    weights  [R][C, K]
    """

    rows: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]

    def received(
        self, ranks: Sequence[int], num_tokens: Sequence[int], slots: Sequence[Tensor], slots_per_rank: int
    ) -> list[Received]:
        """What a dispatch would bring to ranks.

        Args:
            ranks: whose part is taken: the owned ones.
            num_tokens: their T.
            slots: [R][C, K] global slots of all ranks' copies, -1 = goes nowhere.
            slots_per_rank: S.
        """
        num_ranks, capacity = len(self.rows), len(self.rows[0])
        equal = [capacity] * num_ranks
        sent = []
        for s, weights in zip(slots, self.weights, strict=True):
            numbers = number_rows(s, slots_per_rank, num_ranks)
            no_values = weights.narrow(1, 0, 0)  # these are here already
            sent.append(
                pack_rows(no_values, s, weights, numbers, slots_per_rank, num_ranks * capacity, capacity)
            )
        got = []
        for rank, tokens in zip(ranks, num_tokens, strict=True):
            parts = [take_part(*of, rank) for of in zip(self.rows, self.weights, sent, strict=True)]
            rows, local, weights = (torch.cat(column) for column in zip(*parts, strict=True))
            _, *maps = sent[rank]
            own = RowMap(equal, equal, maps[0], maps[1], maps[2][:tokens], rank)
            got.append(Received(rows, local, weights, RowHandle(own, self.rows[0].new_empty(()))))
        return got


def take_part(rows: Tensor, weights: Tensor, sent: PackedRows, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """[C, H] rows, [C, K] local slots and [C, K] weights that one source, of rows [C, H], sends to a rank."""
    capacity, no_values = len(rows), weights.narrow(1, 0, 0)
    part = sent.payload.narrow(0, rank * capacity, capacity)
    _, local, given = RowLayout.of(no_values, weights).parts(part, no_values, weights)
    tokens = sent.row_to_token.narrow(0, rank * capacity, capacity)  # C where the row is padding
    taken = rows.index_select(0, tokens.clamp(max=capacity - 1))
    return taken.masked_fill((tokens == capacity).unsqueeze(1), 0), local, given


def start_gather_tokens(
    group: Group, capacity: int, x: list[Tensor], ids: list[Tensor], weights: list[Tensor]
) -> Callable[[], GatheredTokens]:
    """Begins to gather; what it returns waits for the tokens. All ranks call it together.

    Args:
        capacity: C, the most tokens of a rank.
        x: [T, H] of every owned rank, T at most C.
        ids, weights: [T, K] of every owned rank.
    """
    facts: list[tuple[int, ...]] = [
        (row.shape[1], DTYPES.index(row.dtype), own.shape[1], DTYPES.index(given.dtype))
        for row, own, given in zip(x, ids, weights, strict=True)
    ]
    group.agree_new("dispatch", FACTS, facts, x[0].device)
    packed = []
    for row, own, given in zip(x, ids, weights, strict=True):
        behind = (0, 0, 0, capacity - len(row))
        columns = F.pad(row, behind), F.pad(own.int(), behind, value=-1), F.pad(given, behind)
        packed.append(pack(*(column.contiguous() for column in columns)).flatten())
    finish = group.start_gather("tokens", packed)
    width, top_k = x[0].shape[1], ids[0].shape[1]
    layout = [(width, x[0].dtype), (top_k, torch.int32), (top_k, weights[0].dtype)]

    def wait() -> GatheredTokens:
        columns = [unpack(tokens.view(capacity, -1), layout) for tokens in finish().unbind()]
        rows, chosen, given = (list(column) for column in zip(*columns, strict=True))
        return GatheredTokens(rows, [own.long() for own in chosen], given)

    return wait
