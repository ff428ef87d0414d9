"""Five steps of affine scaling with a big M: how SGLang's ``--ep-dispatch-algorithm lp`` solves its linear program.

For comparison with isoload.ops.plan_lp. Written from a description of the kernel, none of which is here. NumPy and
LAPACK on the host, float32 as published, a layer at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from isoload.ops.results import LpSplit

Array: TypeAlias = "np.ndarray[Any, Any]"
BIG_M, STEP, SMALLEST_PIVOT = 1000.0, np.float32(0.999), np.float32(1e-12)


class Parts(NamedTuple):
    """What of a layer's loads can move: a replicated expert's part on each of its ranks.

    slot, expert, rank  [n] of a part; expert counts the replicated ones, 0..N-1
    load    [N] copies of each replicated expert
    solo    [R] copies that cannot move
    """

    slot: Array
    expert: Array
    rank: Array
    load: Array
    solo: Array


def plan_affine(
    loads: Tensor, slot_to_expert: Tensor, num_ranks: int, base: Tensor | None = None, iterations: int = 5
) -> LpSplit:
    """The published solver's split, in place of :func:`isoload.ops.plan_lp`; on the CPU alone.

    Args:
        loads: [E] copies (leading L as slot_to_expert).
        slot_to_expert: [P]; -1 = none, and so are ids from E on. An expert's slots on one rank are one, the lowest.
        num_ranks: R.
        base: [R] copies that each rank carries besides.
        iterations: steps of affine scaling. More than about eight are worse: float32 breaks down.

    Returns:
        split in float64, its peak as primal, and 0 as dual, since it proves no bound; status 2 where the published test
        does not accept the split, which is then the even one, else 0.
    """
    if loads.device.type != "cpu":
        raise ValueError(f"loads must be on the CPU for affine scaling, got {loads.device}")
    batch = loads.shape[:-1]
    base = torch.zeros(num_ranks, dtype=torch.int32) if base is None else base
    given = (loads, slot_to_expert, base.expand(*batch, num_ranks))
    rows = [part.reshape(-1, part.shape[-1]).numpy() for part in given]
    solved = [
        solve_layer(counts, slots, carried, iterations) for counts, slots, carried in zip(*rows, strict=True)
    ]
    split, peak, status = zip(*solved, strict=True)
    whole = torch.tensor(status, dtype=torch.int32).view(batch)
    primal = torch.tensor(peak, dtype=torch.float64).view(batch)
    found = torch.from_numpy(np.stack(split)).view(*batch, -1)
    return LpSplit(found, primal, torch.zeros_like(primal), torch.full_like(whole, iterations), whole)


def solve_layer(loads: Array, slots: Array, base: Array, steps: int) -> tuple[Array, float, int]:
    """[P] split, its largest rank load and the status of one layer."""
    split = np.zeros(len(slots))
    parts = parts_of(loads, slots, base, split)
    accepted = True
    if parts.load.any():
        found, accepted = scale(parts, steps)
        split[parts.slot] = found * (parts.load / np.bincount(parts.expert, found))[parts.expert]
    peak = float((split.reshape(len(base), -1).sum(1) + base).max())
    return split, peak, 0 if accepted else 2


def parts_of(loads: Array, slots: Array, base: Array, split: Array) -> Parts:
    """The parts; the load of experts with one rank is written to split [P]."""
    num_ranks, size = len(base), len(slots) // len(base)
    held = np.flatnonzero((slots >= 0) & (slots < len(loads)))
    _, first = np.unique(slots[held].astype(np.int64) * num_ranks + held // size, return_index=True)
    held = held[first]  # the lowest slot of each pair of expert and rank, by expert
    ranks = np.bincount(slots[held], minlength=len(loads))
    alone, moving = held[ranks[slots[held]] == 1], held[ranks[slots[held]] > 1]
    split[alone] = loads[slots[alone]]
    solo = split.reshape(num_ranks, size).sum(1) + base
    names, expert = np.unique(slots[moving], return_inverse=True)
    return Parts(moving, expert, moving // size, loads[names].astype(np.float64), solo)


def scale(parts: Parts, steps: int) -> tuple[Array, bool]:
    """[n] shares of the parts, and whether they are accepted; else all are 0.5."""
    experts, ranks, n = len(parts.load), len(parts.solo), len(parts.slot)
    # Columns: parts, a slack per rank, the peak, and the big-M column that makes x = 1 feasible.
    matrix = np.zeros((experts + ranks, n + ranks + 2), dtype=np.float32)
    matrix[parts.expert, np.arange(n)] = matrix[experts + parts.rank, np.arange(n)] = 1
    matrix[experts + np.arange(ranks), n + np.arange(ranks)] = 1
    matrix[experts:, -2] = -1
    right = np.concatenate([parts.load, -parts.solo]) / (parts.load.sum() + parts.solo.sum())
    right = right.astype(np.float32)
    matrix[:, -1] = right - matrix[:, :-1].sum(1)
    cost = np.zeros(matrix.shape[1], dtype=np.float32)
    cost[-2:] = 1, BIG_M
    x, largest = np.ones_like(cost), np.float32(np.inf)
    with np.errstate(all="ignore"):  # what breaks down is not accepted
        for _ in range(steps):
            scaled = matrix * x**2
            normal = scaled @ matrix.T + SMALLEST_PIVOT * np.eye(len(right), dtype=np.float32)
            try:
                lower = np.linalg.cholesky(normal)
            except np.linalg.LinAlgError:
                return np.full(n, 0.5), False
            prices = np.linalg.solve(lower.T, np.linalg.solve(lower, scaled @ cost))
            move = x * (cost - matrix.T @ prices)
            largest = move.max()
            x = x * (1 - (STEP / largest if largest > 1e-9 else 1) * move)
        missed = np.abs(matrix @ x - right).max()
    accepted = bool(largest < 0.1 and 0 <= x[-1] < 1e-4 and missed < 0.05 and (x > 0).all())
    return (x[:n].astype(np.float64) if accepted else np.full(n, 0.5)), accepted
