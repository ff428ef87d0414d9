"""plan_spill: overloaded ranks hand copies, and the experts' weights, to less loaded ranks for one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isoload.results import Spill

MILLION = 1_000_000
WAYS, ROUNDS, FINE = (
    4,
    3,
    1000,
)  # targets tried at once, and how often the best one's neighbourhood is tried again
UNLIMITED = 2**31 - 1
BELOW_THRESHOLD, NO_SPARE_SLOT, EGRESS, IMMOVABLE = 1, 2, 4, 8


def plan_spill(
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    num_ranks: int,
    spare_slots: int,
    fixed: Tensor | None = None,
    *,
    alive: Tensor | None = None,
    ranks_per_node: int | None = None,
    capacity_factor: float | None = 1.0,
    imbalance_threshold: float = 0.0,
    per_expert: bool = False,
    tolerance: float = 0.0,
    min_chunk: int = 1,
    import_costs: tuple[int, int] = (0, 0),
    egress: int | None = None,
) -> Spill:
    """The plan of isoload.ops.plan_spill, which documents the arguments."""
    rules = Rules(
        num_ranks,
        num_ranks if ranks_per_node is None else ranks_per_node,
        spare_slots,
        [True] * num_ranks if alive is None else alive.tolist(),
        None if capacity_factor is None else round(capacity_factor * MILLION),
        round(imbalance_threshold * MILLION),
        per_expert,
        round(tolerance * MILLION),
        min_chunk,
        import_costs,
        UNLIMITED if egress is None else egress,
    )
    fixed = torch.zeros(*slot_to_expert.shape[:-1], num_ranks) if fixed is None else fixed
    if slot_to_expert.dim() == 1:
        return Spiller(rules, loads, slot_to_expert, home_slot, fixed).plan()
    layers = [
        Spiller(rules, *layer).plan() for layer in zip(loads, slot_to_expert, home_slot, fixed, strict=True)
    ]
    return Spill(*(torch.stack(part) for part in zip(*layers, strict=True)))


@dataclass(frozen=True)
class Rules:
    """plan_spill's arguments that every layer shares; factors in millionths, capacity None = seek the least cost."""

    num_ranks: int
    ranks_per_node: int
    spare_slots: int
    alive: list[bool]
    capacity_ppm: int | None
    threshold_ppm: int
    per_expert: bool
    tolerance_ppm: int
    min_chunk: int
    import_costs: tuple[int, int]
    egress: int

    def is_near(self, rank: int, other: int) -> bool:
        return rank // self.ranks_per_node == other // self.ranks_per_node

    def import_cost(self, home: int, helper: int) -> int:
        return self.import_costs[0 if self.is_near(home, helper) else 1]


