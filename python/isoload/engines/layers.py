"""The Balancers of an engine's model, by layer: made when the engine has placed its experts, refreshed in place when it
moves them."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ClassVar, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.balancing.balancer import Balancer
from isoload.engines.record import EngineRecord
from isoload.engines.settings import LOADS, MODE, PLACER, POLICY, RECORD_EVERY, Settings, Variable
from isoload.engines.tables import arrivals, placement_of
from isoload.online.metrics import Meter, Metrics
from isoload.online.switch import Switch, Watchdog
from isoload.online.weight_check import WeightCheck
from isoload.ops import check_device
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.topology import Topology
from isoload.transport import CollectiveGroup, Group, LocalGroup
from isoload.transport.group import checksum

log = logging.getLogger("isoload")
EXCHANGE_EVERY = 16  # forward passes; as rarely as this costs no balance in recorded decoding
JOINED_BY_ALL = ("gathered", "node")  # loads of which ranks without tokens must join each pass, too
_TARGETS = f"targets renewed every {EXCHANGE_EVERY} passes"
EXCHANGED = {
    "same": "same tokens on all ranks, no collective",
    "gathered": "loads gathered: one gather per layer",
    "node": f"loads node: one gather per layer within each node, {_TARGETS}",
    "own": f"loads own: no collective in a pass, {_TARGETS}",
    "alone": "loads own: nothing is exchanged, as ranks may go",
}


class LoneRank(LocalGroup):
    """One of R ranks that waits for no other, where ranks may go: it plans by its own counts alone."""

    def __init__(self, topology: Topology, rank: int) -> None:
        super().__init__(topology)
        self.ranks = (rank,)

    def _gather(self, *given: Any, **how: Any) -> NoReturn:
        raise RuntimeError("nothing may be exchanged where ranks may go, as they would be waited for")

    _swap = _gather


class EngineLayer:
    """One MoE layer: its Balancer, and the meter of the rank that reports."""

    def __init__(self, balancer: Balancer, meter: Meter | None) -> None:
        self.balancer, self.meter = balancer, meter
        self.switch: Switch | None = None
        self.record: EngineRecord | None = None
        self.metrics = Metrics()
        self.ran = False  # whether the engine has called it: a model's dense layers have one, too
        self.policies: dict[str, Policy] = {}  # by phase, where they differ

    def turn(self, phase: Callable[[], str]) -> None:
        """Before a batch, whose phase must be the same on all ranks: its policy plans, in a graph that is captured now
        too. Ranks that gather loads compare their policies there; others could not tell."""
        if not self.policies:
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{POLICY.name} must be one for prefill and decode where the router is traced into one graph of both"
            )
        policy = self.policies[phase()]
        if self.balancer.policy is not policy:
            self.balancer.policy = policy

    @property
    def policy_name(self) -> str:
        """In words, that of each phase where they differ."""
        phases = ", ".join(f"{policy.name} in {phase}" for phase, policy in self.policies.items())
        return phases or self.balancer.policy.name

    def plan_by(self, policies: dict[str, Policy]) -> None:
        """Raises ValueError where one of them cannot plan this layer."""
        self.policies = policies if len(set(policies.values())) > 1 else {}
        for policy in self.policies.values():
            self.balancer.policy = policy

    def standing(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """[T, K] slots as the switch has it, where there is one."""
        return ours if self.switch is None else self.switch.choose(self.balancer.layer, ours, theirs)

    def slots(self, topk_ids: Tensor, num_valid: Tensor | None) -> Tensor:
        """[T, K] as :class:`Balancer`, measured where reports are wanted."""
        self.ran = True
        measured = (self.meter is not None or self.metrics.on) and not torch.compiler.is_compiling()
        start = time.perf_counter() if measured else 0.0
        slots = self.balancer(topk_ids.contiguous(), num_valid)
        assert isinstance(slots, Tensor)
        if measured:
            seconds = time.perf_counter() - start
            self.metrics.observe("plan_seconds", seconds)
            made, loads = self.balancer.last_plan, self.balancer.last_loads
            if self.meter is not None and made is not None and loads is not None:
                self.meter.add(self.balancer.layer, loads, made, seconds)
        return slots


AnyLayer = TypeVar("AnyLayer", bound=EngineLayer)


class EngineLayers(ABC, Generic[AnyLayer]):
    """All layers of one model in this process. A subclass says how its engine is called and where its ranks are."""

    engine: ClassVar[str]  # begins every report

    def __init__(self) -> None:
        self.start(Settings.read({}))

    @abstractmethod
    def engine_group(self) -> dist.ProcessGroup:
        """The engine's expert-parallel ranks, on the devices where it routes."""

    @abstractmethod
    def engine_rank(self) -> int:
        """This process's among them."""

    def own_rank(self) -> int:
        """The same, as the running group numbers it."""
        return self.engine_rank()

    def start(self, settings: Settings) -> None:
        """Of a process whose hooks are attached; it has no model yet."""
        self.settings = settings
        self.by_id: dict[int, AnyLayer] = {}
        self.detached = False  # whether the engine chooses replicas after all
        self.tables = torch.empty(0, 0)  # [L, P] expert in each slot, as the Balancers have it
        seconds = settings.report_seconds
        self.meter = Meter(self.engine, seconds) if seconds else None
        self.weights: WeightCheck | None = None
        self.watch = Watchdog(self.engine, settings.stalled_seconds)
        self.device = torch.device("cpu")  # of the Balancers' tables
        self.passes = 0  # forward passes so far
        self.switch: Switch | None = None
        self.record: EngineRecord | None = None  # in shadow mode, or while the switch says so
        self.recorded = True  # whether there may be one
        self.metrics = Metrics()
        self.num_left = 0  # layers that are the engine's own
        self.slot_bytes: dict[int, int] = {}  # by layer the weights and scales of one expert
        self._groups: dict[int, CollectiveGroup] = {}
        self._placements: dict[int, Placement] = {}  # by shared experts

    def place(self, tables: Tensor, num_experts: int, topology: Topology, device: torch.device) -> None:
        """Before Balancers are made: where the routed experts lie, [L, P] on the host; on what device is routed."""
        self.tables, self._placements, self.device = tables.clone(), {}, device
        self._num_experts, self._topology = num_experts, topology
        if self.record is not None:
            self.record.close()
            self.record = None
        if self.settings.switch is not None:
            group: dist.ProcessGroup | None = None
            if topology.num_ranks > 1:  # the same ranks on their hosts
                ranks = dist.get_process_group_ranks(self.engine_group())
                group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
            self.switch = Switch(self.settings.switch, len(tables), device, group, self.engine)

    def balancer(
        self, index: int, policies: Mapping[str, Policy], group: Group | None, loads: str, num_shared: int = 0
    ) -> Balancer:
        """One layer's; without a group, and loads, where all ranks hold the same tokens.

        With what persists on the device where the engine routes: before a graph is captured, and in layers that the
        model does not run, too, which an exchange takes with the others.
        """
        placement, policy = self.placement(num_shared), policies["decode"]
        if group is None:
            made = Balancer(placement, index, policy, tokens="same", shared_columns=False)
        else:
            made = Balancer(placement, index, policy, group, shared_columns=False, loads=loads)  # type: ignore[arg-type]
        made.placed_on(self.device)
        if made.own_counts is not None:
            made.own_counts.move(self.device)
        return made

    def add(
        self, layer: AnyLayer, policies: dict[str, Policy], model: str = "", decode_tokens: int | None = None
    ) -> None:
        """One layer, made; where there is a switch, also the record of its state "shadow"."""
        layer.plan_by(policies)
        self.by_id[layer.balancer.layer] = layer
        layer.metrics = self.metrics
        if self.switch is None:
            return
        if self.record is None and self.recorded and (self.settings.record or self.settings.report_seconds):
            self.record = EngineRecord(
                self.settings, self.engine, model, self.engine_rank(), self.tables, self._num_experts, self._topology,
                layer.balancer.tokens, self.device, decode_tokens,
            )  # fmt: skip
            self.record.turn(False)
        layer.switch, layer.record = self.switch, self.record

    def measure(
        self, model: str, placer: str, weights: Mapping[int, Sequence[Tensor]], num_left: int = 0
    ) -> None:
        """Of a loaded model, where reports are asked for: its metrics begin.

        Args:
            placer: of rebalances.
            weights: as :meth:`check_loaded`.
            num_left: layers that isoload leaves to the engine.
        """
        if not self.settings.report_seconds:
            return
        self.metrics, self.num_left = Metrics(self.engine, model, str(self.own_rank()), on=True), num_left
        self.slot_bytes = {i: sum(of.nbytes // len(of) for of in held) for i, held in weights.items()}
        policies = sorted({layer.policy_name for layer in self.by_id.values()})
        self.metrics.begin("+".join(policies) or "engine", placer)
        self.tell_attached()
        self.watch.metrics = self.metrics
        for of in (*self.by_id.values(), self.own_meter(), self.record):
            if of is not None:
                of.metrics = self.metrics

    def tell_attached(self) -> None:
        """Whether isoload chooses, or counts in shadow."""
        stands = self.switch is None or self.switch.state != "off"
        ours = self.chooses or self.settings.mode == "shadow"
        self.metrics.set("attached", float(ours and stands and not self.detached))

    @property
    def chooses(self) -> bool:
        """Whether the model has layers whose copies it places."""
        return bool(self.by_id)

    def _count_pass(self) -> None:
        free = [i for i, layer in self.by_id.items() if layer.ran and layer.balancer.has_freedom]
        ours = len(free) if self.switch is None else sum(self.switch.on[i] for i in free)
        ours = 0 if self.detached else ours
        self.metrics.add("batches_total", ours)
        self.metrics.add("fallbacks_total", len(free) - ours + self.num_left)

    def _count_moved(self, tables: Tensor) -> None:
        came = arrivals(self.tables, tables, self.own_rank(), self._topology.num_ranks)
        moved = {i: number for i, number in came.items() if i in self.slot_bytes}
        self.metrics.add("experts_moved_total", sum(moved.values()))
        self.metrics.add("bytes_moved_total", sum(n * self.slot_bytes[i] for i, n in moved.items()))

    def placement(self, num_shared: int = 0) -> Placement:
        """Of all layers, where the experts lie now."""
        if num_shared not in self._placements:
            self._placements[num_shared] = self._placed(self.tables, num_shared)
        return self._placements[num_shared]

    def _placed(self, tables: Tensor, num_shared: int) -> Placement:
        return placement_of(tables, self._num_experts, self._topology, num_shared)

    def refresh(self, tables: Tensor) -> bool:
        """New locations [L, P] into the Balancers, which keep their memory: captured graphs stay valid.

        Returns:
            False where there are no Balancers of this shape: they have to be made.
        """
        if self.tables.shape != tables.shape:
            return False
        if torch.equal(self.tables, tables):
            return True
        if self.record is not None:
            self.record.moved(tables)
        self.check_device()
        changed = [layer.balancer for i, layer in self.by_id.items() if (self.tables[i] != tables[i]).any()]
        with ExitStack() as all_ranks:  # what fails on one of them changes none
            for group in self._groups.values():
                facts = all_ranks.enter_context(group.agreeing("placement"))
                facts["checksum of physical_to_logical_map"] = checksum(tables.tolist())
            made = {n: self._placed(tables, n) for n in {of.placement.num_shared for of in changed}}
            writes = [of.prepare_load(made[of.placement.num_shared]) for of in changed]
        if self.metrics.on:
            self._count_moved(tables)
        self.tables, self._placements = tables.clone(), made
        for write in writes:
            write()
        return True

    def check_loaded(self, weights: Mapping[int, Sequence[Tensor]]) -> None:
        """Of a loaded model: weights and scales of this rank's slots by layer, [P/R, ...] each. They are compared now
        and by :meth:`check_moved`; all ranks call both together."""
        if not self.by_id:
            log.warning(f"isoload {self.engine}: no weights are compared, since isoload chooses no replicas")
            return
        how = self.engine_group(), self.settings.strict, self.detach
        self.weights = WeightCheck(self.engine, weights, *how, metrics=self.metrics)
        self.weights.loaded(self.tables, self._num_experts)

    def check_moved(self, layers: Sequence[int] | None = None) -> None:
        """The experts of these layers, or of all, have moved to where the Balancers have them."""
        if self.weights is not None:
            self.weights.moved(self.tables, layers)

    def detach(self) -> str:
        """Leaves the choice of replicas to the engine from the next batch on, on all ranks; what that is, in words.

        Layers stay and follow rebalances all the same: captured graphs read and write their memory.
        """
        self.detached, self.weights = True, None
        self.tell_attached()
        if self.record is not None:
            self.record.turn(False)
        said = f"{self.engine} chooses replicas from now on"
        if self.switch is None:
            return f"{said}; graphs that were captured keep isoload's choice"
        self.switch.leave()
        return said

    def step_ended(self) -> None:
        """A forward pass of the model is over, on all ranks, outside of any graph: every EXCHANGE_EVERY of them one
        exchange renews the targets of all layers that are planned without the counts of all ranks.

        All ranks must have run the same number of passes, those without tokens too. They have where every pass holds
        an all-to-all over the same ranks, for which none can be early.
        """
        self.passes += 1
        if self.record is not None:
            self.record.step_ended()
        if self.switch is not None and not self.detached and self.switch.step_ended():
            if self.record is not None:
                self.record.turn(self.switch.state == "shadow")
            self.tell_attached()
        if self.metrics.on:
            self._count_pass()
        if self.passes % EXCHANGE_EVERY:
            return
        balancers = [layer.balancer for _, layer in sorted(self.by_id.items())]
        renewed = [of for of in balancers if of.loads != "gathered" and not isinstance(of.group, LoneRank)]
        # All of them, since a rebalance may change which have freedom, and the meter wants the same layers.
        if any(of.has_freedom for of in renewed):
            found = renewed[0].exchange(*renewed[1:])
            if (meter := self.own_meter()) is not None:
                meter.add_exchange(found.imbalance)

    def group(self, topology: Topology) -> Group:
        """The engine's expert-parallel ranks, with a communicator of isoload's own; all ranks call it together."""
        if topology.num_ranks not in self._groups:
            theirs = self.engine_group()
            ranks = dist.get_process_group_ranks(theirs)
            # Synchronised among these ranks alone: other expert-parallel groups may be in other pipeline stages.
            own = dist.new_group(ranks, backend=dist.get_backend(theirs), use_local_synchronization=True)
            self._groups[topology.num_ranks] = CollectiveGroup(topology, own)
        return self._groups[topology.num_ranks]

    def own_meter(self) -> Meter | None:
        """All ranks make the same plans: the first measures."""
        return self.meter if self.meter is not None and self.engine_rank() == 0 else None

    def exchanged(self) -> str:
        """What the ranks exchange so that copies are level, in words."""
        ways = {EXCHANGED[way_of(layer.balancer)] for layer in self.by_id.values()}
        return " and ".join(sorted(ways))

    def say_unused(self, reasons: Mapping[Variable, str]) -> None:
        """Log the variables that are set without effect.

        Args:
            reasons: as :meth:`Settings.unused`, those of the engine's options.
        """
        found = dict(reasons)
        if self.settings.mode == "shadow":
            shadow = f"{self.engine} chooses and rebalances in shadow mode. Set {MODE.name}=on"
            found |= {LOADS: shadow, PLACER: shadow}
        elif self.settings.switch is None:
            found[RECORD_EVERY] = f"no passes are recorded. Set {MODE.name}=shadow"
        for line in self.settings.unused(found):
            log.warning(line)

    def check_device(self) -> None:
        """Raises ValueError for what ops found wrong in values on a GPU; called where the host waits anyway."""
        if self.device.type == "cuda":
            check_device(self.device)

    def describe(self) -> str:
        """Which policy plans how many of the layers."""
        policies = sorted({layer.policy_name for layer in self.by_id.values()})
        free = sum(layer.balancer.has_freedom for layer in self.by_id.values())
        text = f"policy {' and '.join(policies)} on {free} of {len(self.by_id)} layers"
        if self.switch is not None:
            text += f", switched by {self.switch.path}"
        return text if free else f"{text}: no layer has redundant experts, so there is nothing to balance"


def way_of(balancer: Balancer) -> str:
    """Its word in EXCHANGED."""
    if isinstance(balancer.group, LoneRank):
        return "alone"
    return "same" if balancer.tokens == "same" else balancer.loads
