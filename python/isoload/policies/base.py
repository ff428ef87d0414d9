"""The protocol of an online policy, four small parts, each with a default; and the registry of policies by name.

A policy is a frozen dataclass whose fields are its options. It never waits for a device and never exchanges anything
between ranks: from the same loads every rank computes the same plan.

    plan          loads, placed -> Plan        the three below, one after another
    fill          demand, placed -> placed     which experts lie in the spare slots (default: none)
    split         demand, placed -> Plan       how many copies every slot takes (default: exact)
    share         loads, plan -> [R, P]        which source sends them (default: own rank first, then own node)
    route_shared  slots, plan -> [T, n]        where every token's shared experts are computed (default: at home)

What it is, it declares: see the attributes of :class:`Policy`. A policy that draws has weights in place of the share:
:class:`Seeded`.

Mixes need no new class: a policy that fills takes the splitting one as option ``split_by``, one that places shared
experts takes the policy of the routed ones as option ``routed``; both accept any policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from isoload import ops
from isoload.checks import check_options, make, parse, values_readable
from isoload.ops import Order
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies.plan import (
    Plan,
    SharedPlan,
    check_tokens,
    per_expert,
    rank_cost,
    shared_copies,
    widened,
)

GOLDEN = 0x9E3779B97F4A7C15  # spreads layer, step and rank over the 64-bit seeds of sampled routes
Needs = Literal["sum", "per_source"]
EVEN: dict[str, Any] = {"budget": 0, "sweeps": 0}  # plan_exact's start, copies spread evenly over replicas


class Demand(NamedTuple):
    """The copies of one batch (leading L as the placement's layers).

    loads   [E] or [R, E] int32  copies of the routed experts
    tokens  [R] int32            tokens of each source rank that need the shared experts; None without any
    at_home [R] int32            shared copies per rank if all stay home; None without shared experts
    gathered [R, E + n] int32    loads with the shared experts' columns behind; None without shared experts
    rank                         the source whose part of the share is wanted; None: no one's
    """

    loads: Tensor
    tokens: Tensor | None = None
    at_home: Tensor | None = None
    gathered: Tensor | None = None
    rank: int | None = None
    last: PlacedLayers | None = None

    @classmethod
    def of(cls, loads: Tensor, placed: PlacedLayers, rank: int | None = None) -> Demand:
        """Take loads apart: the last num_shared columns say how many tokens of each source need the shared experts."""
        if placed.shared_home is None:
            return cls(loads, rank=rank)
        tokens = loads.select(-1, placed.host.num_routed)
        if values_readable(loads):
            check_tokens(tokens, placed.host.num_routed, placed.num_shared)
        at_home = tokens
        if placed.num_shared > 1 or placed.shared_limits is not None:
            wide = widened(tokens)
            if placed.shared_limits is not None:  # some ranks hold no experts
                home = placed.shared_home.expand(wide.shape)
                wide = torch.zeros_like(wide).scatter_add_(-1, home, wide)
            at_home = shared_copies(wide, placed.num_shared)
        return cls(loads.narrow(-1, 0, placed.host.num_routed), tokens, at_home, loads, rank)

    @property
    def routed(self) -> Demand:
        """Without the shared experts."""
        return self if self.tokens is None else Demand(self.loads, last=self.last)


@dataclass(frozen=True)
class Policy:
    """Base of all policies; by itself it fills nothing, splits exactly and leaves shared experts at home.

    needs    which loads it reads: [E] sums or [R, E] per source rank
    borrows  whether it fills spare slots, so that weights must be copied there before the experts run
    ahead    whether its fill is worth making before the batch, from predicted loads (isoload.balancing.planning.fill)
    samples  whether routed copies draw their slots: its plans have weights in place of a quota
    keeps_local  whether copies whose expert has a slot on their own rank stay there, whatever the loads
    plans_on_host  whether it plans on the CPU whatever the loads' device: for loads on a GPU the host waits for them,
                 once per plan, and where slots are filled ahead once per fill and once per split
    """

    name: ClassVar[str]
    needs: ClassVar[Needs] = "sum"
    borrows: ClassVar[bool] = False
    ahead: ClassVar[bool] = False
    samples: ClassVar[bool] = False
    keeps_local: ClassVar[bool] = False
    plans_on_host: ClassVar[bool] = False

    @property
    def cpu_only(self) -> bool:
        """Whether plans can be made on the CPU alone."""
        return False

    def __post_init__(self) -> None:
        """Raises ValueError for options that cannot be. A subclass with rules of its own comes here first."""
        if not torch.compiler.is_compiling():  # in a graph policies are made of checked ones
            check_options(self)

    def check(self, placement: Placement) -> None:
        """Raises ValueError for a placement that it cannot plan, whatever the loads."""

    def plan(
        self,
        loads: Tensor,
        placed: PlacedLayers,
        rank: int | None = None,
        *,
        filled: PlacedLayers | None = None,
        split: Callable[[Demand, PlacedLayers], Plan] | None = None,
        step: int | Tensor = 0,
    ) -> Plan:
        """Return the plan of one batch: fill, split and share.

        Loads and placement are those that :func:`isoload.plan` has checked, or that a Balancer has made.

        Args:
            loads: [E] or [R, E] int32.
            placed: the layer, or all layers.
            rank: the source rank whose send_counts are part of the plan; None = none.
            filled, step: see :func:`isoload.plan`.
            split: in place of :meth:`split`; see :func:`isoload.policies.borrowing.keeping_local`.
        """
        demand = Demand.of(loads, placed, rank)
        if filled is None:
            filled = self.fill(demand, placed)
        elif filled.host is not placed.host or filled.layer != placed.layer:
            raise ValueError(
                f"filled must be of the placement and layer that are planned, {placed.layer}, got {filled.layer}"
            )
        elif filled.quota is not None:  # the quota of other loads
            filled = replace(filled, quota=None)
        plan = self.split(demand, filled) if split is None else split(demand, filled)
        if demand.tokens is not None:
            plan = with_shared(plan, demand, placed)
        if rank is not None and plan.send_counts is None and plan.quota is not None:
            plan = replace(plan, send_counts=plan.policy.share(demand.loads, plan, rank, "locality"))
        return replace(plan, step=step) if isinstance(step, Tensor) or step else plan

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        """The slots of this batch: those of the placement, spare slots filled if the policy borrows."""
        return placed

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        """How many copies every slot takes, and where shared copies go (``plan.shared`` None: they stay home).

        The quota is of the routed slots: :func:`isoload.plan` adds the shared ones, unless ``plan.shared`` says that
        they are in it. Where the same op makes the share of ``demand.rank``, it goes with it, as send_counts.
        """
        return exact_plan(self, demand, placed)

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        """Source ranks' parts of the routed quota: [..., P] for one rank, [..., R, P] for all, from [..., R, E]."""
        assert plan.quota is not None
        per_node = plan.topology.ranks_per_node
        return ops.share(loads, plan.quota, plan.tables, per_node, rank, order)

    def route_shared(self, slots: Tensor, plan: Plan, rank: int) -> Tensor:
        """[T, n] int32 the rank of every token's shared experts, given its routed slots [T, K]; -1 = no token."""
        assert plan.shared is not None
        placed, by_rank = plan.placed, plan.shared.by_rank
        if by_rank is None:
            home = torch.where((slots >= 0).any(1, keepdim=True), placed.home_rank(rank), -1)
            return home.to(torch.int32).expand(-1, placed.num_shared)
        size, row = placed.host.slots_per_rank, by_rank.select(0, rank)
        return ops.route_shared(slots, row, size, rank, placed.num_shared)


def with_shared(plan: Plan, demand: Demand, placed: PlacedLayers) -> Plan:
    """Add the shared copies to a plan and to its quota; where the policy does not place them, they stay home."""
    assert demand.tokens is not None and demand.at_home is not None
    shared = plan.shared or SharedPlan("home", demand.tokens)
    if shared.in_quota:
        return plan
    if plan.quota is not None and shared.is_met:
        if shared.by_rank is None:
            copies = (demand.at_home // placed.num_shared).unsqueeze(-1)
        else:
            copies = per_expert(shared.by_rank, placed.num_shared).sum(-3, dtype=torch.int32)
        shared_part(plan.quota, placed).add_(copies)  # in which the split left 0
    return replace(plan, shared=shared)


def shared_part(per_slot: Tensor, placed: PlacedLayers) -> Tensor:
    """[..., R, n] the shared slots of per_slot [..., P], a view."""
    per_rank = per_slot.view(*per_slot.shape[:-1], placed.topology.num_ranks, -1)
    return per_rank.narrow(-1, placed.first_shared, placed.num_shared)


@dataclass(frozen=True)
class Seeded(Policy):
    """Base of policies that draw. Options: seed, and step (the batch's number, to which a plan's own is added)."""

    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed("seed", self.seed)
        check_seed("step", self.step)

    def weights_of(self, plan: Plan, rank: int) -> Tensor:
        """[..., P] float32 weights with which a source rank's copies draw their slots, of a plan that is sampled."""
        assert plan.weights is not None
        return plan.weights


def check_seed(name: str, seed: int) -> None:
    if seed < 0:
        raise ValueError(f"{name} must be at least 0, got {seed}")


def sum_sources(loads: Tensor, placed: PlacedLayers) -> Tensor:
    """[..., E] copies per expert, from loads with or without a source dimension."""
    return loads if loads.dim() == placed.home_slot.dim() else loads.sum(-2, dtype=torch.int32)


def exact_plan(
    policy: Policy, demand: Demand, placed: PlacedLayers, rank: int | None = None, **options: Any
) -> Plan:
    """The Plan of the optimal quota of these slots, with a source rank's send_counts.

    options: of :func:`isoload.ops.plan_exact`; by default beside the shared copies at home.
    """
    solution = solve(demand, placed, rank=rank, **options)
    send_counts = None if rank is None else solution.send_counts
    return Plan(
        placed,
        policy,
        solution.quota,
        solution.peak,
        solution.bound,
        solution.telemetry,
        send_counts=send_counts,
    )


def solve(demand: Demand, placed: PlacedLayers, **options: Any) -> ops.ExactSplit:
    """:func:`isoload.ops.plan_exact` of these slots; by default beside the shared copies at home."""
    per_node = placed.topology.ranks_per_node
    how = {"fixed": demand.at_home, "ticks": placed.ticks, "ranks_per_node": per_node, **options}
    return ops.plan_exact(demand.loads, placed.tables, **how)


def even_split(demand: Demand, placed: PlacedLayers) -> ops.ExactSplit:
    """The exact solver's start: copies spread evenly over replicas, with the lower bound that costs nothing."""
    return solve(demand, placed, **EVEN)


def chosen_plan(
    policy: Policy, quota: Tensor, demand: Demand, placed: PlacedLayers, telemetry: Tensor | None = None
) -> Plan:
    """The Plan of a quota that was not made by the solver: its peak, and a bound beside it."""
    peak = rank_cost(quota, placed.topology, demand.at_home).amax(-1)
    bound = torch.minimum(even_split(demand, placed).bound, peak)
    return Plan(placed, policy, quota, peak, bound, telemetry)


def sampled_plan(
    policy: Policy, weights: Tensor, demand: Demand, placed: PlacedLayers, telemetry: Tensor | None = None
) -> Plan:
    """The Plan of a policy whose copies draw their slots with these weights [..., P]."""
    bound = even_split(demand, placed).bound
    return Plan(placed, policy, None, None, bound, telemetry, weights)


def sample_seed(plan: Plan, rank: int) -> tuple[int, Tensor | None]:
    """The random stream of one rank, layer and batch of a sampled policy: seed and step of the ops that draw.

    Where the plan's step is a tensor, the op mixes it and the rank in; the policy's own step is added to the seed, as
    mixing adds them.
    """
    policy = plan.policy
    seed, step = (policy.seed, policy.step) if isinstance(policy, Seeded) else (0, 0)
    mixed = mix(seed, 0)  # else layer 1 of a seed would draw as layer 0 of the next
    seed = mix(mixed, plan.layer or 0)
    if isinstance(plan.step, Tensor):
        return (seed + step) % 2**64, plan.step
    return mix(mix(seed, step + plan.step), rank), None


def mix(seed: int, part: int) -> int:
    """One more number in a 64-bit seed, as csrc/random_word.h does."""
    seed = (seed + part + 1) * GOLDEN % 2**64
    return seed ^ seed >> 31


POLICIES: dict[str, type[Policy]] = {}
_DEFAULTS: dict[str, Policy] = {}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Makes a policy known by its name; one of your own, too, where this may stand as a decorator.

    Raises:
        ValueError: the name is taken.
    """
    if policy.name in POLICIES:
        raise ValueError(f"name must be a new one, policy {policy.name} exists")
    POLICIES[policy.name], _DEFAULTS[policy.name] = policy, policy()
    return policy


def make_policy(policy: str | Policy, options: dict[str, Any] | None = None) -> Policy:
    """A policy by name and options; a ready-made one passes through (and takes no options)."""
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options must be set on the policy itself, got {', '.join(options)}")
        return policy
    if not options and policy in POLICIES:
        return _DEFAULTS[policy]
    return make("policy", POLICIES, policy, options or {})


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a policy written ``name`` or ``name:option=value:option=value``."""
    return parse("policy", POLICIES, text)
