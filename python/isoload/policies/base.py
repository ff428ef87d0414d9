"""The protocol of an online policy, five methods with defaults, and the registry of policies by name.

A policy is a frozen dataclass whose fields are its options (docs/policies.md has their meanings). It never waits for a
device and never communicates between ranks: from the same loads every rank computes the same plan.

    plan          loads, placed -> Plan        fill, split and share, one after another
    fill          demand, placed -> placed     which experts the spare slots hold (default: none)
    split         demand, placed -> Plan       how many copies every slot takes (default: exact)
    share         loads, plan -> [R, P]        which source sends them (default: own rank first, then own node)
    route_shared  slots, plan -> [T, n]        rank of every token's shared experts (default: the token's rank)

Policies combine without a new class: a policy that fills spare slots takes the splitting policy as option ``split_by``,
a policy that places shared experts takes the policy of the routed experts as option ``routed``.
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
EVEN: dict[str, Any] = {"budget": 0, "sweeps": 0}  # plan_exact's start: copies spread evenly over replicas


class Demand(NamedTuple):
    """The copies of one batch (leading L as the placement's layers)."""

    loads: Tensor  # [E] or [R, E] int32 copies of the routed experts
    tokens: Tensor | None = None  # [R] int32 of each source that need the shared experts; None without any
    local_shared: Tensor | None = None  # [R] int32 shared copies if all stay on their token's rank
    gathered: Tensor | None = None  # [R, E + n] int32 loads, followed by the shared experts' columns
    rank: int | None = None  # the source rank whose part of the share is needed; None = none
    last: PlacedLayers | None = None

    @classmethod
    def of(cls, loads: Tensor, placed: PlacedLayers, rank: int | None = None) -> Demand:
        """Split loads into routed copies and tokens: the last num_shared columns count the tokens per source."""
        if placed.shared_home is None:
            return cls(loads, rank=rank)
        tokens = loads.select(-1, placed.host.num_routed)
        if values_readable(loads):
            check_tokens(tokens, placed.host.num_routed, placed.num_shared)
        local_shared = tokens
        if placed.num_shared > 1 or placed.shared_limits is not None:
            wide = widened(tokens)
            if placed.shared_limits is not None:  # some ranks hold no experts
                home = placed.shared_home.expand(wide.shape)
                wide = torch.zeros_like(wide).scatter_add_(-1, home, wide)
            local_shared = shared_copies(wide, placed.num_shared)
        return cls(loads.narrow(-1, 0, placed.host.num_routed), tokens, local_shared, loads, rank)

    @property
    def routed(self) -> Demand:
        return self if self.tokens is None else Demand(self.loads, last=self.last)


@dataclass(frozen=True)
class Policy:
    """Base of all policies. The base fills nothing, splits exactly and computes shared experts on the token's rank.

    Class attributes declare the requirements:
        needs: loads that the policy reads, [E] sums or [R, E] per source rank.
        borrows: whether the policy fills spare slots, so that weights must be copied there before the experts run.
        ahead: whether filling before the batch, from predicted loads, pays (isoload.balancing.planning.fill).
        samples: whether routed copies draw their slots; the plans then have weights and no quota (:class:`Seeded`).
        keeps_local: whether copies whose expert has a slot on their own rank always stay there.
        plans_on_host: whether the policy plans on the CPU; for loads on a GPU the host waits once per plan, or fill and
            split.
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
        """Whether plans can be made on the CPU only."""
        return False

    def __post_init__(self) -> None:
        """Validate the options. A subclass with rules of its own calls this method first."""
        if not torch.compiler.is_compiling():  # compiled code makes policies only from validated ones
            check_options(self)

    def check(self, placement: Placement) -> None:
        """Raise ValueError for a placement that the policy cannot plan."""

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

        Args:
            loads: [E] or [R, E] int32, checked, as :func:`isoload.plan` and the Balancer do.
            placed: the layer, or all layers.
            rank: the source rank whose send_counts are part of the plan; None = none.
            filled, step: see :func:`isoload.plan`.
            split: replaces :meth:`split`; see :func:`isoload.policies.borrowing.keeping_local`.
        """
        demand = Demand.of(loads, placed, rank)
        if filled is None:
            filled = self.fill(demand, placed)
        elif filled.host is not placed.host or filled.layer != placed.layer:
            raise ValueError(
                f"filled must be of the placement and layer that are planned, {placed.layer}, got {filled.layer}"
            )
        elif filled.quota is not None:  # that quota is of other loads
            filled = replace(filled, quota=None)
        plan = self.split(demand, filled) if split is None else split(demand, filled)
        if demand.tokens is not None:
            plan = with_shared(plan, demand, placed)
        if rank is not None and plan.send_counts is None and plan.quota is not None:
            plan = replace(plan, send_counts=plan.policy.share(demand.loads, plan, rank, "locality"))
        return replace(plan, step=step) if isinstance(step, Tensor) or step else plan

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        """Return the slots of this batch: the placement's slots, with spare slots filled if the policy borrows."""
        return placed

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        """Decide how many copies every slot takes, and where shared copies go (``plan.shared`` None: the token's rank).

        The quota is of the routed slots, unless ``plan.shared.in_quota``. The plan has the share of ``demand.rank`` as
        send_counts if the op also computes it.
        """
        return exact_plan(self, demand, placed)

    def share(self, loads: Tensor, plan: Plan, rank: int | None, order: Order) -> Tensor:
        """Return source ranks' parts of the routed quota, [..., P] or of all ranks [..., R, P]; `loads` [..., R, E]."""
        assert plan.quota is not None
        per_node = plan.topology.ranks_per_node
        return ops.share(loads, plan.quota, plan.tables, per_node, rank, order)

    def route_shared(self, slots: Tensor, plan: Plan, rank: int) -> Tensor:
        """Return the [T, n] int32 rank of every token's shared experts, from its routed slots [T, K]; -1 = no token."""
        assert plan.shared is not None
        placed, by_rank = plan.placed, plan.shared.by_rank
        if by_rank is None:
            home = torch.where((slots >= 0).any(1, keepdim=True), placed.home_rank(rank), -1)
            return home.to(torch.int32).expand(-1, placed.num_shared)
        size, row = placed.host.slots_per_rank, by_rank.select(0, rank)
        return ops.route_shared(slots, row, size, rank, placed.num_shared)


def with_shared(plan: Plan, demand: Demand, placed: PlacedLayers) -> Plan:
    assert demand.tokens is not None and demand.local_shared is not None
    shared = plan.shared or SharedPlan("home", demand.tokens)
    if shared.in_quota:
        return plan
    if plan.quota is not None and shared.is_met:
        if shared.by_rank is None:
            copies = (demand.local_shared // placed.num_shared).unsqueeze(-1)
        else:
            copies = per_expert(shared.by_rank, placed.num_shared).sum(-3, dtype=torch.int32)
        shared_part(plan.quota, placed).add_(copies)  # the split left 0 in these slots
    return replace(plan, shared=shared)


def shared_part(per_slot: Tensor, placed: PlacedLayers) -> Tensor:
    """Return a view [..., R, n] of the shared slots of per_slot [..., P]."""
    per_rank = per_slot.view(*per_slot.shape[:-1], placed.topology.num_ranks, -1)
    return per_rank.narrow(-1, placed.first_shared, placed.num_shared)


@dataclass(frozen=True)
class Seeded(Policy):
    """Base of policies that sample. Options: seed, and step (number of the batch; a plan's own step is added)."""

    seed: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed("seed", self.seed)
        check_seed("step", self.step)

    def weights_of(self, plan: Plan, rank: int) -> Tensor:
        """Return the [..., P] float32 weights by which a source rank's copies draw their slots, for a sampled plan."""
        assert plan.weights is not None
        return plan.weights


def check_seed(name: str, seed: int) -> None:
    if seed < 0:
        raise ValueError(f"{name} must be at least 0, got {seed}")


def sum_sources(loads: Tensor, placed: PlacedLayers) -> Tensor:
    """Return the [..., E] copies per expert, from loads with or without a source dimension."""
    return loads if loads.dim() == placed.home_slot.dim() else loads.sum(-2, dtype=torch.int32)


def exact_plan(
    policy: Policy, demand: Demand, placed: PlacedLayers, rank: int | None = None, **options: Any
) -> Plan:
    """Return the Plan with the optimal quota of these slots, and a source rank's send_counts. `options`: of
    :func:`isoload.ops.plan_exact`. By default the ranks also carry the shared copies of their own tokens."""
    split = solve(demand, placed, rank=rank, **options)
    send_counts = None if rank is None else split.send_counts
    return Plan(
        placed, policy, split.quota, split.peak, split.bound, split.telemetry, send_counts=send_counts
    )


def solve(demand: Demand, placed: PlacedLayers, **options: Any) -> ops.ExactSplit:
    """Run :func:`isoload.ops.plan_exact` on these slots, by default above the shared copies of own tokens."""
    per_node = placed.topology.ranks_per_node
    how = {"fixed": demand.local_shared, "ticks": placed.ticks, "ranks_per_node": per_node, **options}
    return ops.plan_exact(demand.loads, placed.tables, **how)


def even_split(demand: Demand, placed: PlacedLayers) -> ops.ExactSplit:
    """Return the exact solver's start: copies spread evenly over replicas, with a lower bound that needs no search."""
    return solve(demand, placed, **EVEN)


def chosen_plan(
    policy: Policy, quota: Tensor, demand: Demand, placed: PlacedLayers, telemetry: Tensor | None = None
) -> Plan:
    peak = rank_cost(quota, placed.topology, demand.local_shared).amax(-1)
    bound = torch.minimum(even_split(demand, placed).bound, peak)
    return Plan(placed, policy, quota, peak, bound, telemetry)


def sampled_plan(
    policy: Policy, weights: Tensor, demand: Demand, placed: PlacedLayers, telemetry: Tensor | None = None
) -> Plan:
    bound = even_split(demand, placed).bound
    return Plan(placed, policy, None, None, bound, telemetry, weights)


def sample_seed(plan: Plan, rank: int) -> tuple[int, Tensor | None]:
    """Return the random stream of one rank, layer and batch of a sampled policy: seed and step of the ops that draw. If
    the plan's step is a tensor, the op mixes the step and the rank in. The policy's own step is added to the seed,
    which gives the same result as adding it to the batch's step."""
    policy = plan.policy
    seed, step = (policy.seed, policy.step) if isinstance(policy, Seeded) else (0, 0)
    mixed = mix(seed, 0)  # otherwise layer 1 of a seed would draw as layer 0 of the next seed
    seed = mix(mixed, plan.layer or 0)
    if isinstance(plan.step, Tensor):
        return (seed + step) % 2**64, plan.step
    return mix(mix(seed, step + plan.step), rank), None


def mix(seed: int, part: int) -> int:
    """Mix one more number into a 64-bit seed, as csrc/random_word.h does."""
    seed = (seed + part + 1) * GOLDEN % 2**64
    return seed ^ seed >> 31


POLICIES: dict[str, type[Policy]] = {}
_DEFAULTS: dict[str, Policy] = {}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Register a policy class under its name, which must be new; also usable as a decorator for your own policies."""
    if policy.name in POLICIES:
        raise ValueError(f"name must be a new one, policy {policy.name} exists")
    POLICIES[policy.name], _DEFAULTS[policy.name] = policy, policy()
    return policy


# Settings of papers under a name, for policies that re-implement a listing.
PRESETS = {
    # LLEP, section 5.1: lambda is a ratio of experts.
    "llep_section_5_1": "llep_published:rule=paper:capacity=1.0:min_chunk=1024:threshold=1.3:measure=expert",
    # Libra, section 5.2: N = 8, half of them the rank's own choice.
    "libra_section_5_2": "libra_published:slots=8:alpha=0.5",
}


def make_policy(policy: str | Policy, options: dict[str, Any] | None = None) -> Policy:
    """Return a policy from its name, or a preset's, and options; a Policy is returned unchanged, without options."""
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options must be set on the policy itself, got {', '.join(options)}")
        return policy
    if policy in PRESETS:
        policy, preset = parse_policy(policy)
        options = {**preset, **(options or {})}
    if not options and policy in POLICIES:
        return _DEFAULTS[policy]
    return make("policy", POLICIES, policy, options or {})


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and options of a policy written ``name`` or ``name:option=value:option=value``; expand a preset."""
    name, colon, options = text.partition(":")
    return parse("policy", POLICIES, PRESETS.get(name, name) + colon + options)
