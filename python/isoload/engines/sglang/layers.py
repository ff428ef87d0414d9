"""The Balancers of one process, by layer, and what they need of SGLang's options. LAYERS is the plug-in's only state.

SGLang's modules are imported inside of functions, which only its processes call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.balancing.balancer import Balancer
from isoload.engines.layers import EXCHANGED, JOINED_BY_ALL, EngineLayer, EngineLayers, LoneRank
from isoload.engines.record import EngineRecord
from isoload.engines.settings import (
    CHECK,
    LOADS,
    PLACER,
    POLICY,
    SWITCH,
    Settings,
    Variable,
    default_policies,
)
from isoload.engines.tables import engine_topology, placement_of
from isoload.online.metrics import Meter
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.policies.plan import without_shared_slots
from isoload.topology import Topology
from isoload.transport import Group
from isoload.weights.pages import PagePool

log = logging.getLogger("isoload")
EPLB = "--eplb-algorithm isoload"
UNAGREED = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"


class Layer(EngineLayer):
    """One MoE layer. With lp it replaces SGLang's LPLBSolver: ``solve(topk_ids)``."""

    def __init__(self, balancer: Balancer, meter: Meter | None) -> None:
        super().__init__(balancer, meter)
        self.num_valid: Tensor | None = None  # of the next batch: rows from this one on are padding
        self.shared: Tensor | None = None  # [T, 1] rank of tokens' shared copies, until Waterfill takes it
        self.policies: dict[str, Policy] = {}  # by phase, where they differ

    def plan_by(self, policies: dict[str, Policy]) -> None:
        """Set a policy for each phase; raise ValueError if one of them cannot plan this layer."""
        self.policies = policies if len(set(policies.values())) > 1 else {}
        for policy in self.policies.values():
            self.balancer.policy = policy

    def turn(self, phase: Callable[[], str]) -> None:
        """Let the phase's policy plan the next batch, also in a graph that is captured now. The phase must be the same
        on all ranks. Ranks that gather loads compare their policies in the gather; other ranks could not detect a
        difference."""
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
        phases = ", ".join(f"{policy.name} in {phase}" for phase, policy in self.policies.items())
        return phases or super().policy_name

    def solve(self, topk_ids: Tensor) -> Tensor:
        """Return [T, K] physical ids from logical ones; all ranks call it together, also with T = 0."""
        num_valid, self.num_valid = self.num_valid, None
        self.turn(LAYERS.phase_now)
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
        return without_shared_slots(slots[:, :-num_shared], per_rank, num_shared)

    @property
    def plans_shared(self) -> bool:
        """Whether Waterfill's shared copies can join the plan: one of all counts that has none yet."""
        balancer = self.balancer
        return balancer.tokens == "own" and balancer.loads == "gathered" and not balancer.placement.num_shared

    def take_shared(self, num_tokens: int) -> Tensor | None:
        """Return [T, 1] the ranks of the shared copies in the plan of this batch, once; None: nothing was planned."""
        shared, self.shared = self.shared, None
        if shared is not None and len(shared) != num_tokens:
            raise RuntimeError(
                f"layer {self.balancer.layer}: Waterfill must have the {len(shared)} tokens that were planned, "
                f"got {num_tokens}"
            )
        return shared


