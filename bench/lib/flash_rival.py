"""A placer in the manner of FlashLB (vllm-ascend's policy 3), for bench_place: the best published one for a window.

Our re-implementation from its public description, in NumPy, so labelled "FlashLB-like": replicas go to the expert
with the largest mean plus 0.674 standard deviations of a replica's load over the window; the heaviest first is laid
onto the rank whose load would have the least mean plus 0.674 deviations, covariances included; a tree of depth 4 and
width 8 tries how many replicas the hotter half of the experts gets, then the hotter half of that, and so on; what
counts is the mean over the window of max/mean rank load. Without its rules on when to re-plan a layer, and on moves.
It says nothing about the speed of vllm-ascend.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import isoload

Floats = np.ndarray[Any, np.dtype[np.float64]]
Z, DEPTH, WIDTH, WINDOW = 0.674, 4, 8, 64


def flash_placement(counts: Any, topology: isoload.Topology, slots_per_rank: int) -> isoload.Placement:
    """A placement for counts [batches, L, E]; no expert twice on a rank."""
    parts = np.array_split(counts, min(len(counts), WINDOW))
    window = np.stack([part.sum(0) for part in parts]).astype(float)
    ranks = topology.num_ranks
    rows = [place_layer(window[:, layer].T, ranks, slots_per_rank) for layer in range(window.shape[1])]
    return isoload.Placement(torch.tensor(np.array(rows), dtype=torch.int32), topology, window.shape[2])


def place_layer(load: Floats, ranks: int, size: int) -> list[int]:
    """[R * size] experts for load [E, n]."""
    risk = load.mean(1) + Z * load.std(1)
    order = np.argsort(-risk, kind="stable")
    extra = ranks * size - len(risk)
    best = pack(load, replicate(risk, extra, ranks), ranks, size)
    fixed: list[tuple[Any, int]] = []  # experts that are settled, colder first, and their replicas
    hot, left = order, extra
    for _ in range(DEPTH):
        if left < 1 or len(hot) < 2:
            break
        upper, lower = hot[: len(hot) // 2], hot[len(hot) // 2 :]
        tried = []
        for share in np.unique(np.rint(left * np.linspace(0.5, 1, WIDTH)).astype(int)):
            copies = np.ones(len(risk), dtype=int)
            for experts, number in [*fixed, (lower, left - share), (upper, share)]:
                copies[experts] = replicate(risk[experts], number, ranks)
            if copies.sum() == ranks * size:  # a group may not have room for all of its share
                tried.append((pack(load, copies, ranks, size), int(share)))
        if not tried:
            break
        found, share = min(tried, key=lambda one: one[0][0])
        best = min(best, found, key=lambda one: one[0])
        fixed.append((lower, left - share))
        hot, left = upper, share
    return best[1]


def replicate(risk: Floats, extra: int, most: int) -> Any:
    """[E] copies: one each, and so many more where the risk of a copy is largest."""
    copies = np.ones(len(risk), dtype=int)
    for _ in range(extra):
        each = np.where(copies < most, risk / copies, -1.0)
        if each.max() < 0:
            break
        copies[each.argmax()] += 1
    return copies


def pack(load: Floats, copies: Any, ranks: int, size: int) -> tuple[float, list[int]]:
    """The window's mean of max/mean rank load, and the slots."""
    part = load / copies[:, None]
    risk = part.mean(1) + Z * part.std(1)
    held: list[list[int]] = [[] for _ in range(ranks)]
    total, room = np.zeros((ranks, load.shape[1])), np.full(ranks, size)
    mean, square = np.zeros(ranks), np.zeros(ranks)  # of each rank's load, and of its square, over the window
    own_mean, own_square = part.mean(1), (part**2).mean(1)
    holds = np.zeros((ranks, len(copies)), dtype=bool)
    order = np.argsort(-np.repeat(risk, copies), kind="stable")
    for expert in np.repeat(np.arange(len(copies)), copies)[order]:
        joint = total @ part[expert] / load.shape[1]
        after, after_square = mean + own_mean[expert], square + 2 * joint + own_square[expert]
        cost = after + Z * np.sqrt(np.maximum(after_square - after**2, 0))
        cost[(room == 0) | holds[:, expert]] = np.inf
        rank = int(cost.argmin())
        if np.isinf(cost[rank]):
            return np.inf, []  # stuck: only ranks that hold it have room
        total[rank] += part[expert]
        mean[rank], square[rank] = after[rank], after_square[rank]
        room[rank] -= 1
        holds[rank, expert] = True
        held[rank].append(int(expert))
    imbalance = total.max(0) / np.maximum(total.mean(0), 1e-300)
    return float(imbalance.mean()), [expert for row in held for expert in row]
