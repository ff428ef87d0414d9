"""Balancer: turn a router's topk_ids into slots, for one layer. Engines and the MoE layer call it.

    mask -> count -> exchange -> plan -> route

Every call allocates its own results, so two batches may be in flight, and capturing a second graph does not change the
first. :meth:`Balancer.load` refreshes the tables in place. All ranks call the Balancers of a group in the same order,
and no other collective may use that group (:meth:`isoload.CollectiveGroup.own`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from isoload import ops
from isoload.balancing.counting import check_one_each, count_owned, without_padding
from isoload.balancing.known_routes import KnownPlan
from isoload.balancing.own_counts import Loads, OwnCounts, make_own_counts
from isoload.balancing.planning import Gathered
from isoload.balancing.routing import route_counted, route_fixed, route_sent
from isoload.balancing.targets import Exchanged, exchange
from isoload.checks import check_whole_number, may_be_kept
from isoload.ops import Counted
from isoload.placement.placed_layers import PlacedLayers, own_layers, refreshing
from isoload.placement.placement import Placement, check_same_shape, position
from isoload.policies import Policy, Seeded, make_policy
from isoload.policies.borrowing import keeping_local
from isoload.policies.exact import ExactPolicy
from isoload.policies.plan import Plan, first_step, in_backward, next_step
from isoload.topology import Topology
from isoload.transport import Call, Group, LocalGroup, checksum
from isoload.transport.group import placement_facts
from isoload.wording import amount

Tokens = Literal["own", "same"]


# Arguments that were removed, with their replacements.
REMOVED = {
    "gather": "the counts of every source are gathered",
    "price": "the targets of loads='own' and 'node' need none",
}


class BatchRecorder(Protocol):
    """Protocol of an object that counts every batch, for example :class:`isoload.online.Recorder`. The next batch may
    overwrite the memory of counts and ids."""

    def add(
        self, layer: int, counts: Sequence[Tensor], source: object, top_k: int, ids: Sequence[Tensor], /
    ) -> None: ...


class Balancer:
    """Maps logical experts to slots so that the ranks of one MoE layer are equally loaded.

    Args:
        placement: which slots hold which experts.
        layer: position of this layer in the placement.
        layer_id: the model's own number of this layer; replaces layer.
        policy: a name in isoload.POLICIES or a Policy; options go with the name. With a policy that borrows,
            ``last_plan`` names the experts whose weights must be copied before the experts run. Only the MoE layer
            copies them itself.
        group: communication of the ranks; all layers share one. None: a single rank, or tokens="same".
        tokens: "own": each rank has its own rows. "same": all ranks hold the same rows, as in tensor-parallel serving
            without an all-to-all; nothing is exchanged, and every rank computes the same slots. All rows count as rank
            0's, which would compute all shared copies: choose waterfill or joint where there are shared experts.
        loads: "gathered": plan from the counts of all ranks, gathered in the forward; the plan has a certificate.
            "node": from the counts of each node, gathered within it. "own": from each rank's own counts, without an
            exchange. "node" and "own" split towards targets that :meth:`exchange` renews
            (:mod:`isoload.balancing.own_counts`). Their policy is exact, shared experts stay on the token's rank, and
            last_plan is None.
        min_tokens: batches with fewer tokens over all ranks are neither gathered nor planned: each routed expert uses
            its ``static`` replica, shared experts stay local, and last_plan is None. Must be the same on all ranks.
        shared_columns: whether the last columns of topk_ids are the shared experts, as
            :func:`isoload.ops.append_shared_expert` adds them. False: the Balancer adds these columns.

    Raises:
        ValueError: on all ranks; the other ranks' message names the rank that failed.
    """

    own_counts: OwnCounts | None = None  # counts and targets with loads="own" or "node", else None
    exchanges = False  # whether ranks exchange counts in a batch that is planned

    def __new__(
        cls,
        placement: Placement | None = None,
        layer: int = 0,
        policy: str | Policy = "exact",
        group: Group | None = None,
        tokens: str = "own",
        *,
        loads: str = "gathered",
        **_: Any,
    ) -> Balancer:
        if cls is Balancer:
            by_loads = OwnOrNodeCounts if loads in ("own", "node") else AllCounts
            cls = SameTokens if tokens == "same" else by_loads
        return super().__new__(cls)

    def __init__(
        self,
        placement: Placement,
        layer: int = 0,
        policy: str | Policy = "exact",
        group: Group | None = None,
        tokens: Tokens = "own",
        *,
        min_tokens: int = 0,
        shared_columns: bool = True,
        loads: Loads = "gathered",
        layer_id: int | None = None,
        **options: Any,
    ) -> None:
        if tokens not in ("own", "same"):
            raise ValueError(f"tokens must be own or same, got {tokens!r}")
        num_ranks = placement.topology.num_ranks
        if tokens == "own" and group is None and num_ranks > 1:
            raise ValueError(
                f"group must be given for {num_ranks} ranks with tokens of their own: pass LocalGroup or "
                "CollectiveGroup.own(topology), got None"
            )
        self.placement, self.layer, self.tokens = placement, layer, tokens
        self.group = LocalGroup(Topology(1)) if group is None else group
        # Ranks whose tokens this process routes. With the same rows on all ranks, every process routes as rank 0.
        self.ranks = (0,) if tokens == "same" else self.group.ranks
        self.min_tokens, self.shared_columns = min_tokens, shared_columns
        self.loads, self.batch = loads, 0  # number of batches so far
        self.last_plan: Plan | None = None
        self.recorder: BatchRecorder | None = None  # counts every batch, planned or not
        self.last_loads: Tensor | None = None  # [R, E] of the last plan
        self.num_experts = placement.num_experts
        self._own: dict[torch.device, PlacedLayers] = {}
        self._steps: dict[torch.device, Tensor] = {}  # [] int64 batches that drew samples, read by graphs
        self._checksums: dict[str, int] = {}
        with self.group.agreeing("construction") as facts:
            self.layer = layer = position(placement, layer, layer_id)
            counts = make_own_counts(loads, tokens, placement, self.group)
            if counts is not None:
                self.own_counts = counts
            if group is not None and group.topology.num_ranks != num_ranks:
                raise ValueError(
                    f"placement must be for the group's {group.topology.num_ranks} ranks, got {num_ranks}"
                )
            if min_tokens < 0:
                raise ValueError(f"min_tokens must be at least 0, got {min_tokens}")
            if removed := next((name for name in options if name in REMOVED), None):
                raise ValueError(f"{removed}= was removed: {REMOVED[removed]}")
            self.policy = make_policy(policy, options)
            self.placed_on(torch.device("cpu"))  # raises if the placement has no such layer
            self.prepare_load(placement)()
            facts.update({"layer": layer, "policy": self.policy, "min_tokens": min_tokens})
            facts.update({"tokens": tokens, "loads": loads})
            facts.update(placement_facts(placement, layer))
        if self.own_counts is not None:
            self.own_counts.join()

    def __getstate__(self) -> dict[str, Any]:
        # A recorder identifies layers by object, so a copy must not record.
        return {**self.__dict__, "recorder": None}

    def __repr__(self) -> str:
        host = self.placement
        layer, ranks = f"layer {self.layer} of {host.num_layers}", amount(host.topology.num_ranks, "rank")
        return f"Balancer({self.policy.name}, {layer}, {ranks}, {self.tokens} tokens, {self.loads} loads)"

    @property
    def policy(self) -> Policy:
        """Policy that makes the plans. It may be replaced between batches, identically on all ranks."""
        return self._policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        if self.own_counts is not None:
            self.own_counts.check(policy)
        policy.check(self.placement)
        self._policy, self._draws = policy, isinstance(policy, Seeded)
        self._checksums["checksum of policy"] = checksum(policy)

    @property
    def facts(self) -> dict[str, int]:
        """Integers that must be equal on all ranks in a batch; they travel with the loads and with the row counts."""
        return {"layer": self.layer, "batch number": self.batch, **self._checksums}

    def __call__(
        self,
        topk_ids: Tensor | Sequence[Tensor],
        num_valid: int | Tensor | None = None,
        num_tokens: int | None = None,
    ) -> Tensor | list[Tensor]:
        """Return the slot of every token copy.

        Args:
            topk_ids: [T, K] int32 or int64 logical experts of this rank's tokens; -1 = masked. T may differ between
                ranks and be 0. A list over the owned ranks where this process owns several.
            num_valid: rows from this one on are padding. An integer, or a tensor [] that is not read on the host.
            num_tokens: tokens over all ranks, or an upper bound, the same on all ranks; compared with min_tokens. None:
                T with tokens="same", otherwise unknown, and the batch is planned.

        Returns:
            [T, K] slots in the dtype of topk_ids, -1 where masked: DeepEP's ``topk_idx``.

        Raises:
            ValueError: on all ranks, like any other exception before the gather, KeyboardInterrupt included.
        """
        try:
            ranks = [topk_ids] if isinstance(topk_ids, Tensor) else list(topk_ids)
            ids = [without_padding(rows, num_valid) for rows in ranks]
        except BaseException as error:
            self.gather([], num_tokens, Call(self.group, failure=error))  # in which the other ranks raise
            raise
        slots = self.route(self.balance(ids, num_tokens))
        return slots[0] if isinstance(topk_ids, Tensor) else slots

    def _begin(self, device: torch.device) -> PlacedLayers:
        if not torch.compiler.is_compiling():  # the compiler would recompile for every number
            self.batch += 1
        self.last_plan = self.last_loads = None
        return self.placed_on(device)

    def _record(self, counts: list[Tensor], ids: list[Tensor]) -> None:
        """Add a batch, with ids [T, K] of every owned rank, to the recorder, if any; a recomputed one is not added."""
        if self.recorder is not None and not in_backward():
            self.recorder.add(self.layer, counts, self, ids[0].shape[1] - self.placement.num_shared, ids)

    def plans(self, num_tokens: int | None) -> bool:
        """Return whether a batch of this many tokens is planned: a host decision, the same on all ranks."""
        if num_tokens is None:
            return self.has_freedom
        check_whole_number("num_tokens", num_tokens)
        return self.has_freedom and num_tokens >= self.min_tokens

    def balance(
        self, topk_ids: list[Tensor], num_tokens: int | None = None, call: Call | None = None
    ) -> Gathered:
        """Run :meth:`gather` and :meth:`plan`: all steps of a call except the route."""
        return self.plan(self.gather(topk_ids, num_tokens, call))

    def gather(
        self,
        topk_ids: list[Tensor],
        num_tokens: int | None = None,
        call: Call | None = None,
        more: list[Tensor] | None = None,
    ) -> Gathered:
        """Count the batch and gather the loads. All ranks call it together.

        Args:
            topk_ids: as for a call, one tensor per owned rank; not read if call has failed.
            num_tokens: see :meth:`__call__`.
            call: carries an earlier failure, which the gather transmits to the other ranks, and facts that must agree.
            more: [W] int32 of every owned rank, gathered with the loads; W is the same on all ranks.
        """
        if not torch.compiler.is_compiling():  # the compiler would recompile for every number
            self.batch += 1
        call = Call(self.group) if call is None else call
        planned = self.has_freedom  # so the other ranks gather, unless num_tokens excludes it
        counted: list[Counted] = []
        rows: list[Tensor] = []
        with call:
            if self.tokens == "same" and num_tokens is None and topk_ids:
                num_tokens = len(topk_ids[0])
            planned = self.plans(num_tokens)
            call.raise_failure()
            check_one_each(topk_ids, len(self.ranks))
            counted = count_owned(topk_ids, self.placement, self.shared_columns)
            rows = [rank.counts for rank in counted]
            self._record(rows, [rank.ids for rank in counted])
            if more is not None:
                rows = [torch.cat(parts) for parts in zip(rows, more, strict=True)]
        self.last_plan = self.last_loads = None
        call.facts = {**self.facts, **call.facts}
        width = self.num_experts if more is None else self.num_experts + len(more[0])
        if planned:
            loads = self._exchange(rows, width, call)
        else:
            if call.failure is not None:
                call.stop()
            loads = torch.stack(rows)
        if more is None or not planned:
            return Gathered(counted, loads, planned)
        beside = loads.narrow(1, self.num_experts, width - self.num_experts)
        return Gathered(counted, loads.narrow(1, 0, self.num_experts), True, beside)

    def _exchange(self, rows: list[Tensor], width: int, call: Call) -> Tensor:
        """Return the loads of a batch that is planned, from rows [width] of every owned rank."""
        raise NotImplementedError

    def plan(self, batch: Gathered, filled: PlacedLayers | None = None, keep_local: bool = False) -> Gathered:
        """Plan the batch unless it is too small or has no freedom; filled and keep_local as in :func:`isoload.plan`."""
        if batch.planned:
            loads, rank = batch.loads, self.ranks[0] if len(self.ranks) == 1 else None
            placed, step = self.placed_on(loads.device), self._step(loads.device)
            split = keeping_local(self._policy) if keep_local else None
            self.last_loads = loads
            self.last_plan = batch.plan = plan = self._policy.plan(
                loads, placed, rank, filled=filled, split=split, step=step
            )
            batch.send_counts = None if plan.send_counts is None else [plan.send_counts]
        return batch

    def follow(self, topk_ids: list[Tensor], plan: KnownPlan | None, call: Call) -> Gathered:
        """Count the batch and take a plan of :class:`isoload.KnownRoutes`, without a gather. All ranks call it.

        The plan is of the same micro-batch on all ranks. `call` transmits failures and the plan's checksum with the row
        counts.
        """
        self.batch += 1
        self.last_plan = self.last_loads = None
        with call:
            call.raise_failure()
            if not isinstance(plan, KnownPlan):
                raise ValueError(f"plan must be one of KnownRoutes.plans(), got {type(plan).__name__}")
            if self.own_counts is not None:
                raise ValueError(f"plan needs a layer with loads='gathered', got loads={self.loads!r}")
            check_one_each(topk_ids, len(self.ranks))
            counted = count_owned(topk_ids, self.placement, self.shared_columns)
            chosen = plan.placed_in(self.placed_on(counted[0].counts.device))
            plan.check(counted, self.ranks)
            rows = [rank.counts for rank in counted]
            self._record(rows, [rank.ids for rank in counted])
        call.facts = {**self.facts, "checksum of the plan": getattr(plan, "number", 0), **call.facts}
        if call.failure is not None:
            call.stop()
        assert plan is not None
        step = self._step(plan.loads.device)
        chosen = replace(chosen, step=step) if self._draws else chosen
        self.last_plan, self.last_loads = chosen, plan.loads
        sent = chosen.send_counts if self.ranks == (plan.rank,) else None
        return Gathered(counted, plan.loads, True, None, chosen, None if sent is None else [sent])

    def _step(self, device: torch.device) -> int | Tensor:
        """Return the number of this batch, on the device if the policy draws samples, else 0."""
        if not self._draws:
            return 0
        last = self._steps.get(device)
        return next_step(first_step(device) if last is None else last)

    def route(self, batch: Gathered) -> list[Tensor]:
        """Return the [T, K] slots of every owned rank's copies, by the plan if there is one, else by fixed replicas."""
        batch_plan, slots, placed = batch.plan, [], self.placed_on(batch.loads.device)
        for i, (rank, counted) in enumerate(zip(self.ranks, batch.counted, strict=True)):
            sent = None if batch.send_counts is None else batch.send_counts[i]
            if batch_plan is not None:
                slots.append(route_counted(counted, batch.loads, batch_plan, rank, send_counts=sent))
            elif sent is not None:
                slots.append(route_sent(counted, sent, placed, rank))
            else:
                slots.append(route_fixed(counted.ids, placed, rank))
        return slots

    def exchange(self, *others: Balancer) -> Exchanged:
        """Renew the targets of this layer and of others: :func:`isoload.balancing.targets.exchange`."""
        return exchange([self, *others])

    def load(self, placement: Placement) -> None:
        """Load a new placement of the same shape in place, between batches. Captured graphs stay valid.

        Raises:
            ValueError: on all ranks; names the argument, the rule and the value, or the fact in which ranks differ.
        """
        with self.group.agreeing("placement") as facts:
            check_same_shape(self.placement, placement)
            facts.update(placement_facts(placement, self.layer))
            write = self.prepare_load(placement)
        write()

    def prepare_load(self, placement: Placement) -> Callable[[], None]:
        """Run the checks of :meth:`load` and return a function that applies it, so that all ranks load or none does.

        Every step that can fail runs here and changes nothing. Call the result after all ranks have come this far.
        """
        has_freedom = placement.has_freedom[self.layer]
        known = checksum(list(placement_facts(placement, self.layer).values()))
        refresh = {
            d: refreshing(kept_layers, placement.layer(self.layer, d)) for d, kept_layers in self._own.items()
        }

        def write() -> None:
            self.placement, self.has_freedom = placement, has_freedom
            self._checksums["checksum of placement"] = known
            self._own.update({device: refreshed() for device, refreshed in refresh.items()})
            if self.own_counts is not None:
                self.own_counts.reset()

        return write

    def placed_on(self, device: torch.device) -> PlacedLayers:
        """Return the layer's tables on a device; :meth:`load` writes them in place."""
        if device in self._own:
            return self._own[device]
        placed = own_layers(self.placement.layer(self.layer, device))
        if may_be_kept(placed.home_slot):
            self._own[device] = placed
            with torch.inference_mode(False):  # otherwise only inference mode could update it
                self._steps[device] = first_step(device)
        return placed

    def _device(self) -> torch.device:
        """Device of the most recently used tables: the host at construction, then the batches' device."""
        return next(reversed(self._own), torch.device("cpu"))


