"""pack_rows: every row by itself, in the order in which it is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.results import PackedRows, RowLayout, RowNumbers


def pack_rows(
    x: Tensor,
    slots: Tensor,
    weights: Tensor,
    rows: RowNumbers,
    slots_per_rank: int,
    num_rows: int,
    capacity: int | None = None,
) -> PackedRows:
    """As ops.pack_rows; a padding row's values are 0."""
    num_ranks, tokens = rows.counts.shape[1], len(slots)
    counts = rows.counts[0].tolist()
    first = [sum(counts[:r]) if capacity is None else r * capacity for r in range(num_ranks)]
    row_to_token, row_to_rank = [tokens] * num_rows, [num_ranks] * num_rows
    token_to_rows = [[num_rows] * rows.ranks.shape[1] for _ in range(tokens)]
    for token, (ranks, numbers) in enumerate(zip(rows.ranks.tolist(), rows.numbers.tolist(), strict=True)):
        for column, (rank, number) in enumerate(zip(ranks, numbers, strict=True)):
            if rank < num_ranks:
                row = first[rank] + number
                assert row_to_rank[row] == num_ranks, "a row belongs to one token"
                row_to_token[row], row_to_rank[row] = token, rank
                token_to_rows[token][column] = row

    layout = RowLayout.of(x, weights)
    payload = torch.zeros(num_rows, layout.bytes, dtype=torch.uint8)
    values, local, gates = layout.parts(payload, x, weights)
    local.fill_(-1)
    for row, (token, rank) in enumerate(zip(row_to_token, row_to_rank, strict=True)):
        if rank < num_ranks:
            values[row] = x[token]
            for k, slot in enumerate(slots[token].tolist()):
                if slot // slots_per_rank == rank:
                    local[row, k], gates[row, k] = slot % slots_per_rank, weights[token, k]
    return PackedRows(
        payload,
        torch.tensor(row_to_token, dtype=torch.int64),
        torch.tensor(row_to_rank, dtype=torch.int64),
        torch.tensor(token_to_rows, dtype=torch.int64).view(rows.ranks.shape),
    )
