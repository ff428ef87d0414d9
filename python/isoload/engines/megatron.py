"""Megatron-Core: a token dispatcher that follows a plan, with experts borrowed for one batch.

Home experts stay Megatron's own modules and Parameters, so its optimizers, checkpoints and data parallelism need no
change. A replica, resident in the placement or borrowed by the policy, is a copy of the home's weights that every
forward transfers again; backward returns its gradient to the home Parameter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from isoload.balancing.balancer import Balancer
from isoload.balancing.known_routes import KnownPlan
from isoload.balancing.planning import Gathered
from isoload.checks import values_readable
from isoload.layer.blocks import check_spare, spare_count
from isoload.ops import group_copies
from isoload.ops.counting import gather_copies, weighted_sum
from isoload.ops.results import Grouping
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.policies import Policy
from isoload.policies.plan import in_backward
from isoload.topology import Topology
from isoload.transport import Call, CollectiveTransport, Group, Received
from isoload.weights.layout import Address, Move, add_back, move_rows


@dataclass(frozen=True)
class Loans:
    """The loans of one batch.

    moves   of all ranks: a rank's rows are the experts that it lends, ascending, then those that it borrows, by slot
    lent    the experts that this rank lends
    places  this rank's row of every local slot that is borrowed
    """

    moves: list[Move]
    lent: list[int]
    places: dict[int, int]


def loans(placement: Placement, slots: Sequence[int], rank: int) -> Loans:
    """Return the loans for all slots that are not home slots.

    placement: its first layer has the home slots. slots: [P] expert of every slot that has copies; -1 = none.
    """
    size, ranks = placement.slots_per_rank, placement.topology.num_ranks
    homes = placement.arrays[1][0].tolist()
    copies = [(p, e) for p, e in enumerate(slots) if e >= 0 and p != homes[e]]
    lent: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted({e for _, e in copies}):
        lent[homes[expert] // size].append(expert)
    row = {expert: i for of_rank in lent for i, expert in enumerate(of_rank)}
    places: list[dict[int, int]] = [{} for _ in range(ranks)]
    moves = []
    for p, e in copies:
        borrowed = places[p // size]
        moves.append(Move(Address(homes[e] // size, row[e]), Address(p // size, len(borrowed))))
        borrowed[p % size] = len(borrowed)
    return Loans(moves, lent[rank], places[rank])


class Lend(torch.autograd.Function):
    """Rows [N, H] and the lent experts' Parameters in; the rows and the borrowed stacks [n, ...] out.

    Rows pass through so that every rank enters the exchange of the gradients, also one that neither lends nor borrows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        moves: list[Move],
        num_borrowed: int,
        like: Sequence[Tensor],
        rows: Tensor,
        *lent: Tensor,
    ) -> tuple[Tensor, ...]:
        width = len(like)
        stacks = [
            torch.stack(lent[w::width]) if lent else weight.new_empty(0, *weight.shape)
            for w, weight in enumerate(like)
        ]
        pools = [weight.new_empty(num_borrowed, *weight.shape) for weight in like]
        move_rows(group, "borrow", moves, [stacks], [pools])
        ctx.group, ctx.moves, ctx.shapes = group, moves, [stack.shape for stack in stacks]
        return rows.view_as(rows), *pools

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, *grads: Tensor) -> tuple[Any, ...]:
        totals = [grad.new_zeros(shape) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        add_back(ctx.group, "borrowed gradients", ctx.moves, [[g.contiguous() for g in grads]], [totals])
        of_experts = (weight for expert in zip(*totals, strict=True) for weight in expert)
        return None, None, None, None, rows, *of_experts


class SequentialExperts:
    """Weights and computation of a SequentialMLP's experts, one module each."""

    def __init__(self, experts: Any) -> None:
        self.modules = list(experts.local_experts)
        self.names = [name for name, _ in self.modules[0].named_parameters()]

    def weights(self, row: int) -> list[Tensor]:
        """Return an expert's weights in a fixed order."""
        return list(self.modules[row].parameters())

    def run(self, copies: Tensor, ends: Sequence[int], stacks: Sequence[Tensor]) -> Tensor:
        """Return the results [C, H] of copies that are ordered by expert, for experts [n, ...] of other ranks.

        Args:
            copies: [C, H].
            ends: [n] end of every expert's copies.
            stacks: weights [n, ...] in the order of :meth:`weights`.
        """
        first, results = 0, []
        for i, end in enumerate(ends):
            rows = copies[first:end]
            weights = {name: stack[i] for name, stack in zip(self.names, stacks, strict=True)}
            results.append(functional_call(self.modules[0], weights, (rows, rows.new_ones(len(rows))))[0])
            first = end
        return torch.cat([*results, copies[first:]])


class NumberedExperts(SequentialExperts):
    """Experts of a TEGroupedMLP: Parameters ``linear_fc1.weight{i}``, ``linear_fc2.weight{i}`` and biases."""

    def __init__(self, experts: Any) -> None:
        self.module, self.count = experts, int(experts.num_local_experts)
        parameters = dict(experts.named_parameters())
        self.names = [name[:-1] for name in parameters if re.fullmatch(r".*[a-z_]0", name)]
        wanted = {f"{name}{i}" for name in self.names for i in range(self.count)}
        if not self.names or parameters.keys() != wanted:
            stray = next(iter(parameters.keys() ^ wanted), "none")
            raise ValueError(
                f"experts must have Parameters numbered 0..{self.count - 1} alone, as TEGroupedMLP has, got {stray} in "
                f"a {type(experts).__name__}"
            )

    def weights(self, row: int) -> list[Tensor]:
        parameters = dict(self.module.named_parameters())
        return [parameters[f"{name}{row}"] for name in self.names]

    def run(self, copies: Tensor, ends: Sequence[int], stacks: Sequence[Tensor]) -> Tensor:
        begins, results = [0, *ends], []
        for first in range(0, len(ends), self.count):  # the module computes as many experts as the rank has
            last = min(first + self.count, len(ends))
            rows = copies[begins[first] : begins[last]]
            counts = [begins[i + 1] - begins[i] for i in range(first, last)] + [0] * (
                self.count - last + first
            )
            weights = self._as_own([stack[first:last] for stack in stacks])
            inputs = rows, torch.tensor(counts), rows.new_ones(len(rows))
            results.append(functional_call(self.module, weights, inputs)[0])
        return torch.cat([*results, copies[begins[-1] :]])

    def _as_own(self, stacks: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return experts [n, ...] as the module's first Parameters."""
        of_names = zip(self.names, stacks, strict=True)
        return {f"{name}{i}": weight for name, stack in of_names for i, weight in enumerate(stack)}


class StackedExperts(NumberedExperts):
    """Experts of a GroupedMLP: ``weight1`` [H, experts * F] and ``weight2`` [experts * I, H], in the memory of
    [experts, H, F] and [experts, I, H].
    """

    def __init__(self, experts: Any) -> None:
        self.module, self.count = experts, int(experts.num_local_experts)
        self.names = ["weight1", "weight2"]
        if strays := dict(experts.named_parameters()).keys() - set(self.names):
            raise ValueError(
                f"experts must have the Parameters weight1 and weight2 alone, as GroupedMLP has, got {min(strays)} in "
                f"a {type(experts).__name__}"
            )
        self.width = experts.weight1.shape[0]  # H

    def weights(self, row: int) -> list[Tensor]:
        first, second = (getattr(self.module, name) for name in self.names)
        stacks = first.view(self.count, self.width, -1), second.view(self.count, -1, self.width)
        return [stack[row] for stack in stacks]

    def _as_own(self, stacks: Sequence[Tensor]) -> dict[str, Tensor]:
        whole = [torch.cat([s, s.new_zeros(self.count - len(s), *s.shape[1:])]) for s in stacks]
        first, second = (stack.contiguous() for stack in whole)
        return {"weight1": first.view(self.width, -1), "weight2": second.view(-1, self.width)}


def experts_of(layer: MoELayer) -> SequentialExperts:
    """Return the access to a layer's experts, by the names of their Parameters.

    Raises:
        ValueError: the experts have other Parameters than SequentialMLP, TEGroupedMLP and GroupedMLP.
    """
    experts = layer.experts
    if hasattr(experts, "local_experts"):
        return SequentialExperts(experts)
    if not hasattr(experts, "num_local_experts"):
        raise ValueError(
            f"experts must be a SequentialMLP, TEGroupedMLP or GroupedMLP, got a {type(experts).__name__}"
        )
    return StackedExperts(experts) if hasattr(experts, "weight1") else NumberedExperts(experts)


# Megatron options that the dispatcher does not support, with their neutral value.
REFUSED: dict[str, Any] = {
    "moe_expert_capacity_factor": None,
    "moe_router_padding_for_quantization": False,
    "moe_shared_expert_overlap": False,
    "moe_apply_probs_on_input": False,
    "gradient_accumulation_fusion": False,  # it would drop the gradients of borrowed copies
    "moe_latent_size": None,
    "fp8": None,
    "fp4": None,
    "cuda_graph_impl": "none",
}

# Of these options the name before Megatron-Core 0.16; empty: there was none.
OLDER_OPTIONS = {"moe_router_padding_for_quantization": "moe_router_padding_for_fp8", "moe_latent_size": ""}


class BalancedTokenDispatcher(MoETokenDispatcher):  # type: ignore[misc]  # Megatron has no types
    """The token dispatcher that :func:`isoload.engines.megatron.balance` installs in a layer.

    The host reads the plan once per forward, because borrowed weights travel by its list; rows add a second wait.
    ``balancer.last_plan`` is the last batch's.
    """

    def __init__(
        self, layer: MoELayer, placement: Placement, transport: CollectiveTransport, **options: Any
    ) -> None:
        group, stock = transport.group, layer.token_dispatcher
        with group.agreeing("construction"):
            check_layer(layer)
            check_placement(placement, layer, group.ranks[0])
        groups = SimpleNamespace(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
        super().__init__(layer.config, groups)
        self.group, self.dispatcher = group, transport.dispatcher
        self.balancer = Balancer(placement, 0, group=group, **options)
        self.row_of_expert = {expert: row for row, expert in enumerate(layer.local_expert_indices)}
        self.experts = experts_of(layer)
        # Plan of the next forwards, made ahead for the experts that RouterReplay gives the router; None: planned here
        self.plan: KnownPlan | None = None
        self.top_k = layer.config.moe_router_topk

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[S, B, H] tokens, [T, E] choices and probabilities -> [T, H], [T, K] float32; stores the choices."""
        self._shape = tokens.shape
        self._ids = routing_map.new_full((len(routing_map), 1), -1, dtype=torch.int64)
        self._call = Call(self.group, device=tokens.device, later=self.dispatcher.carry_failure)
        with self._call:
            self._ids = chosen_experts(routing_map, self.top_k)
        weights = probs.gather(1, self._ids.clamp(min=0)).float()
        return tokens.reshape(-1, tokens.shape[-1]), weights.masked_fill(self._ids < 0, 0)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Balance the batch, transfer the weights it borrows, and send the rows: [N, H], [N, K]."""
        balancer = self.balancer
        slots = balancer.route(self._balance())
        per_rank = balancer.placement.slots_per_rank
        (received,) = self.dispatcher.dispatch([hidden_states], slots, [probs], per_rank, self._call)
        loan = loans(balancer.placement, self._slots(), self.group.ranks[0])
        rows, borrowed = received.rows, []
        if loan.moves:
            like = self._weights(next(iter(self.row_of_expert)))
            lent = [weight for expert in loan.lent for weight in self._weights(expert)]
            rows, *borrowed = Lend.apply(self.group, loan.moves, len(loan.places), like, rows, *lent)
        received = Received(rows, received.slots, received.weights, received.handle)
        local, num_own, lent_to = self._local(received.slots, loan), len(self.row_of_expert), len(loan.places)
        home_copies, borrowed_copies = (
            int(((local >= 0) & (local < num_own)).sum()),
            int((local >= num_own).sum()),
        )
        if home_copies + borrowed_copies != (num_copies := int((received.slots >= 0).sum())):
            raise RuntimeError(
                f"all {num_copies} copies must be for experts of this rank, {home_copies + borrowed_copies} are"
            )
        groups = [(0, num_own, home_copies), (num_own, lent_to, borrowed_copies)]
        # At least one place, as in run_experts: no product of zero rows.
        places = [min(max(number, 1), local.numel()) for *_, number in groups]
        homes, borrowed_groups = (
            group_copies(local, first, size, number)
            for (first, size, _), number in zip(groups, places, strict=True)
        )
        # For combine: the result of dispatch, the borrowed experts' stacks [n, ...] in the order of an expert's
        # Parameters, and the places of the copies of own and of borrowed experts.
        self._received, self._borrowed, self._homes, self._away = received, borrowed, homes, borrowed_groups
        return rows, received.weights

    def _balance(self) -> Gathered:
        """Plan the batch, or take the plan that was made ahead."""
        if self.plan is None:
            return self.balancer.balance([self._ids], None, self._call)
        with self._call:
            if in_backward():  # by then plan is another micro-batch's
                raise ValueError("plan must be None for layers that a checkpoint recomputes, got a plan")
        return self.balancer.follow([self._ids], self.plan, self._call)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return [C, H] copies of the own experts, [experts] their counts, and [C] ones: weights are applied in the
        sum.
        """
        ends = self._homes.ends.long()
        copies = gather_copies(hidden_states, self._homes)[: int(ends[-1])]
        return copies, ends.diff(prepend=ends.new_zeros(1)).cpu(), copies.new_ones(len(copies))

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """[C, H] results of the own experts -> [N, H] weighted sums, with those of the borrowed ones."""
        received, away = self._received, self._away
        parts = [(padded(hidden_states, self._homes), self._homes)]
        if self._borrowed:
            ends = away.ends.tolist()
            copies = gather_copies(received.rows, away)[: ends[-1] if ends else 0]
            parts.append((padded(self.experts.run(copies, ends, self._borrowed), away), away))
        return weighted_sum(parts, received.weights, hidden_states.dtype)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """[N, H] -> [T, H]."""
        (combined,) = self.dispatcher.combine([hidden_states], [self._received])
        return combined

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """[T, H] -> [S, B, H]."""
        return hidden_states.view(self._shape)

    def _weights(self, expert: int) -> list[Tensor]:
        return self.experts.weights(self.row_of_expert[expert])

    def _slots(self) -> list[int]:
        """Return [P] the expert in every slot that may have copies; -1 = none."""
        plan = self.balancer.last_plan
        if plan is None:
            return self.balancer.placement.arrays[0][0].tolist()  # type: ignore[no-any-return]
        slots = plan.slot_to_expert
        if plan.quota is not None and plan.realisation == "quota":
            slots = torch.where(plan.quota > 0, slots, -1)
        return slots.tolist()  # type: ignore[no-any-return]

    def _local(self, slots: Tensor, loan: Loans) -> Tensor:
        """Return local slots [N, K] as experts: the own ones, then the borrowed ones; -1 stays -1."""
        placement = self.balancer.placement
        size = placement.slots_per_rank
        table = [-1] * size
        for expert, row in self.row_of_expert.items():
            table[int(placement.arrays[1][0][expert]) % size] = row
        for slot, row in loan.places.items():
            table[slot] = len(self.row_of_expert) + row
        at = torch.tensor(table, device=slots.device)
        return torch.where(slots < 0, -1, at[slots.clamp(min=0)])


def chosen_experts(routing_map: Tensor, top_k: int) -> Tensor:
    """Return [T, K] int64 the experts of a map [T, E] bool, ascending; -1 after those of a token with fewer than K."""
    experts = routing_map.shape[1]
    ids = torch.arange(experts, device=routing_map.device)
    ordered = torch.where(routing_map, ids, experts).sort(1).values
    if values_readable(ordered) and (ordered[:, top_k:] < experts).any():
        raise ValueError(f"routing_map must choose at most moe_router_topk={top_k} experts per token")
    ordered = ordered[:, :top_k]
    return ordered.masked_fill(ordered == experts, -1)


def check_layer(layer: MoELayer) -> None:
    """Raise ValueError for a layer whose tokens this dispatcher does not support."""
    experts_of(layer)
    for name, value in REFUSED.items():
        older = OLDER_OPTIONS.get(name)
        absent = value if older == "" else "no such option"
        if (setting := getattr(layer.config, name, getattr(layer.config, older or name, absent))) != value:
            raise ValueError(f"{name} must be {value}, got {setting!r}")
    if (implementation := getattr(layer.config, "transformer_impl", "local")) == "inference_optimized":
        raise ValueError(
            f"transformer_impl must not replace token dispatchers as its inference runs, got {implementation!r}"
        )
    if (size := layer.token_dispatcher.tp_group.size()) != 1:
        raise ValueError(f"expert_tensor_parallel_size must be 1, got {size}")


def check_placement(placement: Placement, layer: MoELayer, rank: int) -> None:
    """Raise ValueError for a placement that does not have this layer's experts."""
    if placement.num_experts != layer.config.num_moe_experts or placement.num_shared:
        raise ValueError(
            f"placement must be of num_moe_experts={layer.config.num_moe_experts} and no shared experts, "
            f"got {placement.num_experts} and {placement.num_shared}"
        )
    home = placement.home_experts(0, rank)
    if home != list(layer.local_expert_indices):
        raise ValueError(
            f"placement must have Megatron's experts {list(layer.local_expert_indices)} as home experts of rank "
            f"{rank}, "
            f"got {home}"
        )


def padded(copies: Tensor, grouping: Grouping) -> Tensor:
    """Return [C, H]: copies, and zeros in the places of a grouping that has more places than copies."""
    return torch.cat([copies, copies.new_zeros(len(grouping.copy) - len(copies), copies.shape[1])])


def balance(
    model: nn.Module,
    policy: str | Policy = "llep",
    *,
    placement: Placement | None = None,
    spare_slots: int | None = None,
    ranks_per_node: int = 0,
    **options: Any,
) -> list[BalancedTokenDispatcher]:
    """Install a balanced dispatcher in every MoELayer of a model, in the order of its modules. All ranks call it.

    Args:
        model: with experts of SequentialMLP, TEGroupedMLP or GroupedMLP; each rank has those that Megatron gave it.
        policy: a name in isoload.POLICIES or a Policy; options go with the name.
        placement: its first layer, for every MoELayer; each expert's home slot is on the rank that has it. None: the
            experts without replicas, and spare_slots.
        spare_slots: experts that a rank can borrow at a time, if there is no placement. None: 2 if the policy
            borrows, else 0.
        ranks_per_node: of the expert-parallel group; 0 = all on one node.

    Raises:
        ValueError: a layer with other experts, an option of Megatron's that is not supported, or a placement that
            does not fit; names the argument, the rule and the value.
    """
    transports: dict[Any, CollectiveTransport] = {}
    dispatchers = []
    for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
        group, ranks = layer.ep_group, layer.ep_group.size()
        if group not in transports:
            transports[group] = CollectiveTransport(Topology(ranks, ranks_per_node), group)
        transport, chosen = transports[group], placement
        if chosen is None:
            experts = torch.ones(1, layer.config.num_moe_experts)
            topology = transport.group.topology
            spare = spare_count(policy, spare_slots)
            chosen = place(experts, topology, placer="trivial", spare_slots=spare)
        else:
            check_spare(chosen, spare_slots)
        layer.token_dispatcher = BalancedTokenDispatcher(layer, chosen, transport, policy=policy, **options)
        dispatchers.append(layer.token_dispatcher)
    if not dispatchers:
        raise ValueError(f"model must have a MoELayer, got a {type(model).__name__} without")
    return dispatchers
