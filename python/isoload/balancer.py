"""Balancer: from a router's topk_ids to slots, for one layer; what engines and the layer call.

    count -> gather -> plan -> share -> route

Every call allocates its own results and writes nothing that an earlier call returned: two batches may be in flight,
and a second captured graph leaves the first alone. What persists are the layer's tables, refreshed in place by
:meth:`Balancer.load`. The gather is the only exchange: all Balancers of a group must be called in one order on all
ranks, so give them a group of their own (:meth:`isoload.CollectiveGroup.own`), which no other collective shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from isoload.counting import count
from isoload.ops import Numbered, Prefer, count_columns, count_numbered, gather_rows
from isoload.placed_layers import Filled, PlacedLayers, own_layers, refresh_layers
from isoload.placement import Placement, check_same_shape
from isoload.planning import plan
from isoload.policies import Policy, Seeded, make_policy
from isoload.policies.at_gather import PlanAtGather, is_plan_of, plan_at_gather
from isoload.records import Plan
from isoload.routing import route_counted, route_fixed
from isoload.shared_experts import without_shared_slots
from isoload.steps import first_step, in_backward, next_step
from isoload.topology import Topology
from isoload.transport import Group, LocalGroup, checksum, error_code
from isoload.transport.agreement import placement_facts
from isoload.value_checks import may_be_kept

if TYPE_CHECKING:
    from isoload.online.recorder import Recorder

Tokens = Literal["own", "same"]


@dataclass(frozen=True, eq=False)
class Gathered:
    """One batch, counted: topk_ids [T, K] of every owned rank, loads [R, E], and what was gathered beside them [R, W].

    Where nothing will be planned, nothing is gathered: loads are the owned ranks' own counts. numbered: of every owned
    rank's topk_ids, or None where its route has no use for it.
    """

    topk_ids: list[Tensor]
    numbered: Sequence[Numbered | None]
    loads: Tensor
    planned: bool
    beside: Tensor | None = None
    plan: Plan | None = None  # which the gather made


@dataclass(frozen=True, eq=False)
class Balanced:
    """One batch on its way: topk_ids [T, K] of every owned rank, loads as gathered, and the plan, if there is one."""

    topk_ids: list[Tensor]
    numbered: Sequence[Numbered | None]
    loads: Tensor
    plan: Plan | None


class Balancer:
    """Balances one layer: logical experts in, slots out.

    Args:
        placement: where the experts lie.
        layer: position of this layer in the placement.
        policy: a name in isoload.POLICIES or a Policy; options go with the name. One that borrows names experts in
            ``last_plan`` whose weights must be copied before the experts run (the layer does so).
        group: joins the ranks, one for all layers. None: one rank, or tokens="same".
        tokens: "own": each rank has its own rows, and loads are gathered over the group. "same": all ranks hold the
            same rows, as tensor-parallel serving without an all-to-all does; nothing is exchanged, and every rank
            computes the same slots. All rows count as rank 0's, which is then home to all shared copies: choose
            waterfill or joint where the placement has shared experts.
        prefer: see :func:`isoload.route`.
        min_tokens: with fewer tokens over all ranks nothing is gathered or planned: each expert goes to its ``static``
            replica, shared ones stay home, and last_plan is None. The same on all ranks.
        shared_columns: whether topk_ids carry the shared experts in their last columns, as
            :func:`isoload.append_shared_expert` adds them. False: the Balancer adds them.

    Raises:
        ValueError: naming the argument, the rule and the value; on the other ranks naming the rank.
    """

    def __init__(
        self,
        placement: Placement,
        layer: int = 0,
        policy: str | Policy = "exact",
        group: Group | None = None,
        tokens: Tokens = "own",
        *,
        prefer: Prefer | None = None,
        min_tokens: int = 0,
        shared_columns: bool = True,
        **options: Any,
    ) -> None:
        group = LocalGroup(Topology(1)) if group is None and placement.topology.num_ranks == 1 else group
        if tokens not in ("own", "same"):
            raise ValueError(f"tokens must be own or same, got {tokens!r}")
        if tokens == "own" and group is None:
            raise ValueError(
                f"group must join the {placement.topology.num_ranks} ranks for tokens='own', got None"
            )
        self.placement, self.layer, self.group, self.tokens = placement, layer, group, tokens
        self.prefer, self.min_tokens, self.shared_columns = prefer, min_tokens, shared_columns
        self.batch = 0  # batches so far
        self.last_plan: Plan | None = None
        self.recorder: Recorder | None = None  # counts every batch, planned or not
        self.last_loads: Tensor | None = None  # [R, E] of the last plan
        self._own: dict[torch.device, PlacedLayers] = {}
        self._steps: dict[torch.device, Tensor] = {}  # [] int64, batches that drew: read by captured graphs
        self._checksums: dict[str, int] = {}
        if group is None:
            self._check(make_policy(policy, options))
            return
        with group.agreeing("construction") as facts:
            self._check(make_policy(policy, options))
            facts.update({"layer": layer, "policy": self.policy, "min_tokens": min_tokens, "tokens": tokens})
            facts.update(placement_facts(placement, layer))

    @classmethod
    def from_slots(
        cls,
        slot_to_expert: Tensor,
        topology: Topology,
        num_experts: int,
        *,
        num_shared: int = 0,
        **how: Any,
    ) -> Balancer:
        """From an engine's table: slot_to_expert [P], its physical-to-logical map of one layer; see Placement."""
        slots = torch.as_tensor(slot_to_expert).unsqueeze(0)
        return cls(Placement(slots, topology, num_experts, num_shared=num_shared), **how)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "recorder": None}  # which tells layers apart: a copy does not record

    @property
    def policy(self) -> Policy:
        """What plans; another may be set between batches, the same on all ranks."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        policy.check(self.placement)
        self._policy = policy
        self._checksums["checksum of policy"] = checksum(policy)

    @property
    def facts(self) -> dict[str, int]:
        """Integers that must be equal on all ranks in a batch; they travel with the loads and with the row counts."""
        return {"layer": self.layer, "batch number": self.batch, **self._checksums}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose tokens this process routes; with tokens="same" all ranks route as rank 0 would."""
        return (0,) if self.group is None or self.tokens == "same" else self.group.ranks

    def __call__(
        self,
        topk_ids: Tensor | Sequence[Tensor],
        num_valid: int | Tensor | None = None,
        num_tokens: int | None = None,
    ) -> Tensor | list[Tensor]:
        """The slot of every token copy.

        Args:
            topk_ids: [T, K] int32 or int64 logical experts of this rank's tokens; -1 = masked. T may differ between
                ranks and be 0. A list over the owned ranks, where this process owns several.
            num_valid: rows from here on are padding: neither counted nor routed. A tensor is not read on the host.
            num_tokens: tokens over all ranks, or an upper bound of them, the same on all ranks; compared with
                min_tokens. None: with tokens="same" T, else unknown, and the batch is planned.

        Returns:
            [T, K] slots in the dtype of topk_ids, -1 where masked: DeepEP's ``topk_idx``.

        Raises:
            ValueError: naming the argument, the rule and the value, on the other ranks naming the rank and the stage.
        """
        ids = [topk_ids] if isinstance(topk_ids, Tensor) else list(topk_ids)
        failure = None
        try:
            ids = [self._masked(rows, num_valid) for rows in ids]
        except ValueError as error:
            failure = error
        slots = self.route(self.balance(ids, num_tokens, failure))
        return slots[0] if isinstance(topk_ids, Tensor) else slots

    def plans(self, num_tokens: int | None) -> bool:
        """Whether a batch of so many tokens is planned: known on the host, and alike on all ranks."""
        small = num_tokens is not None and num_tokens < self.min_tokens
        return self.has_freedom and not small

    def balance(
        self, topk_ids: list[Tensor], num_tokens: int | None = None, failure: Exception | None = None
    ) -> Balanced:
        """:meth:`gather` and :meth:`plan`: all of a call but the route."""
        return self.plan(self.gather(topk_ids, num_tokens, failure))

    def gather(
        self,
        topk_ids: list[Tensor],
        num_tokens: int | None = None,
        failure: Exception | None = None,
        tell: Callable[[], None] | None = None,
        facts: Mapping[str, int] | None = None,
        beside: list[Tensor] | None = None,
    ) -> Gathered:
        """Counts and gathers. All ranks call it together.

        Args:
            topk_ids: of the owned ranks, as the call takes them; not read where there is a failure.
            num_tokens: see :meth:`__call__`.
            failure: why this process has no choices. The gather carries the fact to the other ranks; it is raised here.
            tell: called before a failure of this process is raised that the other ranks have not raised yet: where
                nothing is gathered, and on a device, whose errors the host reads later.
            facts: more integers that all ranks must give alike, beside :attr:`facts`.
            beside: [W] int32 of every owned rank, gathered with the loads; W is the same on all ranks.
        """
        tell = (lambda: None) if tell is None else tell
        if not torch.compiler.is_compiling():  # which would compile anew for every number
            self.batch += 1
        if self.tokens == "same" and num_tokens is None and topk_ids:
            num_tokens = len(topk_ids[0])
        planned = self.plans(num_tokens)
        counts: list[Tensor] = []
        numbered: Sequence[Numbered | None] = []
        if failure is None:
            try:
                topk_ids, counts, numbered = self._count(topk_ids, planned)
                self._record(counts)
            except ValueError as error:
                failure = error
        self.last_plan = self.last_loads = None
        if not planned:
            if failure is not None:
                tell()
                raise failure
            return Gathered(topk_ids, numbered, torch.stack(counts), False)
        rows = counts
        if beside is not None and failure is None:
            rows = [torch.cat(parts) for parts in zip(counts, beside, strict=True)]
        width = self.placement.num_experts + (0 if beside is None else len(beside[0]))
        ahead = None
        if beside is None and failure is None and len(self.ranks) == 1:
            ahead = plan_at_gather(self.policy, self.placed_on(rows[0].device), rows[0])
        gathered = self._gather(rows, width, failure, tell, {**self.facts, **(facts or {})}, ahead)
        if beside is None:
            return Gathered(topk_ids, numbered, gathered, True, plan=ahead.plan if ahead else None)
        loads, more = gathered.split([self.placement.num_experts, len(beside[0])], dim=1)
        return Gathered(topk_ids, numbered, loads, True, more)

    def plan(self, gathered: Gathered, filled: Filled | None = None, keep_local: bool = False) -> Balanced:
        """Plans a batch, if it is to be planned; filled and keep_local as in :func:`isoload.plan`."""
        topk_ids, numbered, loads = gathered.topk_ids, gathered.numbered, gathered.loads
        if not gathered.planned:
            return Balanced(topk_ids, numbered, loads, None)
        self.last_loads = loads
        placed = self.placed_on(loads.device)
        if filled is None and not keep_local and is_plan_of(gathered.plan, self.policy, placed):
            self.last_plan = gathered.plan
            return Balanced(topk_ids, numbered, loads, self.last_plan)
        step = next_step(self._step_on(loads.device)) if isinstance(self.policy, Seeded) else 0
        rank = self.ranks[0] if len(self.ranks) == 1 else None
        how: dict[str, Any] = {"filled": filled, "keep_local": keep_local, "step": step, "rank": rank}
        self.last_plan = plan(loads, placed, None, self.policy, **how)
        return Balanced(topk_ids, numbered, loads, self.last_plan)

    def route(self, balanced: Balanced) -> list[Tensor]:
        """[T, K] slots of every owned rank's copies: as planned or, without a plan, where they always go."""
        of_rank = zip(self.ranks, balanced.topk_ids, balanced.numbered, strict=True)
        loads, made = balanced.loads, balanced.plan
        if made is None:
            return [route_fixed(ids, self.placed_on(ids.device), rank) for rank, ids, _ in of_rank]
        return [route_counted(ids, n, loads, made, rank, prefer=self.prefer) for rank, ids, n in of_rank]

    def load(self, placement: Placement) -> None:
        """Takes a new placement in place: no address changes, so captured graphs stay valid. Between batches.

        Args:
            placement: of the same topology, layers, experts, shared experts, slots and spare slots.

        Raises:
            ValueError: on all ranks, naming the argument, the rule and the value, or the fact in which ranks differ.
        """
        if self.group is None:
            check_same_shape(self.placement, placement)
        else:
            with self.group.agreeing("placement") as facts:
                check_same_shape(self.placement, placement)
                facts.update(placement_facts(placement, self.layer))
        self.settle(placement)

    def settle(self, placement: Placement) -> None:
        """:meth:`load` of a placement that all ranks have agreed on already."""
        self.placement, self.has_freedom = placement, placement.has_freedom[self.layer]
        self._checksums["checksum of placement"] = checksum(
            list(placement_facts(placement, self.layer).values())
        )
        for device, own in self._own.items():
            self._own[device] = refresh_layers(own, placement.layer(self.layer, device))

    def placed_on(self, device: torch.device) -> PlacedLayers:
        """The layer's own tables on a device, which :meth:`load` writes in place."""
        if device in self._own:
            return self._own[device]
        own = own_layers(self.placement.layer(self.layer, device))
        if may_be_kept(own.home_slot):
            self._own[device] = own
            with torch.inference_mode(False):  # else only inference could advance it
                self._steps[device] = first_step(device)
        return own

    def _step_on(self, device: torch.device) -> Tensor:
        return self._steps[device] if device in self._steps else first_step(device)

    def routed_ids(self, slots: Tensor) -> Tensor:
        """Slots numbered as if the shared experts had none: an engine's physical ids of routed experts; -1 stays."""
        return without_shared_slots(slots, self.placement.slots_per_rank, self.placement.num_shared)

    def _masked(self, topk_ids: Tensor, num_valid: int | Tensor | None) -> Tensor:
        """topk_ids with its padding rows masked."""
        if topk_ids.dim() != 2:
            raise ValueError(f"topk_ids must be [T, K], got {list(topk_ids.shape)}")
        if num_valid is None:
            return topk_ids
        row = torch.arange(len(topk_ids), device=topk_ids.device)
        return topk_ids.masked_fill((row >= num_valid).unsqueeze(1), -1)

    def _count(
        self, topk_ids: list[Tensor], planned: bool
    ) -> tuple[list[Tensor], list[Tensor], Sequence[Numbered | None]]:
        """Of every owned rank: ids with shared columns, their counts; numbers too, where the route looks them up."""
        experts, num_shared = self.placement.num_experts, self.placement.num_shared
        numbers = planned and self.prefer is None and not self.policy.samples
        if num_shared and not self.shared_columns:
            added = [count_columns(rows, self.placement.num_routed, num_shared) for rows in topk_ids]
            topk_ids, numbered = [ids for ids, _ in added], [found for _, found in added]
        elif numbers:
            numbered = [count_numbered(rows, experts) for rows in topk_ids]
        else:
            return topk_ids, [count(rows, experts) for rows in topk_ids], [None] * len(topk_ids)
        return topk_ids, [found.counts for found in numbered], numbered if numbers else [None] * len(topk_ids)

    def _record(self, counts: list[Tensor]) -> None:
        # A checkpoint's recompute counts no batch again.
        if self.recorder is not None and (torch.compiler.is_compiling() or not in_backward()):
            self.recorder.add(self.layer, counts, self)

    def _gather(
        self,
        rows: list[Tensor],
        width: int,
        failure: Exception | None,
        tell: Callable[[], None],
        facts: Mapping[str, int],
        ahead: PlanAtGather | None,
    ) -> Tensor:
        """[R, width] counts of all ranks. With tokens="same" rank 0 stands for the one source there is."""
        if self.tokens == "same":
            if failure is not None:
                raise failure
            others = self.placement.topology.num_ranks - 1
            return torch.nn.functional.pad(rows[0].unsqueeze(0), (0, 0, 0, others))
        assert self.group is not None
        if failure is None:
            return self.group.gather_loads(rows, None, facts, ahead or gather_rows)
        nothing = torch.zeros(width, dtype=torch.int32, device=self._device())
        try:
            owned = len(self.ranks)
            self.group.gather_loads([nothing] * owned, [error_code("count")] * owned, facts)
        except ValueError:
            raise failure from None
        tell()
        raise failure

    def _device(self) -> torch.device:
        """Where this layer's tables are."""
        return next(iter(self._own), torch.device("cpu"))

    def _check(self, policy: Policy) -> None:
        """What construction refuses."""
        topology, group = self.placement.topology, self.group
        if group is not None and group.topology.num_ranks != topology.num_ranks:
            raise ValueError(
                f"placement must be for the group's {group.topology.num_ranks} ranks, got {topology.num_ranks}"
            )
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")
        self.policy = policy
        self.placed_on(torch.device("cpu"))  # refuses a layer that is not there
        self.settle(self.placement)
