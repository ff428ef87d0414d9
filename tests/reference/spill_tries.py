"""plan_spill's tries to bring every rank down to a target: a greedy that lends little, one for scarce slots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

NO_SPARE_SLOT, EGRESS, IMMOVABLE, SMALL_EXCESS = 2, 4, 8, 16


@dataclass(frozen=True)
class SpillRules:
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
    within: bool

    def is_near(self, rank: int, other: int) -> bool:
        return rank // self.ranks_per_node == other // self.ranks_per_node

    def import_cost(self, owner: int, helper: int) -> int:
        return self.import_costs[0 if self.is_near(owner, helper) else 1]


class Layer:
    """One layer and batch: loads [E], slots [P] with the spare ones empty, home_slot [E], fixed [R], start [P]."""

    def __init__(
        self,
        rules: SpillRules,
        loads: list[int],
        slots: list[int],
        home_slot: list[int],
        fixed: list[int],
        start: list[int],
    ) -> None:
        self.rules, self.loads, self.slots, self.home_slot = rules, loads, slots, home_slot
        self.fixed, self.start = fixed, start
        self.size = len(slots) // rules.num_ranks
        self.load = [n + sum(start[r * self.size : (r + 1) * self.size]) for r, n in enumerate(fixed)]
        self.busiest = max(self.load)

    def owner(self, expert: int) -> int:
        """The rank that lends an expert."""
        return self.home_slot[expert] // self.size

    def load_of(self, slot: int) -> int:
        """The load of a slot's rank."""
        return self.load[slot // self.size]

    def replicated(self) -> bool:
        """Whether an expert has more than its home slot."""
        return sum(0 <= e < len(self.loads) for e in self.slots) > len(self.loads)

    def groups(self) -> Iterator[tuple[int, int]]:
        """Copies and live ranks of every group that lends within itself: the nodes, or all ranks."""
        size = self.rules.ranks_per_node if self.rules.within else self.rules.num_ranks
        for first in range(0, self.rules.num_ranks, size):
            if live := sum(self.rules.alive[first : first + size]):
                yield sum(self.load[first : first + size]), live


class Try:
    """What has been lent so far; a rank's cost is its copies plus what its imports cost it."""

    def __init__(self, layer: Layer) -> None:
        self.layer, self.rules = layer, layer.rules
        self.cost, self.quota, self.filled = list(layer.load), list(layer.start), list(layer.slots)
        self.free = [self.rules.spare_slots * alive for alive in self.rules.alive]
        self.exports = [0] * self.rules.num_ranks  # by owner
        self.lender: dict[int, int] = {}  # filled spare slot -> the slot that its copies are from

    def row(self, rank: int) -> range:
        return range(rank * self.layer.size, (rank + 1) * self.layer.size)

    def peak(self) -> int:
        """The largest load of a rank, without what imports cost."""
        return max(
            fixed + sum(self.quota[p] for p in self.row(rank)) for rank, fixed in enumerate(self.layer.fixed)
        )

    def holds(self, expert: int, rank: int) -> bool:
        return any(self.filled[p] == expert for p in self.row(rank))

    def give(self, source: int, helper: int, copies: int) -> None:
        """Copies of a slot to a rank that holds the expert, or imports it."""
        expert = self.layer.slots[source]
        if not self.holds(expert, helper):
            owner, slot = self.layer.owner(expert), self.row(helper)[-self.free[helper]]
            self.filled[slot], self.lender[slot] = expert, source
            self.cost[helper] += self.rules.import_cost(owner, helper)
            self.free[helper] -= 1
            self.exports[owner] += 1
        self.move(source, next(p for p in self.row(helper) if self.filled[p] == expert), copies)

    def move(self, source: int, to: int, copies: int) -> None:
        self.quota[source] -= copies
        self.cost[source // self.layer.size] -= copies
        self.quota[to] += copies
        self.cost[to // self.layer.size] += copies


class Greedy(Try):
    """The busiest ranks first, always their largest expert, no more than is above the target."""

    def __init__(self, layer: Layer, target: int) -> None:
        super().__init__(layer)
        self.target, self.flags = target, 0
        self.relays = not layer.replicated()  # whether there may be one

    def run(self, slack: int = 0) -> Greedy:
        for giver in self.by_load():
            self.relieve(giver, slack)
        assert max(self.cost) <= self.layer.busiest, "no rank passes what it had"
        return self

    def reached(self, limit: int) -> int:
        """The largest cost; or that of the first rank that cannot get below the limit."""
        for giver in self.by_load():
            self.relieve(giver, 0)
            if self.layer.load[giver] > self.target and self.cost[giver] >= limit:
                return self.cost[giver]
        return max(self.cost)

    def by_load(self) -> list[int]:
        return sorted(range(self.rules.num_ranks), key=lambda r: (-self.layer.load[r], r))

    def relieve(self, giver: int, slack: int) -> None:
        """Hands chunks of the rank's largest experts away until it is at the target, or no rank has room."""
        while self.cost[giver] > self.target:
            excess = self.cost[giver] - self.target
            if self.rules.capacity_ppm is not None and excess < self.rules.min_chunk:  # not worth an import
                self.flags |= SMALL_EXCESS * (excess > slack)
                return
            largest = max(self.row(giver), key=lambda p: (self.quota[p], -p))
            if self.quota[largest] == 0:
                self.flags |= IMMOVABLE
                return
            copies, helper = self.choose(largest)
            if copies < self.rules.min_chunk and excess <= slack:
                return  # the tail stays at home
            if copies == 0:
                copies, helper = self.relay(largest)
            if copies == 0:
                owner = self.layer.owner(self.layer.slots[largest])
                self.flags |= EGRESS if self.exports[owner] == self.rules.egress else NO_SPARE_SLOT
                return
            self.give(largest, helper, copies)

    def choose(self, source: int) -> tuple[int, int]:
        """(copies, rank) of the largest chunk near the owner, by the fullest rank; of a far one if that is small."""
        best: dict[bool, tuple[int, int, int]] = {True: (0, 0, 0), False: (0, 0, 0)}
        owner = self.layer.owner(self.layer.slots[source])
        for r, cost in enumerate(self.cost):
            near = self.rules.is_near(owner, r)
            best[near] = max(best[near], (self.chunk(source, r), cost, -r))
        enough = min(self.rules.min_chunk, best[False][0])
        chosen = best[best[True][0] >= enough]
        return chosen[0], -chosen[2]

    def chunk(self, source: int, helper: int) -> int:
        """How many copies the helper takes before its cost reaches the target; 0 if it cannot."""
        room, expert = self.target - self.cost[helper], self.layer.slots[source]
        if not self.holds(expert, helper):
            owner = self.layer.owner(expert)
            may = self.rules.is_near(owner, helper) or not self.rules.within
            lent = may and self.free[helper] > 0 and self.exports[owner] < self.rules.egress
            room = room - self.rules.import_cost(owner, helper) if lent else 0
        excess = self.cost[source // self.layer.size] - self.target
        return max(0, min(excess, self.quota[source], room))

    def relay(self, source: int) -> tuple[int, int]:
        """(copies, rank) of the largest chunk that a giver can take after it has lent more copies, of an expert that
        it lends already, to a rank with room but no spare slot. Once there is none, none is sought."""
        best: tuple[int, int, int] = (0, 0, 0)
        home = source // self.layer.size
        if not self.relays or self.exports[home] == self.rules.egress:
            return 0, 0
        wanted = min(self.cost[home] - self.target, self.quota[source])
        for slot, lent in sorted(self.lender.items()):
            rank, giver = slot // self.layer.size, lent // self.layer.size
            room = self.target - self.cost[rank]
            copies = min(wanted, min(room, self.quota[lent]) - self.rules.import_cost(home, giver))
            if self.free[rank] or room <= min(self.rules.import_costs):
                continue
            if self.rules.within and not self.rules.is_near(home, giver):
                continue
            if copies > best[0] and giver != home and self.free[giver]:
                best = copies, giver, slot
        copies, giver, slot = best
        self.relays = copies > 0
        if self.relays:
            assert not self.holds(self.layer.slots[source], giver), "no expert twice on a rank"
            self.move(self.lender[slot], slot, copies + self.rules.import_cost(home, giver))
        return copies, giver


class Level(Try):
    """The largest expert of any rank above the level first, whole, to the rank with most room."""

    def __init__(self, layer: Layer, level: int, lendable: list[int]) -> None:
        super().__init__(layer)
        self.level, self.waiting = level, list(lendable)

    def run(self) -> Level:
        while self.waiting:
            self.waiting.sort(key=lambda p: (-self.quota[p], p))
            self.offer(self.waiting.pop(0))
        return self

    def offer(self, source: int) -> None:
        expert, here = self.layer.slots[source], self.quota[source]
        owner = self.layer.owner(expert)
        takers = [
            (self.cost[r], r)
            for r in range(self.rules.num_ranks)
            if self.free[r]
            and self.cost[r] < self.level
            and (self.rules.is_near(owner, r) or not self.rules.within)
        ]
        if self.cost[source // self.layer.size] <= self.level or not takers:
            return
        cost, helper = min(takers)
        held = self.holds(expert, helper)
        copies = min(here, self.level - cost - (0 if held else self.rules.import_cost(owner, helper)))
        if copies < self.rules.min_chunk or not (held or self.exports[owner] < self.rules.egress):
            return
        self.give(source, helper, copies)
        if copies < here:
            self.waiting.append(source)

    def take_back(self, largest: int) -> None:
        """Copies go back as far as their rank has room below `largest`, first where that saves an import."""
        for whole in (True, False):
            for slot in sorted(self.lender, key=lambda p: (p // self.layer.size, p), reverse=True):
                here, home = self.quota[slot], self.lender[slot]
                back = min(here, largest - self.cost[home // self.layer.size])
                if not whole:
                    back = min(back, here - self.rules.min_chunk)
                if back == here if whole else back > 0:
                    self.move(slot, home, back)
                if whole and self.quota[slot] == 0:
                    owner, rank = self.layer.owner(self.filled[slot]), slot // self.layer.size
                    self.cost[rank] -= self.rules.import_cost(owner, rank)
        for rank in range(self.rules.num_ranks):
            self.close_up(rank)

    def close_up(self, rank: int) -> None:
        """The rank's imports without those that are empty, in its first spare slots."""
        used = [p for p in self.row(rank) if p in self.lender]
        kept = [(self.filled[p], self.quota[p], self.lender[p]) for p in used if self.quota[p]]
        for p in used:
            self.filled[p], self.quota[p] = -1, 0
            del self.lender[p]
        for p, (expert, copies, home) in zip(used, kept, strict=False):
            self.filled[p], self.quota[p], self.lender[p] = expert, copies, home
