"""Policies that borrow weights for one batch: ``llep``, ``spill_cost``, ``libra`` and ``hedge``.

Each fills the spare slots by options of one fill (:func:`isoload.ops.plan_fill`); a second policy, by default
``exact``, splits the copies over the filled slots. Copies whose expert is on their own rank may stay there, below
the split of all other copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from isoload import ops
from isoload.checks import check_range
from isoload.ops import Order, Within
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies.base import Demand, Needs, Policy, chosen_plan, even_split, make_policy, solve
from isoload.policies.exact import ExactPolicy
from isoload.policies.plan import Plan
from isoload.times.exchanges import DEEPSEEK_V3_FP8, DEEPSEEK_V3_TOKEN_US, DEFAULT_BANDWIDTHS, break_even

EXACT = ExactPolicy()
MILLION = 1_000_000
Made = TypeVar("Made")


class BorrowPolicy(Policy, ABC):
    """Base: :meth:`fill` fills the spare slots; the copies go as it says, or as another policy splits them.

    Options, for who has them: split_by, "fill" or any policy, e.g. "exact", "lp", "joint" or a Policy; in plans of a
    fill without a quota, or that was made from other loads (isoload.balancing.planning.fill), "fill" means "exact".
    slots: the most spare slots of a rank that are filled, the last ones; None = all.
    """

    borrows = True
    split_by: str | Policy = "fill"
    slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splitter.borrows:
            raise ValueError(f"split_by must be a policy that does not borrow, got {self.split_by!r}")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self.slots}")

    @property
    def splitter(self) -> Policy:
        """What splits the copies where the fill does not."""
        return EXACT if self.split_by == "fill" else make_policy(self.split_by)

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return self.splitter.needs

    @property
    def samples(self) -> bool:  # type: ignore[override]
        return self.splitter.samples

    def check(self, placement: Placement) -> None:
        spare = placement.spare_slots
        if spare < 1:
            raise ValueError(f"spare_slots must be at least 1 for policy {self.name}, got {spare}")
        if placement.topology.speeds is not None:
            raise ValueError(f"speeds must be None for policy {self.name}, which counts copies")
        if self.slots is not None and self.slots > spare:
            raise ValueError(
                f"slots must be at most spare_slots, {spare}, for policy {self.name}, got {self.slots}"
            )
        self.splitter.check(placement)

    @abstractmethod
    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        """The placed layers with filled spare slots, their quota if it has one, and telemetry."""

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        by_fill, policy = self.split_by == "fill", type(self)
        if by_fill and placed.quota is not None:
            return chosen_plan(self, placed.quota, demand, placed, placed.telemetry)
        if policy.split is not BorrowPolicy.split or policy.share is not BorrowPolicy.share:
            demand = demand._replace(rank=None)  # which may split or share its own way
        plan = self.splitter.split(demand, placed)
        keeps_name = by_fill or self.split_by == "exact"
        return replace(plan, policy=self if keeps_name else plan.policy, telemetry=placed.telemetry)

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        return self.splitter.share(loads, plan, rank, order)


def fill_spare(
    op: Callable[..., Made],
    demand: Demand,
    placed: PlacedLayers,
    slots: int | None,
    begun: Tensor | None = None,
    **rules: Any,
) -> Made:
    """What an op that fills spare slots makes of a placement and its topology.

    slots: the last ones of every rank that may be filled; None = all. begun: [..., P] with some filled already.
    """
    return op(
        demand.loads,
        placed.slot_to_expert if begun is None else begun,
        routed_homes(placed),
        placed.topology.num_ranks,
        placed.spare_slots if slots is None else slots,
        demand.at_home,
        alive=placed.alive,
        ranks_per_node=placed.topology.ranks_per_node,
        **rules,
    )


class FillPolicy(BorrowPolicy):
    """Base of policies that fill by levels (:func:`isoload.ops.plan_fill`) and split exactly over the filled slots.

    Options, for who has them: split_by, a policy that splits over the filled slots in place of "exact".
    refill_above: where the caller passes the last fill (isoload.balancing.planning.fill), it is kept while the exact
    split over it has at most this imbalance; None = every batch is filled anew. slots: as of :class:`BorrowPolicy`.
    """

    split_by: str | Policy = "exact"
    refill_above: float | None = None

    def __post_init__(self) -> None:
        if self.split_by == "fill":
            use = "the copies go as split_by=exact splits them over the filled slots"
            raise ValueError(f"option split_by=fill of policy {self.name} was removed: {use}")
        super().__post_init__()
        check_range("refill_above", self.refill_above, 1, 1000)

    def fill_levels(self, demand: Demand, placed: PlacedLayers, **rules: Any) -> ops.SlotFill:
        """:func:`isoload.ops.plan_fill` by a policy's rules, from the exact split over replicas if there are any."""
        start = solve(demand, placed).quota if placed.replicated else None
        return fill_spare(ops.plan_fill, demand, placed, self.slots, start=start, **rules)

    def filled(self, demand: Demand, placed: PlacedLayers, fill: ops.SlotFill) -> PlacedLayers:
        """The layers with these slots, or with those of the last fill where the exact split over it is level enough."""
        last, slots, telemetry = demand.last, fill.slot_to_expert, fill.telemetry
        if last is None or self.refill_above is None:
            return placed.fill(slots, telemetry=telemetry)
        assert last.telemetry is not None
        copies = demand.loads.flatten(placed.home_slot.dim() - 1).sum(-1)
        if demand.at_home is not None:
            copies = copies + demand.at_home.sum(-1)
        live, limit = len(placed.topology.live_ranks), round(self.refill_above * MILLION)
        keep = (solve(demand, last).peak * live * MILLION <= copies * limit).unsqueeze(-1)
        slots = torch.where(keep, last.slot_to_expert, slots)
        return placed.fill(slots, telemetry=torch.where(keep, last.telemetry, telemetry))


