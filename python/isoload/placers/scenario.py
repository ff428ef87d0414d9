"""Placer ``scenario``: a search for a placement that suits every recorded batch instead of their sum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from isoload.placers.base import WHOLE, Floats, Ints, LiveRanks, Placed, Placer, Scenarios, Slots, slots_of
from isoload.placers.compiled import LANES, MAX_NODES, near_slots, num_threads, search_slots
from isoload.placers.craft import allocate, assign, budget_capacity, check_budget, make_grid
from isoload.placers.eplb import pack_into, pack_once
from isoload.placers.resize import resized

SWAP_STEPS = 30_000  # changes that all searches of a layer try together
LONGEST = 10_000  # most changes that one search tries; with few slots there are more and shorter searches
WALK = 500  # first changes of each further search, which may add rows and exceed the caps
STRESS = 3.0  # factor on each scenario's distance from the mean load, for the cap of the exact split
MAX_TOKENS = 20_000  # of all traces together; more tokens save hardly any further rows


def applies(scenarios: Scenarios, live_ranks: LiveRanks) -> bool:
    return bool(scenarios.topk_ids) and 1 < len(np.unique(live_ranks.node)) <= MAX_NODES


def fewer_rows(
    scenarios: Scenarios, live_ranks: LiveRanks, slots: Slots, node: Ints, home: Ints, moves: int | None
) -> tuple[Slots, dict[str, Any]]:
    """Return slots [L, R, S] with fewer rows to other nodes, and notes with a token's rows before and after. `home` [L,
    E] is the node on which a replica of an expert stays; `moves` limits the slots of a layer that differ from the
    placement before."""
    loads = scaled(scenarios.shares())
    ids, weight = choose_tokens(scenarios)
    steps = min(LONGEST, 12 * (slots.shape[1] * slots.shape[2]) ** 2)
    rows_node = np.unique(live_ranks.node, return_inverse=True)[1].astype(np.int32)
    nearer, rows = near_slots(
        slots=slots,
        loads=by_layer(loads),
        stress=by_layer(stressed(scenarios)),
        weight=np.pad(scenarios.weight, (0, -len(loads) % LANES)),
        tick=live_ranks.tick,
        node=node,
        home=home,
        before=live_ranks.before,
        topk_ids=ids.transpose(1, 0, 2),
        token_weight=weight,
        rows_node=rows_node,
        steps=steps,
        walk=min(WALK, steps // 4),
        moves=-1 if moves is None else moves,
        starts=max(1, SWAP_STEPS // steps),
        threads=num_threads(),
    )
    of_token = rows.mean(0) / max(1, int(weight.sum())) / (int(rows_node.max()) + 1)
    return nearer, {"rows_to_other_nodes": [round(float(number), 4) for number in of_token]}


def stressed(scenarios: Scenarios) -> Floats:
    """Return [n, L, E] loads of scenarios with STRESS times their distance from the mean."""
    shares = scenarios.shares()
    mean = scenarios.mean(shares)
    return scaled(np.maximum(mean + STRESS * (shares - mean), 0))


def scaled(shares: Floats) -> Floats:
    """Return integer loads that add up to about WHOLE in every scenario and layer."""
    total = shares.sum(-1, keepdims=True)
    whole: Floats = np.rint(shares / np.maximum(total, np.finfo(float).tiny) * WHOLE)
    return whole


def by_layer(loads: Floats) -> Floats:
    """Return loads [n, L, E] as [L, E, n], with n padded to a multiple of LANES."""
    padded: Floats = np.pad(loads, ((0, -len(loads) % LANES), (0, 0), (0, 0))).transpose(1, 2, 0)
    return padded


def choose_tokens(scenarios: Scenarios) -> tuple[Any, Any]:
    """Return [tokens, L, K] choices of evenly spaced tokens of every trace, and weights that make traces equal."""
    number = MAX_TOKENS // len(scenarios.topk_ids)
    parts = [
        ids[np.linspace(0, len(ids) - 1, number).astype(int)] if len(ids) > number else ids
        for ids in scenarios.topk_ids
    ]
    width, longest = max(part.shape[2] for part in parts), max(map(len, parts))
    ids = [np.pad(part, ((0, 0), (0, 0), (0, width - part.shape[2])), constant_values=-1) for part in parts]
    weight = [np.full(len(part), round(longest / max(1, len(part)))) for part in parts]
    return np.concatenate(ids), np.concatenate(weight)


SPREADS = (0.0, 0.674, 1.5)  # standard deviations above the mean load, by which a start counts replicas
STEPS = 5000  # most changes that the search of a layer tries; the search ends long before
TABLE_STEPS = 100  # the same if only the worth of a number of slots is needed
FEW_SLOTS = 4  # up to this number of slots on a rank, replica counts matter more than the ranks of replicas


@dataclass(frozen=True)
class ScenarioPlacer(Placer):
    """Local search for the least mean, over batches, of the busiest rank's load.

    Every batch of the calibration is a scenario of equal size. Replicas are counted by the mean plus some standard
    deviations of an expert's share. Then each expert, the largest first, goes to the rank whose load complements its
    own best over the scenarios. Then slots are exchanged, and replicas given to other experts, while this helps. The
    slots do not depend on the number of threads. ``eplb`` (with ``dedup``) is one of the starts, so the result is never
    worse on the scenarios, except without search, or with before, groups or pinned.
    """

    name = "scenario"
    takes_before = True
    takes_capacity = True
    uses_tokens = True
    split: str = "even"  # "even" as in serving engines; "exact" as in isoload's policies
    search: bool = True  # False ends before the local search, after milliseconds
    shrink: float | None = None  # None: see isoload.placers.base.Scenarios.shares
    groups: int = 0  # of consecutive experts: one replica of each expert stays on its group's node
    replicas: int | str | None = None  # per rank over all layers, where they save most time; or as in craft
    moves: int | None = None  # with before: most slots of a layer that get another expert
    pinned: bool = False  # home slots stay: those of before, else experts in order, E/R per rank
    near: bool = True  # then search for fewer rows to other nodes, on 2 to 64 nodes
    least_gain: float = 0.0  # with before: least fall of a layer's mean imbalance to change it

    @property
    def has_budget(self) -> bool:  # type: ignore[override]
        return self.replicas is not None

    def place(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Placed:
        self._check(scenarios, live_ranks)
        capacity, notes = self._capacity(scenarios, live_ranks)
        if live_ranks.before is not None and (self.replicas is not None or live_ranks.capacity is not None):
            loads, ranks = scenarios.mean(scenarios.loads), range(live_ranks.num_ranks)
            start = resized(live_ranks.before, ranks, capacity, loads, live_ranks.tick)
            live_ranks = replace(live_ranks, before=start)
        slots, objective = self.search_layers(scenarios, live_ranks, capacity, STEPS if self.search else 0)
        if self.near and self.search and applies(scenarios, live_ranks):
            node, home = self._kept(scenarios, live_ranks)
            slots, rows = fewer_rows(scenarios, live_ranks, slots, node, home, self.moves)
            notes |= rows
            objective = self._judged(scenarios, live_ranks, slots, capacity)[1]
        if self.least_gain and live_ranks.before is not None:
            start, level = self._judged(scenarios, live_ranks, live_ranks.before, capacity)
            stay = level - objective < self.least_gain  # [L]
            slots = np.where(stay[:, None, None], start, slots)
            objective = np.where(stay, level, objective)
            notes |= {"layers_kept": int(stay.sum())}
        notes = {"seen_imbalance": round(float(objective.mean()), 4), **notes}
        if not self.pinned:
            return Placed(slots, notes=notes)
        homes = pinned_homes(live_ranks, scenarios)
        return Placed(homes_first(slots, homes), notes=notes, home_rank=homes)

    def _judged(
        self, scenarios: Scenarios, live_ranks: LiveRanks, slots: Slots, capacity: Ints
    ) -> tuple[Slots, Floats]:
        judge = replace(self, groups=0, pinned=False, moves=None)
        return judge.search_layers(scenarios, replace(live_ranks, before=slots), capacity, 0)

    def _capacity(self, scenarios: Scenarios, live_ranks: LiveRanks) -> tuple[Ints, dict[str, Any]]:
        layers, experts, ranks = scenarios.num_layers, scenarios.num_experts, live_ranks.num_ranks
        if self.replicas is None:
            if live_ranks.capacity is not None:
                return live_ranks.capacity, {}
            return np.full((layers, ranks), slots_of(live_ranks), dtype=np.int32), {}
        check_budget(self.replicas, layers, live_ranks, experts)
        grid = make_grid(live_ranks, experts)
        times, anew = [], replace(live_ranks, before=None, home_rank=None)
        judge = replace(self, moves=None)
        mean = scenarios.weight @ scenarios.loads.sum(-1) / ranks  # [L] copies
        for number in grid:
            alone = np.repeat(assign(np.array([experts + number]), ranks), layers, axis=0)
            times.append(
                mean * judge.search_layers(scenarios, anew, alone, TABLE_STEPS if self.search else 0)[1]
            )
        table = np.array(times).T
        counts, curve = allocate(table[:, :1] - table, grid, ranks, self.replicas)
        notes = {"replicas_by_layer": counts.tolist(), "worth_by_replicas_of_a_rank": curve}
        return budget_capacity(counts, live_ranks, experts), notes

    def _check(self, scenarios: Scenarios, live_ranks: LiveRanks) -> None:
        if self.split not in ("even", "exact"):
            raise ValueError(f"split must be even or exact, got {self.split!r}")
        if self.shrink is not None and not 0 <= self.shrink <= 1:
            raise ValueError(f"shrink must be in 0..1, got {self.shrink}")
        if self.groups < 0 or (self.groups and scenarios.num_experts % self.groups):
            raise ValueError(f"groups must divide the {scenarios.num_experts} experts, got {self.groups}")
        if self.moves is not None and self.moves < 0:
            raise ValueError(f"moves must be at least 0, got {self.moves}")
        if self.moves is not None and live_ranks.before is None:
            raise ValueError(f"moves must come with before, got {self.moves} without")
        if not 0 <= self.least_gain < float("inf"):
            raise ValueError(f"least_gain must be a number from 0 on, got {self.least_gain}")
        if self.pinned and self.groups:
            raise ValueError(f"groups must be 0 with pinned, which fixes the homes, got {self.groups}")
        if self.pinned and self.replicas is not None and scenarios.num_experts % live_ranks.num_ranks:
            raise ValueError(
                f"replicas must be None with pinned where {live_ranks.num_ranks} ranks do not divide the "
                f"{scenarios.num_experts} experts, got {self.replicas}"
            )
        uneven = self.replicas is not None or live_ranks.capacity is not None
        if self.pinned and live_ranks.before is not None and uneven:
            raise ValueError("pinned must be False with before where slots move between layers, got True")
        if self.replicas is None and slots_of(live_ranks) > scenarios.num_experts:
            raise ValueError(
                f"slots_per_rank must be at most {scenarios.num_experts} without spare slots, one for each expert, "
                f"got {slots_of(live_ranks)}"
            )

    def search_layers(
        self, scenarios: Scenarios, live_ranks: LiveRanks, capacity: Ints, steps: int
    ) -> tuple[Slots, Floats]:
        """Return slots [L, R, S] for ranks with capacity [L, R], and their objective on the scenarios, [L]. The
        objective is the mean, over scenarios, of the busiest rank's load (a time if speeds differ) over the mean rank
        load."""
        shares = scenarios.shares(self.shrink)
        loads = np.rint(shares * WHOLE)
        whole = loads.sum(-1)  # [n, L]
        weight = np.pad(scenarios.weight, (0, -len(loads) % LANES))
        width = int(capacity.max())
        constrained = self.groups or self.pinned
        # eplb's slots are compared, but not without search: there the comparison would take longer than the placement.
        compared = self.search and live_ranks.before is None and not constrained
        rival = pack_into(scenarios.total().astype(np.float32), capacity) if compared else None
        mean = scenarios.mean(loads)
        deviation = np.sqrt(scenarios.mean((loads - mean) ** 2))
        spreads = SPREADS if self.search else SPREADS[1:2]
        node, home = self._kept(scenarios, live_ranks)
        slots, objective = search_slots(
            loads=np.pad(loads, ((0, len(weight) - len(loads)), (0, 0), (0, 0))).transpose(1, 2, 0),
            weight=weight,
            tick=live_ranks.tick,
            node=node,
            home=home,
            capacity=capacity,
            risks=np.stack([mean + z * deviation for z in spreads]),
            rival=rival,
            before=live_ranks.before,
            width=width,
            exact=self.split == "exact",
            few_slots=width <= FEW_SLOTS or self.pinned,  # with pinned homes, replica counts matter more, too
            steps=steps,
            moves=-1 if self.moves is None else self.moves,
            threads=num_threads(),
        )
        ideal = (scenarios.weight @ whole) / (1 / live_ranks.tick).sum()
        return slots, objective / np.maximum(ideal, 1)

    def _kept(self, scenarios: Scenarios, live_ranks: LiveRanks) -> tuple[Ints, Ints]:
        """Return [R] nodes, and [L, E] the node on which a replica of each expert stays, -1 = none. With pinned homes
        every rank is a node of its own, so that the replica that stays is the home."""
        if not self.pinned:
            return live_ranks.node, self._home(scenarios, live_ranks)
        return np.arange(live_ranks.num_ranks, dtype=np.int32), pinned_homes(live_ranks, scenarios)

    def _home(self, scenarios: Scenarios, live_ranks: LiveRanks) -> Ints:
        """Return [L, E] the node on which a replica of each expert stays; -1 without groups. Groups are packed onto
        nodes by load, the largest first, the same number on each node. With ``before`` a group belongs to the node that
        has most of its experts."""
        layers, experts = scenarios.num_layers, scenarios.num_experts
        nodes = np.unique(live_ranks.node)
        if not self.groups or len(nodes) == 1:
            return np.full((layers, experts), -1, dtype=np.int32)
        if live_ranks.before is not None:
            return self._home_before(live_ranks, experts)
        if self.groups % len(nodes):
            raise ValueError(f"groups must be a multiple of the {len(nodes)} live nodes, got {self.groups}")
        load = scenarios.mean(scenarios.shares()).reshape(layers, self.groups, -1).sum(-1)
        groups_of_node = pack_once(load.astype(np.float32), len(nodes))  # [L, nodes, groups of a node]
        node_of_group = np.empty((layers, self.groups), dtype=np.int32)
        for index, node in enumerate(nodes):
            np.put_along_axis(node_of_group, groups_of_node[:, index].astype(np.int64), node, axis=1)
        size = min(int((live_ranks.node == node).sum()) for node in nodes) * (
            live_ranks.slots_per_rank or experts
        )
        if size < (experts_per_node := experts // len(nodes)):
            raise ValueError(
                f"groups must fit their nodes: {experts_per_node} experts on a node of {size} slots"
            )
        return np.repeat(node_of_group, experts // self.groups, axis=1)

    def _home_before(self, live_ranks: LiveRanks, experts: int) -> Ints:
        assert live_ranks.before is not None
        on_rank = np.stack([(live_ranks.before == e).any(2) for e in range(experts)], axis=1)  # [L, E, R]
        nodes = np.unique(live_ranks.node)
        per_node = np.stack([on_rank[:, :, live_ranks.node == node].any(2) for node in nodes], axis=2)
        by_group = per_node.reshape(len(on_rank), self.groups, -1, len(nodes)).sum(2)
        home: Ints = np.repeat(nodes[by_group.argmax(2)], experts // self.groups, axis=1).astype(np.int32)
        return home


def pinned_homes(live_ranks: LiveRanks, scenarios: Scenarios) -> Ints:
    """Return [L, E] the rank of each expert's home: that in ``before``, or else experts in order."""
    layers, experts = scenarios.num_layers, scenarios.num_experts
    if live_ranks.home_rank is None:
        in_order = np.arange(experts, dtype=np.int32) // -(-experts // live_ranks.num_ranks)
        return np.tile(in_order, (layers, 1))
    if (lost := np.argwhere(live_ranks.home_rank < 0)).size:
        layer, expert = lost[0]
        raise ValueError(
            f"before must have pinned homes on live ranks, expert {expert} of layer {layer} has none"
        )
    return live_ranks.home_rank


def homes_first(slots: Slots, homes: Ints) -> Slots:
    """Return slots [L, R, S] with every rank's homes in order, then its replicas in order, then empty slots."""
    experts = homes.shape[1]
    ranks = np.arange(slots.shape[1])[None, :, None]
    home_of_slot = np.take_along_axis(homes[:, None], np.maximum(slots, 0), axis=2)
    key = np.where(slots < 0, 2 * experts, np.where(home_of_slot == ranks, slots, slots + experts))
    return np.take_along_axis(slots, key.argsort(axis=2, kind="stable"), axis=2)
