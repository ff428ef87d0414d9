"""The rows that travel: a token goes once to every rank that holds a slot of its."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from isoload.permutation import spread_rows


class Destinations(NamedTuple):
    """Where the tokens of one rank go, before the host has read how many rows that makes.

    ranks   [T, D] int64  the distinct ranks of a token's slots, ascending, then R; D = min(K, R)
    counts  [R] int64     rows to every rank
    """

    ranks: Tensor
    counts: Tensor


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


def find_destinations(slots: Tensor, slots_per_rank: int, num_ranks: int) -> Destinations:
    """The ranks that a rank's tokens go to, from slots [T, K]; ids outside 0..R*S-1 are absent copies."""
    ranks = slots.long().div(slots_per_rank, rounding_mode="floor")
    ranks = ranks.masked_fill((slots < 0) | (ranks >= num_ranks), num_ranks).sort(dim=1).values
    repeated = ranks.diff(dim=1, prepend=ranks.new_full((len(ranks), 1), -1)) == 0
    ranks = ranks.masked_fill(repeated, num_ranks).sort(dim=1).values
    ranks = ranks.narrow(1, 0, min(ranks.shape[1], num_ranks))
    flat = ranks.flatten()
    # bincount would wait for the device
    counts = flat.new_zeros(num_ranks + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return Destinations(ranks, counts.narrow(0, 0, num_ranks))


def map_rows(
    destinations: Destinations, sent: list[int], got: list[int], capacity: int | None = None
) -> RowMap:
    """Numbers the rows of one rank; with a capacity C those to destination d start at d * C."""
    ranks, counts = destinations
    tokens, width = ranks.shape
    num_ranks, num_rows = len(sent), sum(sent)
    by_rank, order = ranks.flatten().sort(stable=True)
    row = torch.arange(len(order), device=ranks.device)
    if capacity is not None:
        first = counts.cumsum(0) - counts
        start = torch.arange(num_ranks, device=ranks.device) * capacity
        row = row + (start - first).index_select(0, by_rank.clamp(max=num_ranks - 1))
    row = row.masked_fill(by_rank == num_ranks, num_rows)

    def placed(values: Tensor, padding: int) -> Tensor:  # copies that go nowhere meet in entry n, cut off
        return values.new_full((num_rows + 1,), padding).scatter_(0, row, values).narrow(0, 0, num_rows)

    token_to_rows = torch.empty_like(order).scatter_(0, order, row).view(tokens, width)
    row_to_token = placed(order.div(width, rounding_mode="floor"), tokens)
    return RowMap(row_to_token, placed(by_rank, num_ranks), token_to_rows, sent, got)


def take_rows(values: Tensor, map_: RowMap, padded: bool) -> Tensor:
    """[n, F] the tokens' values [T, F] row by row; zeros in padding rows."""
    return spread_rows(values, map_.token_to_rows, map_.row_to_token, padded)


def local_copies(
    slots: Tensor, weights: Tensor, map_: RowMap, slots_per_rank: int, padded: bool
) -> tuple[Tensor, Tensor]:
    """What a row carries of its token's copies: [n, K] int32 slots on its rank (-1 elsewhere), [n, K] weights."""
    shifted = take_rows(slots.long() + 1, map_, padded) - 1  # so that padding reads -1
    here = shifted.div(slots_per_rank, rounding_mode="floor") == map_.row_to_rank.unsqueeze(1)
    local = torch.where(here, shifted % slots_per_rank, -1).int()
    return local, take_rows(weights, map_, padded).masked_fill(here.logical_not(), 0)


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
