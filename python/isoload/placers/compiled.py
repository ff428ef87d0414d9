"""The placers' inner loops: csrc/placers, two C functions of the compiled library, on NumPy arrays.

The slots are the same for any number of threads; the interpreter goes on meanwhile.

Raises (both): ValueError naming the argument and the rule; the library itself checks nothing.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from isoload.ops.load import LIBRARY
from isoload.placers.base import Floats, Ints

LANES = 4  # the loops sum scenarios in so many lanes


def pack_slots(weight: Any, capacity: Any, dedup: bool, threads: int) -> Ints:
    """Slots [L, R, S], S the largest capacity.

    Args:
        weight: [L, E] loads.
        capacity: [L, R] slots of every rank.
        dedup: never two replicas of one expert on one rank.
        threads: that layers are spread over.
    """
    weight, capacity = np.require(weight, np.float32, "C"), np.require(capacity, np.int32, "C")
    _need(weight.ndim == capacity.ndim == 2, "weight must be [L, E] and capacity [L, R]")
    (layers, experts), ranks, width = weight.shape, capacity.shape[1], int(capacity.max(initial=0))
    _need_room(capacity, (layers, ranks), experts, experts if dedup else width)
    slots = np.full((layers, ranks, width), -1, dtype=np.int32)
    _call(LIBRARY, "eplb", weight, capacity, layers, experts, ranks, width, dedup, threads, slots)
    return slots


def search_slots(
    *,
    loads: Any,
    weight: Any,
    tick: Any,
    node: Any,
    home: Any,
    capacity: Any,
    risks: Any,
    rival: Any,
    before: Any,
    width: int,
    exact: bool,
    few_slots: bool,
    steps: int,
    moves: int,
    threads: int,
    library: ctypes.CDLL = LIBRARY,
) -> tuple[Ints, Floats]:
    """Slots [L, R, width] and the objective of every layer [L].

    Args:
        loads: [L, E, n] whole numbers, n a multiple of LANES; weight [n].
        tick: [R] cost of a copy; node [R].
        home: [L, E] node that keeps a copy of an expert; -1 = none.
        capacity: [L, R] slots of every rank, of width.
        risks: [z, L, E] by what experts are replicated, a start each.
        rival: [L, R, width] slots that the result is never worse than; before: likewise, to start from. Or None.
        steps, moves: of the search; moves -1 = any.
    """
    loads, weight, tick, risks = (np.require(x, np.float64, "C") for x in (loads, weight, tick, risks))
    node, home, capacity = (np.require(x, np.int32, "C") for x in (node, home, capacity))
    old, other = (None if x is None else np.require(x, np.int32, "C") for x in (before, rival))
    fits = loads.ndim == 3 and loads.shape[2] % LANES == 0
    _need(fits, f"loads must be [L, E, n], n a multiple of {LANES}")
    (layers, experts, n), ranks = loads.shape, len(tick)
    _need_shape("weight", weight, n)
    _need_shape("node", node, ranks)
    _need_shape("home", home, layers, experts)
    _need_shape("risks", risks, len(risks), layers, experts)
    _need_room(capacity, (layers, ranks), experts, min(width, experts))
    _need(old is not None or other is not None or len(risks) > 0, "risks must be given without before")
    _need_valid("rival", other, capacity, experts, width)
    _need_valid("before", old, capacity, experts, width)
    slots, objective = np.empty((layers, ranks, width), np.int32), np.empty(layers)
    arrays = loads, weight, tick, node, home, capacity, risks, other, old
    numbers = layers, experts, n, ranks, len(risks), width, exact, few_slots, steps, moves, threads
    _call(library, "scenario", *arrays, *numbers, slots, objective)
    return slots, objective


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Arrays go as addresses, None as null."""
    function = getattr(library, f"isoload_place_{name}")
    function.restype = ctypes.c_char_p
    passed = [ctypes.c_void_p(x.ctypes.data) if isinstance(x, np.ndarray) else x for x in arguments]
    if fault := function(*passed):
        raise ValueError(fault.decode())


def _need(holds: Any, rule: str) -> None:
    if not holds:
        raise ValueError(rule)


def _need_shape(name: str, array: Any, *shape: int) -> None:
    _need(array.shape == shape, f"{name} must be {list(shape)} for these loads and ranks")


def _need_room(capacity: Ints, shape: tuple[int, int], experts: int, most: int) -> None:
    _need_shape("capacity", capacity, *shape)
    _need(((capacity >= 0) & (capacity <= most)).all(), f"capacity must be in 0..{most} on every rank")
    _need((capacity.sum(1) >= experts).all(), f"capacity must hold all {experts} experts")


def _need_valid(name: str, slots: Ints | None, capacity: Ints, experts: int, width: int) -> None:
    """The search relies on it that slots which are taken over lie in their ranks' room and repeat no expert there."""
    if slots is None:
        return
    _need_shape(name, slots, *capacity.shape, width)
    held, row = slots >= 0, np.sort(slots, axis=2)
    fits = (slots >= -1) & (slots < experts) & (~held | (np.arange(width) < capacity[..., None]))
    repeats = (row[..., 1:] == row[..., :-1]) & (row[..., 1:] >= 0)
    _need(fits.all() and not repeats.any(), f"{name} must have experts within capacity, none twice on a rank")


def num_threads() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
