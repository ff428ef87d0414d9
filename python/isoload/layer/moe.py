"""MoE: an expert-parallel Mixture-of-Experts layer that balances itself, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from isoload.balancing.balancer import Balancer
from isoload.balancing.own_counts import Loads
from isoload.balancing.planning import Gathered
from isoload.balancing.targets import Exchanged
from isoload.checks import values_readable
from isoload.layer.checks import (
    check_compute_dtype,
    check_halves,
    check_parts,
    check_rows,
    experts_by_rank,
    name_of,
)
from isoload.layer.compiled import Choose, handle_of, run_in_graph
from isoload.layer.routers import Routing, given_choices
from isoload.layer.stored import StoredExperts
from isoload.ops import append_shared_expert
from isoload.placement.placement import Placement, position
from isoload.policies import Policy
from isoload.policies.plan import Plan
from isoload.transport import DTYPES, Call, Received, Transport
from isoload.weights.borrowing import Borrowed, BringAgain, join_rows, trained_stacks
from isoload.weights.checkpoints import Checkpoint
from isoload.weights.compute import count_copies, run_experts, run_sorted
from isoload.weights.experts import Activation, ExpertWeights, SwiGLU
from isoload.weights.layout import count_rows, layouts, shard_layouts
from isoload.weights.shard import Shard

Gate = Callable[[Tensor], tuple[Tensor, Tensor]]
# What must be the same on all ranks in a batch
ROW_FACTS = ("hidden size of x", "dtype of x", "top-k")
# a bit each: in backward ranks exchange gradients of nothing else
TRAINED = "requires_grad of the expert stacks"


@dataclass(frozen=True, eq=False)
class Chosen:
    """The owned ranks' rows [T, H] and what they chose, shared experts included; nothing where the call has failed."""

    rows: list[Tensor]
    routings: list[Routing]
    call: Call

    @property
    def ids(self) -> list[Tensor]:
        """[T, K] each."""
        return [ids for ids, _ in self.routings]

    @property
    def weights(self) -> list[Tensor]:
        """[T, K] each."""
        return [weights for _, weights in self.routings]

    def kept(self, slots: list[Tensor]) -> list[Received]:
        """The rows as if they had been received, with local slots [T, K] on their own rank; -1 = elsewhere."""
        of_ranks = zip(self.rows, slots, self.weights, strict=True)
        return [Received(row, local, gates, None) for row, local, gates in of_ranks]


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Of every owned rank; what is neither is refused where the other ranks hear of it."""
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]  # type: ignore[list-item]


class MoE(StoredExperts):
    """One MoE layer over the ranks of a transport; the dense layer's mathematics, whatever the policy.

    Lists run over the ranks that this process owns (one for torch.distributed, all for the local transport); a
    process that owns one rank may pass and gets plain tensors.

    Args:
        gate: rows [T, H] -> (topk_ids [T, K] int64, weights [T, K] float32): a router, see isoload.layer.routers.Gate.
        experts: the stacks of all E experts, shared ones last, of which each rank copies its own; or their Checkpoint,
            of which each rank reads its own; or a Shard, a list of them in process order, of the owned ranks' home
            experts, which stay in the memory where they are.
        transport: joins the ranks.
        placement: where the experts lie.
        layer: position of this layer in the placement.
        layer_id: in place of layer, the model's own number of this layer.
        policy: a name in isoload.POLICIES or a Policy; options go with the name. One that samples draws anew in
            every batch.
        activation: SwiGLU, or gpt-oss's ClampedGLU. None: the checkpoint's, else SwiGLU.
        shared: a module for all local rows, added to the result, outside of dispatch. Shared experts of the
            placement need none: the layer adds them to every token's choices, with weight 1.
        min_tokens: with fewer tokens over all ranks nothing is gathered or planned: each expert goes to its
            ``static`` replica, shared ones stay home, and last_plan is None. What is compared must be known on the
            host: see num_tokens of :meth:`forward`. The same on all ranks.
        loads: by which a batch is planned, see :class:`isoload.Balancer`. "node" and "own" need
            :meth:`exchange` now and then; their policy is ``exact``, which borrows nothing and leaves shared experts
            at home.
        weight_rows: experts that every rank has memory for, for :meth:`load_placement`. None: as many as the
            placement's slots hold on it.
        borrow: the backend that brings the weights of spare slots: "pull", "copy", "all_to_all" or, over a
            DeepEPTransport, "deep_ep", see isoload.weights.backends. None: "pull" where ranks can read each other's
            memory, else "all_to_all"; ``borrowing.backend.name`` says which.
        compute_dtype: in which rows travel, experts compute and borrowed weights travel, whatever the experts' dtype;
            Parameters and their gradients keep the experts' dtype. None: autocast's dtype where autocast is on (but
            for float64), else the experts'. "pull" and "copy" bring borrowed weights in the experts' dtype. Not for
            quantised experts, which compute in the rows' dtype.

    Raises:
        ValueError: naming the argument, the rule and the value; on the other ranks naming the rank and the stage.
    """

    def __init__(
        self,
        gate: Gate,
        experts: ExpertWeights | Checkpoint | Shard | Sequence[Shard],
        transport: Transport,
        placement: Placement,
        layer: int = 0,
        policy: str | Policy = "exact",
        *,
        activation: Activation | None = None,
        shared: nn.Module | None = None,
        min_tokens: int = 0,
        loads: Loads = "gathered",
        weight_rows: int | None = None,
        borrow: str | None = None,
        layer_id: int | None = None,
        compute_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.gate, self.shared = gate, shared
        self.run_by: Callable[[list[Tensor], Choose, int | None], list[Tensor]] | None = None  # a stack
        self.transport, self.group, self.dispatcher = transport, transport.group, transport.dispatcher
        parts = experts_by_rank(experts, len(self.group.ranks))
        with self.group.agreeing("construction") as facts:
            layer = position(placement, layer, layer_id)
            placed = placement.layer(layer, "cpu")
            described = check_parts(parts, self.group, placement, layer)
            stored = parts[0].activation if isinstance(parts[0], Checkpoint) else SwiGLU()
            self.activation: Activation = stored if activation is None else activation
            check_halves(parts, self.activation)
            arrange = shard_layouts if isinstance(parts[0], Shard) else layouts
            self.layouts, self.num_rows = arrange(placed), count_rows(placed, weight_rows)
            check_compute_dtype(compute_dtype, parts)
            facts.update({"weight_rows": weight_rows, "borrow": borrow, "compute_dtype": compute_dtype})
            facts.update({"experts": described, "activation": name_of(self.activation)})
        how = {"min_tokens": min_tokens, "loads": loads, **options}
        self.balancer = Balancer(placement, layer, policy, self.group, **how)
        self._hold(parts, borrow)
        self.balancer.placed_on(self._ranks()[0].row_of_slot.device)
        self._note_layouts(self.layouts)
        if isinstance(parts[0], Shard):  # replicas come from other ranks
            self.refresh_replicas()
        self.handle = handle_of(self)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "run_by": None}  # a stack runs its own layers

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.handle = handle_of(self)  # a copy is another layer

    @property
    def policy(self) -> Policy:
        """What plans; another may be set between batches, the same on all ranks."""
        return self.balancer.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.balancer.policy = policy

    @property
    def last_plan(self) -> Plan | None:
        """Of the last batch; None where nothing was planned."""
        return self.balancer.last_plan

    def exchange(self, *others: MoE) -> Exchanged:
        """:func:`isoload.balancing.targets.exchange` of this layer and of others. All ranks call it."""
        return self.balancer.exchange(*(other.balancer for other in others))

    def forward(self, x: Tensor | Sequence[Tensor], num_tokens: int | None = None) -> Tensor | list[Tensor]:
        """[T, H] -> [T, H] on every owned rank, in the dtype of x; T may differ and be 0.

        x has the experts' dtype or the one that they compute in, see compute_dtype.
        num_tokens: tokens over all ranks, or an upper bound of them, the same on all ranks; compared with min_tokens.
            None: what max_tokens_per_rank allows, else unknown, and the batch is planned.
        """
        rows = as_list(x)
        combined = self._run(rows, lambda: [self.gate(row) for row in rows], num_tokens)
        if self.shared is not None:
            combined = [y + self.shared(row) for y, row in zip(combined, rows, strict=True)]
        return combined[0] if isinstance(x, Tensor) else combined

    def compute(
        self,
        x: Tensor | Sequence[Tensor],
        topk_ids: Tensor | Sequence[Tensor],
        weights: Tensor | Sequence[Tensor],
        num_tokens: int | None = None,
    ) -> Tensor | list[Tensor]:
        """The experts' part of :meth:`forward`, for choices made elsewhere: neither gate nor `shared` is called.

        Args:
            x: [T, H] on every owned rank, a list as in forward.
            topk_ids: [T, K] routed experts, -1 = masked; lists as x is.
            weights: [T, K], see isoload.layer.routers.Gate.
            num_tokens: as in forward.
        """
        rows, ids, gates = map(as_list, (x, topk_ids, weights))
        combined = self._run(rows, lambda: list(zip(ids, gates, strict=True)), num_tokens)
        return combined[0] if isinstance(x, Tensor) else combined

    def _run(self, rows: list[Tensor], choose: Choose, num_tokens: int | None) -> list[Tensor]:
        if torch.compiler.is_compiling():
            return run_in_graph(self, rows, choose(), num_tokens)
        return self.run(rows, choose, num_tokens)

    def run(self, rows: list[Tensor], choose: Choose, num_tokens: int | None) -> list[Tensor]:
        """The pipeline, a line per stage, for the rows and choices of every owned rank: see :meth:`compute`.

        A LibraStack has the same stages in another order.
        """
        run = self._stages if self.run_by is None else self.run_by
        outputs = run(rows, choose, num_tokens)
        if not torch.is_grad_enabled() and any(p.grad is not None for p in self.weights.parameters()):
            self.meet_readers()  # An optimizer step may come next, without another backward that makes ranks meet.
        return [y.to(row.dtype) for y, row in zip(outputs, rows, strict=True)]

    def _stages(self, rows: list[Tensor], choose: Choose, num_tokens: int | None) -> list[Tensor]:
        chosen = self.choices(rows, choose)  # [T, K] ids and weights
        batch = self.balancer.plan(self.gather(chosen, num_tokens))  # loads [R, E], quota [P]
        borrowed = self.borrow(batch.plan, chosen)  # on their way from here on
        slots = self.balancer.route(batch)  # [T, K]
        received = self.dispatcher.dispatch(*self.sent(chosen, slots))
        if borrowed is not None:
            borrowed.proceed()
        computed = self._compute(received, batch.loads, slots, borrowed)  # [N, H], summed over a row's copies
        return self.dispatcher.combine(computed, received)  # [T, H]

    def choices(self, rows: list[Tensor], choose: Choose) -> Chosen:
        """Every owned rank's choices, or why there are none.

        A rank that fails tells the others in the gather or, without one, in dispatch; on a GPU with max_tokens_per_rank
        nothing there is read, and the others wait for the group's timeout.
        """
        ranks, routings = self._ranks(), list[Routing]()
        device, facts = ranks[0].row_of_slot.device, {TRAINED: 0}
        call = Call(self.group, "count", device, facts, later=self.dispatcher.carry_failure)
        call.in_gather = dict.fromkeys(ROW_FACTS, 0)
        with call:
            computes = self.dtype_now()
            check_rows(rows, self.dispatcher.max_tokens_per_rank, ranks[0].stored_down, computes)
            self._check_weights()
            routings = [self._complete(*routing) for routing in choose()]
            rows = rows if computes is None else [row.to(computes) for row in rows]
            for i, trains in enumerate(trained_stacks([rank.home_rows() for rank in ranks])):
                call.facts[TRAINED] |= trains << i
            row_facts = rows[0].shape[1], DTYPES.index(rows[0].dtype), routings[0][0].shape[1]
            call.in_gather.update(zip(ROW_FACTS, row_facts, strict=True))
        return Chosen(rows, routings, call)

    def gather(self, chosen: Chosen, num_tokens: int | None, more: list[Tensor] | None = None) -> Gathered:
        """The batch counted and gathered; num_tokens as in :meth:`forward`, more as in :meth:`Balancer.gather`."""
        max_tokens = self.dispatcher.max_tokens_per_rank
        if num_tokens is None and max_tokens is not None:
            num_tokens = max_tokens * self.group.topology.num_ranks
        return self.balancer.gather(chosen.ids, num_tokens, chosen.call, more)

    def borrow(self, plan: Plan | None, chosen: Chosen) -> Borrowed | None:
        """Begins to bring the experts in the plan's spare slots."""
        if plan is None or self.borrowing is None or plan.placed.unfilled is None:
            return None
        return self.borrowing.borrow(plan.placed, dtype=self._dtype_of(chosen.rows))

    def _dtype_of(self, rows: Sequence[Tensor]) -> torch.dtype | None:
        """The dtype in which experts compute with rows on their way; None where they are quantised."""
        return rows[0].dtype if self._ranks()[0].stored_down.dtype in DTYPES else None

    def sent(
        self, chosen: Chosen, slots: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], int, Call]:
        """What dispatch takes, for copies that go to slots [T, K]."""
        return chosen.rows, slots, chosen.weights, self.placement.slots_per_rank, chosen.call

    def stacks(self, chosen: Chosen, borrowed: Borrowed | None) -> list[list[ExpertWeights]]:
        """Every owned rank's weights, resident, then borrowed, where no gradients are recorded."""
        dtype = self._dtype_of(chosen.rows)
        return join_rows(self.group, self._ranks(), [], self.replica_moves, borrowed, {}, dtype)[1]

    def run_local(
        self, received: Sequence[Received], stacks: Sequence[Sequence[ExpertWeights]]
    ) -> list[Tensor]:
        """[N, H] of every owned rank: its experts on the rows that it received, or has itself."""
        outputs = []
        for rank, got, groups in zip(self._ranks(), received, stacks, strict=True):
            ends = None if got.ends is None else rank.row_ends(got.ends)
            if ends is not None:
                outputs.append(run_sorted(got.rows, got.weights, ends, groups, self.activation))
                continue
            local = rank.weight_rows(got.slots)
            max_copies = None if got.max_copies is None else [got.max_copies] * len(groups)
            if values_readable(local):  # on a device the count would be one more wait
                max_copies = count_copies(local, groups)
            outputs.append(run_experts(got.rows, local, got.weights, groups, self.activation, max_copies))
        return outputs

    def _compute(
        self, received: list[Received], loads: Tensor, slots: list[Tensor], borrowed: Borrowed | None
    ) -> list[Tensor]:
        """Resident experts first, while borrowed weights still travel."""
        noted = {f"route of rank {r}": s for r, s in zip(self.group.ranks, slots, strict=True)}
        noted = {"loads": loads, **noted} if values_readable(loads) else {}
        rows = [got.rows for got in received]
        parts = self._ranks(), rows, self.replica_moves, borrowed, noted, self._dtype_of(rows)
        rows, stacks = join_rows(self.group, *parts)
        received = [replace(got, rows=row) for got, row in zip(received, rows, strict=True)]
        outputs = self.run_local(received, stacks)
        return outputs if borrowed is None else list(BringAgain.apply(borrowed, *outputs))

    def _complete(self, topk_ids: Tensor, weights: Tensor) -> Routing:
        """One rank's choices, checked, with the shared experts after them."""
        placement = self.placement
        routing = given_choices(topk_ids, weights, num_experts=placement.num_routed)
        if not placement.num_shared:
            return routing
        ids, weights = routing
        ranks = torch.zeros(len(ids), placement.num_shared, dtype=torch.int32, device=ids.device)
        return Routing(*append_shared_expert(ids, weights, ranks, placement.num_routed))
