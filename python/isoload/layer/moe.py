"""MoE: an expert-parallel Mixture-of-Experts layer that rebalances every batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isoload.balancing.balancer import Balancer
from isoload.balancing.known_routes import KnownPlan
from isoload.balancing.own_counts import Loads
from isoload.balancing.planning import Gathered
from isoload.balancing.targets import Exchanged
from isoload.checks import values_readable
from isoload.layer.checks import (
    check_compute_dtype,
    check_halves,
    check_overflow,
    check_parts,
    check_rows,
    experts_by_rank,
    infers_shapes,
    name_of,
)
from isoload.layer.compiled import Choice, Choose, between_graphs, handle_of, run_in_graph
from isoload.layer.routers import Routing, given_choices
from isoload.layer.stored import StoredExperts
from isoload.ops import append_shared_expert
from isoload.placement.placement import Placement, position
from isoload.policies import Policy
from isoload.policies.plan import Plan, in_backward
from isoload.transport import DTYPES, Call, Received, Transport
from isoload.weights.borrowing import Borrowed, BringAgain, join_rows, trained_stacks
from isoload.weights.checkpoints import Checkpoint
from isoload.weights.compute import count_copies, run_experts, run_sorted
from isoload.weights.experts import Activation, ExpertWeights, SwiGLU
from isoload.weights.layout import count_rows, layouts, shard_layouts
from isoload.weights.shard import Shard

if TYPE_CHECKING:
    from isoload.layer.two_stage import KnownBatch

Gate = Callable[[Tensor], tuple[Tensor, Tensor]]
RunBy = Callable[[list[Tensor], Choose, int | None, KnownPlan | None], list[Tensor]]
# Facts that must be equal on all ranks in a batch
ROW_FACTS = ("hidden size of x", "dtype of x", "top-k")
# One bit per stack: in backward ranks exchange gradients of these stacks only.
TRAINED = "requires_grad of the expert stacks"


@dataclass(frozen=True, eq=False)
class Chosen:
    """Rows [T, H] and choices of the owned ranks, shared experts included; empty if the call has failed."""

    rows: list[Tensor]
    routings: list[Routing]
    call: Call

    @property
    def ids(self) -> list[Tensor]:
        return [ids for ids, _ in self.routings]

    @property
    def weights(self) -> list[Tensor]:
        return [weights for _, weights in self.routings]

    def kept(self, slots: list[Tensor]) -> list[Received]:
        """Return the rows as if dispatch had delivered them to their own rank's slots [T, K]; -1 = another rank."""
        of_ranks = zip(self.rows, slots, self.weights, strict=True)
        return [Received(row, local, gates, None) for row, local, gates in of_ranks]


