"""plan_spill: overloaded ranks hand copies, and the experts' weights, to less loaded ranks for one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.results import Spill
from reference.spill_tries import (
    EGRESS,
    NO_SPARE_SLOT,
    SMALL_EXCESS,
    Greedy,
    Layer,
    Level,
    SpillRules,
    Try,
)

MILLION = 1_000_000
# Targets tried at once, how often the best one's neighbourhood is tried again, and when that is enough.
WAYS, ROUNDS, FINE = 4, 3, 1000
LEVEL_WAYS, LEVEL_ROUNDS, LEVEL_FIRST, LEVEL_FINE = 2, 5, 4, 10_000
UNLIMITED = 2**31 - 1
BELOW_THRESHOLD = 1


def plan_spill(
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
    capacity_factor: float | None = 1.0,
    imbalance_threshold: float = 0.0,
    per_expert: bool = False,
    tolerance: float = 0.0,
    min_chunk: int = 1,
    import_costs: tuple[int, int] = (0, 0),
    egress: int | None = None,
    within: str = "all",
) -> Spill:
    """The plan of isoload.ops.plan_spill, which documents the arguments."""
    rules = SpillRules(
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
        within == "node",
    )
    batch = slot_to_expert.shape[:-1]
    fixed = torch.zeros(*batch, num_ranks, dtype=torch.int32) if fixed is None else fixed
    sums = loads if loads.dim() == home_slot.dim() else loads.sum(-2)
    home = torch.zeros_like(slot_to_expert).scatter(-1, home_slot.long(), sums.to(torch.int32))
    layers = (loads, slot_to_expert, home_slot, fixed, home, home if start is None else start)
    if not batch:
        return plan_layer(rules, *layers)
    plans = [plan_layer(rules, *layer) for layer in zip(*layers, strict=True)]
    return Spill(*(torch.stack(part) for part in zip(*plans, strict=True)))


def plan_layer(
    rules: SpillRules,
    loads: Tensor,
    slot_to_expert: Tensor,
    home_slot: Tensor,
    fixed: Tensor,
    home: Tensor,
    start: Tensor,
) -> Spill:
    """One layer and batch."""
    summed = loads.reshape(-1, len(home_slot)).sum(0).tolist()
    where = slot_to_expert.tolist(), home_slot.tolist(), fixed.tolist()
    given = Layer(rules, summed, *where, start.tolist())
    if is_balanced(given):
        return result(Greedy(given, given.busiest), given.busiest, BELOW_THRESHOLD)
    capacity = capacity_of(given)
    attempt = lend(given, capacity)
    if given.replicated():
        attempt = fewer(attempt, lend(Layer(rules, summed, *where, home.tolist()), capacity), capacity)
    if capacity == 0:
        return result(attempt, max(attempt.cost), attempt.flags & EGRESS)
    if attempt.flags & NO_SPARE_SLOT:
        return level_out(given, attempt, capacity)
    return result(attempt, capacity, attempt.flags)


def capacity_of(layer: Layer) -> int:
    """0 where the least cost is sought."""
    if (ppm := layer.rules.capacity_ppm) is None:
        return 0
    return min(max(-(-copies * ppm // (MILLION * live)) for copies, live in layer.groups()), UNLIMITED)


def slack_of(layer: Layer, capacity: int) -> int:
    return capacity * layer.rules.tolerance_ppm // MILLION


def lend(layer: Layer, capacity: int) -> Greedy:
    """Towards the capacity, or the least cost."""
    return Greedy(layer, capacity or search(layer)).run(slack_of(layer, capacity))


def fewer(split: Greedy, home: Greedy, capacity: int) -> Greedy:
    """The plan from the exact split, unless that from home costs less, or as much with fewer imports or a lower peak.

    What is above the capacity by less than min_chunk costs nothing.
    """
    enough = capacity + split.rules.min_chunk - 1 if capacity else 0
    costs = [max(enough, *attempt.cost) for attempt in (split, home)]
    peaks = [max(enough, attempt.peak()) for attempt in (split, home)]
    no_worse = len(split.lender) <= len(home.lender) and peaks[0] <= peaks[1]
    return split if costs[0] < costs[1] or (costs[0] == costs[1] and no_worse) else home


def level_out(layer: Layer, attempt: Greedy, capacity: int) -> Spill:
    """Where spare slots ran out: the lowest level found, if it is below what the attempt has reached."""
    lendable = [
        p for p, n in enumerate(layer.start) if n and layer.load_of(p) >= capacity + layer.rules.min_chunk
    ]
    slack, reached = slack_of(layer, capacity), max(attempt.cost)
    low = least_level(layer, capacity, reached, lendable)
    chosen = seek(layer, lendable, low, capacity + slack, reached)
    if chosen is None:
        return result(attempt, capacity, attempt.flags)
    largest = max(chosen.cost)
    chosen.take_back(largest)
    above = largest - capacity
    flags = 0 if above <= slack else SMALL_EXCESS if above < layer.rules.min_chunk else attempt.flags
    return result(chosen, capacity, flags)


def least_level(layer: Layer, low: int, high: int, lendable: list[int]) -> int:
    """A level that no plan is below: with its spare slots full of the largest chunks a rank still has room."""
    if layer.replicated():  # whose ranks take copies without a spare slot
        return low
    chunks = sorted((layer.start[p] for p in lendable), reverse=True)
    most = [sum(chunks[: layer.rules.spare_slots]) * alive for alive in layer.rules.alive]
    while low < high:
        middle = (low + high) // 2
        room = sum(min(middle - n, more) for n, more in zip(layer.load, most, strict=True))
        low, high = (low, middle) if room >= 0 else (middle + 1, high)
    return low


def seek(layer: Layer, lendable: list[int], low: int, enough: int, least: int) -> Level | None:
    """The plan of the level with the least load found, if that is below `least`.

    Each round tries a level near the lowest one open and a higher one, which does not count if the lower one was
    reached. A level that was missed is too low by an equal part of what is above it at least.
    """
    best = None
    for turn in range(LEVEL_ROUNDS):
        span = least - low
        if least <= enough or span <= low // LEVEL_FINE:
            break
        levels = [
            low + (span * (k + 1) // (LEVEL_WAYS + 1) if turn else span * k // LEVEL_FIRST)
            for k in range(LEVEL_WAYS)
        ]
        for level in levels:
            attempt = Level(layer, level, lendable).run()
            if max(attempt.cost) < least:
                least, best = max(attempt.cost), attempt
            if max(attempt.cost) <= level:
                break
            low = level + sum(max(0, n - level) for n in attempt.cost) // layer.rules.num_ranks + 1
    return best


def is_balanced(layer: Layer) -> bool:
    """Whether max / mean, of the ranks that lend to each other or of experts, is at most the threshold."""
    threshold = layer.rules.threshold_ppm
    if layer.rules.per_expert:
        return max(layer.loads) * len(layer.loads) * MILLION <= sum(layer.loads) * threshold
    return any(layer.busiest * live * MILLION <= copies * threshold for copies, live in layer.groups())


def least_target(layer: Layer) -> int:
    """The lowest target at which the other ranks have room for all excess if each pays for one import."""
    cost = 0 if layer.replicated() else min(layer.rules.import_costs)
    live = [n for n, alive in zip(layer.load, layer.rules.alive, strict=True) if alive]
    low, high = max(-(-copies // live) for copies, live in layer.groups()), layer.busiest
    while low < high:
        middle = (low + high) // 2
        excess = sum(max(0, n - middle) for n in layer.load)
        room = sum(max(0, middle - cost - n) for n in live)
        low, high = (low, middle) if room >= excess else (middle + 1, high)
    return low


def search(layer: Layer) -> int:
    """The target of the least cost found: geometric steps above the least target, then even ones."""
    low, least, best = least_target(layer), layer.busiest, layer.busiest
    for turn in range(ROUNDS):
        span = least - low
        if span < low // FINE:
            break
        steps = [span * k // WAYS if turn else (span >> WAYS - k) * (k > 0) for k in range(WAYS)]
        costs = [Greedy(layer, low + step).reached(least) for step in steps]
        k = costs.index(min(costs))
        if costs[k] < least:
            least, best = costs[k], low + steps[k]
        low += steps[max(k - 1, 0)]
    return best


def result(attempt: Try, level: int, flags: int) -> Spill:
    layer, rules = attempt.layer, attempt.layer.rules
    imports, exports, across = [0] * rules.num_ranks, [0] * rules.num_ranks, 0
    for slot in attempt.lender:
        rank, owner = slot // layer.size, layer.owner(attempt.filled[slot])
        imports[rank] += 1
        exports[owner] += 1
        across += not rules.is_near(owner, rank)
    assert max(imports) <= rules.spare_slots and sum(attempt.quota) == sum(layer.loads)
    telemetry = [sum(imports), max(imports), max(exports), across, flags]
    return Spill(
        torch.tensor(attempt.filled, dtype=torch.int32),
        torch.tensor(attempt.quota, dtype=torch.int32),
        torch.tensor(level),
        torch.tensor(telemetry, dtype=torch.int32),
    )