def routed_homes(placed: PlacedLayers) -> Tensor:
    """[..., E] home slots of the routed experts."""
    return placed.home_slot.narrow(-1, 0, placed.host.num_routed)


def may_keep_local(policy: Policy) -> bool:
    """Whether copies can stay on their own rank beneath its split: not if it draws or fixes the share."""
    if isinstance(policy, BorrowPolicy) and type(policy).share is BorrowPolicy.share:
        policy = policy.splitter
    return not policy.samples and type(policy).share is Policy.share


def keeping_local(policy: Policy) -> Callable[[Demand, PlacedLayers], Plan]:
    """Return :func:`split_above_local` of a policy.

    Raises:
        ValueError: the policy draws or fixes the share.
    """
    if not may_keep_local(policy):
        raise ValueError(f"keep_local must be False for policy {policy.name}, which draws or fixes the share")
    return partial(split_above_local, policy)


def held_experts(placed: PlacedLayers) -> Tensor:
    """[..., R, E] int32: 1 where a rank has a slot that takes copies of the expert, else 0."""
    experts = _experts_of_slots(placed)
    resident = experts.new_zeros(*experts.shape[:-1], placed.tables.num_experts + 1, dtype=torch.int32)
    resident.scatter_(-1, experts, torch.ones_like(experts, dtype=torch.int32))
    return resident.narrow(-1, 0, placed.tables.num_experts)


def _experts_of_slots(placed: PlacedLayers) -> Tensor:
    """[..., R, S] int64 what each slot that takes copies holds; E = nothing."""
    tables = placed.tables
    experts = torch.where(tables.is_replica(), placed.slot_to_expert, tables.num_experts).long()
    return experts.view(*experts.shape[:-1], tables.num_ranks, -1)


def split_above_local(policy: Policy, demand: Demand, placed: PlacedLayers) -> Plan:
    """The split by a policy where copies whose expert has a slot on their own rank stay; loads [..., R, E].

    The default share sends them nowhere else. The plan's bound is of all quotas, those that keep fewer copies too: the
    one that costs nothing.
    """
    local_loads = held_experts(placed) * demand.loads  # [..., R, E]
    stay = local_loads.sum(-1, dtype=torch.int32)
    besides = stay if demand.at_home is None else demand.at_home + stay
    plan = policy.split(
        Demand(demand.loads - local_loads, demand.tokens, besides), replace(placed, quota=None)
    )
    assert plan.quota is not None and plan.peak is not None
    local = torch.nn.functional.pad(local_loads, (0, 1)).gather(-1, _experts_of_slots(placed))
    quota = plan.quota + local.flatten(-2)
    bound = torch.minimum(even_split(demand, placed).bound, plan.peak)
    return replace(plan, quota=quota, bound=bound)