def as_list(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return one entry per owned rank. Other types are rejected later, where the error reaches all ranks."""
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]  # type: ignore[list-item]


class MoE(StoredExperts):
    """Expert-parallel MoE layer that rebalances every batch, with the dense layer's result under every policy.

    Lists have one entry per rank that this process owns: one with torch.distributed, all ranks with a LocalTransport. A
    process that owns one rank may pass and get plain tensors. Arguments that differ between ranks raise on all ranks.

    Args:
        gate: maps rows [T, H] to topk_ids [T, K] int64 and weights [T, K] float32, see isoload.layer.routers.Gate.
        experts: the stacks of all E experts, shared experts last, or a Checkpoint of them, of which each rank takes its
            own. Or a Shard of the rank's home experts (a list of them in rank order), which stay in their memory.
        transport: connects the ranks.
        placement: slots of every expert.
        layer: position of this layer in the placement.
        layer_id: the model's own number of this layer, instead of layer.
        policy: name in isoload.POLICIES with its options, or a Policy.
        activation: SwiGLU, or gpt-oss's ClampedGLU. None: the checkpoint's, else SwiGLU.
        shared: module that runs on all local rows; its output is added. The placement's shared experts need none.
        min_tokens: batches with fewer tokens over all ranks (num_tokens of :meth:`forward`) are not planned: each
            expert uses its ``static`` replica, shared experts stay local, and last_plan is None. The same on all ranks.
        loads: loads by which a batch is planned, see :class:`isoload.Balancer`. "node" and "own" need regular calls of
            :meth:`exchange`; their policy is ``exact``, which borrows nothing and keeps shared experts local.
        weight_rows: experts for which every rank has memory, for :meth:`load_placement`. None: those of the placement.
        borrow: what fetches the weights of spare slots: "pull", "copy", "all_to_all" or, with a DeepEPTransport,
            "deep_ep". None: "pull" if ranks can read each other's memory, else "all_to_all".
        compute_dtype: dtype in which rows and borrowed weights (except by "pull" and "copy") travel and experts
            compute. Parameters and gradients keep their dtype. None: autocast's dtype (not for float64 experts), else
            the experts'. Quantised experts compute in the rows' dtype.
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
        self.run_by: RunBy | None = None  # a stack
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
        self.balancer.placed_on(self._device())
        self._note_layouts(self.layouts)
        # [2, E] int64 copies in training since the last read: those of all ranks, and those of this process alone.
        with torch.inference_mode(False):  # otherwise only inference mode could write them
            self._expert_counts = torch.zeros(
                2, placement.num_routed, dtype=torch.int64, device=self._device()
            )
        self._counts_alone = False  # whether any batch was counted by this process alone
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
        """Policy of the next batches. It may be set between batches, the same on all ranks."""
        return self.balancer.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.balancer.policy = policy

    @property
    def last_plan(self) -> Plan | None:
        """Plan of the last batch; None if the batch was not planned."""
        return self.balancer.last_plan

    def exchange(self, *others: MoE) -> Exchanged:
        """Renew the targets of these layers, on all ranks together: :func:`isoload.balancing.targets.exchange`."""
        return self.balancer.exchange(*(other.balancer for other in others))

    def expert_counts(self, exchange: bool = False) -> Tensor:
        """Return how often each routed expert was chosen in training since the last call, over all ranks, [E] int64;
        reset the sums. A recomputed forward counts once, masked copies do not count.

        Args:
            exchange: gather the counts of batches whose loads were not gathered, on all ranks together: of a placement
                without replicas and spare slots, below min_tokens, and with loads="own" or "node"; False raises for
                these.
        """
        if self._counts_alone and not exchange:
            raise ValueError(
                "exchange must be True where not every batch gathers the loads of all ranks: call "
                "expert_counts(exchange=True) on all ranks together, got False"
            )
        total, alone = self._expert_counts.to(self._device(), copy=True).unbind()
        if exchange and not self.group.owns_all:
            nothing = [torch.zeros_like(alone)] * (len(self.group.ranks) - 1)
            total += self.group.gather("expert counts", [alone, *nothing]).sum(0)
        self._expert_counts.zero_()
        return total

    def forward(
        self, x: Tensor | Sequence[Tensor], num_tokens: int | None = None, plan: KnownPlan | None = None
    ) -> Tensor | list[Tensor]:
        """Return the layer's output [T, H], in the dtype of x, for rows [T, H] on every owned rank.

        Args:
            x: [T, H] of the owned ranks; T may differ between ranks and be 0. In the experts' or the computing dtype.
            num_tokens: tokens over all ranks or an upper bound, the same on all ranks, compared with min_tokens. None:
                R times max_tokens_per_rank, or unknown; then the batch is planned.
            plan: made ahead for this batch by :class:`isoload.KnownRoutes`, on all ranks or on none. Then nothing is
                gathered or planned, and a token may choose an expert twice.
        """
        rows = as_list(x)
        combined = self._run(rows, lambda: [self.gate(row) for row in rows], num_tokens, plan)
        if self.shared is not None:
            combined = [y + self.shared(row) for y, row in zip(combined, rows, strict=True)]
        return combined[0] if isinstance(x, Tensor) else combined

    def compute(
        self,
        x: Tensor | Sequence[Tensor],
        topk_ids: Tensor | Sequence[Tensor],
        weights: Tensor | Sequence[Tensor],
        num_tokens: int | None = None,
        plan: KnownPlan | None = None,
    ) -> Tensor | list[Tensor]:
        """Return the experts' output [T, H] for choices that were made elsewhere, without gate and `shared`.

        Args:
            x, num_tokens, plan: as in :meth:`forward`.
            topk_ids: [T, K] routed experts, -1 = masked; a list if x is a list.
            weights: [T, K] gate weights; a list if x is a list.
        """
        rows, ids, gates = map(as_list, (x, topk_ids, weights))
        combined = self._run(rows, lambda: list(zip(ids, gates, strict=True)), num_tokens, plan)
        return combined[0] if isinstance(x, Tensor) else combined

    def _run(
        self, rows: list[Tensor], choose: Choose, num_tokens: int | None, plan: KnownPlan | None
    ) -> list[Tensor]:
        if not torch.compiler.is_compiling():
            return self.run(rows, choose, num_tokens, plan)
        if plan is not None:
            return self._run_apart(rows, choose(), num_tokens, plan)
        return run_in_graph(self, rows, choose(), num_tokens)

    @between_graphs("a plan that was made ahead")
    def _run_apart(
        self, rows: list[Tensor], chosen: Sequence[Choice], num_tokens: int | None, plan: KnownPlan
    ) -> list[Tensor]:
        return self.run(rows, lambda: chosen, num_tokens, plan)

    def run(
        self, rows: list[Tensor], choose: Choose, num_tokens: int | None, plan: KnownPlan | None = None
    ) -> list[Tensor]:
        """Run the stages, or those of a LibraStack, for every owned rank's rows and choices, see :meth:`compute`."""
        if infers_shapes():  # the handle requires a gradient, as the experts do
            return [row + 0 * self.handle for row in rows]
        run = self.stages if self.run_by is None else self.run_by
        outputs = run(rows, choose, num_tokens, plan)
        if not torch.is_grad_enabled() and any(p.grad is not None for p in self.weights.parameters()):
            self.meet_readers()  # An optimizer step may follow without a backward, which would synchronise the ranks.
        return [y.to(row.dtype) for y, row in zip(outputs, rows, strict=True)]

    def stages(
        self,
        rows: list[Tensor],
        choose: Choose,
        num_tokens: int | None,
        plan: KnownPlan | None,
        ahead: KnownBatch | None = None,
    ) -> list[Tensor]:
        """Run the stages of a batch that is planned now or was planned ahead; `ahead` fetches for known plans."""
        borrowed = None
        chosen = self.choices(rows, choose, repeats=plan is not None)  # [T, K] ids and weights
        if plan is None and ahead is None:
            batch = self.balancer.plan(self.gather(chosen, num_tokens))  # loads [R, E], quota [P]
            borrowed = self.borrow(batch.plan, chosen)  # starts the transfer
        else:
            if ahead is not None:
                chosen.call.facts["weights fetched ahead"] = ahead.ready
            batch = self.balancer.follow(chosen.ids, plan, chosen.call)
        slots = self.balancer.route(batch)  # [T, K]
        received = self.dispatcher.dispatch(*self.sent(chosen, slots))
        if plan is not None:
            # Without a gather only dispatch waits for the other ranks' last writes of the weights that are read here.
            fetch = self.borrow if ahead is None else ahead.fetch
            borrowed = fetch(batch.plan, chosen)
        if borrowed is not None:
            borrowed.proceed()
        computed = self._compute(received, batch.loads, slots, borrowed)  # [N, H], summed over a row's copies
        combined = self.dispatcher.combine(computed, received)  # [T, H]
        self.count(batch)
        return combined

    def choices(self, rows: list[Tensor], choose: Choose, repeats: bool = False) -> Chosen:
        """Return every owned rank's choices, or the failure that prevented them; repeats: a token may repeat an expert.
        On a GPU with max_tokens_per_rank and without a gather, other ranks wait for a failed one until the timeout.
        """
        ranks, routings = self._ranks(), list[Routing]()
        device, facts = ranks[0].row_of_slot.device, {TRAINED: 0}
        call = Call(self.group, "count", device, facts, later=self.dispatcher.carry_failure)
        call.in_gather = dict.fromkeys(ROW_FACTS, 0)
        with call:
            computes = self.dtype_now()
            check_rows(rows, self.dispatcher.max_tokens_per_rank, ranks[0].stored_down, computes)
            self._check_weights()
            if computes is torch.float16:
                check_overflow(self.group, ranks)
            routings = [self._complete(*routing, repeats) for routing in choose()]
            rows = rows if computes is None else [row.to(computes) for row in rows]
            for i, trains in enumerate(trained_stacks([rank.home_rows() for rank in ranks])):
                call.facts[TRAINED] |= trains << i
            row_facts = rows[0].shape[1], DTYPES.index(rows[0].dtype), routings[0][0].shape[1]
            call.in_gather.update(zip(ROW_FACTS, row_facts, strict=True))
        return Chosen(rows, routings, call)

    def gather(self, chosen: Chosen, num_tokens: int | None, more: list[Tensor] | None = None) -> Gathered:
        """Count the batch and gather the loads; see :meth:`Balancer.gather` for num_tokens and more."""
        max_tokens = self.dispatcher.max_tokens_per_rank
        if num_tokens is None and max_tokens is not None:
            num_tokens = max_tokens * self.group.topology.num_ranks
        return self.balancer.gather(chosen.ids, num_tokens, chosen.call, more)

    @torch.inference_mode(False)  # otherwise only inference mode could write the moved sums
    def count(self, batch: Gathered) -> None:
        """Add a batch to the sums that :meth:`expert_counts` returns, after its experts have run."""
        if not self.training or in_backward():  # a checkpoint's recompute is not counted again
            return
        complete = self.group.owns_all or (batch.planned and self.balancer.loads == "gathered")
        loads = batch.loads if complete else torch.stack([counted.counts for counted in batch.counted])
        self._counts_alone |= not complete
        if self._expert_counts.device != loads.device:
            self._expert_counts = self._expert_counts.to(loads.device)
        self._expert_counts[0 if complete else 1] += loads.sum(0)[: self._expert_counts.shape[1]]

    def borrow(self, plan: Plan | None, chosen: Chosen) -> Borrowed | None:
        """Start to fetch the experts in the plan's spare slots; None if there are none."""
        if plan is None or self.borrowing is None or plan.placed.unfilled is None:
            return None
        return self.borrowing.borrow(plan.placed, dtype=self._dtype_of(chosen.rows))

    def _dtype_of(self, rows: Sequence[Tensor]) -> torch.dtype | None:
        """Return the dtype in which experts compute with these rows; None for quantised experts."""
        return rows[0].dtype if self._ranks()[0].stored_down.dtype in DTYPES else None

    def sent(
        self, chosen: Chosen, slots: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], int, Call]:
        """Return the arguments of dispatch, for copies that go to slots [T, K]."""
        return chosen.rows, slots, chosen.weights, self.placement.slots_per_rank, chosen.call

    def stacks(self, chosen: Chosen, borrowed: Borrowed | None) -> list[list[ExpertWeights]]:
        """Return every owned rank's weights, resident and then borrowed, without recording gradients."""
        dtype = self._dtype_of(chosen.rows)
        return join_rows(self.group, self._ranks(), [], self.replica_moves, borrowed, {}, dtype)[1]

    def run_local(
        self, received: Sequence[Received], stacks: Sequence[Sequence[ExpertWeights]]
    ) -> list[Tensor]:
        """Compute the experts of every owned rank on received or local rows, and return their outputs, [N, H] each."""
        outputs = []
        for rank, got, groups in zip(self._ranks(), received, stacks, strict=True):
            ends = None if got.ends is None else rank.row_ends(got.ends)
            if ends is not None:
                outputs.append(run_sorted(got.rows, got.weights, ends, groups, self.activation))
                continue
            local = rank.weight_rows(got.slots)
            max_copies = None if got.max_copies is None else [got.max_copies] * len(groups)
            if values_readable(local):  # on a device the host would wait once more for the count
                max_copies = count_copies(local, groups)
            outputs.append(run_experts(got.rows, local, got.weights, groups, self.activation, max_copies))
        return outputs

    def _compute(
        self, received: list[Received], loads: Tensor, slots: list[Tensor], borrowed: Borrowed | None
    ) -> list[Tensor]:
        noted = {f"route of rank {r}": s for r, s in zip(self.group.ranks, slots, strict=True)}
        noted = {"loads": loads, **noted} if values_readable(loads) else {}
        rows = [got.rows for got in received]
        parts = self._ranks(), rows, self.replica_moves, borrowed, noted, self._dtype_of(rows)
        rows, stacks = join_rows(self.group, *parts)
        received = [replace(got, rows=row) for got, row in zip(received, rows, strict=True)]
        outputs = self.run_local(received, stacks)
        return outputs if borrowed is None else list(BringAgain.apply(borrowed, *outputs))

    def _complete(self, topk_ids: Tensor, weights: Tensor, repeats: bool) -> Routing:
        placement = self.placement
        routing = given_choices(topk_ids, weights, placement.num_routed, repeats)
        if not placement.num_shared:
            return routing
        ids, weights = routing
        ranks = torch.zeros(len(ids), placement.num_shared, dtype=torch.int32, device=ids.device)
        return Routing(*append_shared_expert(ids, weights, ranks, placement.num_routed))
