"""The Balancers of one process, by layer: made when SGLang has its expert locations, refreshed in place when it moves
experts. LAYERS is the only state of the plug-in."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch import Tensor

from isoload.balancer import Balancer
from isoload.integrations.engine_layers import EngineLayer, EngineLayers
from isoload.integrations.engine_tables import engine_topology
from isoload.integrations.meter import Meter
from isoload.policies import make_policy
from isoload.topology import Topology

log = logging.getLogger("isoload")


class Layer(EngineLayer):
    """It stands where SGLang has an LPLBSolver: ``solve(topk_ids)``. tokens="own" behind lp, "same" behind dynamic."""

    def __init__(self, balancer: Balancer, meter: Meter | None) -> None:
        super().__init__(balancer, meter)
        self.num_valid: Tensor | None = None  # of the batch that comes next: rows from here on are padding
        self.shared: Tensor | None = None  # [T, 1] rank of every token's shared copy; Waterfill takes it

    def solve(self, topk_ids: Tensor) -> Tensor:
        """[T, K] physical ids of the routed copies, from [T, K] logical ones; all ranks together, also with T = 0."""
        num_valid, self.num_valid = self.num_valid, None
        slots = self.slots(topk_ids, num_valid)
        num_shared = self.balancer.placement.num_shared
        if not num_shared:
            return slots
        if self.shared is not None:
            raise RuntimeError(
                f"layer {self.balancer.layer}: Waterfill did not take the shared copies of a batch"
            )
        per_rank = self.balancer.placement.slots_per_rank
        self.shared = slots[:, -num_shared:].div(per_rank, rounding_mode="floor")
        return self.balancer.routed_ids(slots[:, :-num_shared])

    def take_shared(self, num_tokens: int) -> Tensor | None:
        """[T, 1] the ranks that the plan of this batch chose for the shared copies, once; None: nothing was planned."""
        shared, self.shared = self.shared, None
        if shared is not None and len(shared) != num_tokens:
            raise RuntimeError(
                f"layer {self.balancer.layer}: Waterfill must have the {len(shared)} tokens that were planned, "
                f"got {num_tokens}"
            )
        return shared


class Layers(EngineLayers[Layer]):
    """All layers of this process. SGLang's modules are imported inside of functions, which only its processes call."""

    engine = "SGLang"

    def reset(self) -> None:
        super().reset()
        self.num_waterfill = 0  # layers whose shared experts are placed beside routed copies as they lie

    def engine_group(self) -> dist.ProcessGroup:
        from sglang.srt.runtime_context import get_parallel

        group: dist.ProcessGroup = get_parallel().moe_ep_group.device_group
        return group

    def engine_rank(self) -> int:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().moe_ep_rank)

    def follow(self, metadata: Any, door: str) -> None:
        """Takes SGLang's expert locations: Balancers are made, or refreshed in place where there are some.

        Args:
            metadata: ExpertLocationMetadata.
            door: "dynamic" (all ranks hold the same tokens) or "lp" (each has its own); the same on all ranks.
        """
        from sglang.srt.runtime_context import get_exec

        tables = metadata.physical_to_logical_map_cpu
        if self.refresh(tables):
            return
        topology, device = topology_of(metadata), metadata.physical_to_logical_map.device
        self.place(tables, metadata.num_logical_experts, topology, device)
        # A policy of shared experts comes with Waterfill, which SGLang makes when it has loaded the model.
        waits = self.settings.places_shared and get_exec().moe.enable_waterfill
        policy = make_policy("exact") if waits else self.settings.policy_for(shared=False)
        how = {"tokens": "same"} if door == "dynamic" else {"group": self.group(topology)}
        self.by_id = {
            i: Layer(Balancer(self.placement(), i, policy, shared_columns=False, **how), self.own_meter())
            for i in range(metadata.num_layers)
        }
        for layer in self.by_id.values():
            layer.balancer.placed_on(self.device)  # before any graph is captured

    def add_shared(self, layer: Layer) -> None:
        """Waterfill is on in this layer: the shared expert's copies are planned with the routed ones."""
        old = layer.balancer
        policy = self.settings.policy_for(shared=True)
        layer.balancer = Balancer(self.placement(1), old.layer, policy, old.group, shared_columns=False)
        layer.balancer.placed_on(self.device)

    def announce(self) -> None:
        """The line that says what is attached, of one rank for all; when the model is loaded.

        Raises:
            ValueError: the policy is one of shared experts, and no layer of the model left them to Waterfill.
        """
        from sglang.srt.runtime_context import get_exec

        if self.by_id and not any(layer.balancer.placement.num_shared for layer in self.by_id.values()):
            self.settings.policy_for(shared=False)
        if self.engine_rank():
            return
        moe, attached = get_exec().moe, []
        if self.by_id:
            attached.append(self._describe(moe.ep_dispatch_algorithm))
        if self.num_waterfill:
            attached.append(f"--enable-waterfill, policy waterfill on {self.num_waterfill} layers")
        if moe.eplb_algorithm == "isoload":
            attached.append(f"--eplb-algorithm isoload, placer {self.settings.placer}")
        log.info(
            f"isoload: attached to SGLang's {'; '.join(attached) or 'loader, and to none of its options'}"
        )
        if not self.by_id:
            backend = f"with --moe-a2a-backend {moe.moe_a2a_backend}: isoload's are dynamic with none, lp with others"
            log.info(
                f"isoload: SGLang's own --ep-dispatch-algorithm {moe.ep_dispatch_algorithm} stays {backend}"
            )

    def _describe(self, algorithm: str) -> str:
        """What is attached behind --ep-dispatch-algorithm."""
        tokens = (
            "same tokens on all ranks, no collective" if algorithm == "dynamic" else "one gather per layer"
        )
        return f"--ep-dispatch-algorithm {algorithm} ({tokens}), {self.describe()}"


def topology_of(metadata: Any) -> Topology:
    from sglang.srt.runtime_context import get_parallel

    return engine_topology(metadata.ep_size, get_parallel().nnodes)


LAYERS = Layers()
