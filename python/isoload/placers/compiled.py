"""The placers' inner loops: three C functions of the compiled library (csrc/placers), on NumPy arrays.

The slots are the same for any number of threads, and the calls release the interpreter's lock. Every function raises
ValueError for wrong arguments; the library itself checks nothing.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

from isoload.ops.library import LIBRARY
from isoload.placers.base import Floats, Ints

LANES = 4  # lanes in which the loops sum scenarios
MAX_NODES, MAX_TOP_K = 64, 64  # csrc/placers/rows.h


def pack_slots(weight: Any, capacity: Any, dedup: bool, threads: int) -> Ints:
    """Return slots [L, R, S], with the largest capacity as S, from loads [L, E] and slots of every rank [L, R]. With
    dedup no two replicas of an expert are on one rank."""
    weight, capacity = np.require(weight, np.float32, "C"), np.require(capacity, np.int32, "C")
    _need(weight.ndim == capacity.ndim == 2, "weight must be [L, E] and capacity [L, R]")
    (layers, experts), ranks, width = weight.shape, capacity.shape[1], int(capacity.max(initial=0))
    _need_capacity(capacity, (layers, ranks), experts, experts if dedup else width)
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
    """Return slots [L, R, width] and the objective of every layer [L].

    `loads` [L, E, n] are integers, n a multiple of LANES, with weight [n] of the scenarios and tick [R] the cost of a
    copy. `home` [L, E] is the node (of node [R]) on which a replica of an expert stays, -1 = none; `capacity` [L, R]
    the slots of every rank. Replicas are counted by each of risks [z, L, E]. The search starts from before [L, R,
    width], if any, of which at most `moves` slots change (-1 = any number), and is never worse than rival [L, R,
    width], if any.
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
    _need_capacity(capacity, (layers, ranks), experts, min(width, experts))
    _need(old is not None or other is not None or len(risks) > 0, "risks must be given without before")
    _need_valid("rival", other, capacity, experts, width)
    _need_valid("before", old, capacity, experts, width)
    slots, objective = np.empty((layers, ranks, width), np.int32), np.empty(layers)
    arrays = loads, weight, tick, node, home, capacity, risks, other, old
    numbers = layers, experts, n, ranks, len(risks), width, exact, few_slots, steps, moves, threads
    _call(library, "scenario", *arrays, *numbers, slots, objective)
    return slots, objective


def near_slots(
    *,
    slots: Any,
    loads: Any,
    stress: Any,
    weight: Any,
    tick: Any,
    node: Any,
    home: Any,
    before: Any,
    topk_ids: Any,
    token_weight: Any,
    rows_node: Any,
    steps: int,
    walk: int,
    moves: int,
    starts: int,
    threads: int,
    library: ctypes.CDLL = LIBRARY,
) -> tuple[Ints, Any]:
    """Return slots [L, R, width] with fewer rows to other nodes, and the rows before and after [L, 2].

    Arguments as of :func:`search_slots`; `topk_ids` [L, tokens, K] are experts, -1 = none, which count token_weight
    [tokens] times, and rows_node [R] is the node of each rank, 0..63. The best of `starts` searches is returned, each
    of `steps` changes, of which the first `walk` may add rows; the first search has no walk.
    """
    loads, stress, weight, tick = (np.require(x, np.float64, "C") for x in (loads, stress, weight, tick))
    node, home, rows_node = (np.require(x, np.int32, "C") for x in (node, home, rows_node))
    ids, token_weight = np.require(topk_ids, np.int32, "C"), np.require(token_weight, np.int32, "C")
    old = None if before is None else np.require(before, np.int32, "C")
    placed: Ints = np.array(slots, dtype=np.int32, order="C")
    fits = loads.ndim == 3 and loads.shape[2] % LANES == 0
    _need(fits, f"loads must be [L, E, n], n a multiple of {LANES}")
    (layers, experts, n), ranks = loads.shape, len(tick)
    fits = placed.ndim == 3 and placed.shape[:2] == (layers, ranks)
    _need(fits, "slots must be [L, R, width] for these loads")
    width = placed.shape[2]
    _need_shape("stress", stress, *loads.shape)
    _need_shape("weight", weight, n)
    _need_shape("node", node, ranks)
    _need_shape("home", home, layers, experts)
    _need_shape("rows_node", rows_node, ranks)
    _need(((rows_node >= 0) & (rows_node < MAX_NODES)).all(), f"rows_node must be in 0..{MAX_NODES - 1}")
    full = np.full((layers, ranks), width, dtype=np.int32)
    _need_valid("slots", placed, full, experts, width)
    _need_valid("before", old, full, experts, width)
    copies = np.stack([(placed == e).any((1, 2)) for e in range(experts)])
    _need(copies.all(), f"slots must hold all {experts} experts")
    fits = ids.ndim == 3 and len(ids) == layers and 1 <= ids.shape[2] <= MAX_TOP_K
    layout = f"[L, tokens, K] for the {layers} layers of the loads, K at most {MAX_TOP_K}"
    _need(fits, f"topk_ids must be {layout}")
    limit = f"-1..{experts - 1}, the experts of the loads: are they of another model?"
    _need(((ids >= -1) & (ids < experts)).all(), f"topk_ids must be in {limit}")
    _need_shape("token_weight", token_weight, ids.shape[1])
    rows = np.zeros((layers, 2), dtype=np.int64)
    arrays = loads, stress, weight, tick, node, home, old, ids, token_weight, rows_node
    numbers = layers, experts, n, ranks, width, *ids.shape[1:], int(rows_node.max()) + 1
    _call(library, "near", *arrays, *numbers, steps, walk, moves, starts, threads, placed, rows)
    return placed, rows


def _call(library: ctypes.CDLL, name: str, *arguments: Any) -> None:
    """Call a function of the library with arrays as addresses and None as null; raise its fault as ValueError."""
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


def _need_capacity(capacity: Ints, shape: tuple[int, int], experts: int, limit: int) -> None:
    _need_shape("capacity", capacity, *shape)
    _need(((capacity >= 0) & (capacity <= limit)).all(), f"capacity must be in 0..{limit} on every rank")
    _need((capacity.sum(1) >= experts).all(), f"capacity must hold all {experts} experts")


def _need_valid(name: str, slots: Ints | None, capacity: Ints, experts: int, width: int) -> None:
    if slots is None:
        return
    _need_shape(name, slots, *capacity.shape, width)
    filled, row = slots >= 0, np.sort(slots, axis=2)
    fits = (slots >= -1) & (slots < experts) & (~filled | (np.arange(width) < capacity[..., None]))
    repeats = (row[..., 1:] == row[..., :-1]) & (row[..., 1:] >= 0)
    _need(fits.all() and not repeats.any(), f"{name} must have experts within capacity, none twice on a rank")


def num_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
