"""MoE: an expert-parallel Mixture-of-Experts layer that balances itself, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isoload.balancer import Balanced, Balancer
from isoload.checkpoints import Checkpoint
from isoload.experts.compute import count_copies, run_experts
from isoload.experts.weights import Activation, ExpertWeights
from isoload.layer import checks
from isoload.layer.compiled import Choose, handle_of, run_in_graph
from isoload.layer.modules import place_module
from isoload.layer.routers import Routing, given_choices
from isoload.ops import Prefer, append_shared_expert
from isoload.placement import Placement
from isoload.policies import Policy
from isoload.records import Plan
from isoload.topology import Topology
from isoload.transport import DTYPES, LocalTransport, Received, Transport
from isoload.value_checks import values_readable
from isoload.weights.autograd import bring_again, join_rows
from isoload.weights.backends import make_backend
from isoload.weights.borrow import Borrowed, Borrowing
from isoload.weights.full_state import gather_full, load_full
from isoload.weights.layout import Layout, count_rows, layouts, replica_moves, shard_layouts
from isoload.weights.migrate import FACTS, check_move, move_facts, move_state, move_weights
from isoload.weights.shard import Shard, hold
from isoload.weights.storage import RankWeights, new_stack, refresh_replicas

Gate = Callable[[Tensor], tuple[Tensor, Tensor]]
ROW_FACTS = ("hidden size of x", "dtype of x", "top-k")  # which must be the same on all ranks in a batch


class MoE(nn.Module):
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
        policy: a name in isoload.POLICIES or a Policy; options go with the name. One that samples draws anew in
            every batch.
        activation: SwiGLU, or gpt-oss's ClampedGLU. None: the checkpoint's, else SwiGLU.
        shared: a module for all local rows, added to the result, outside of dispatch. Shared experts of the
            placement need none: the layer adds them to every token's choices, with weight 1.
        prefer: see isoload.route.
        min_tokens: with fewer tokens over all ranks nothing is gathered or planned: each expert goes to its
            ``static`` replica, shared ones stay home, and last_plan is None. What is compared must be known on the
            host: see num_tokens of :meth:`forward`. The same on all ranks.
        weight_rows: experts that every rank has memory for, for :meth:`load_placement`. None: as many as the
            placement's slots hold on it.
        borrow: the backend that brings the weights of spare slots: "pull", "copy", "all_to_all", "p2p" or, over a
            DeepEPTransport, "deep_ep", see isoload.weights.backends. None: "pull" where ranks can read each other's
            memory, else "all_to_all"; ``borrowing.backend.name`` says which.

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
        prefer: Prefer | None = None,
        min_tokens: int = 0,
        weight_rows: int | None = None,
        borrow: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.gate, self.shared = gate, shared
        self.transport, self.group, self.dispatcher = transport, transport.group, transport.dispatcher
        own = checks.experts_by_rank(experts, len(self.group.ranks))
        with self.group.agreeing("construction") as facts:
            placed = placement.layer(layer, "cpu")
            described = checks.check_parts(own, self.group, placement, layer)
            self.activation = checks.activation_of(own) if activation is None else activation
            arrange = shard_layouts if isinstance(own[0], Shard) else layouts
            self.layouts, self.num_rows = arrange(placed), count_rows(placed, weight_rows)
            facts.update(
                {
                    "weight_rows": weight_rows,
                    "borrow": borrow,
                    "experts": described,
                    "activation": checks.name_of(self.activation),
                }
            )
        self.balancer = Balancer(
            placement, layer, policy, self.group, prefer=prefer, min_tokens=min_tokens, **options
        )
        self._hold(own, borrow)
        self.balancer.placed_on(self._ranks()[0].row_of_slot.device)
        self._settle(self.layouts)
        if isinstance(own[0], Shard):  # replicas come from other ranks
            self.refresh_replicas()
        self.handle = handle_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.handle = handle_of(self)  # a copy is another layer

    def _settle(self, held: list[Layout]) -> None:
        self.layouts, self.replica_moves = held, replica_moves(held)
        self._replicated = {move.source.rank for move in self.replica_moves}

    def _hold(self, experts: checks.Experts, borrow: str | None) -> None:
        """Takes memory for the ranks' weights and, with spare slots, for borrowed ones."""
        spare, group, new, self.borrowing = self.placement.spare_slots, self.group, new_stack, None
        if spare:
            with group.agreeing("construction"):
                whole = not isinstance(experts[0], Shard)
                backend = make_backend(group, borrow, checks.device_of(experts), own_memory=whole)
            new = backend.new_stack
            if backend.reads_peers:
                self.num_rows = [max(self.num_rows)] * len(self.num_rows)
        with group.agreeing("construction"):
            self.weights = nn.ModuleList(
                hold(self.layouts[rank], own, self.num_rows[rank], spare, new)
                for rank, own in zip(group.ranks, experts, strict=True)
            )
            if spare:
                self.borrowing = Borrowing(group, self._ranks(), spare, backend)
                self.borrowing.settle(self.layouts, self.placement.num_experts)

    @property
    def has_replicas(self) -> bool:
        """Whether any expert lies on several ranks."""
        return bool(self.replica_moves)

    @property
    def placement(self) -> Placement:
        """Where the experts lie; see :meth:`load_placement`."""
        return self.balancer.placement

    @property
    def layer(self) -> int:
        """Position of this layer in the placement."""
        return self.balancer.layer

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

    @classmethod
    def from_module(
        cls,
        block: nn.Module,
        topology: Topology,
        *,
        transport: Transport | None = None,
        placement: Placement | None = None,
        **how: Any,
    ) -> MoE:
        """The layer of a Hugging Face block: Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V3 or gpt-oss.

        Args:
            block: with the weights of all experts; see :func:`isoload.layer.modules.module_parts`.
            topology: R ranks.
            transport: None = all ranks in this process.
            placement: see :func:`isoload.layer.modules.place_module`.
            **how: layer, policy, prefer and the policy's options.
        """
        parts, placement = place_module(block, topology, placement, how.get("policy", "exact"))
        transport = LocalTransport(topology) if transport is None else transport
        how = {"activation": parts.activation, "shared": parts.shared, **how}
        return cls(parts.gate, parts.dense, transport, placement, **how)

    def forward(self, x: Tensor | Sequence[Tensor], num_tokens: int | None = None) -> Tensor | list[Tensor]:
        """[T, H] -> [T, H] on every owned rank, autocast or not in the experts' dtype; T may differ and be 0.

        num_tokens: tokens over all ranks, or an upper bound of them, the same on all ranks; compared with min_tokens.
            None: what max_tokens_per_rank allows, else unknown, and the batch is planned.
        """
        rows = [x] if isinstance(x, Tensor) else list(x)
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
        rows, ids, given = ([v] if isinstance(v, Tensor) else list(v) for v in (x, topk_ids, weights))
        combined = self._run(rows, lambda: list(zip(ids, given, strict=True)), num_tokens)
        return combined[0] if isinstance(x, Tensor) else combined

    def _run(self, rows: list[Tensor], choose: Choose, num_tokens: int | None) -> list[Tensor]:
        if torch.compiler.is_compiling():
            return run_in_graph(self, rows, choose(), num_tokens)
        return self.run(rows, choose, num_tokens)

    def run(self, rows: list[Tensor], choose: Choose, num_tokens: int | None) -> list[Tensor]:
        """The pipeline, a line per stage, for the rows and choices of every owned rank: see :meth:`compute`."""
        chosen, batch = self._balance(rows, choose, num_tokens)  # [T, K] ids; loads [R, E], quota [P]
        borrowed = self._borrow(batch.plan)  # on their way from here on
        slots = self.balancer.route(batch)  # [T, K]
        gate_weights = [weights for _, weights in chosen]
        size, facts = self.placement.slots_per_rank, self.balancer.facts
        received = self.dispatcher.dispatch(rows, slots, gate_weights, size, facts)
        if borrowed is not None:
            borrowed.proceed()
        computed = self._compute(received, batch.loads, slots, borrowed)  # [N, H], summed over a row's copies
        return self.dispatcher.combine(computed, received)  # [T, H]

    def expert_parameters(self) -> list[nn.Parameter]:
        """The owned ranks' expert Parameters.

        Their gradients are sums over the tokens of all ranks, so data parallelism must leave them alone; those of all
        other Parameters are sums over the own rank's tokens and need an all-reduce. See docs/borrowing.md.
        """
        return list(self.weights.parameters())

    def refresh_replicas(self) -> None:
        """Copies home rows to their replicas: after every optimizer step, by all ranks together."""
        if self.has_replicas:
            refresh_replicas(self.group, self._ranks(), self.replica_moves)

    def full_state_dict(self) -> dict[str, Any]:
        """The state on every rank, whatever the placement: all ranks together.

        ``experts.gate_up`` and so on are stacks [E, ...]; a rank's own state_dict() holds only the rows of its homes.
        """
        own = {name: value for name, value in self.state_dict().items() if not name.startswith("weights.")}
        return own | gather_full(self.group, self._ranks(), self.layouts)

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads what :meth:`full_state_dict` or merge_states made, replicas included, under any number of ranks.

        Raises:
            ValueError: before anything is copied: a missing or unknown key, or another shape.
        """
        own = {name: value for name, value in state.items() if not name.startswith("experts.")}
        wanted = {name for name in self.state_dict() if not name.startswith("weights.")}
        if own.keys() != wanted:
            raise ValueError(f"state must hold {sorted(wanted)} beside experts, got {sorted(own)}")
        load_full(self._ranks(), self.placement.num_experts, state)
        self.load_state_dict(own, strict=False)

    def load_placement(
        self,
        placement: Placement,
        *,
        rows_per_chunk: int | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Moves the layer to a new placement: between batches, by all ranks together.

        Only rows that change travel. Memory stays where it is: the Parameters are the same objects on the same
        memory, with the rows of their new experts; what planning reads is written in place. Layers that share a
        Placement may be moved one by one, with batches between.

        Args:
            placement: with the same topology, layers, experts and slots. Replicas must be fresh
                (:meth:`refresh_replicas`): any of an expert's rows may be the one that is copied.
            rows_per_chunk: most rows, over all ranks, that are copied at a time; bounds the memory needed on the way.
                None: R, at least 2.
            optimizer: whose state of the expert Parameters moves along, wherever it has their shape. None: no state
                moves, and an optimizer that keeps state by row raises at its next step.

        Raises:
            ValueError: on all ranks and before anything moves: naming the argument, the rule and the value on the rank
                at fault, that rank or the fact they differ in on the others.
            RuntimeError: naming the stage, if a rank is gone. The layer's weights are then undefined.
        """
        ranks, before = self._ranks(), self.layouts
        size = max(2, len(before)) if rows_per_chunk is None else rows_per_chunk
        facts: list[list[int]] = []
        failure = None
        try:
            check_move(self.placement, placement, size, ranks)
            self._check_weights()
            placed = placement.layer(self.layer, "cpu")
            after = layouts(placed, before)
            facts = move_facts(placed, before, after, self.num_rows, size, ranks, optimizer)
        except Exception as error:
            failure = error
        self.group.agree("placement", FACTS, facts, ranks[0].row_of_slot.device, failure)
        if optimizer is not None:
            move_state(self.group, ranks, optimizer, before, after, size)
        move_weights(self.group, ranks, before, after, size)
        for rank, weights in zip(self.group.ranks, ranks, strict=True):
            weights.settle(after[rank])
        if self.borrowing is not None:
            self.borrowing.settle(after, placement.num_experts)
        self._settle(after)
        self.balancer.settle(placement)

    def _ranks(self) -> list[RankWeights]:
        return list(self.weights)  # type: ignore[arg-type]

    def _borrow(self, made: Plan | None) -> Borrowed | None:
        """Begins to bring the experts in the plan's spare slots."""
        if made is None or self.borrowing is None or made.filled is made.placed.filled:
            return None
        return self.borrowing.borrow(made.filled)

    def _balance(
        self, rows: list[Tensor], choose: Choose, num_tokens: int | None
    ) -> tuple[list[Routing], Balanced]:
        """Every owned rank's choices, and the batch balanced by them.

        A rank that fails tells the others in the gather or, without one, in dispatch; on a GPU with max_tokens_per_rank
        nothing there is read, and the others wait for the group's timeout.
        """
        most, device = self.dispatcher.max_tokens_per_rank, self._ranks()[0].row_of_slot.device
        if num_tokens is None and most is not None:
            num_tokens = most * self.group.topology.num_ranks
        chosen: list[Routing] = []
        failure = None
        try:
            checks.check_rows(rows, most, self._ranks()[0].stored_down)
            self._check_weights()
            chosen = [self._complete(*routing) for routing in choose()]
        except Exception as error:
            failure = error
        ids = [ids for ids, _ in chosen]
        tell = partial(self.dispatcher.tell_failure, "count", device, self.balancer.facts)
        row_facts = [0] * len(ROW_FACTS)
        if failure is None:
            row_facts = [rows[0].shape[1], DTYPES.index(rows[0].dtype), ids[0].shape[1]]
        facts = dict(zip(ROW_FACTS, row_facts, strict=True))
        return chosen, self.balancer.balance(ids, num_tokens, failure, tell, facts)

    def _check_weights(self) -> None:
        """Raises ValueError if an owned rank's Parameters cannot be computed from as they are now."""
        checks.check_wrappers(self.group, self._ranks())
        for rank, weights in zip(self.group.ranks, self._ranks(), strict=True):
            weights.check(rank in self._replicated)
            if self.borrowing is not None:
                self.borrowing.check(weights)

    def _complete(self, topk_ids: Tensor, weights: Tensor) -> Routing:
        """One rank's choices, checked, with the shared experts after them."""
        placement = self.placement
        routing = given_choices(topk_ids, weights, num_experts=placement.num_routed)
        if not placement.num_shared:
            return routing
        ids, weights = routing
        ranks = torch.zeros(len(ids), placement.num_shared, dtype=torch.int32, device=ids.device)
        return Routing(*append_shared_expert(ids, weights, ranks, placement.num_routed))

    def _compute(
        self, received: list[Received], loads: Tensor, slots: list[Tensor], borrowed: Borrowed | None
    ) -> list[Tensor]:
        """Resident experts first, while borrowed weights still travel."""
        ranks, readable = self._ranks(), values_readable(loads)
        noted = {f"route of rank {r}": s for r, s in zip(self.group.ranks, slots, strict=True)}
        noted = {"loads": loads, **noted} if readable else {}
        arrived_rows = [arrived.rows for arrived in received]
        rows, groups = join_rows(self.group, ranks, arrived_rows, self.replica_moves, borrowed, noted)
        outputs = []
        for row, rank, arrived, stacks in zip(rows, ranks, received, groups, strict=True):
            local = rank.weight_rows(arrived.slots)
            # On a device the count would be one more wait: there buffers hold N*K copies.
            held = count_copies(local, stacks) if readable else None
            outputs.append(run_experts(row, local, arrived.weights, stacks, self.activation, held))
        return outputs if borrowed is None else bring_again(borrowed, outputs)