class Spiller:
    """One layer and batch."""

    def __init__(
        self, rules: Rules, loads: Tensor, slot_to_expert: Tensor, home_slot: Tensor, fixed: Tensor
    ) -> None:
        self.rules = rules
        self.loads: list[int] = loads.reshape(-1, len(home_slot)).sum(0).tolist()
        self.slots: list[int] = slot_to_expert.tolist()
        self.home_slot: list[int] = home_slot.tolist()
        self.size = len(self.slots) // rules.num_ranks
        self.home_rank = [p // self.size for p in self.home_slot]
        self.experts_of: list[list[int]] = [[] for _ in range(rules.num_ranks)]
        for e, r in enumerate(self.home_rank):
            self.experts_of[r].append(e)
        self.load = [
            int(n) + sum(self.loads[e] for e in held)
            for n, held in zip(fixed.tolist(), self.experts_of, strict=True)
        ]
        self.total, self.busiest = sum(self.load), max(self.load)

    def plan(self) -> Spill:
        rules = self.rules
        if self.is_balanced():
            return self.result(Attempt(self, self.busiest), self.busiest, BELOW_THRESHOLD)
        if rules.capacity_ppm is None:
            attempt = self.attempt(self.search())
            attempt.flags &= EGRESS
            return self.result(attempt, max(attempt.cost))
        capacity = min(-(-self.total * rules.capacity_ppm // (MILLION * sum(rules.alive))), UNLIMITED)
        attempt = self.attempt(capacity, capacity * rules.tolerance_ppm // MILLION)
        return self.result(attempt, capacity)

    def holds(self, expert: int, rank: int) -> bool:
        return expert in self.slots[rank * self.size : (rank + 1) * self.size]

    def replicated(self) -> bool:
        """Whether an expert has more than its home slot."""
        return sum(0 <= e < len(self.loads) for e in self.slots) > len(self.loads)

    def is_balanced(self) -> bool:
        """Whether max / mean, of ranks that are alive or of experts, is at most the threshold."""
        top, count, total = self.busiest, sum(self.rules.alive), self.total
        if self.rules.per_expert:
            top, count, total = max(self.loads), len(self.loads), sum(self.loads)
        return top * count * MILLION <= total * self.rules.threshold_ppm

    def attempt(self, target: int, slack: int = 0) -> Attempt:
        """The busiest ranks first."""
        attempt = Attempt(self, target)
        for home in self.by_load():
            attempt.relieve(home, slack)
        assert max(attempt.cost) <= self.busiest, "no rank passes plain EP"
        return attempt

    def try_below(self, target: int, limit: int) -> int:
        """The largest cost of an attempt; or that of the first rank that cannot get below the limit."""
        attempt = Attempt(self, target)
        for home in self.by_load():
            attempt.relieve(home, 0)
            if self.load[home] > target and attempt.cost[home] >= limit:
                return attempt.cost[home]
        return max(attempt.cost)

    def by_load(self) -> list[int]:
        return sorted(range(len(self.load)), key=lambda r: (-self.load[r], r))

    def least_target(self) -> int:
        """The lowest target at which the other ranks have room for all excess if each pays for one import."""
        cost = 0 if self.replicated() else min(self.rules.import_costs)
        live = [n for n, alive in zip(self.load, self.rules.alive, strict=True) if alive]
        low, high = -(-self.total // len(live)), self.busiest
        while low < high:
            middle = (low + high) // 2
            excess = sum(max(0, n - middle) for n in self.load)
            room = sum(max(0, middle - cost - n) for n in live)
            low, high = (low, middle) if room >= excess else (middle + 1, high)
        return low

    def search(self) -> int:
        """The target of the least cost found: geometric steps above the least target, then even ones."""
        low, least, best = self.least_target(), self.busiest, self.busiest
        for turn in range(ROUNDS):
            span = least - low
            if span < low // FINE:
                break
            steps = [span * k // WAYS if turn else (span >> WAYS - k) * (k > 0) for k in range(WAYS)]
            costs = [self.try_below(low + step, least) for step in steps]
            k = costs.index(min(costs))
            if costs[k] < least:
                least, best = costs[k], low + steps[k]
            low += steps[max(k - 1, 0)]
        return best

    def result(self, attempt: Attempt, level: int, flags: int = 0) -> Spill:
        slots, quota, imports = list(self.slots), [0] * len(self.slots), [0] * len(self.load)
        for e, slot in enumerate(self.home_slot):
            quota[slot] = attempt.left[e]
        across = 0
        for expert, rank, copies, imported in attempt.chunks:
            first = rank * self.size
            slot = slots.index(expert, first) if not imported else -1
            if imported:
                slot = first + self.size - self.rules.spare_slots + imports[rank]
                imports[rank] += 1
                slots[slot] = expert
                across += not self.rules.is_near(self.home_rank[expert], rank)
            quota[slot] += copies
        assert max(imports) <= self.rules.spare_slots and sum(quota) == sum(self.loads)
        telemetry = [sum(imports), max(imports), max(attempt.exports), across, flags | attempt.flags]
        return Spill(
            torch.tensor(slots, dtype=torch.int32),
            torch.tensor(quota, dtype=torch.int32),
            torch.tensor(level),
            torch.tensor(telemetry, dtype=torch.int32),
        )


class Attempt:
    """One run of the greedy towards a target; a rank's cost is its copies plus what its imports cost it."""

    def __init__(self, spiller: Spiller, target: int) -> None:
        self.spiller, self.rules, self.target = spiller, spiller.rules, target
        self.cost, self.left = list(spiller.load), list(spiller.loads)  # [R]; [E] copies still at home
        self.free = [self.rules.spare_slots * alive for alive in self.rules.alive]
        self.exports = [0] * self.rules.num_ranks
        self.chunks: list[tuple[int, int, int, bool]] = []  # expert, rank, copies, imported
        self.flags = 0
        self.relays = not spiller.replicated()  # whether there may be one

    def relieve(self, home: int, slack: int) -> None:
        """Hands chunks of the rank's largest experts away until it is at the target, or nobody takes them."""
        slot = self.spiller.home_slot
        while self.cost[home] > self.target:
            excess = self.cost[home] - self.target
            largest = max(self.spiller.experts_of[home], key=lambda e: (self.left[e], -slot[e]), default=None)
            if largest is None or self.left[largest] == 0:
                self.flags |= IMMOVABLE
                return
            copies, helper = self.choose(largest, home)
            if copies < self.rules.min_chunk and excess <= slack:
                return  # the tail stays at home
            if copies == 0:
                copies, helper = self.relay(largest, home)
            if copies == 0:
                self.flags |= EGRESS if self.exports[home] == self.rules.egress else NO_SPARE_SLOT
                return
            self.give(largest, home, helper, copies)

    def choose(self, expert: int, home: int) -> tuple[int, int]:
        """(copies, rank) of the largest chunk near home, by the fullest rank; of a far one if that is small."""
        best: dict[bool, tuple[int, int, int]] = {True: (0, 0, 0), False: (0, 0, 0)}
        for r, cost in enumerate(self.cost):
            near = self.rules.is_near(home, r)
            best[near] = max(best[near], (self.chunk(expert, home, r), cost, -r))
        enough = min(self.rules.min_chunk, best[False][0])
        chosen = best[best[True][0] >= enough]
        return chosen[0], -chosen[2]

    def chunk(self, expert: int, home: int, helper: int) -> int:
        """How many copies the helper takes before its cost reaches the target; 0 if it cannot."""
        room = self.target - self.cost[helper]
        if not self.spiller.holds(expert, helper):
            lent = self.free[helper] > 0 and self.exports[home] < self.rules.egress
            room = room - self.rules.import_cost(home, helper) if lent else 0
        return max(0, min(self.cost[home] - self.target, self.left[expert], room))

    def relay(self, expert: int, home: int) -> tuple[int, int]:
        """(copies, rank) of the largest chunk that a giver can take after it has lent more copies, of an expert that
        it lends already, to a rank with room but no spare slot. Once there is none, none is sought."""
        best: tuple[int, int, tuple[int, int]] = (0, 0, (0, 0))
        if not self.relays or self.exports[home] == self.rules.egress:
            return 0, 0
        wanted = min(self.cost[home] - self.target, self.left[expert])
        imported = sorted((rank, i) for i, (_, rank, _, new) in enumerate(self.chunks) if new)
        for rank, i in imported:
            lent = self.chunks[i][0]
            giver, room = self.spiller.home_rank[lent], self.target - self.cost[rank]
            copies = min(wanted, min(room, self.left[lent]) - self.rules.import_cost(home, giver))
            if self.free[rank] or room <= min(self.rules.import_costs):
                continue
            if copies > best[0] and giver != home and self.free[giver]:
                best = copies, giver, (lent, rank)
        self.relays = best[0] > 0
        if self.relays:
            copies, giver, (lent, rank) = best
            assert (expert, giver) not in [chunk[:2] for chunk in self.chunks], "no expert twice on a rank"
            more = copies + self.rules.import_cost(home, giver)
            self.cost[giver] -= more
            self.cost[rank] += more
            self.left[lent] -= more
            self.chunks.append((lent, rank, more, False))
        return best[:2]

    def give(self, expert: int, home: int, helper: int, copies: int) -> None:
        imported = not self.spiller.holds(expert, helper)
        self.cost[home] -= copies
        self.cost[helper] += copies
        self.left[expert] -= copies
        if imported:
            self.cost[helper] += self.rules.import_cost(home, helper)
            self.free[helper] -= 1
            self.exports[home] += 1
        self.chunks.append((expert, helper, copies, imported))
