"""Layers for bench_cuda: one batch of every layer, with what each stage makes for the next, on any device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload import ops

EXPERTS, LAYERS, TOP_K, PER_NODE, RANK = 256, 58, 8, 8, 1


@dataclass
class Layer:
    """One layer's inputs on one device; what a stage makes is the input of the next."""

    ids: Tensor  # [T, K]
    numbers: Tensor  # [T, K]
    parts: Tensor  # [C, E]
    slot_to_expert: Tensor  # [P]
    loads: Tensor  # [R, E]
    tables: isoload.ops.tables.ReplicaTables
    quota: Tensor  # [P]
    row: Tensor  # [P]
    weights: Tensor  # [P]
    slots: Tensor  # [T, K]
    gates: Tensor  # [T, K]
    copies: Tensor  # [R, R] routed copies
    tokens: Tensor  # [R]
    fixed: Tensor  # [R]
    pour: Tensor  # []
    shared_row: Tensor  # [R]
    even_row: Tensor  # [R] shared copies that every rank takes alike
    shared_ranks: Tensor  # [T, 1]
    split: Tensor  # [P]
    gathered: Tensor  # [R, E + 1] loads with those of a shared expert
    shared_tables: isoload.ops.tables.ReplicaTables  # with a slot for it behind each rank's
    shared_ids: Tensor  # [T, K + 1]
    shared_numbers: Tensor  # [T, K + 1]
    shared_parts: Tensor  # [C, E + 1]

    @cached_property
    def values(self) -> Tensor:
        """[T, 1792] rows of 7168 bytes."""
        count = len(self.ids) * 1792
        return torch.arange(count, dtype=torch.float32, device=self.ids.device).view(len(self.ids), 1792)

    def to(self, device: str) -> Layer:
        def there(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.to(device)
            return replace(value, data=value.data.to(device))

        return Layer(**{field.name: there(getattr(self, field.name)) for field in fields(self)})


def make_layers(ranks: int, replicas: int, tokens: int, seed: int, layers: int = LAYERS) -> list[Layer]:
    draw = np.random.default_rng([seed, ranks, tokens])
    zipf = 1 / np.arange(1, EXPERTS + 1) ** 0.8
    popularity = np.stack([draw.permutation(zipf) for _ in range(layers)])
    topology = isoload.Topology(ranks, min(PER_NODE, ranks))
    placement = isoload.place(popularity / zipf.sum() * 1e6, topology, (EXPERTS + replicas) // ranks)
    live = popularity * np.exp(0.5 * draw.standard_normal(popularity.shape))
    return [make_layer(placement, i, live[i] / live[i].sum(), tokens, draw) for i in range(layers)]


def make_layer(
    placement: isoload.Placement, i: int, popularity: np.ndarray, tokens: int, draw: np.random.Generator
) -> Layer:
    ranks, slots = placement.topology.num_ranks, placement.slot_to_expert[i]
    keys = draw.random((tokens, EXPERTS)) ** (1 / (popularity * EXPERTS + 1e-9))
    ids = torch.from_numpy(np.argpartition(-keys, TOP_K, axis=1)[:, :TOP_K].copy())
    others = [draw.multinomial(TOP_K * tokens, popularity) for _ in range(ranks)]
    loads = torch.from_numpy(np.stack(others)).to(torch.int32)
    counted = ops.count(ids, EXPERTS)
    loads[RANK] = counted.counts
    tables, per_node = ops.replica_tables(slots, ranks, EXPERTS), min(PER_NODE, ranks)
    quota = ops.plan_exact(loads, tables).quota
    row = ops.share(loads, quota, tables, per_node, RANK)
    routed, copies = ops.route(counted, row, tables), ops.share_by_rank(loads, quota, tables, per_node)
    per_rank = torch.full((ranks,), tokens, dtype=torch.int32)
    poured = ops.plan_waterfill(copies, per_rank)
    shared_row = poured.share[RANK].contiguous()
    shared_ids = torch.nn.functional.pad(ids, (0, 1), value=EXPERTS)
    of_shared = ops.count(shared_ids, EXPERTS + 1)
    wide = torch.nn.functional.pad(slots.view(ranks, -1), (0, 1), value=-1)
    return Layer(
        ids=ids,
        numbers=counted.numbers,
        parts=counted.parts,
        slot_to_expert=slots,
        loads=loads,
        tables=tables,
        quota=quota,
        row=row,
        weights=torch.from_numpy(draw.random(len(slots)).astype(np.float32) + 0.1),
        slots=routed,
        gates=torch.from_numpy(draw.random(ids.shape).astype(np.float32)),
        copies=copies,
        tokens=per_rank,
        fixed=torch.zeros(ranks, dtype=torch.int32),
        pour=per_rank.sum(dtype=torch.int32),
        shared_row=shared_row,
        even_row=(tokens + torch.arange(ranks - 1, -1, -1, dtype=torch.int32)) // ranks,
        shared_ranks=ops.route_shared(routed, shared_row, len(slots) // ranks, RANK),
        split=ops.plan_lp(loads, tables).split,
        gathered=torch.cat([loads, per_rank.unsqueeze(1)], 1),
        shared_tables=ops.replica_tables(wide.flatten(), ranks, EXPERTS),
        shared_ids=shared_ids,
        shared_numbers=of_shared.numbers,
        shared_parts=of_shared.parts,
    )


def per_node(x: Layer) -> int:
    return min(PER_NODE, len(x.loads))


def size(x: Layer) -> int:
    return len(x.row) // len(x.loads)
