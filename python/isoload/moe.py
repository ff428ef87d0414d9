"""MoE: an expert-parallel Mixture-of-Experts layer that balances itself, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isoload.counting import count
from isoload.expert_weights import Activation, ExpertWeights, SwiGLU
from isoload.experts import run_experts
from isoload.modules import module_parts
from isoload.ops import Prefer
from isoload.placement import Placement
from isoload.placers import place
from isoload.planning import plan
from isoload.policies import Policy, make_policy
from isoload.records import Plan
from isoload.resident import RankWeights, join_replicas, refresh_replicas, residences
from isoload.routing import route
from isoload.topology import Topology
from isoload.transport import LocalTransport, Received, Transport, error_code

Gate = Callable[[Tensor], tuple[Tensor, Tensor]]


class MoE(nn.Module):
    """One MoE layer over the ranks of a transport; the dense layer's mathematics, whatever the policy.

    Lists run over the ranks that this process owns (one for torch.distributed, all for the local transport); a
    process that owns one rank may pass and gets plain tensors.

    Args:
        gate: rows [T, H] -> (topk_ids [T, K] int64, weights [T, K] float32): a router, see isoload.routers.Gate.
        dense: the stacks of all E experts; each rank keeps its own rows of them.
        transport: joins the ranks.
        placement: where the experts lie.
        layer: position of this layer in the placement.
        policy: a name in isoload.POLICIES or a Policy; options go with the name. One that samples draws the same
            in every batch until its step is changed (``layer.policy = ...``).
        activation: SwiGLU (default), or gpt-oss's ClampedGLU.
        shared: a module for all local rows, added to the result; None = no shared expert.
        prefer: see isoload.route.

    Raises:
        ValueError: naming the argument, the rule and the value; on the other ranks naming the rank and the stage.
    """

    def __init__(
        self,
        gate: Gate,
        dense: ExpertWeights,
        transport: Transport,
        placement: Placement,
        layer: int = 0,
        policy: str | Policy = "exact",
        *,
        activation: Activation | None = None,
        shared: nn.Module | None = None,
        prefer: Prefer | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if dense.num_slots != placement.num_experts:
            raise ValueError(
                f"dense must hold num_experts={placement.num_experts} experts, got {dense.num_slots}"
            )
        if placement.topology.num_ranks != transport.topology.num_ranks:
            raise ValueError(
                f"placement must be for the transport's {transport.topology.num_ranks} ranks, "
                f"got {placement.topology.num_ranks}"
            )
        self.gate, self.transport, self.placement, self.layer = gate, transport, placement, layer
        self.policy, self.prefer, self.shared = make_policy(policy, options), prefer, shared
        self.activation: Activation = SwiGLU() if activation is None else activation
        held = residences(placement.layer(layer, "cpu"))
        self.weights = nn.ModuleList(RankWeights(held[rank], dense) for rank in transport.ranks)
        self.has_replicas = any(residence.replicas for residence in held)
        self.last_plan: Plan | None = None

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
            block: with the weights of all experts; see :func:`isoload.modules.module_parts`.
            topology: R ranks.
            transport: None = all ranks in this process.
            placement: None = experts in order (placer ``trivial``).
            **how: layer, policy, prefer and the policy's options.
        """
        parts = module_parts(block)
        if placement is None:
            placement = place(torch.ones(1, parts.dense.num_slots), topology, placer="trivial")
        transport = LocalTransport(topology) if transport is None else transport
        how = {"activation": parts.activation, "shared": parts.shared, **how}
        return cls(parts.gate, parts.dense, transport, placement, **how)

    def forward(self, x: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
        """[T, H] -> [T, H] on every owned rank; T may differ between ranks and be 0."""
        rows = [x] if isinstance(x, Tensor) else list(x)
        chosen, loads = self._choose(rows)  # [T, K] ids and weights; [R, E] copies
        made = self.last_plan = plan(loads, self.placement, self.layer, self.policy)  # quota [P]
        slots = [
            route(ids, loads, made, rank, prefer=self.prefer)  # [T, K]
            for rank, (ids, _) in zip(self.transport.ranks, chosen, strict=True)
        ]
        gate_weights = [weights for _, weights in chosen]
        received = self.transport.dispatch(rows, slots, gate_weights, self.placement.slots_per_rank)
        computed = self._compute(received)  # [N, H], weighted and summed over each row's local copies
        combined = self.transport.combine(computed, received)  # [T, H]
        if self.shared is not None:
            combined = [y + self.shared(row) for y, row in zip(combined, rows, strict=True)]
        return combined[0] if isinstance(x, Tensor) else combined

    def refresh_replicas(self) -> None:
        """Copies home rows to their replicas: after every optimizer step, by all ranks together."""
        if self.has_replicas:
            refresh_replicas(self.transport, self._ranks())

    def _ranks(self) -> list[RankWeights]:
        return list(self.weights)  # type: ignore[arg-type]

    def _choose(self, rows: list[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """Every owned rank's choices, and the gathered loads; a rank that fails tells the others in the gather."""
        experts, most = self.placement.num_experts, self.transport.max_tokens_per_rank
        try:
            if most is not None and max(map(len, rows)) > most:
                raise ValueError(
                    f"x must have at most max_tokens_per_rank={most} tokens, got {max(map(len, rows))}"
                )
            chosen = [self.gate(row) for row in rows]
            counts, errors, failure = [count(ids, experts) for ids, _ in chosen], [0] * len(rows), None
        except Exception as error:
            device = self._ranks()[0].row_of_slot.device
            nothing = torch.zeros(experts, dtype=torch.int32, device=device)
            chosen, counts, failure = [], [nothing] * len(self.transport.ranks), error
            errors = [error_code("count")] * len(counts)
        try:
            loads = self.transport.gather_loads(counts, errors)
        except ValueError:
            if failure is not None:
                raise failure from None
            raise
        return chosen, loads

    def _compute(self, received: list[Received]) -> list[Tensor]:
        ranks = self._ranks()
        rows = [arrived.rows for arrived in received]
        if self.has_replicas:
            rows, groups = join_replicas(self.transport, ranks, rows)
        else:
            groups = [[rank.as_weights(rank.home_rows())] for rank in ranks]
        return [
            run_experts(row, rank.weight_rows(arrived.slots), arrived.weights, stacks, self.activation)
            for row, rank, arrived, stacks in zip(rows, ranks, received, groups, strict=True)
        ]
