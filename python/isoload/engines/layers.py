"""The Balancers of an engine's model: made when the engine has placed its experts, refreshed when it moves them."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Generic, NoReturn, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.analysis.judge import ExpertSize
from isoload.balancing.balancer import Balancer
from isoload.engines.record import EngineRecord
from isoload.engines.settings import LOADS, MODE, PLACER, RECORD_EVERY, TIMES, Settings, Variable
from isoload.engines.tables import arrivals, measured, placement_of
from isoload.engines.worth import NewMaps
from isoload.online.metrics import Meter, Metrics
from isoload.online.switch import Switch, Watchdog
from isoload.online.weight_check import WeightCheck
from isoload.ops import check_device
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.times.file import gpu_uuid
from isoload.topology import Topology
from isoload.transport import CollectiveGroup, Group, LocalGroup
from isoload.transport.group import checksum

log = logging.getLogger("isoload")
EXCHANGE_EVERY = 16  # forward passes; exchanging this rarely costs no balance in recorded decoding
JOINED_BY_ALL = ("gathered", "node")  # loads with which ranks without tokens must join each pass
_TARGETS = f"targets renewed every {EXCHANGE_EVERY} passes"
EXCHANGED = {
    "same": "same tokens on all ranks, no collective",
    "gathered": "loads gathered: one gather per layer",
    "node": f"loads node: one gather per layer within each node, {_TARGETS}",
    "own": f"loads own: no collective in a pass, {_TARGETS}",
    "alone": "loads own: nothing is exchanged, because ranks may leave",
}


class LoneRank(LocalGroup):
    """One of R ranks that waits for no other, where ranks may leave: it plans by its own counts alone."""

    def __init__(self, topology: Topology, rank: int) -> None:
        super().__init__(topology)
        self.ranks = (rank,)

    def _gather(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "nothing may be exchanged where ranks may leave, because the other ranks would wait for them"
        )

    _swap = _gather


class FilledSlots(Protocol):
    """A layer's spare slots: what they hold now, and the slots of a batch over them."""

    filled: PlacedLayers

    def __call__(self, topk_ids: Tensor, num_valid: Tensor | None) -> Tensor: ...


class EngineLayer:
    """One MoE layer: its Balancer, and the meter of the rank that reports."""

    def __init__(self, balancer: Balancer, meter: Meter | None) -> None:
        self.balancer, self.meter = balancer, meter
        self.switch: Switch | None = None
        self.spare: FilledSlots | None = None  # plans batches over filled spare slots
        self.metrics = Metrics()
        self.ran = False  # whether the engine has called it: the model's dense layers have one, too

    @property
    def policy_name(self) -> str:
        return self.balancer.policy.name

    def slots(self, topk_ids: Tensor, num_valid: Tensor | None) -> Tensor:
        self.ran = True
        measured = (self.meter is not None or self.metrics.on) and not torch.compiler.is_compiling()
        start = time.perf_counter() if measured else 0.0
        choose = self.balancer if self.spare is None else self.spare
        slots = choose(topk_ids.contiguous(), num_valid)
        assert isinstance(slots, Tensor)
        if measured:
            seconds = time.perf_counter() - start
            self.metrics.observe("plan_seconds", seconds)
            plan, loads = self.balancer.last_plan, self.balancer.last_loads
            if self.meter is not None and plan is not None and loads is not None:
                self.meter.add(self.balancer.layer, loads, plan, seconds)
        return slots


AnyLayer = TypeVar("AnyLayer", bound=EngineLayer)


