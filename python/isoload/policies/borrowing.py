"""Policies that borrow weights for one batch: ``llep``, ``spill_cost``, ``libra`` and ``hedge``.

Each fills the spare slots by its own options of one fill (:func:`isoload.ops.plan_fill`). A second policy, by default
``exact``, splits the copies over the filled slots. Copies whose expert is on their own rank may stay there; the other
copies are then split above them.
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
    """Base: :meth:`fill` fills the spare slots; the copies follow the fill's quota or the split of another policy.

    For a fill without a quota, or one made from other loads (isoload.balancing.planning.fill), split_by="fill" means
    "exact".
    """

    borrows = True
    split_by: str | Policy = "fill"
    slots: int | None = None  # largest number of spare slots of a rank that are filled; None = all

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.splitter.borrows:
            raise ValueError(f"split_by must be a policy that does not borrow, got {self.split_by!r}")
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"slots must be at least 1, got {self.slots}")

    @property
    def splitter(self) -> Policy:
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
                f"slots must be at most spare_slots ({spare}) for policy {self.name}, got {self.slots}"
            )
        self.splitter.check(placement)

    @abstractmethod
    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        """Return the layers with filled spare slots, their quota if the fill has one, and telemetry."""

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        by_fill, policy = self.split_by == "fill", type(self)
        if by_fill and placed.quota is not None:
            return chosen_plan(self, placed.quota, demand, placed, placed.telemetry)
        if policy.split is not BorrowPolicy.split or policy.share is not BorrowPolicy.share:
            demand = demand._replace(rank=None)  # the other policy may split or share in its own way
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
    """Run an op that fills the last `slots` spare slots of every rank (None = all), on a placement and its topology.
    `begun`: [..., P] slots of which some are filled already."""
    return op(
        demand.loads,
        placed.slot_to_expert if begun is None else begun,
        routed_homes(placed),
        placed.topology.num_ranks,
        placed.spare_slots if slots is None else slots,
        demand.local_shared,
        alive=placed.alive,
        ranks_per_node=placed.topology.ranks_per_node,
        **rules,
    )


class FillPolicy(BorrowPolicy):
    """Base of policies that fill by levels (:func:`isoload.ops.plan_fill`) and split exactly over the filled slots."""

    split_by: str | Policy = "exact"
    refill_above: float | None = None  # keep the last fill while its exact split has at most this imbalance

    def __post_init__(self) -> None:
        if self.split_by == "fill":
            use = "the copies go as split_by=exact splits them over the filled slots"
            raise ValueError(f"option split_by=fill of policy {self.name} was removed: {use}")
        super().__post_init__()
        check_range("refill_above", self.refill_above, 1, 1000)

    def fill_levels(self, demand: Demand, placed: PlacedLayers, **rules: Any) -> ops.SlotFill:
        """Run :func:`isoload.ops.plan_fill` by a policy's rules, starting from the exact split over replicas."""
        start = solve(demand, placed).quota if placed.replicated else None
        return fill_spare(ops.plan_fill, demand, placed, self.slots, start=start, **rules)

    def filled(self, demand: Demand, placed: PlacedLayers, fill: ops.SlotFill) -> PlacedLayers:
        """Return the layers with these slots, or with those of the last fill if its exact split is level enough."""
        last, slots, telemetry = demand.last, fill.slot_to_expert, fill.telemetry
        if last is None or self.refill_above is None:
            return placed.fill(slots, telemetry=telemetry)
        assert last.telemetry is not None
        copies = demand.loads.flatten(placed.home_slot.dim() - 1).sum(-1)
        if demand.local_shared is not None:
            copies = copies + demand.local_shared.sum(-1)
        live, limit = len(placed.topology.live_ranks), round(self.refill_above * MILLION)
        keep = (solve(demand, last).peak * live * MILLION <= copies * limit).unsqueeze(-1)
        slots = torch.where(keep, last.slot_to_expert, slots)
        return placed.fill(slots, telemetry=torch.where(keep, last.telemetry, telemetry))


def routed_homes(placed: PlacedLayers) -> Tensor:
    return placed.home_slot.narrow(-1, 0, placed.host.num_routed)


def may_keep_local(policy: Policy) -> bool:
    """Whether copies can stay on their own rank below the policy's split: False if it samples or fixes the share."""
    if isinstance(policy, BorrowPolicy) and type(policy).share is BorrowPolicy.share:
        policy = policy.splitter
    return not policy.samples and type(policy).share is Policy.share


