"""replica_tables: the slots of every expert, derived from a placement. ReplicaTables' docstring defines the fields."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops.tables import ReplicaTables


def replica_tables(
    slot_to_expert: Tensor, num_ranks: int, num_experts: int, out: ReplicaTables | None = None
) -> ReplicaTables:
    """Tables of slot_to_expert [P] or [L, P] int32 (-1 = empty; ids outside -1..E-1 behave as -1).

    Written into ``out`` if given, else into a new buffer.
    """
    slots = slot_to_expert.shape[-1]
    if out is None:
        size = ReplicaTables.size(num_experts, slots)
        data = torch.empty((*slot_to_expert.shape[:-1], size), dtype=torch.int32)
        out = ReplicaTables(data, num_ranks, num_experts, slots)
    layers = slot_to_expert.reshape(-1, slots).tolist()
    rows = [_one_layer(layer, slots // num_ranks, num_experts) for layer in layers]
    out.data.copy_(torch.tensor(rows, dtype=torch.int32).view(out.data.shape))
    return out


def replicas(tables: ReplicaTables) -> list[list[int]]:
    """The slots of every expert of one layer, ascending, at most one per rank."""
    offsets, slots = tables.field("offsets").tolist(), tables.field("slots").tolist()
    return [slots[offsets[e] : offsets[e + 1]] for e in range(tables.num_experts)]


def _one_layer(slot_to_expert: list[int], slots_per_rank: int, num_experts: int) -> list[int]:
    num_slots = len(slot_to_expert)
    held = _list_replicas(slot_to_expert, slots_per_rank, num_experts)
    classes = _colour([[p // slots_per_rank for p in slots] for slots in held])
    order = [e for members in classes for e in members]

    offsets, starts = [0], [0]
    for slots in held:
        offsets.append(offsets[-1] + len(slots))
    for members in classes:
        starts.append(starts[-1] + len(members))
    listed = [p for slots in held for p in slots]
    solo, split = [-1] * num_slots, [-1] * num_slots
    for e, slots in enumerate(held):
        for p in slots:
            if len(slots) == 1:
                solo[p] = e
            else:
                split[p] = order.index(e)

    return [
        *(len(order), len(classes)),
        *offsets,
        *_padded(listed, num_slots, -1),
        *_padded([p // slots_per_rank for p in listed], num_slots, -1),
        *solo,
        *split,
        *_padded(order, num_experts, -1),
        *_padded(starts, num_experts + 1, len(order)),
    ]


def _list_replicas(slot_to_expert: list[int], slots_per_rank: int, num_experts: int) -> list[list[int]]:
    """Slots of every expert, ascending. Of two slots on one rank only the lower is listed."""
    held: list[list[int]] = [[] for _ in range(num_experts)]
    for p, e in enumerate(slot_to_expert):
        if 0 <= e < num_experts and not (held[e] and held[e][-1] // slots_per_rank == p // slots_per_rank):
            held[e].append(p)
    return held


def _colour(ranks_of: list[list[int]]) -> list[list[int]]:
    """Replicated experts in classes: each expert, lowest first, joins the first class it shares no rank with."""
    classes: list[list[int]] = []
    taken: list[set[int]] = []
    for e, ranks in enumerate(ranks_of):
        if len(ranks) < 2:
            continue
        k = next((k for k, others in enumerate(taken) if others.isdisjoint(ranks)), len(classes))
        if k == len(classes):
            classes.append([])
            taken.append(set())
        classes[k].append(e)
        taken[k].update(ranks)
    assert sorted(e for members in classes for e in members) == [
        e for e, ranks in enumerate(ranks_of) if len(ranks) > 1
    ], "every replicated expert is in exactly one class"
    return classes


def _padded(values: list[int], length: int, filler: int) -> list[int]:
    return values + [filler] * (length - len(values))
