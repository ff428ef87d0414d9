"""Ranks' loads where replicas share alike, and weights of replicas for policies that split by them."""

from __future__ import annotations

from typing import Any

import numpy as np

from isoload.placers.base import Floats, Slots

LEAST = 1e-6  # of the mean load: what a rank without any counts as


def weights_by_load(slots: Slots, load: Floats, tick: Floats) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[L, R, S] mean load over the load of the slot's rank, each expert's split evenly over its replicas.

    GRACE-MoE's Equation 3, for any replicas. Sums run in a fixed order, so that all machines find the same bits. Equal
    in layers without loads; 0 in slots without an expert.

    Args:
        slots: [L, R, S] int32 experts, -1 = none.
        load: [L, E] copies.
        tick: [R] cost of a copy on each rank.
    """
    held = merged(slots)
    layer, there = np.arange(len(slots))[:, None, None], held >= 0
    replicas = np.zeros(load.shape)
    np.add.at(replicas, (layer, held.clip(0)), there)
    part = np.where(there, load[layer, held.clip(0)] / np.maximum(replicas, 1)[layer, held.clip(0)], 0)
    of_rank = tick * part.cumsum(-1)[..., -1]
    mean = of_rank.cumsum(-1)[..., -1:] / of_rank.shape[-1]
    weight = np.where(mean > 0, mean / np.maximum(np.maximum(of_rank, LEAST * mean), np.finfo(float).tiny), 1)
    return np.where(slots >= 0, weight[..., None], 0).astype(np.float32)


def merged(slots: Slots) -> Slots:
    """[L, R, S] a copy without the second and later slots of an expert on a rank (-1 there)."""
    rows: Slots = slots.copy()
    for j in range(1, rows.shape[2]):
        rows[:, :, j][(rows[:, :, :j] == rows[:, :, j : j + 1]).any(-1)] = -1
    return rows


def rank_loads(loads: Any, slots: Slots) -> Floats:
    """[n, L, R] loads of ranks for loads [n, L, E] on slots [L, R, S] (-1 = none), replicas sharing alike."""
    rows = slots.reshape(len(slots), -1)
    copies = np.stack([np.bincount(row[row >= 0], minlength=loads.shape[2]) for row in rows])
    held = np.broadcast_to(np.maximum(rows, 0), (len(loads), *rows.shape))
    part = np.where(rows >= 0, np.take_along_axis(loads / copies, held, 2), 0)
    found: Floats = part.reshape(*loads.shape[:2], *slots.shape[1:]).sum(-1)
    return found
