"""route, route_sampled: the slot of every copy on one rank."""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from isoload.reference.replica_tables import replicas
from isoload.replica_tables import ReplicaTables

UNSET = -2  # no slot granted yet; the op's outputs never hold it


def route(
    topk_ids: Tensor, source_quota: Tensor, tables: ReplicaTables, prefer: Literal["visited"] | None = None
) -> Tensor:
    """[T, K] slots: the i-th copy of an expert goes to its first replica whose cumulative share exceeds i.

    Copies are counted in token order. With prefer="visited" some copies are granted their wish first (see
    :func:`_grant`); the others are dealt by the same rule from what is left of the share.
    """
    held = replicas(tables)
    tokens, left = topk_ids.tolist(), source_quota.tolist()
    slots = [[-1 if e == -1 else UNSET for e in token] for token in tokens]
    if prefer == "visited":
        _grant(tokens, held, tables.num_slots // tables.num_ranks, left, slots)
    cumulative = [list(accumulate(left[p] for p in ps)) for ps in held]
    dealt = [0] * tables.num_experts
    for token, chosen in zip(tokens, slots, strict=True):
        for k, e in enumerate(token):
            if chosen[k] == UNSET:
                chosen[k] = next(p for p, upto in zip(held[e], cumulative[e], strict=True) if upto > dealt[e])
                dealt[e] += 1
    received = torch.tensor([p for chosen in slots for p in chosen if p >= 0], dtype=torch.int64)
    assert torch.equal(received.bincount(minlength=tables.num_slots), source_quota.long()), (
        "slots get their share"
    )
    return torch.tensor(slots, dtype=topk_ids.dtype).view(topk_ids.shape)


def _grant(
    tokens: list[list[int]],
    held: list[list[int]],
    slots_per_rank: int,
    left: list[int],
    slots: list[list[int]],
) -> None:
    """Grants wishes in token order while the wished slot has copies left; takes them from ``left``.

    An expert with one replica that has a share leaves no choice: its tokens visit that rank anyway. A copy of
    any other expert wishes its first replica with a share on a rank that its token visits anyway.
    """
    served = [[p for p in ps if left[p] > 0] for ps in held]
    for token, chosen in zip(tokens, slots, strict=True):
        visited = {served[e][0] // slots_per_rank for e in token if e != -1 and len(served[e]) == 1}
        for k, e in enumerate(token):
            if e == -1 or len(served[e]) == 1:
                continue
            wish = next((p for p in served[e] if p // slots_per_rank in visited), None)
            if wish is not None and left[wish] > 0:
                left[wish] -= 1
                chosen[k] = wish


def route_sampled(
    topk_ids: Tensor,
    weights: Tensor,
    tables: ReplicaTables,
    seed: int,
    step: Tensor | None = None,
    rank: int = 0,
) -> Tensor:
    """[T, K] slots: a replica for every copy, drawn with probability proportional to weights [P] float32.

    Copy i of the flattened topk_ids uses word i of the stream ``seed`` or, with a step, of seed, step and rank. Sums
    and products are float32, in slot order: rounding is part of the definition.
    """
    held, weight = replicas(tables), weights.numpy()
    seed = stream_of(seed, step, rank)
    slots = []
    for i, e in enumerate(topk_ids.flatten().tolist()):
        slots.append(-1 if e == -1 else _draw(held[e], weight, random_word(seed, i)))
    return torch.tensor(slots, dtype=topk_ids.dtype).view(topk_ids.shape)


def _draw(candidates: list[int], weight: np.ndarray[tuple[int], np.dtype[np.float32]], word: int) -> int:
    total = np.float32(0)
    for p in candidates:
        total += weight[p]
    unit = np.float32(word >> 40) * np.float32(2.0**-24)  # 24 bits: exact in float32, in [0, 1)
    left = unit * total
    chosen = -1
    for p in candidates:
        if weight[p] > 0:
            chosen = p
        if left < weight[p]:
            break
        left -= weight[p]
    assert chosen >= 0, "a routed expert has a replica of positive weight"
    return chosen


def stream_of(seed: int, step: Tensor | None, rank: int) -> int:
    """The stream of seed, step and rank; seed itself without a step."""
    for part in [] if step is None else [int(step), rank]:
        seed = (seed + part + 1) * 0x9E3779B97F4A7C15 % 2**64
        seed ^= seed >> 31
    return seed


def random_word(seed: int, i: int) -> int:
    """SplitMix64: 64-bit word i of the stream ``seed``."""
    mask = 2**64 - 1
    z = (seed + (i + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return z ^ z >> 31
