"""The rows that travel: a token goes once to every rank that holds a slot of its."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isoload.permutation import spread_rows


@dataclass(frozen=True, eq=False)
class RowMap:
    """Which rows a rank sends (n of them, by destination, then token) and how many it gets.

    row_to_token   [n] int64     T where the row is padding
    row_to_rank    [n] int64     destination, R where the row is padding
    token_to_rows  [T, D] int64  the token's rows by ascending destination, n where there is none
    sent, got      [R] rows to every destination and from every source, padding included
    """

    row_to_token: Tensor
    row_to_rank: Tensor
    token_to_rows: Tensor
    sent: list[int]
    got: list[int]


def take_rows(values: Tensor, map_: RowMap, padded: bool) -> Tensor:
    """[n, F] the tokens' values [T, F] row by row; zeros in padding rows."""
    return spread_rows(values, map_.token_to_rows, map_.row_to_token, padded)


def with_own(map_: RowMap, rank: int) -> Tensor:
    """[T, D + 1] token_to_rows where row n + t is the own contribution of token t, at the rank's place.

    It comes behind the token's row from the rank itself, if there is one. n + T is no row.
    """
    num_rows, (tokens, _) = len(map_.row_to_rank), map_.token_to_rows.shape
    nowhere = len(map_.sent)
    row_to_rank = torch.cat([map_.row_to_rank, map_.row_to_rank.new_full((1,), nowhere)])
    ranks = torch.cat([row_to_rank[map_.token_to_rows], row_to_rank.new_full((tokens, 1), rank)], dim=1)
    own = torch.arange(num_rows, num_rows + tokens, device=ranks.device).unsqueeze(1)
    absent = map_.token_to_rows == num_rows
    rows = torch.cat([map_.token_to_rows.masked_fill(absent, num_rows + tokens), own], dim=1)
    return rows.gather(1, ranks.argsort(dim=1, stable=True))