class AllCounts(Balancer):
    """Balances by the counts of all ranks, gathered in the forward. Only these plans have a certificate."""

    exchanges = True

    def __call__(
        self,
        topk_ids: Tensor | Sequence[Tensor],
        num_valid: int | Tensor | None = None,
        num_tokens: int | None = None,
    ) -> Tensor | list[Tensor]:
        several = not isinstance(topk_ids, Tensor) or len(self.ranks) > 1 or self.placement.num_shared
        if several or not self.has_freedom:
            return super().__call__(topk_ids, num_valid, num_tokens)
        assert isinstance(topk_ids, Tensor)
        ids, batch, rank = topk_ids, self.batch, self.ranks[0]
        try:
            if num_valid is not None or ids.dim() != 2:
                ids = without_padding(ids, num_valid)
            if num_tokens is not None and not self.plans(num_tokens):
                return self.route(self.gather([ids], num_tokens))[0]
            placed, facts = self._begin(ids.device), self.facts
            counted = ops.count(ids, self.num_experts)  # [E]
            if self.recorder is not None:
                self._record([counted.counts], [ids])
        except BaseException as error:
            self.batch = batch
            self.gather([], num_tokens, Call(self.group, failure=error))  # in which the other ranks raise
            raise
        loads = self.group.gather_loads([counted.counts], facts=facts)  # [R, E]; raises if any rank failed
        self.last_loads = loads
        step = self._step(ids.device) if self._draws else 0
        self.last_plan = plan = self._policy.plan(loads, placed, rank, step=step)
        if plan.send_counts is None:  # the policy draws samples by weights
            return route_counted(counted, loads, plan, rank)
        return ops.route(counted, plan.send_counts, plan.placed.tables)

    def _exchange(self, rows: list[Tensor], width: int, call: Call) -> Tensor:
        if call.failure is not None and call.device is None:
            call.device = self._device()
        return call.gather_loads(rows, width)