def keeping_local(policy: Policy) -> Callable[[Demand, PlacedLayers], Plan]:
    """Return :func:`split_above_local` of a policy; raise ValueError if it samples or fixes the share."""
    if not may_keep_local(policy):
        raise ValueError(f"keep_local must be False for policy {policy.name}, which draws or fixes the share")
    return partial(split_above_local, policy)


def held_experts(placed: PlacedLayers) -> Tensor:
    """Return [..., R, E] int32: 1 where a rank has a slot that takes copies of the expert, else 0."""
    experts = _experts_of_slots(placed)
    resident = experts.new_zeros(*experts.shape[:-1], placed.tables.num_experts + 1, dtype=torch.int32)
    resident.scatter_(-1, experts, torch.ones_like(experts, dtype=torch.int32))
    return resident.narrow(-1, 0, placed.tables.num_experts)


def _experts_of_slots(placed: PlacedLayers) -> Tensor:
    """Return the [..., R, S] int64 expert of each slot that takes copies; E = none."""
    tables = placed.tables
    experts = torch.where(tables.is_replica(), placed.slot_to_expert, tables.num_experts).long()
    return experts.view(*experts.shape[:-1], tables.num_ranks, -1)


def split_above_local(policy: Policy, demand: Demand, placed: PlacedLayers) -> Plan:
    """Split by a policy after all copies whose expert has a slot on their own rank stay there; loads [..., R, E]. The
    default share then sends these copies nowhere else. The plan's bound is over all quotas, including those that keep
    fewer copies local, and needs no search."""
    local_loads = held_experts(placed) * demand.loads  # [..., R, E]
    stay = local_loads.sum(-1, dtype=torch.int32)
    besides = stay if demand.local_shared is None else demand.local_shared + stay
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

    The fill starts from the exact split over resident replicas and lends nothing if that is level enough. No rank's
    load exceeds the peak of that split. If the spare slots do not suffice, higher levels are tried. With within="node"
    capacity and threshold relate to the mean of the most loaded node.
    """

    name = "llep"
    removed: ClassVar[Mapping[str, str]] = {
        "tolerance": "a rank that is above the capacity by less than min_chunk lends nothing"
    }
    split_by: str | Policy = "exact"
    capacity: float = 1.0  # times the mean load
    min_chunk: int = 1024  # copies: a rank with a smaller excess lends nothing
    threshold: float = 1.3  # up to this imbalance nothing moves
    measure: str = "rank"  # "rank" as the published code, "expert" as the paper's text
    within: Within = "all"  # "node": no expert is borrowed outside the node of its home slot
    refill_above: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rules(self.capacity, self.min_chunk, self.threshold, self.measure)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        how = {"capacity_factor": self.capacity, "imbalance_threshold": self.threshold}
        how |= {"per_expert": self.measure == "expert", "min_chunk": self.min_chunk}
        return self.filled(demand, placed, self.fill_levels(demand, placed, within=self.within, **how))


# llep's options in engines, whose weights travel during the dispatch. The published defaults move experts for large
# imbalances only. With these and refill_above=1.1 the busiest of 32 ranks has 1.13 instead of 1.23 times the mean load
# on domains of GLM-5.2 that the placement was not made for (one spare slot on each rank, nodes of 8); a smaller chunk
# levels as well with more exports.
IN_ENGINES: dict[str, Any] = {"threshold": 1.0, "min_chunk": 128}


def check_rules(capacity: float, min_chunk: int, threshold: float, measure: str) -> None:
    check_range("capacity", capacity, 1, 1000)
    check_range("min_chunk", min_chunk, 1, 2**31 - 1)
    check_range("threshold", threshold, 0, 1000)
    if measure not in ("rank", "expert"):
        raise ValueError(f"measure must be rank or expert, got {measure!r}")


@dataclass(frozen=True)
class SpillCostPolicy(FillPolicy):
    """The cheapest of several levels of the largest load, where imports and exports have a price.

    The cost of a level is its largest load plus the imports of the busiest importer and the exports of the busiest
    exporter, each worth the copies that could be computed in its time (:func:`isoload.times.exchanges.break_even`), by
    the topology's bandwidths or DEFAULT_BANDWIDTHS. No expert moves for fewer copies. The fill starts from the exact
    split over resident replicas; no rank's load exceeds the peak of that split.
    """

    name = "spill_cost"
    removed: ClassVar[Mapping[str, str]] = {
        "egress": "exports have a price, and within=node keeps experts in the node of their home slot"
    }
    split_by: str | Policy = "exact"
    expert_bytes: float = DEEPSEEK_V3_FP8  # weights of one expert
    token_us: float = DEEPSEEK_V3_TOKEN_US  # microseconds per copy in a large GEMM
    min_chunk: int = 1
    within: Within = "all"
    refill_above: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        break_even(self.expert_bytes, 1.0, self.token_us)  # raises for values that are not positive
        check_range("min_chunk", self.min_chunk, 1, 2**31 - 1)

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        near, far = placed.topology.bandwidths or DEFAULT_BANDWIDTHS
        costs = tuple(break_even(self.expert_bytes, speed, self.token_us) for speed in (near, far))
        how = {"min_chunk": self.min_chunk, "import_costs": costs, "export_costs": costs}
        return self.filled(demand, placed, self.fill_levels(demand, placed, within=self.within, **how))


@dataclass(frozen=True)
class HedgePolicy(FillPolicy):
    """Levels the predicted loads, and hedges against their errors with more replicas of the hottest experts.

    A forecast needs few slots to be level. The remaining slots go to the experts with most copies per replica, where
    the exact split of the true loads can use them.
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
    """Every rank borrows the experts that its tokens choose most, then those that level the other copies. Copies whose
    expert has a slot on their own rank stay there. The remaining copies are split exactly above them."""

    name = "libra"
    ahead = True
    keeps_local = True
    needs = "per_source"
    removed: ClassVar[Mapping[str, str]] = {
        "printed": "policy libra_published runs both algorithms as printed in the paper",
        "split_by": "copies that may leave their rank are split exactly, libra_published shards them as the paper",
    }
    alpha: float = 0.5  # fraction of the slots for the experts that the rank's tokens choose
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
        # In exact arithmetic 0.3 of 10 is 3; in floats the product may be slightly less.
        local = round(self.alpha * MILLION) * slots // MILLION
        filled = borrow_local(demand, placed, slots, local)
        if slots > local:
            begun = placed.fill(filled) if local else placed
            local_loads = held_experts(begun) * demand.loads
            stay = local_loads.sum(-1, dtype=torch.int32)
            fixed = stay if demand.local_shared is None else demand.local_shared + stay
            remote = Demand(demand.loads - local_loads, local_shared=fixed)
            filled = fill_spare(ops.plan_fill, remote, begun, slots - local).slot_to_expert
        return placed.fill(filled, telemetry=count_borrowed(filled, placed))

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        plan = split_above_local(ExactPolicy(self.tolerance), demand, placed)
        return replace(plan, policy=self, telemetry=placed.telemetry)