class Layers(EngineLayers[Layer]):
    """All layers of this process."""

    engine = "SGLang"

    def start(self, settings: Settings) -> None:
        super().start(settings)
        self.num_waterfill = 0  # layers whose shared experts are placed after the routed copies
        self.waterfill_flag = "--enable-waterfill"  # the option that places them
        self.lost: frozenset[str] = frozenset()  # options to which isoload is not attached
        self.phase = "decode"  # of the current pass
        self.pages: PagePool | None = None  # of the weights, where slots are absent
        self.paged: list[tuple[int, Tensor, int]] = []  # layer, parameter, and its address in pages
        self.page_limits: Tensor | None = None  # [R] slots of every rank with memory at the start
        self.in_prefill_graph: Callable[[], bool] | None = None  # set if each phase has a policy

    def engine_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = parallel().moe_ep_group.device_group
        return group

    def engine_rank(self) -> int:
        return int(parallel().moe_ep_rank)

    def own_rank(self) -> int:
        return self.engine_rank() + joined_behind()

    def group(self, topology: Topology) -> Group:
        return super().group(topology) if elastic_backend() is None else LoneRank(topology, self.own_rank())

    def follow(self, metadata: Any, algorithm: str) -> None:
        """Set SGLang's ExpertLocationMetadata: make the Balancers, or refresh existing ones in place. The algorithm,
        "dynamic" or "lp", is the same on all ranks."""
        tables = live_tables(metadata)
        if self.refresh(tables):
            return
        switched = self.settings.switch is not None
        if switched and (algorithm != "dynamic" or parallel().pp_size > 1):
            raise ValueError(
                f"{SWITCH.name} must come with --ep-dispatch-algorithm dynamic and without --pp-size, got "
                f"{algorithm!r} and {parallel().pp_size}"
            )
        if (backend := elastic_backend()) is not None and (switched or self.settings.check_weights):
            raise ValueError(
                f"--elastic-ep-backend must come without {SWITCH.name} and {CHECK.name}, by which all ranks meet, got "
                f"{backend!r} with one"
            )
        self.by_id = {}
        topology, device = topology_of(metadata), metadata.physical_to_logical_map.device
        self.place(tables, metadata.num_logical_experts, topology, device)
        # A policy of shared experts comes with Waterfill, which SGLang makes after it has loaded the model.
        options = moe()
        waterfill = any(
            getattr(options, f"enable_{name}", False) for name in ("waterfill", "deepep_waterfill")
        )
        waits = self.settings.places_shared and waterfill and "Waterfill" not in self.lost
        policies = default_policies(shared=False) if waits else self.settings.policies_for(shared=False)
        self.in_prefill_graph = prefill_graphs() if self.settings.phased else None
        same = options.moe_a2a_backend == "none"
        loads, group = ("gathered", None) if same else (self.loads_of(algorithm), self.group(topology))
        for i in range(metadata.num_layers):
            layer = Layer(self.balancer(i, policies["decode"], group, loads), self.own_meter())
            layer.plan_by(policies)
            self.add(layer)

    def _placement_of(self, tables: Tensor, num_shared: int) -> Placement:
        experts, topology = self._num_experts, self._topology
        return placement_of(tables, experts, topology, num_shared, self.settings.spare_slots)

    def present(self) -> Tensor:
        tables = self.tables.clone()
        for i, layer in self.by_id.items():
            if layer.spare is not None:
                tables[i] = layer.spare.filled.slot_to_expert.to(tables)
        return tables

    def count(self, metadata: Any) -> None:
        options, tables = moe(), metadata.physical_to_logical_map_cpu
        if options.eplb_algorithm == "isoload":
            raise ValueError(
                "--eplb-algorithm must be one of SGLang's where ISOLOAD_MODE is shadow, got 'isoload'"
            )
        if self.record is not None and self.record.tables.shape == tables.shape:
            self.record.moved(tables)
            return
        self.record = EngineRecord(
            self.settings, self.engine, "", self.own_rank(), tables, metadata.num_logical_experts,
            topology_of(metadata), "same" if options.moe_a2a_backend == "none" else "own",
            metadata.physical_to_logical_map.device,
        )  # fmt: skip

    def loads_of(self, algorithm: str) -> str:
        loads = self.settings.loads_for("own" if algorithm == "dynamic" else "gathered")
        if (backend := elastic_backend()) is not None and (algorithm, loads) != ("dynamic", "own"):
            raise ValueError(
                f"--elastic-ep-backend must come with --ep-dispatch-algorithm dynamic and {LOADS.name} own, got "
                f"{backend!r} with {algorithm} and {loads}"
            )
        if algorithm == "dynamic" and loads in JOINED_BY_ALL:
            raise ValueError(
                f"{LOADS.name} must be own with --ep-dispatch-algorithm dynamic over an all-to-all backend, "
                f"because ranks without tokens join no gather there (with lp they do), got {loads!r}"
            )
        return loads

    def add_shared(self, layer: Layer) -> None:
        """Plan the copies of this layer's shared expert together with the routed ones, because Waterfill is on."""
        old, policies = layer.balancer, self.settings.policies_for(shared=True)
        layer.balancer = self.balancer(old.layer, policies["decode"], old.group, "gathered", num_shared=1)
        layer.plan_by(policies)

    def phase_now(self) -> str:
        """Return the phase of the current pass; while a graph is captured, the phase in which it will be replayed."""
        return "prefill" if self.in_prefill_graph is not None and self.in_prefill_graph() else self.phase

    def layer(self, layer_id: int) -> Layer | None:
        return None if self.detached else self.by_id.get(layer_id)

    def detach(self) -> str:
        if moe().ep_dispatch_algorithm == "lp":  # isoload has replaced its solvers
            return "isoload continues to choose replicas, because SGLang has no other solver with lp"
        return super().detach()

    @property
    def chooses(self) -> bool:
        return bool(self.by_id or self.num_waterfill)

    def exchanged(self) -> str:
        ways = set()
        for balancer in (layer.balancer for layer in self.by_id.values()):
            alone = isinstance(balancer.group, LoneRank)
            ways.add("alone" if alone else "same" if balancer.tokens == "same" else balancer.loads)
        return " and ".join(sorted(EXCHANGED[way] for way in ways))

    def places(self) -> bool:
        if EPLB in self.lost:  # an older SGLang may have no get_exec
            return False
        return bool(moe().eplb_algorithm == "isoload")

    def announce(self) -> None:
        if self.by_id and not any(layer.balancer.placement.num_shared for layer in self.by_id.values()):
            self.settings.policies_for(shared=False)
        if self.engine_rank():
            return
        attached, without = [], {"dynamic", "lp"} - self.lost
        if self.by_id:
            dispatch = f"--ep-dispatch-algorithm {moe().ep_dispatch_algorithm}"
            attached.append(f"{dispatch} ({self.exchanged()}), {self.describe()}")
        if self.num_waterfill:
            attached.append(f"{self.waterfill_flag}, policy waterfill on {self.num_waterfill} layers")
        if self.places():
            attached.append(f"--eplb-algorithm isoload, placer {self.settings.placer}")
        line = f"isoload: attached to SGLang's {'; '.join(attached) or 'loader, and to none of its options'}"
        lost = f"; not to {', '.join(sorted(self.lost))}, where this SGLang is not as isoload expects"
        log.info(line + lost if self.lost else line)
        if not self.by_id and without:
            log.info(
                f"isoload: SGLang's own --ep-dispatch-algorithm {moe().ep_dispatch_algorithm} stays: isoload's are "
                f"{' and '.join(sorted(without))}"
            )
        if without:  # an older SGLang may have no get_exec
            self.warn_unused(self.unused())

    def unused(self) -> dict[Variable, str]:
        reasons = {}
        if not self.by_id:
            choice = f"SGLang's own --ep-dispatch-algorithm {moe().ep_dispatch_algorithm} chooses replicas"
            reasons = dict.fromkeys((POLICY, LOADS), f"{choice}. Pass --ep-dispatch-algorithm dynamic")
        elif all(layer.balancer.tokens == "same" for layer in self.by_id.values()):
            reasons[LOADS] = (
                "all ranks hold the same tokens without an all-to-all backend, so each has the counts of all. "
                "Pass --moe-a2a-backend deepep"
            )
        if not self.places():
            reasons[PLACER] = (
                "SGLang's own --eplb-algorithm places experts. Pass --enable-eplb --eplb-algorithm isoload"
            )
        return reasons

    def announce_shadow(self, model: str, weights: Mapping[int, Sequence[Tensor]]) -> None:
        if self.record is None:
            return
        self.record.clear()
        self.measure(model, "engine", weights)
        self.record.slot_bytes = self.slot_bytes
        if self.record.rank:
            return
        if (algorithm := moe().ep_dispatch_algorithm) is None:
            log.error(
                "isoload: in shadow mode, where SGLang maps no ids: nothing is counted without "
                "--ep-dispatch-algorithm. Add --ep-dispatch-algorithm dynamic: with one slot per expert "
                "it leaves ids as they are"
            )
            return
        stays = f"SGLang's --ep-dispatch-algorithm {algorithm}, which chooses as without isoload"
        log.info(f"isoload: in shadow mode with {stays}: {self.record.summary()}")
        self.warn_unused({})