@dataclass(frozen=True)
class LlepPolicy(FillPolicy):
    """Ranks above their capacity lend experts to less loaded ranks, and the copies are split exactly over all slots.

    Starts from the exact split over resident replicas, and lends nothing where that is enough. No rank's load passes
    the largest of that. Where spare slots run out, higher levels are tried, see :func:`isoload.ops.plan_fill`.

    Options: capacity (times the mean load), min_chunk (copies: a rank that is above its capacity by less lends nothing;
    a larger excess may leave in smaller chunks), threshold (up to this imbalance nothing moves), measure (the
    threshold's: "rank" as the published code, "expert" as the paper's text), within ("all", or "node": no expert is
    borrowed beyond its home's node, and capacity and threshold are about the mean of the most loaded node), split_by
    and refill_above (see :class:`FillPolicy`).
    """

    name = "llep"
    removed: ClassVar[Mapping[str, str]] = {
        "tolerance": "a rank that is above the capacity by less than min_chunk lends nothing"
    }
    split_by: str | Policy = "exact"
    capacity: float = 1.0
    min_chunk: int = 1024
    threshold: float = 1.3
    measure: str = "rank"
    within: Within = "all"
    refill_above: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        filled = self.fill_levels(
            demand,
            placed,
            capacity_factor=self.capacity,
            imbalance_threshold=self.threshold,
            per_expert=self.measure == "expert",
            min_chunk=self.min_chunk,
            within=self.within,
        )
        return self.filled(demand, placed, filled)


def check_rules(capacity: float, min_chunk: int, threshold: float, measure: str) -> None:
    check_range("capacity", capacity, 1, 1000)
    check_range("min_chunk", min_chunk, 1, 2**31 - 1)
    check_range("threshold", threshold, 0, 1000)
    if measure not in ("rank", "expert"):
        raise ValueError(f"measure must be rank or expert, got {measure!r}")


@dataclass(frozen=True)
class SpillCostPolicy(FillPolicy):
    """The cheapest of several levels of the largest load, where imports and exports have a price.

    A level costs its largest load, the imports of the busiest importer and the exports of the busiest exporter. An
    import or export costs as many copies as could be computed in its time (:func:`isoload.times.exchanges.break_even`),
    by the topology's bandwidths, or DEFAULT_BANDWIDTHS if it has none; no expert moves with fewer copies. Starts from
    the exact split over resident replicas; no rank's load passes the largest of that.

    Options: expert_bytes (weights of one expert), token_us (microseconds per copy in a large GEMM), min_chunk (copies;
    a rank that is above a level by less lends nothing), within ("all" or "node", beyond which no expert is borrowed),
    split_by and refill_above (see :class:`FillPolicy`).
    """

    name = "spill_cost"
    removed: ClassVar[Mapping[str, str]] = {
        "egress": "exports have a price, and within=node keeps experts in the node of their home slot"
    }
    split_by: str | Policy = "exact"
    expert_bytes: float = DEEPSEEK_V3_FP8
    token_us: float = DEEPSEEK_V3_TOKEN_US
    min_chunk: int = 1
    within: Within = "all"
    refill_above: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        break_even(self.expert_bytes, 1.0, self.token_us)  # refuses what is not positive
        check_range("min_chunk", self.min_chunk, 1, 2**31 - 1)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        near, far = (
            break_even(self.expert_bytes, bandwidth, self.token_us)
            for bandwidth in placed.topology.bandwidths or DEFAULT_BANDWIDTHS
        )
        filled = self.fill_levels(
            demand,
            placed,
            min_chunk=self.min_chunk,
            import_costs=(near, far),
            export_costs=(near, far),
            within=self.within,
        )
        return self.filled(demand, placed, filled)


@dataclass(frozen=True)
class HedgePolicy(FillPolicy):
    """The plan that levels the predicted loads, and against their errors more replicas of the hottest experts.

    Few slots level a forecast; those that are left go to the experts with most copies per replica, where the exact
    split of the true loads can use them.

    Options: slots (most that are filled per rank; None = all spare ones), within ("all", or "node": no expert is
    borrowed beyond its home's node), refill_above (see :class:`FillPolicy`).
    """

    name = "hedge"
    ahead = True
    slots: int | None = None
    within: Within = "all"
    refill_above: float | None = None

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        filled = self.fill_levels(demand, placed, within=self.within)
        filled = fill_spare(ops.top_up, demand, placed, self.slots, filled.slot_to_expert, within=self.within)
        return self.filled(demand, placed, filled)


