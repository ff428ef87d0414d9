"""The normal equations of plan_lp by a dense Cholesky factorisation, and sums in a fixed order."""

from __future__ import annotations

from typing import Any

import numpy as np

Reals = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
COLUMNS = 8
TILE = 16


def ordered_sum(terms: Reals) -> Any:
    """Term i in column i % 8, by ascending i; then the columns as a tree."""
    columns = np.zeros(COLUMNS, terms.dtype)
    for start in range(0, len(terms), COLUMNS):
        block = terms[start : start + COLUMNS]
        columns[: len(block)] += block
    while len(columns) > 1:
        half = len(columns) // 2
        columns = columns[:half] + columns[half:]
    return columns[0]


def add_by(index: Indices, terms: Reals, start: Reals) -> Reals:
    """start + the terms of each index, one after another."""
    sums: Reals = start.copy()
    np.add.at(sums, index, terms)
    return sums


def tile_of(k: int, n: int) -> slice:
    """The rows of k's tile, whose triangle is inverted."""
    first = k // TILE * TILE
    return slice(first, min(first + TILE, n))


class Cholesky:
    """Solves: every rank's diagonal entry is the weights of its slack and its parts, every expert's those of its parts;
    a part couples its rank and its expert by its negated weight.

    The larger side is eliminated first. Entries off the diagonal are stored negated, and a pivot is the sum of its row,
    so that nothing is subtracted.
    """

    def __init__(self, rank: Indices, expert: Indices, num_ranks: int, num_experts: int) -> None:
        self.keeps_ranks = num_ranks <= num_experts
        self.num_experts = num_experts
        self.kept, self.gone = (rank, expert) if self.keeps_ranks else (expert, rank)

    def factor(self, weight: Reals, slack_weight: Reals) -> None:
        """weight: of every part; slack_weight: of every rank."""
        none = np.zeros(self.num_experts, weight.dtype)
        excess, gone_own = (slack_weight, none) if self.keeps_ranks else (none, slack_weight)
        self.weight = weight
        self.diagonal = add_by(self.gone, weight, gone_own)
        self.share = weight / self.diagonal[self.gone]
        excess = add_by(self.kept, self.share * gone_own[self.gone], excess)
        n = len(excess)
        self.rows, self.inverse = np.zeros((n, n), weight.dtype), np.empty(n, weight.dtype)
        parts_of = [np.flatnonzero(self.gone == h) for h in range(len(self.diagonal))]
        for k, (a, h) in enumerate(zip(self.kept, self.gone, strict=True)):
            others = parts_of[h]
            self.rows[a, self.kept[others]] += self.share[k] * weight[others]
        self.lower = np.zeros((n, n), weight.dtype)
        for k in range(n):
            self.eliminate(k, excess)

    def eliminate(self, k: int, excess: Reals) -> None:
        """Turns the rows below row k into those of the equations without unknown k."""
        row, tile = self.rows[k, k + 1 :], tile_of(k, len(excess))
        self.inverse[k] = 1 / (excess[k] + ordered_sum(row))
        part = row * self.inverse[k]
        excess[k + 1 :] += part * excess[k]
        self.rows[k + 1 :, k + 1 :] += np.outer(part, row)
        within = np.outer(part[: tile.stop - k - 1], self.lower[k, tile.start : k])
        self.lower[k + 1 : tile.stop, tile.start : k] += within
        self.lower[k + 1 :, k] = part

    def solve(self, rank: Reals, expert: Reals) -> tuple[Reals, Reals]:
        """The ranks' and experts' unknowns for their right-hand sides."""
        kept, gone = (rank, expert) if self.keeps_ranks else (expert, rank)
        kept = add_by(self.kept, self.share * gone[self.gone], kept)
        n = len(kept)
        middle, tiles = np.empty_like(kept), [tile_of(k, n) for k in range(0, n, TILE)]
        for tile in tiles:
            right = kept.copy()
            for j in range(tile.start, tile.stop):
                right[j + 1 :] += self.lower[j + 1 :, j] * kept[j]
            middle[tile] = (right * self.inverse)[tile]
            for k in range(tile.start, tile.stop):
                kept[tile.stop :] += self.rows[k, tile.stop :] * middle[k]
        for tile in reversed(tiles):
            kept[tile] = middle[tile]
            for k in range(tile.start + 1, tile.stop):
                kept[tile.start : k] += self.lower[k, tile.start : k] * middle[k]
            for k in range(tile.start, tile.stop):
                middle[: tile.start] += self.lower[k, : tile.start] * kept[k]
        gone = add_by(self.gone, self.weight * kept[self.kept], gone) / self.diagonal
        return (kept, gone) if self.keeps_ranks else (gone, kept)