def model_name(runner: Any) -> str:
    return str(runner.server_args.served_model_name or runner.model_config.model_path)


def topology_of(metadata: Any) -> Topology:
    return engine_topology(metadata.ep_size, parallel().nnodes, LAYERS.settings.times)


def moe() -> Any:
    from sglang.srt.runtime_context import get_exec

    return get_exec().moe


def parallel() -> Any:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()


def phase_of(batch: Any) -> str:
    """Return a ForwardBatch's phase, the same on all ranks: prefill if any rank has some, as in SGLang's all-to-all. A
    mixed batch is prefill, a draft's verification decode."""
    mode = batch.forward_mode
    prefill = batch.is_extend_in_batch or (mode.is_extend() and not mode.is_target_verify())
    return "prefill" if prefill else "decode"


def prefill_graphs() -> Callable[[], bool]:
    """Return SGLang's function that tests whether a graph of prefill is being captured, if each phase has a policy."""
    from sglang.srt.utils import get_bool_env_var

    rule = f"{POLICY.name} must be one for prefill and decode"
    if get_bool_env_var(UNAGREED):
        raise ValueError(f"{rule} while {UNAGREED} is set, because the ranks then do not agree on a phase")
    try:
        from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope
    except ImportError:
        raise ValueError(
            f"{rule} with this SGLang, which does not state which graphs are of prefill"
        ) from None
    in_scope: Callable[[], bool] = is_in_prefill_graph_scope
    return in_scope


