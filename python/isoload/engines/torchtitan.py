"""torchtitan: a token dispatcher that follows a plan, with experts borrowed for one batch.

The experts stay torchtitan's own module and Parameters. See :mod:`isoload.engines.lending`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torchtitan.models.common.moe import RoutedExperts
from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher

from isoload.engines.lending import LendingDispatcher, Sent, check_homes, placement_of, transport_of
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.transport import CollectiveTransport


class StackedExperts:
    """Access to the Parameters [experts, ...] of a GroupedExperts, which expert parallelism shards by experts."""

    def __init__(self, experts: nn.Module, count: int) -> None:
        self.module = experts
        self.names = [name for name, _ in experts.named_parameters()]
        for name, weight in zip(self.names, self._stacks(), strict=True):
            if len(weight) != count:
                raise ValueError(
                    f"experts must have Parameters [{count}, ...] on this rank, got {name} {list(weight.shape)} in a "
                    f"{type(experts).__name__}: apply isoload after torchtitan has parallelized the model"
                )

    def weights(self, row: int) -> list[Tensor]:
        return [stack[row] for stack in self._stacks()]

    def run(self, copies: Tensor, ends: Sequence[int], stacks: Sequence[Tensor]) -> Tensor:
        if not ends:  # this rank lends experts and borrows none
            return copies
        counts = torch.tensor(ends, device=copies.device).diff(prepend=copies.new_zeros(1, dtype=torch.int64))
        weights = dict(zip(self.names, stacks, strict=True))
        result: Tensor = functional_call(self.module, weights, (copies, counts))
        return result

    def _stacks(self) -> Iterator[Tensor]:
        # Read in every forward: FSDP replaces the Parameters between forwards.
        for _, weight in self.module.named_parameters():
            yield weight.to_local() if isinstance(weight, DTensor) else weight


class BalancedTokenDispatcher(LendingDispatcher, BaseEPTokenDispatcher):  # type: ignore[misc]  # torchtitan is untyped
    """The token dispatcher that :func:`balance` installs in a RoutedExperts, in place of `stock`. The host reads the
    plan, the row counts and the number of copies once per forward."""

    def __init__(
        self,
        stock: BaseEPTokenDispatcher,
        experts: nn.Module,
        placement: Placement,
        transport: CollectiveTransport,
        **options: Any,
    ) -> None:
        with transport.group.agreeing("construction"):
            check_dispatcher(stock)
            rank, count = transport.group.ranks[0], stock.num_experts // stock.ep_mesh.size()
            local_experts = range(rank * count, (rank + 1) * count)
            check_homes(placement, stock.num_experts, local_experts, rank)
            stacks = StackedExperts(experts, count)
        LendingDispatcher.__init__(self, placement, transport, stacks, local_experts, **options)
        self.num_experts, self.top_k, self.ep_mesh = stock.num_experts, stock.top_k, stock.ep_mesh

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Sent]:
        """Return [C, D] copies of the own experts, ordered by expert, [experts] their counts, and a state for combine.
        num_local_tokens_per_expert_E is not used; the Balancer counts the ids."""
        call = self.begin(x_TD.device)
        sent = self.send(x_TD, topk_expert_ids_TK, topk_scores_TK.float(), call)
        return *self.own_copies(sent), sent

    def combine(self, routed_output_RD: Tensor, metadata: Sent, x_TD: Tensor) -> Tensor:
        return self.give_back(self.sums(routed_output_RD, metadata), metadata)


def check_dispatcher(stock: BaseEPTokenDispatcher) -> None:
    if multiple := getattr(stock, "pad_multiple", None):
        raise ValueError(f"pad_multiple must be None, as for experts that are not quantised, got {multiple}")
    if getattr(stock, "non_blocking_capacity_factor", None) is not None or getattr(
        stock, "cudagraphable", False
    ):
        raise ValueError(
            f"{type(stock).__name__} must not have a fixed capacity: pass comm_backend='standard'"
        )


def balance(
    model: nn.Module,
    policy: str | Policy = "llep",
    *,
    placement: Placement | None = None,
    spare_slots: int | None = None,
    ranks_per_node: int = 0,
    **options: Any,
) -> list[BalancedTokenDispatcher]:
    """Install a balanced dispatcher in every RoutedExperts of a parallelized model, in the order of its modules.

    All ranks call it. The arguments are those of :func:`isoload.engines.megatron.balance`.

    Raises:
        ValueError: no expert parallelism, or the dispatcher, the experts or the placement are not supported.
    """
    transports: dict[Any, CollectiveTransport] = {}
    dispatchers = []
    for routed in [module for module in model.modules() if isinstance(module, RoutedExperts)]:
        stock = routed.token_dispatcher
        if (mesh := getattr(stock, "ep_mesh", None)) is None:
            raise ValueError(
                f"model must be parallelized over experts, got a {type(stock).__name__} without a mesh: pass "
                "--parallelism.expert_parallel_degree"
            )
        transport = transport_of(mesh.get_group(), transports, ranks_per_node)
        chosen = placement_of(placement, stock.num_experts, transport, policy, spare_slots)
        routed.token_dispatcher = BalancedTokenDispatcher(
            stock, routed.inner_experts, chosen, transport, policy=policy, **options
        )
        dispatchers.append(routed.token_dispatcher)
    if not dispatchers:
        raise ValueError(f"model must have a RoutedExperts, got a {type(model).__name__} without")
    return dispatchers
