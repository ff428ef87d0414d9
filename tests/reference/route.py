"""route, route_sampled: the slot of every copy on one rank."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from isoload.ops.results import PART_ROWS, Counted, SharedColumns
from isoload.ops.tables import ReplicaTables
from reference.replica_tables import replicas
from reference.route_shared import route_shared


def route(
    counted: Counted,
    send_counts: Tensor,
    tables: ReplicaTables,
    shared: SharedColumns | None = None,
) -> Tensor:
    """[T, K] slots: the i-th copy of an expert goes to its first replica whose cumulative count exceeds i.

    Copies are counted in token order. A token's shared copies go home, or where :func:`route_shared` deals them.
    """
    if shared is not None:
        size = tables.num_slots // tables.num_ranks
        slots = route(counted.routed(shared.num_shared), send_counts, tables)
        if shared.row is None:
            present = (slots >= 0).any(1, keepdim=True)
            ranks = torch.where(present, shared.home, -1).expand(-1, shared.num_shared)
        else:
            ranks = route_shared(slots, shared.row, size, shared.home, shared.num_shared)
        place = shared.first_shared + torch.arange(shared.num_shared)
        return torch.cat([slots, torch.where(ranks < 0, -1, ranks * size + place).to(slots.dtype)], dim=1)
    held = replicas(tables)
    tokens, copies = counted.ids.tolist(), send_counts.tolist()
    chosen = [[-1] * len(token) for token in tokens]
    cumulative = [list(accumulate(copies[p] for p in ps)) for ps in held]
    before = (counted.parts.cumsum(0) - counted.parts).tolist()
    dealt = [0] * tables.num_experts
    for t, (token, numbers) in enumerate(zip(tokens, counted.numbers.tolist(), strict=True)):
        for k, e in enumerate(token):
            if e != -1:
                assert dealt[e] == before[t // PART_ROWS][e] + numbers[k], "a copy's number is its place"
                chosen[t][k] = next(
                    p for p, upto in zip(held[e], cumulative[e], strict=True) if upto > dealt[e]
                )
                dealt[e] += 1
    received = torch.tensor([p for slots in chosen for p in slots if p >= 0], dtype=torch.int64)
    assert torch.equal(received.bincount(minlength=tables.num_slots), send_counts.long()), (
        "slots get their share"
    )
    return torch.tensor(chosen, dtype=counted.ids.dtype).view(counted.ids.shape)


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
