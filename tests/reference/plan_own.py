"""plan_own: the least sum of squares over one source's whole copies, by augmenting paths."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from isoload.ops.results import ONE_OFFSET
from isoload.ops.tables import ReplicaTables
from reference.replica_tables import replicas

ONE = 2**32  # fixed point of a load
TURNS = (0xC13FA9A9, 0x91E10DA6, 0x61C88647)  # of source, rank and layer: 0.7549, 0.5698, 0.3820


def base_of(
    counts: Tensor, offset: Tensor, source: int, fixed: Tensor | None = None, layer: int = 0
) -> list[int]:
    """[R] what the source takes each rank to carry before its own copies, in 2^-32 copies."""
    besides = [0] * len(offset) if fixed is None else fixed.tolist()
    copies = int(counts.sum()) + sum(besides)
    turned = [
        sum(n * turn for n, turn in zip((source, r, layer), TURNS, strict=True)) for r in range(len(offset))
    ]
    return [
        f * ONE + o * copies * (ONE // ONE_OFFSET) + u % ONE
        for f, o, u in zip(besides, offset.tolist(), turned, strict=True)
    ]


def plan_own(
    counts: Tensor,
    tables: ReplicaTables,
    offset: Tensor,
    source: int,
    *,
    fixed: Tensor | None = None,
    ticks: Tensor | None = None,
    layer: int = 0,
) -> Tensor:
    """[P] int32 copies that the source sends to each slot; counts [E], offset [R] (leading L as the tables).

    The optimum: no path of copies leads from a rank to another with a lower sum of squares. The op sweeps, and may
    stop short of it.
    """
    if counts.dim() == 2:
        rows = (
            plan_own(
                counts[i], tables[i], offset[i], source, fixed=None if fixed is None else fixed[i], ticks=ticks,
                layer=layer + i,
            )
            for i in range(len(counts))
        )  # fmt: skip
        return torch.stack(list(rows))
    size = tables.num_slots // tables.num_ranks
    held, own = replicas(tables), counts.tolist()
    load, tick = base_of(counts, offset, source, fixed, layer), [1] * tables.num_ranks
    tick = tick if ticks is None else ticks.tolist()
    send = [0] * tables.num_slots
    for e, slots in enumerate(held):
        assert own[e] == 0 or slots, "an expert with copies has a replica"
        if slots:
            send[slots[0]] += own[e]
            load[slots[0] // size] += own[e] * ONE
    while path := _better(send, load, tick, held, size):
        for giver, taker in path:
            send[giver] -= 1
            send[taker] += 1
            load[giver // size] -= ONE
            load[taker // size] += ONE
    assert min(send) >= 0 and sum(send) == sum(own), "every copy is sent"
    return torch.tensor(send, dtype=torch.int32)


def _better(
    send: list[int], load: list[int], tick: list[int], held: list[list[int]], size: int
) -> list[tuple[int, int]]:
    """Slots between which one copy each moves so that the sum falls; empty if there are none."""
    expert_of = {p: e for e, slots in enumerate(held) for p in slots}
    for start in sorted(range(len(load)), key=lambda r: -tick[r] * load[r]):
        came: dict[int, tuple[int, int] | None] = {start: None}
        queue = deque([start])
        while queue:
            rank = queue.popleft()
            saved = tick[start] * (2 * load[start] - ONE)
            if tick[rank] * (2 * load[rank] + ONE) < saved:
                path = []
                while (hop := came[rank]) is not None:
                    path.append(hop)
                    rank = hop[0] // size
                return path
            for giver in range(rank * size, (rank + 1) * size):
                if send[giver] == 0:
                    continue
                for taker in held[expert_of[giver]]:
                    if taker // size not in came:
                        came[taker // size] = (giver, taker)
                        queue.append(taker // size)
    return []