class SameTokens(Balancer):
    """Balances where all ranks hold the same rows: nothing is exchanged, and every rank computes the same slots."""

    def __call__(
        self,
        topk_ids: Tensor | Sequence[Tensor],
        num_valid: int | Tensor | None = None,
        num_tokens: int | None = None,
    ) -> Tensor | list[Tensor]:
        one_op = isinstance(topk_ids, Tensor) and type(self._policy) is ExactPolicy
        if not one_op or self.placement.num_shared:
            return super().__call__(topk_ids, num_valid, num_tokens)
        assert isinstance(topk_ids, Tensor) and isinstance(self._policy, ExactPolicy)
        ids = topk_ids
        if num_valid is not None or ids.dim() != 2:
            ids = without_padding(ids, num_valid)
        tokens = len(ids) if num_tokens is None else num_tokens
        if not self.has_freedom or ((self.min_tokens or num_tokens is not None) and not self.plans(tokens)):
            return self.route(self.balance([ids], num_tokens))[0]
        placed = self._begin(ids.device)
        slots, self.last_loads, self.last_plan = self._policy.balance_same(ids, placed)
        if self.recorder is not None:
            self._record([self.last_loads[0]], [ids])
        return slots

    def _exchange(self, rows: list[Tensor], width: int, call: Call) -> Tensor:
        if call.failure is not None:
            call.stop()
        # All rows count as rank 0's, the only source.
        return torch.nn.functional.pad(rows[0].unsqueeze(0), (0, 0, 0, self.placement.topology.num_ranks - 1))