class EngineLayers(ABC, Generic[AnyLayer]):
    """All layers of one model in this process. A subclass for an engine makes them from the engine's records."""

    engine: ClassVar[str]  # begins every report

    def __init__(self) -> None:
        self.start(Settings.read({}))

    @abstractmethod
    def engine_group(self) -> dist.ProcessGroup:
        """Return the engine's expert-parallel ranks, on the devices where it routes."""

    @abstractmethod
    def engine_rank(self) -> int:
        """Return the rank of this process in the engine's group."""

    def own_rank(self) -> int:
        """Return the rank of this process in the running group, in which other ranks may have joined."""
        return self.engine_rank()

    def start(self, settings: Settings) -> None:
        self.settings = settings
        self.by_id: dict[int, AnyLayer] = {}
        self.detached = False  # whether the engine chooses replicas despite the hooks
        self.tables = torch.empty(0, 0)  # [L, P] expert in each slot, as the Balancers have it
        seconds = settings.report_seconds
        self.meter = Meter(self.engine, seconds) if seconds else None
        self.weights: WeightCheck | None = None
        self.watch = Watchdog(self.engine, settings.stalled_seconds)
        self.device = torch.device("cpu")  # of the Balancers' tables
        self.passes = 0  # forward passes so far
        self.switch: Switch | None = None
        self.record: EngineRecord | None = None  # in shadow mode
        self.metrics = Metrics()
        self.num_left = 0  # layers whose replicas the engine chooses
        self.new_maps: NewMaps | None = None  # if ISOLOAD_REBALANCE is set
        self.slot_bytes: dict[int, int] = {}  # by layer the weights and scales of one expert
        self._groups: dict[int, CollectiveGroup] = {}
        self._placements: dict[int, Placement] = {}  # by shared experts

    def place(self, tables: Tensor, num_experts: int, topology: Topology, device: torch.device) -> None:
        """Set the locations of the routed experts, [L, P] on the host, before Balancers are made. Raises ValueError if
        ISOLOAD_TIMES was measured on another kind of GPU, or on another GPU than this rank's."""
        if self.settings.times is not None and device.type == "cuda":
            times, source = measured(self.settings.times), f"{TIMES.name}={self.settings.times}"
            advice = f"run isoload measure on these GPUs, or unset {TIMES.name}"
            name = torch.cuda.get_device_name(device)
            if times.device != name:
                raise ValueError(
                    f"{source} was measured on {times.device} but this rank has {name}: {advice}"
                )
            rank = self.engine_rank()
            if times.gpus and times.gpus[rank] != (uuid := gpu_uuid(device)):
                raise ValueError(
                    f"{source} has GPU {times.gpus[rank]} as rank {rank} but this rank has GPU {uuid}: {advice}"
                )
        self.tables, self._placements, self.device = tables.clone(), {}, device
        self._num_experts, self._topology = num_experts, topology
        if self.settings.switch is not None:
            group: dist.ProcessGroup | None = None
            if topology.num_ranks > 1:  # the same ranks, grouped by host
                ranks = dist.get_process_group_ranks(self.engine_group())
                group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self.switch = Switch(self.settings.switch, device, group, self.engine)

    def balancer(
        self, index: int, policy: Policy, group: Group | None, loads: str, num_shared: int = 0
    ) -> Balancer:
        """Return one layer's Balancer. Without a group and loads, all ranks hold the same tokens. Its memory is on the
        engine's device before a graph is captured, and also in layers that the model does not run, because one exchange
        includes all layers."""
        if num_shared not in self._placements:
            self._placements[num_shared] = self._placement_of(self.tables, num_shared)
        placement = self._placements[num_shared]
        if group is None:
            balancer = Balancer(placement, index, policy, tokens="same", shared_columns=False)
        else:
            balancer = Balancer(placement, index, policy, group, shared_columns=False, loads=loads)  # type: ignore[arg-type]
        balancer.placed_on(self.device)
        if balancer.own_counts is not None:
            balancer.own_counts.move(self.device)
        return balancer

    def add(self, layer: AnyLayer) -> None:
        self.by_id[layer.balancer.layer] = layer
        layer.metrics, layer.switch = self.metrics, self.switch

    def measure(
        self, model: str, placer: str, weights: Mapping[int, Sequence[Tensor]], num_left: int = 0
    ) -> None:
        """Begin the metrics of a loaded model, if reports are on; `num_left`: layers that the engine balances."""
        if not self.settings.report_seconds:
            return
        self.metrics, self.num_left = Metrics(self.engine, model, str(self.own_rank()), on=True), num_left
        self.slot_bytes = {i: sum(t.nbytes // len(t) for t in tensors) for i, tensors in weights.items()}
        policies = sorted({layer.policy_name for layer in self.by_id.values()})
        self.metrics.begin("+".join(policies) or "engine", placer)
        self.set_attached()
        self._set_replica_bytes()
        self.watch.metrics = self.metrics
        for user in (*self.by_id.values(), self.own_meter(), self.record):
            if user is not None:
                user.metrics = self.metrics

    def _set_replica_bytes(self) -> None:
        if not self.slot_bytes:
            return
        if self.record is not None:  # in shadow mode
            tables, experts, topology = self.record.tables, self.record.num_experts, self.record.topology
        elif self.by_id:
            tables, experts, topology = self.tables, self._num_experts, self._topology
        else:
            return
        size = tables.shape[1] // topology.num_ranks
        local = tables[:, self.own_rank() * size :][:, :size]
        even = experts / len(topology.live_ranks)
        replicas = {i: int((local[i] >= 0).sum()) - even for i in self.slot_bytes}
        self.metrics.set("replica_bytes", sum(number * self.slot_bytes[i] for i, number in replicas.items()))

    def decide(self, weights: Mapping[int, Sequence[Tensor]], interval: int) -> None:
        """Apply new maps from now on only if they pay, by ISOLOAD_REBALANCE; `interval`: passes between rebalances."""
        assert self.settings.rebalance is not None
        size, experts = ExpertSize.of(next(iter(weights.values()))), None
        if self.settings.times is not None:
            experts = measured(self.settings.times).experts
            timed = 3 * experts.hidden * experts.intermediate
            if not 0.8 < size.num_weights / timed < 1.25:  # kernels pad, gpt-oss by 14 %
                raise ValueError(
                    f"{TIMES.name}={self.settings.times} is of experts of {timed} weights but the model's have "
                    f"{size.num_weights}: run isoload measure with this model, or unset {TIMES.name}"
                )
        how = interval, self.chooses and not self.detached, experts, self.metrics
        self.new_maps = NewMaps(self.engine, self.settings.rebalance, size, *how)

    def set_attached(self) -> None:
        attached = self.chooses or self.settings.mode == "shadow"
        switched_on = self.switch is None or self.switch.on
        self.metrics.set("attached", float(attached and switched_on and not self.detached))

    @property
    def chooses(self) -> bool:
        return bool(self.by_id)

    def _placement_of(self, tables: Tensor, num_shared: int) -> Placement:
        return placement_of(tables, self._num_experts, self._topology, num_shared)

    def refresh(self, tables: Tensor) -> bool:
        """Load new locations [L, P] into the Balancers, which keep their memory: captured graphs stay valid. Returns
        False if there are no Balancers of this shape: they must be made."""
        if self.tables.shape != tables.shape:
            return False
        if torch.equal(self.tables, tables):
            return True
        self.check_device()
        changed = [layer.balancer for i, layer in self.by_id.items() if (self.tables[i] != tables[i]).any()]
        with ExitStack() as all_ranks:  # a failure on one of them changes none
            for group in self._groups.values():
                facts = all_ranks.enter_context(group.agreeing("placement"))
                facts["checksum of physical_to_logical_map"] = checksum(tables.tolist())
            shared = {balancer.placement.num_shared for balancer in changed}
            placements = {number: self._placement_of(tables, number) for number in shared}
            writes = [
                balancer.prepare_load(placements[balancer.placement.num_shared]) for balancer in changed
            ]
        if self.metrics.on:
            arrived = arrivals(self.tables, tables, self.own_rank(), self._topology.num_ranks)
            moved = {i: number for i, number in arrived.items() if i in self.slot_bytes}
            self.metrics.add("experts_moved_total", sum(moved.values()))
            self.metrics.add("bytes_moved_total", sum(n * self.slot_bytes[i] for i, n in moved.items()))
        self.tables, self._placements = tables.clone(), placements
        for write in writes:
            write()
        self._set_replica_bytes()
        return True

    def check_loaded(self, weights: Mapping[int, Sequence[Tensor]]) -> None:
        """Record checksums of a loaded model's weights, for :meth:`check_moved`; all ranks call both together. weights:
        by layer the weights and scales of this rank's slots, [P/R, ...] each."""
        if not self.by_id:
            log.warning(
                f"isoload {self.engine}: no weights are compared, because isoload chooses no replicas"
            )
            return
        how = self.engine_group(), self.settings.strict, self.detach
        self.weights = WeightCheck(self.engine, weights, *how, metrics=self.metrics)
        self.weights.loaded(self.tables, self._num_experts)

    def check_moved(self, layers: Sequence[int] | None = None) -> None:
        if self.weights is not None:
            self.weights.moved(self.present(), layers)

    def present(self) -> Tensor:
        """Return [L, P] on the host, the expert whose weights each slot has now; -1: none that is known."""
        return self.tables

    def detach(self) -> str:
        """Leave the choice of replicas to the engine from the next batch on, on all ranks; return a sentence about it.
        Layers stay and follow rebalances, because captured graphs read and write their memory."""
        self.detached, self.weights = True, None
        self.set_attached()
        text = f"{self.engine} chooses replicas from now on"
        if self.switch is None:
            return f"{text}; graphs that were captured keep isoload's choice"
        self.switch.leave()
        return text

    def step_ended(self) -> None:
        """Count a forward pass, outside of any graph; every EXCHANGE_EVERY passes one exchange renews all targets. All
        ranks must have run the same number of passes, those without tokens too. This holds where every pass contains an
        all-to-all over the same ranks, which no rank can pass early."""
        self.passes += 1
        if self.record is not None:
            self.record.step_ended()
        if self.switch is not None and not self.detached and self.switch.step_ended():
            self.set_attached()
        if self.metrics.on:
            free = sum(layer.ran and layer.balancer.has_freedom for layer in self.by_id.values())
            left = self.detached or (self.switch is not None and not self.switch.on)
            self.metrics.add("batches_total", 0 if left else free)
            self.metrics.add("fallbacks_total", (free if left else 0) + self.num_left)
        if self.passes % EXCHANGE_EVERY:
            return
        balancers = [layer.balancer for _, layer in sorted(self.by_id.items())]
        renewed = [b for b in balancers if b.loads != "gathered" and not isinstance(b.group, LoneRank)]
        # All of them, because a rebalance may change which have freedom, and the meter needs the same layers.
        if any(balancer.has_freedom for balancer in renewed):
            exchanged = renewed[0].exchange(*renewed[1:])
            if (meter := self.own_meter()) is not None:
                meter.add_exchange(exchanged.imbalance)

    def group(self, topology: Topology) -> Group:
        """Return the engine's expert-parallel ranks, with a communicator of isoload's own; all ranks call it."""
        if topology.num_ranks not in self._groups:
            engine_group = self.engine_group()
            ranks = dist.get_process_group_ranks(engine_group)
            # Synchronised among these ranks alone: other expert-parallel groups may be in other pipeline stages.
            backend = dist.get_backend(engine_group)
            group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            self._groups[topology.num_ranks] = CollectiveGroup(topology, group)
        return self._groups[topology.num_ranks]

    def own_meter(self) -> Meter | None:
        return self.meter if self.meter is not None and self.engine_rank() == 0 else None

    def warn_unused(self, reasons: Mapping[Variable, str]) -> None:
        reasons = dict(reasons)
        if self.settings.mode == "shadow":
            shadow = f"{self.engine} chooses and rebalances in shadow mode. Set {MODE.name}=on"
            reasons |= {LOADS: shadow, PLACER: shadow}
        else:
            reasons[RECORD_EVERY] = f"no passes are recorded. Set {MODE.name}=shadow"
        for line in self.settings.unused(reasons):
            log.warning(line)

    def check_device(self) -> None:
        """Raise ValueError for wrong values that ops found on a GPU; called where the host waits anyway."""
        if self.device.type == "cuda":
            check_device(self.device)

    def describe(self) -> str:
        policies = sorted({layer.policy_name for layer in self.by_id.values()})
        free = sum(layer.balancer.has_freedom for layer in self.by_id.values())
        text = f"policy {' and '.join(policies)} on {free} of {len(self.by_id)} layers"
        if self.switch is not None:
            text += f", switched by {self.switch.path}"
        return text if free else f"{text}: no layer has redundant experts, so there is nothing to balance"
