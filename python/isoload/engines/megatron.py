"""Megatron-Core: a token dispatcher that follows a plan, with experts borrowed for one batch.

Home experts stay Megatron's own modules and Parameters, so its optimizers, checkpoints and data parallelism need no
change. See :mod:`isoload.engines.lending`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor, nn
from torch.func import functional_call

from isoload.checks import values_readable
from isoload.engines.lending import LendingDispatcher, check_homes, placement_of, transport_of
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.transport import CollectiveTransport


class SequentialExperts:
    """Weights and computation of a SequentialMLP's experts, one module each."""

    def __init__(self, experts: Any) -> None:
        self.modules = list(experts.local_experts)
        self.names = [name for name, _ in self.modules[0].named_parameters()]

    def weights(self, row: int) -> list[Tensor]:
        return list(self.modules[row].parameters())

    def run(self, copies: Tensor, ends: Sequence[int], stacks: Sequence[Tensor]) -> Tensor:
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
        of_names = zip(self.names, stacks, strict=True)
        return {f"{name}{i}": weight for name, stack in of_names for i, weight in enumerate(stack)}


class StackedExperts(NumberedExperts):
    """Experts of a GroupedMLP: ``weight1`` [H, experts * F], ``weight2`` [experts * I, H], of [experts, ...] memory."""

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


class BalancedTokenDispatcher(LendingDispatcher, MoETokenDispatcher):  # type: ignore[misc]  # Megatron has no types
    """The token dispatcher that :func:`balance` installs in a layer; ``balancer.last_plan`` is the last batch's. The
    host reads the plan once per forward, because borrowed weights travel by its list; rows add a second wait."""

    def __init__(
        self, layer: MoELayer, placement: Placement, transport: CollectiveTransport, **options: Any
    ) -> None:
        group, stock = transport.group, layer.token_dispatcher
        with group.agreeing("construction"):
            check_layer(layer)
            check_homes(placement, layer.config.num_moe_experts, layer.local_expert_indices, group.ranks[0])
        groups = SimpleNamespace(ep=stock.ep_group, expt_tp=stock.tp_group, tp_ep=stock.tp_ep_group)
        MoETokenDispatcher.__init__(self, layer.config, groups)
        LendingDispatcher.__init__(
            self, placement, transport, experts_of(layer), layer.local_expert_indices, **options
        )
        self.top_k = layer.config.moe_router_topk

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[S, B, H] tokens, [T, E] choices and probabilities -> [T, H], [T, K] float32; stores the choices."""
        self._shape = tokens.shape
        self._ids = routing_map.new_full((len(routing_map), 1), -1, dtype=torch.int64)
        self._call = self.begin(tokens.device)
        with self._call:
            self._ids = chosen_experts(routing_map, self.top_k)
        weights = probs.gather(1, self._ids.clamp(min=0)).float()
        return tokens.reshape(-1, tokens.shape[-1]), weights.masked_fill(self._ids < 0, 0)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Balance the batch, transfer the weights it borrows, and send the rows: [N, H], [N, K]."""
        self._sent = self.send(hidden_states, self._ids, probs, self._call)
        return self._sent.received.rows, self._sent.received.weights

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return [C, H] copies of the own experts, [experts] their counts, [C] ones: weights are applied in the sum."""
        copies, counts = self.own_copies(self._sent)
        return copies, counts.cpu(), copies.new_ones(len(copies))

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """[C, H] results of the own experts -> [N, H] weighted sums, with those of the borrowed ones."""
        return self.sums(hidden_states, self._sent)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        return self.give_back(hidden_states, self._sent)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.view(self._shape)


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
        placement: its first layer, for every MoELayer; an expert's home slot is on the rank that has the expert. None:
            the experts without replicas, and spare_slots.
        spare_slots: without a placement: experts that a rank can borrow at a time. None: 2 if the policy borrows,
            else 0.
        ranks_per_node: of the expert-parallel group; 0 = all on one node.

    Raises:
        ValueError: the experts, an option of Megatron's or the placement are not supported.
    """
    transports: dict[Any, CollectiveTransport] = {}
    dispatchers = []
    for layer in [module for module in model.modules() if isinstance(module, MoELayer)]:
        transport = transport_of(layer.ep_group, transports, ranks_per_node)
        chosen = placement_of(placement, layer.config.num_moe_experts, transport, policy, spare_slots)
        layer.token_dispatcher = BalancedTokenDispatcher(layer, chosen, transport, policy=policy, **options)
        dispatchers.append(layer.token_dispatcher)
    if not dispatchers:
        raise ValueError(f"model must have a MoELayer, got a {type(model).__name__} without")
    return dispatchers