def check_foreign(feature: str, names: Iterable[str], *sources: Any) -> None:
    """Raise ValueError if one of these options of FOREIGN is on; `feature`: isoload's, which it cannot be combined
    with. Of sources, records of SGLang's options, the first that has an option counts."""
    for name in names:
        value = next((getattr(source, name) for source in sources if hasattr(source, name)), None)
        off, parts = FOREIGN[name]
        if (value not in off) if off else any(part in str(value or "") for part in parts):
            raise ValueError(f"--{name.replace('_', '-')} must be left out with {feature}, got {value!r}")


# SGLang's options whose code reads, moves or frees the memory of experts in other ways: the values with which each is
# off, or the parts of values with which it is on.
FOREIGN: dict[str, tuple[tuple[Any, ...], tuple[str, ...]]] = {
    "elastic_ep_backend": ((None, "none"), ()),
    "enable_elastic_expert_backup": ((None, False), ()),
    "enable_paged_experts": ((None, False), ()),
    "dwdp_size": ((None, 0, 1), ()),
    "enable_memory_saver": ((None, False), ()),
    "remote_instance_weight_loader_start_seed_via_transfer_engine": ((None, False), ()),
    "weight_cache_mode": ((None, "none", "off", ""), ()),
    "kt_weight_path": ((None, ""), ()),
    "cpu_offload_gb": ((None, 0), ()),
    "offload_group_size": ((None, -1, 0), ()),
    "moe_a2a_backend": ((), ("megamoe",)),
    "moe_runner_backend": ((), ("megamoe",)),
    "load_format": ((), ("expert_pack", "remote")),
    "enable_two_batch_overlap": ((None, False), ()),
    "enable_waterfill": ((None, False), ()),
    "enable_deepep_waterfill": ((None, False), ()),
}


def elastic_backend() -> str | None:
    backend: str | None = moe().elastic_ep_backend
    return backend


def joined_behind() -> int:
    """Return by how much this process's rank exceeds SGLang's number, if it has joined a running engine."""
    return int(parallel().ep_join_rank_offset) if moe().is_ep_scale_joiner else 0


def live_tables(metadata: Any) -> Tensor:
    """Return [L, P] the expert in each slot of an ExpertLocationMetadata, on the host; -1 on ranks that are gone. An
    expert without a remaining copy keeps its slots there, and the log names it."""
    tables: Tensor = metadata.physical_to_logical_map_cpu
    if elastic_backend() is None:
        return tables
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

    state = ElasticEPStateManager.instance()
    if state is None or bool((alive := state.active_ranks_cpu[: metadata.ep_size] != 0).all()):
        return tables
    gone = ~alive.repeat_interleave(tables.shape[1] // metadata.ep_size)
    live = tables.masked_fill(gone, -1)
    for layer, (row, left) in enumerate(zip(tables, live, strict=True)):
        if lost := sorted(set(range(metadata.num_logical_experts)) - set(left.tolist())):
            live[layer] = torch.where(torch.isin(row, torch.tensor(lost)), row, left)
            ranks = (~alive).nonzero().flatten().tolist()
            log.error(f"isoload: layer {layer} has no copy left of experts {lost}: ranks {ranks} are gone")
    return live


LAYERS = Layers()