@dataclass(frozen=True)
class LibraPolicy(BorrowPolicy):
    """Every rank borrows what its tokens choose most; then experts are borrowed that level the copies which can move.

    Copies whose expert has a slot on their own rank stay there. The rest is split exactly above them.

    Options: alpha (part of the slots for what the rank's tokens choose), tolerance (of the split, relative), slots
    (most that are filled per rank; None = all spare ones).
    """

    name = "libra"
    ahead = True
    keeps_local = True
    needs = "per_source"
    removed: ClassVar[Mapping[str, str]] = {
        "printed": "policy libra_published runs both algorithms as printed in the paper",
        "split_by": "copies that may leave their rank are split exactly, libra_published shards them as the paper",
    }
    alpha: float = 0.5
    tolerance: float = 0.0
    slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("alpha", self.alpha, 0, 1)
        check_range("tolerance", self.tolerance, 0, 1000)

    @property
    def splitter(self) -> Policy:
        return EXACT

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        slots = placed.spare_slots if self.slots is None else self.slots
        # 0.3 of 10 are 3, although the float is a little less.
        local = round(self.alpha * MILLION) * slots // MILLION
        filled = borrow_local(demand, placed, slots, local)
        if slots > local:
            begun = placed.fill(filled) if local else placed
            local_loads = held_experts(begun) * demand.loads
            stay = local_loads.sum(-1, dtype=torch.int32)
            fixed = stay if demand.at_home is None else demand.at_home + stay
            remote = Demand(demand.loads - local_loads, at_home=fixed)
            filled = fill_spare(ops.plan_fill, remote, begun, slots - local).slot_to_expert
        return placed.fill(filled, telemetry=count_borrowed(filled, placed))

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        plan = split_above_local(ExactPolicy(self.tolerance), demand, placed)
        return replace(plan, policy=self, telemetry=placed.telemetry)


def borrow_local(demand: Demand, placed: PlacedLayers, slots: int, local: int) -> Tensor:
    """Return [..., P] slots where every rank borrows the experts that its own tokens choose most.

    Args:
        slots: the last ones of every rank that may be filled.
        local: how many of them are filled, from the first on. Equal loads go by the lowest expert.
    """
    wanted = torch.where(held_experts(placed) > 0, 0, demand.loads)  # [..., R, E]
    if placed.alive is not None:
        wanted = wanted * placed.alive.unsqueeze(-1)
    ranks, experts = wanted.shape[-2:]
    # No two keys of a rank are equal, so that topk chooses the same on every device.
    key = wanted.long() * experts + torch.arange(experts - 1, -1, -1, device=wanted.device)
    chosen = key.topk(min(local, experts), dim=-1).indices
    chosen = torch.where(wanted.gather(-1, chosen) > 0, chosen, -1).to(torch.int32)
    per_rank = placed.slot_to_expert.view(*placed.slot_to_expert.shape[:-1], ranks, -1)
    size, taken = per_rank.shape[-1], chosen.shape[-1]
    resident, empty = (
        per_rank.narrow(-1, 0, size - slots),
        per_rank.narrow(-1, size - slots + taken, slots - taken),
    )
    return torch.cat([resident, chosen, empty], dim=-1).flatten(-2)


def count_borrowed(filled: Tensor, placed: PlacedLayers) -> Tensor:
    """[..., 5] telemetry of filled slots, see :class:`isoload.ops.SlotFill`."""
    ranks, per_node, size = (
        placed.topology.num_ranks,
        placed.topology.ranks_per_node,
        placed.host.slots_per_rank,
    )
    borrowed = ((filled >= 0) & (placed.slot_to_expert < 0)).long()
    owner = routed_homes(placed).gather(-1, (filled * borrowed).long()).long() // size
    taker = torch.arange(filled.shape[-1], device=filled.device) // size
    imports = borrowed.view(*borrowed.shape[:-1], ranks, size).sum(-1)
    exports = torch.zeros_like(imports).scatter_add_(-1, owner, borrowed)
    far = borrowed * (owner // per_node != taker // per_node)
    counts = [borrowed.sum(-1), imports.amax(-1), exports.amax(-1), far.sum(-1)]
    return pad(torch.stack(counts, dim=-1), (0, 1)).to(torch.int32)
