"""Potentials of a resistor network with two sides, and sums in a fixed order: the arithmetic of plan_lp."""

from __future__ import annotations

from typing import Any

import numpy as np

Reals = np.ndarray[tuple[int, ...], np.dtype[np.floating[Any]]]
Indices = np.ndarray[tuple[int], np.dtype[np.int64]]
COLUMNS = 16
TILE = 16


def ordered_sum(terms: Reals) -> Any:
    """Term i in column i % 16, by ascending i; then the columns as a tree."""
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
    """The nodes of k's tile: together they are one step of a solve."""
    first = k // TILE * TILE
    return slice(first, min(first + TILE, n))


class Network:
    """Potentials for currents in a resistor network with two sides. Edges join left[k] and right[k].

    The nodes of the larger side go first; the mesh that remains is dense in the smaller side. Stars are turned
    into meshes: conductances are added and never subtracted.
    """

    def __init__(self, left: Indices, right: Indices, left_size: int, right_size: int) -> None:
        self.left_kept = left_size <= right_size
        self.kept, self.hub = (left, right) if self.left_kept else (right, left)

    def factor(self, conductance: Reals, left_ground: Reals, right_ground: Reals) -> None:
        """conductance per edge; grounds per node: what conducts to potential 0."""
        ground, hub_ground = (left_ground, right_ground) if self.left_kept else (right_ground, left_ground)
        self.conductance = conductance
        self.star = add_by(self.hub, conductance, hub_ground)
        self.part = conductance / self.star[self.hub]
        ground = add_by(self.kept, self.part * hub_ground[self.hub], ground)
        n = len(ground)
        mesh = np.zeros((n, n), conductance.dtype)
        edges_of = [np.flatnonzero(self.hub == h) for h in range(len(self.star))]
        for k, (a, h) in enumerate(zip(self.kept, self.hub, strict=True)):
            others = edges_of[h]
            mesh[a, self.kept[others]] += self.part[k] * conductance[others]
        self.rows, self.inverse = mesh, np.empty(n, conductance.dtype)
        self.taken = np.zeros((n, n), conductance.dtype)
        for k in range(n):
            row, inside = mesh[k, k + 1 :], tile_of(k, n)
            self.inverse[k] = 1 / (ground[k] + ordered_sum(row))
            part = row * self.inverse[k]
            ground[k + 1 :] += part * ground[k]
            mesh[k + 1 :, k + 1 :] += np.outer(part, row)
            ways = np.outer(part[: inside.stop - k - 1], self.taken[k, inside.start : k])
            self.taken[k + 1 : inside.stop, inside.start : k] += ways
            self.taken[k + 1 :, k] = part

    def solve(self, left: Reals, right: Reals) -> tuple[Reals, Reals]:
        """Potentials of the left and right nodes for their currents."""
        kept, hub = (left, right) if self.left_kept else (right, left)
        kept = add_by(self.kept, self.part * hub[self.hub], kept)
        n = len(kept)
        own, tiles = np.empty_like(kept), [tile_of(k, n) for k in range(0, n, TILE)]
        for inside in tiles:
            current = kept.copy()
            for j in range(inside.start, inside.stop):
                current[j + 1 :] += self.taken[j + 1 :, j] * kept[j]
            own[inside] = (current * self.inverse)[inside]
            for k in range(inside.start, inside.stop):
                kept[inside.stop :] += self.rows[k, inside.stop :] * own[k]
        for inside in reversed(tiles):
            kept[inside] = own[inside]
            for k in range(inside.start + 1, inside.stop):
                kept[inside.start : k] += self.taken[k, inside.start : k] * own[k]
            for k in range(inside.start, inside.stop):
                own[: inside.start] += self.taken[k, : inside.start] * kept[k]
        hub = add_by(self.hub, self.conductance * kept[self.kept], hub) / self.star
        return (kept, hub) if self.left_kept else (hub, kept)