class OwnOrNodeCounts(Balancer):
    """Balances by the counts of each rank or of each node, towards targets that :meth:`exchange` renews."""

    own_counts: OwnCounts

    @property
    def exchanges(self) -> bool:  # type: ignore[override]
        return self.own_counts.by_node

    def __call__(
        self,
        topk_ids: Tensor | Sequence[Tensor],
        num_valid: int | Tensor | None = None,
        num_tokens: int | None = None,
    ) -> Tensor | list[Tensor]:
        several = not isinstance(topk_ids, Tensor) or len(self.ranks) > 1 or self.placement.num_shared
        if several or not self.has_freedom:
            return super().__call__(topk_ids, num_valid, num_tokens)
        assert isinstance(topk_ids, Tensor)
        ids, batch = topk_ids, self.batch
        try:
            if num_valid is not None or ids.dim() != 2:
                ids = without_padding(ids, num_valid)
            if num_tokens is not None and not self.plans(num_tokens):
                return self.route(self.balance([ids], num_tokens))[0]
            placed, facts = self._begin(ids.device), self.facts
            if not self.own_counts.by_node:
                slots, counts = self.own_counts.balance(ids, placed, self.layer)
                if self.recorder is not None:
                    self._record([counts], [ids])
                return slots
            counted = ops.count(ids, self.num_experts)  # [E]
            if self.recorder is not None:
                self._record([counted.counts], [ids])
        except BaseException as error:
            self.batch = batch
            # The other ranks of the node raise in this gather, ranks of other nodes at the next exchange.
            self.gather([], num_tokens, Call(self.group, failure=error))
            raise
        # [R, E], 0 for ranks of other nodes
        loads = self.group.gather_loads([counted.counts], facts=facts, in_node=True)
        (send_counts,) = self.own_counts.split(loads, placed, self.layer)
        return ops.route(counted, send_counts, placed.tables)

    def _exchange(self, rows: list[Tensor], width: int, call: Call) -> Tensor:
        return self.own_counts.gather(rows, call)

    def plan(self, batch: Gathered, filled: PlacedLayers | None = None, keep_local: bool = False) -> Gathered:
        placed = self.placed_on(batch.loads.device)
        if batch.planned:
            batch.send_counts = self.own_counts.split(batch.loads, placed, self.layer)
        else:
            self.own_counts.note_unplanned([counted.counts for counted in batch.counted], placed)
        return batch
