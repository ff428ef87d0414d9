"""The Balancers of one process, by layer: made when SGLang has its expert locations, refreshed in place when it moves
experts. LAYERS is the only state of the plug-in."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.balancer import Balancer
from isoload.integrations.engine_tables import engine_topology, placement_of
from isoload.integrations.meter import Meter
from isoload.integrations.settings import Settings
from isoload.ops import check_device
from isoload.placement import Placement
from isoload.policies import make_policy
from isoload.topology import Topology
from isoload.transport import CollectiveGroup
from isoload.transport.agreement import checksum

log = logging.getLogger("isoload")


class Layer:
    """One MoE layer. It stands where SGLang has an LPLBSolver: ``solve(topk_ids)``.

    Args:
        balancer: tokens="own" behind lp, "same" behind dynamic.
        meter: of the rank that reports.
    """

    def __init__(self, balancer: Balancer, meter: Meter | None) -> None:
        self.balancer, self.meter = balancer, meter
        self.num_valid: Tensor | None = None  # of the batch that comes next: rows from here on are padding
        self.shared: Tensor | None = None  # [T, 1] rank of every token's shared copy; Waterfill takes it

    def slots(self, topk_ids: Tensor, num_valid: Tensor | None) -> Tensor:
        """[T, K] as :class:`Balancer`, measured where reports are wanted."""
        if self.meter is None or torch.compiler.is_compiling():
            return self._one(topk_ids, num_valid)
        start = time.perf_counter()
        slots = self._one(topk_ids, num_valid)
        made, loads = self.balancer.last_plan, self.balancer.last_loads
        if made is not None and loads is not None:
            self.meter.add(self.balancer.layer, loads, made, time.perf_counter() - start)
        return slots

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

    def _one(self, topk_ids: Tensor, num_valid: Tensor | None) -> Tensor:
        slots = self.balancer(topk_ids.contiguous(), num_valid)
        assert isinstance(slots, Tensor)
        return slots


class Layers:
    """All layers of this process. SGLang's modules are imported inside of functions, which only its processes call."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As before the first model."""
        self.settings = Settings.read({})
        self.by_id: dict[int, Layer] = {}
        self.tables: Tensor | None = None  # [L, P] expert in each slot, as the Balancers have it
        self.meter: Meter | None = None
        self.num_waterfill = 0  # layers whose shared experts are placed beside routed copies as they lie
        self._groups: dict[int, CollectiveGroup] = {}
        self._placements: dict[int, Placement] = {}  # by shared experts
        self.device = torch.device("cpu")  # of the tables

    def start(self, settings: Settings) -> None:
        """Of a process whose hooks are attached."""
        self.reset()
        self.settings = settings
        if settings.report_seconds:
            self.meter = Meter("SGLang", settings.report_seconds)

    def get(self, layer_id: int | None) -> Layer | None:
        """The layer's, if isoload dispatches it."""
        return None if layer_id is None else self.by_id.get(layer_id)

    def follow(self, metadata: Any, door: str) -> None:
        """Takes SGLang's expert locations: Balancers are made, or refreshed in place where there are some.

        Args:
            metadata: ExpertLocationMetadata.
            door: "dynamic" (all ranks hold the same tokens) or "lp" (each has its own); the same on all ranks.
        """
        from sglang.srt.runtime_context import get_exec

        tables = metadata.physical_to_logical_map_cpu
        if self.tables is not None and self.tables.shape == tables.shape:
            if not torch.equal(self.tables, tables):
                self._refresh(tables)
            return
        self.tables, self._placements = tables.clone(), {}
        self._num_experts, self._topology = metadata.num_logical_experts, topology_of(metadata)
        topology, placement = self._topology, self._placement(0)
        # A policy of shared experts comes with Waterfill, which SGLang makes when it has loaded the model.
        waits = self.settings.places_shared and get_exec().moe.enable_waterfill
        policy = make_policy("exact") if waits else self.settings.policy_for(shared=False)
        self.device = metadata.physical_to_logical_map.device
        how = {"tokens": "same"} if door == "dynamic" else {"group": self.group(topology)}
        self.by_id = {
            i: Layer(Balancer(placement, i, policy, shared_columns=False, **how), self._own_meter())
            for i in range(metadata.num_layers)
        }
        for layer in self.by_id.values():
            layer.balancer.placed_on(self.device)  # before any graph is captured

    def add_shared(self, layer: Layer) -> None:
        """Waterfill is on in this layer: the shared expert's copies are planned with the routed ones."""
        old = layer.balancer
        policy = self.settings.policy_for(shared=True)
        layer.balancer = Balancer(self._placement(1), old.layer, policy, old.group, shared_columns=False)
        layer.balancer.placed_on(self.device)

    def group(self, topology: Topology) -> CollectiveGroup:
        """The ranks of the expert-parallel group, with a communicator of isoload's own; all ranks call it together."""
        from sglang.srt.runtime_context import get_parallel

        if topology.num_ranks not in self._groups:
            theirs = get_parallel().moe_ep_group.device_group
            ranks = dist.get_process_group_ranks(theirs)
            # Synchronised among these ranks alone: other expert-parallel groups may be in other pipeline stages.
            own = dist.new_group(ranks, backend=dist.get_backend(theirs), use_local_synchronization=True)
            self._groups[topology.num_ranks] = CollectiveGroup(topology, own)
        return self._groups[topology.num_ranks]

    def check_device(self) -> None:
        """Raises ValueError for what ops found wrong in values on a GPU; called where the host waits anyway."""
        if self.device.type == "cuda":
            check_device(self.device)

    def announce(self) -> None:
        """The line that says what is attached, of one rank for all; when the model is loaded.

        Raises:
            ValueError: the policy is one of shared experts, and no layer of the model left them to Waterfill.
        """
        from sglang.srt.runtime_context import get_exec, get_parallel

        if self.by_id and not any(layer.balancer.placement.num_shared for layer in self.by_id.values()):
            self.settings.policy_for(shared=False)
        if get_parallel().moe_ep_rank:
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
        policies = sorted({layer.balancer.policy.name for layer in self.by_id.values()})
        free = sum(layer.balancer.has_freedom for layer in self.by_id.values())
        tokens = (
            "same tokens on all ranks, no collective" if algorithm == "dynamic" else "one gather per layer"
        )
        text = (
            f"--ep-dispatch-algorithm {algorithm} ({tokens}), policy {' and '.join(policies)} on {free} of "
        )
        text += f"{len(self.by_id)} layers"
        return text if free else f"{text}: no layer has redundant experts, so there is nothing to balance"

    def _own_meter(self) -> Meter | None:
        """All ranks make the same plans: the first of the group measures."""
        from sglang.srt.runtime_context import get_parallel

        return self.meter if self.meter is not None and get_parallel().moe_ep_rank == 0 else None

    def _placement(self, num_shared: int) -> Placement:
        """Of all layers, where the experts lie now."""
        assert self.tables is not None
        if num_shared not in self._placements:
            made = placement_of(self.tables, self._num_experts, self._topology, num_shared)
            self._placements[num_shared] = made
        return self._placements[num_shared]

    def _refresh(self, tables: Tensor) -> None:
        """New locations into the Balancers, which keep their memory: captured graphs stay valid."""
        assert self.tables is not None
        self.check_device()
        changed = [i for i in self.by_id if not torch.equal(self.tables[i], tables[i])]
        for group in self._groups.values():
            group.agree_once("placement", {"checksum of physical_to_logical_map": checksum(tables.tolist())})
        self.tables, self._placements = tables.clone(), {}
        for i in changed:
            balancer = self.by_id[i].balancer
            balancer.settle(self._placement(balancer.placement.num_shared))


def topology_of(metadata: Any) -> Topology:
    from sglang.srt.runtime_context import get_parallel

    return engine_topology(metadata.ep_size, get_parallel().nnodes)


LAYERS = Layers()