def borrow_local(demand: Demand, placed: PlacedLayers, slots: int, local: int) -> Tensor:
    """Return [..., P] slots where every rank borrows the experts that its own tokens choose most. Of the last `slots`
    spare slots of every rank the first `local` are filled, among equal loads by the lowest expert."""
    wanted = torch.where(held_experts(placed) > 0, 0, demand.loads)  # [..., R, E]
    if placed.alive is not None:
        wanted = wanted * placed.alive.unsqueeze(-1)
    ranks, experts = wanted.shape[-2:]
    # The keys of a rank differ, so topk chooses the same experts on every device.
    key = wanted.long() * experts + torch.arange(experts - 1, -1, -1, device=wanted.device)
    chosen = key.topk(min(local, experts), dim=-1).indices
    chosen = torch.where(wanted.gather(-1, chosen) > 0, chosen, -1).to(torch.int32)
    per_rank = placed.slot_to_expert.view(*placed.slot_to_expert.shape[:-1], ranks, -1)
    size, taken = per_rank.shape[-1], chosen.shape[-1]
    resident = per_rank.narrow(-1, 0, size - slots)
    empty = per_rank.narrow(-1, size - slots + taken, slots - taken)
    return torch.cat([resident, chosen, empty], dim=-1).flatten(-2)


def count_borrowed(filled: Tensor, placed: PlacedLayers) -> Tensor:
    """Return the [..., 5] telemetry of filled slots, see :class:`isoload.ops.SlotFill`."""
    ranks, per_node = placed.topology.num_ranks, placed.topology.ranks_per_node
    size = placed.host.slots_per_rank
    borrowed = ((filled >= 0) & (placed.slot_to_expert < 0)).long()
    owner = routed_homes(placed).gather(-1, (filled * borrowed).long()).long() // size
    taker = torch.arange(filled.shape[-1], device=filled.device) // size
    imports = borrowed.view(*borrowed.shape[:-1], ranks, size).sum(-1)
    exports = torch.zeros_like(imports).scatter_add_(-1, owner, borrowed)
    far = borrowed * (owner // per_node != taker // per_node)
    counts = [borrowed.sum(-1), imports.amax(-1), exports.amax(-1), far.sum(-1)]
    return pad(torch.stack(counts, dim=-1), (0, 1)).to(torch.int32)
