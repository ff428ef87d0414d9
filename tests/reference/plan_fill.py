"""plan_fill: spare slots filled by levels, the largest copies of overloaded ranks first."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isoload.ops.results import SlotFill
from reference.spare_fill import fixed_copies, pick

MILLION, LEVELS, FINE = 1_000_000, 6, 10_000
BELOW_THRESHOLD, ABOVE_CAPACITY = 1, 2  # flags


def plan_fill(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    start: Tensor | None = None,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
    capacity_factor: float = 1.0,
    imbalance_threshold: float = 0.0,
    per_expert: bool = False,
    min_chunk: int = 1,
    import_costs: tuple[int, int] = (0, 0),
    export_costs: tuple[int, int] = (0, 0),
    within: Literal["all", "node"] = "all",
) -> SlotFill:
    """The fill of isoload.ops.plan_fill, which documents the arguments."""
    if slot_to_expert.dim() == 2:
        layers = [
            plan_fill(
                loads[i], slot_to_expert[i], home_slot[i], num_ranks, spare_slots, pick(fixed, i),
                start=pick(start, i), alive=alive, ranks_per_node=ranks_per_node, capacity_factor=capacity_factor,
                imbalance_threshold=imbalance_threshold, per_expert=per_expert, min_chunk=min_chunk,
                import_costs=import_costs, export_costs=export_costs, within=within,
            )
            for i in range(len(slot_to_expert))
        ]  # fmt: skip
        return SlotFill(*(torch.stack(field) for field in zip(*layers, strict=True)))
    slots, home = slot_to_expert.tolist(), home_slot.tolist()
    totals: list[int] = loads.reshape(-1, len(home)).long().sum(0).tolist()
    size, besides = len(slots) // num_ranks, fixed_copies(fixed, num_ranks)
    if start is None:
        copies = [totals[e] if 0 <= e < len(home) and home[e] == p else 0 for p, e in enumerate(slots)]
    else:
        copies = start.tolist()
    load = [besides[r] + sum(copies[r * size : (r + 1) * size]) for r in range(num_ranks)]
    layer = Layer(
        num_ranks,
        size,
        ranks_per_node or num_ranks,
        spare_slots,
        slots,
        home,
        [True] * num_ranks if alive is None else alive.tolist(),
        copies,
        load,
        min_chunk,
        import_costs,
        export_costs,
        within == "node",
    )
    total, live = layer.most_loaded()
    threshold = round(imbalance_threshold * MILLION)
    if per_expert:
        balanced = max(totals) * len(home) * MILLION <= sum(totals) * threshold
    else:
        balanced = max(load) * live * MILLION <= total * threshold
    filled, flags = slots, BELOW_THRESHOLD
    if not balanced:
        low = -(-total * round(capacity_factor * MILLION) // (MILLION * live))
        filled, flags = best_of_levels(layer, min(low, 2**31 - 1))
    return SlotFill(torch.tensor(filled, dtype=torch.int32), layer.telemetry(filled, flags))


@dataclass
class Layer:
    """One layer's copies before any import, and the rules."""

    ranks: int
    size: int  # slots per rank
    per_node: int
    spare: int
    slots: list[int]  # [P]
    home: list[int]  # [E]
    alive: list[bool]  # [R]
    copies: list[int]  # [P]
    load: list[int]  # [R] with the copies that cannot move
    min_chunk: int
    import_costs: tuple[int, int]
    export_costs: tuple[int, int]
    within: bool

    def owner(self, expert: int) -> int:
        return self.home[expert] // self.size

    def is_near(self, a: int, b: int) -> bool:
        return a // self.per_node == b // self.per_node

    def price(self, costs: tuple[int, int], expert: int, rank: int) -> int:
        return costs[not self.is_near(self.owner(expert), rank)]

    def most_loaded(self) -> tuple[int, int]:
        """Copies and live ranks of the group with the largest mean: the nodes, or all ranks."""
        size = self.per_node if self.within else self.ranks
        groups = [range(r, r + size) for r in range(0, self.ranks, size)]
        found = [(sum(self.load[r] for r in group), sum(self.alive[r] for r in group)) for group in groups]
        best = (0, 1)
        for copies, live in found:
            if live and copies * best[1] > best[0] * live:
                best = (copies, live)
        return best if self.within else found[0]

    def telemetry(self, filled: list[int], flags: int) -> Tensor:
        spare = [p for p in range(len(filled)) if p % self.size >= self.size - self.spare]
        pairs = [(self.owner(filled[p]), p // self.size) for p in spare if filled[p] >= 0]
        imports, exports = [0] * self.ranks, [0] * self.ranks
        for owner, rank in pairs:
            imports[rank] += 1
            exports[owner] += 1
        across = sum(not self.is_near(owner, rank) for owner, rank in pairs)
        return torch.tensor([len(pairs), max(imports), max(exports), across, flags], dtype=torch.int32)


class Attempt:
    """One level: the largest copies on any rank above it go, whole if they fit, to the roomiest rank below it."""

    def __init__(self, layer: Layer, level: int) -> None:
        self.layer, self.level = layer, level
        self.slots, self.copies, self.load = list(layer.slots), list(layer.copies), list(layer.load)
        self.free = [layer.spare if alive else 0 for alive in layer.alive]
        self.imported, self.exported = [0] * layer.ranks, [0] * layer.ranks
        queue = [(-n, p) for p, n in enumerate(self.copies) if n > 0 and self.is_above(p // layer.size)]
        heapq.heapify(queue)
        while queue and any(free and load < level for free, load in zip(self.free, self.load, strict=True)):
            _, slot = heapq.heappop(queue)
            if self.is_above(slot // layer.size) and self.offer(slot):
                heapq.heappush(queue, (-self.copies[slot], slot))

    def is_above(self, rank: int) -> bool:
        return self.load[rank] - self.level >= self.layer.min_chunk

    @property
    def cost(self) -> int:
        return max(self.load) + max(self.imported) + max(self.exported)

    def offer(self, slot: int) -> bool:
        """Moves copies of a slot; whether some are left to be offered again."""
        layer, expert, giver = self.layer, self.slots[slot], slot // self.layer.size
        gain, taker = 0, -1
        for rank in range(layer.ranks):
            holds = expert in self.slots[rank * layer.size : (rank + 1) * layer.size]
            may = self.free[rank] > 0 and (layer.is_near(layer.owner(expert), rank) or not layer.within)
            room = self.level - self.load[rank]
            room -= 0 if holds else layer.price(layer.import_costs, expert, rank)
            if (holds or may) and room > gain:
                gain, taker = room, rank
        if taker < 0:
            return False
        begin = taker * layer.size
        row = self.slots[begin : begin + layer.size]
        holds = expert in row
        to = begin + (row.index(expert) if holds else layer.size - self.free[taker])
        cost_in = 0 if holds else layer.price(layer.import_costs, expert, taker)
        cost_out = 0 if holds else layer.price(layer.export_costs, expert, taker)
        chunk = min(gain + cost_in, self.copies[slot])
        if chunk <= max(cost_in, cost_out):
            return False
        if not holds:
            self.slots[to] = expert
            self.free[taker] -= 1
            self.imported[taker] += cost_in
            self.exported[layer.owner(expert)] += cost_out
        self.copies[to] += chunk
        self.copies[slot] -= chunk
        self.load[giver] -= chunk
        self.load[taker] += chunk
        return self.copies[slot] > 0


def best_of_levels(layer: Layer, low: int) -> tuple[list[int], int]:
    """The slots of the cheapest of at most six levels, and the flags."""
    cheapest = min(layer.import_costs) + min(layer.export_costs)
    priced = max(*layer.import_costs, *layer.export_costs) > 0
    best, least = layer.slots, max(layer.load)
    high, reached = least - cheapest, least - low < layer.min_chunk
    for number in range(LEVELS):
        if high - low < layer.min_chunk or (high - low) * FINE <= low:
            break
        level = low + ((high - low) // (8 if priced else 3) if number else 0)
        attempt = Attempt(layer, level)
        met = max(attempt.load) - level < layer.min_chunk
        better = attempt.cost < least
        if better:
            best, least, reached = attempt.slots, attempt.cost, met and number == 0
            high = min(high, least - cheapest)
        if met and not (priced and better):
            high = min(high, level)
        else:
            low = level + 1
    return best, 0 if reached else ABOVE_CAPACITY
