"""The Balancers of one process, by model and layer, and what they need of vLLM. MODELS is the plug-in's only state."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.balancing.balancer import Balancer
from isoload.balancing.counting import count
from isoload.engines.layers import EXCHANGED, JOINED_BY_ALL, EngineLayer, EngineLayers
from isoload.engines.record import EngineRecord
from isoload.engines.settings import LOADS, POLICY, SWITCH, Settings, Variable
from isoload.engines.tables import EngineSizes, check_placer, engine_topology
from isoload.online.metrics import Meter
from isoload.online.switch import Watchdog
from isoload.placement.engine_files import REDUNDANT

log = logging.getLogger("isoload")
RankTokens = Literal["own", "same", "gathered"]


class Layer(EngineLayer):
    """One MoE layer, its MoERunner of vLLM, and which tokens a rank routes: see :func:`tokens_of`."""

    def __init__(self, balancer: Balancer, meter: Meter | None, runner: Any, tokens: RankTokens) -> None:
        super().__init__(balancer, meter)
        self.runner, self.tokens = runner, tokens

    def describe(self) -> str:
        texts = {"own": f"tokens of their own, {EXCHANGED[self.balancer.loads]}", "same": EXCHANGED["same"]}
        return texts.get(self.tokens, "tokens gathered before they are routed, no collective")

    def map_and_record(
        self,
        topk_ids: Tensor,
        expert_load_view: Tensor,
        record_enabled: Tensor,
        num_unpadded_tokens: Tensor | None,
        theirs: Tensor | None = None,
    ) -> Tensor:
        """Return slots [T, K] of logical ids [T, K]; rows of padding that were not planned are -1. Adds the copies of
        each slot, padding aside, to expert_load_view [P] int32 if record_enabled [] is True. Rows from
        num_unpadded_tokens [] on are padding. `theirs`: [T, K] vLLM's choice, where there is a switch."""
        if self.runner.do_naive_dispatch_combine != (self.tokens == "gathered"):
            raise RuntimeError(
                f"layer {self.balancer.layer}: vLLM must exchange tokens as when its model was loaded, "
                f"do_naive_dispatch_combine is now {self.runner.do_naive_dispatch_combine}"
            )
        ids = topk_ids if topk_ids.dtype in (torch.int32, torch.int64) else topk_ids.to(torch.int32)
        # Gathered rows are all ranks', but the number of unpadded rows is this rank's: with it, plans of ranks would
        # differ.
        padding_after = None if self.tokens == "gathered" else num_unpadded_tokens
        slots = counted = self.slots(ids, padding_after)
        if self.switch is not None and theirs is not None:
            slots = counted = self.switch.choose(slots, theirs)
        if (self.tokens == "gathered" or theirs is not None) and num_unpadded_tokens is not None:
            counted = slots.masked_fill(padding(slots, num_unpadded_tokens), -1)
        expert_load_view += count(counted, len(expert_load_view)) * record_enabled
        return slots.to(topk_ids.dtype)


def padding(rows: Tensor, num_unpadded_tokens: Tensor) -> Tensor:
    return (torch.arange(len(rows), device=rows.device) >= num_unpadded_tokens).unsqueeze(1)


class ModelLayers(EngineLayers[Layer]):
    """All layers of one model, the served one or a draft."""

    engine = "vLLM"
    draft = False  # whether the model drafts for the served one
    window = 1  # forward passes of the counts by which vLLM rebalances

    def engine_group(self) -> dist.ProcessGroup:
        from vllm.distributed.parallel_state import get_ep_group

        group: dist.ProcessGroup = get_ep_group().device_group
        return group

    def engine_rank(self) -> int:
        from vllm.distributed.parallel_state import get_ep_group

        return int(get_ep_group().rank_in_group)

    def make(self, state: Any, parallel: Any) -> Counter[str]:
        """Make Balancers for the layers of an EplbModelState; return by reason how many layers vLLM keeps."""
        from vllm.distributed.parallel_state import get_ep_group, get_node_count

        if self.settings.switch is not None and getattr(parallel, "pipeline_parallel_size", 1) > 1:
            raise ValueError(
                f"{SWITCH.name} must come without pipeline parallelism, whose stages would not turn together"
            )
        tables = state.physical_to_logical_map.cpu()
        topology = engine_topology(get_ep_group().world_size, get_node_count(), self.settings.times)
        experts = state.model.num_logical_experts
        if not self.draft and not parallel.enable_elastic_ep:
            check_sizes(state, parallel, topology.num_ranks)
        check_placer("--enable-eplb", self.settings.placer, tables, experts, topology)
        self.place(tables, experts, topology, state.physical_to_logical_map.device)
        policy = self.settings.policies_for(shared=False)["decode"]
        loads = self.settings.loads_for("own" if self.settings.policy is None else "gathered")
        layer_tokens, skipped = tokens_by_layer(state, parallel, loads)
        for i, tokens in layer_tokens.items():
            balancer = self.balancer(i, policy, self.group(topology) if tokens == "own" else None, loads)
            self.add(Layer(balancer, self.own_meter(), state.model.moe_layers[i], tokens))
        return skipped

    def count(self, state: Any, parallel: Any, name: str) -> dict[int, Counted]:
        """In shadow mode: make the record of an EplbModelState and return the layers that it counts."""
        from vllm.distributed.parallel_state import get_ep_group, get_node_count

        layer_tokens, skipped = tokens_by_layer(state, parallel, "own")
        if not parallel.enable_elastic_ep:
            check_sizes(state, parallel, get_ep_group().world_size)
        group, kinds = get_ep_group(), {tokens == "own" for tokens in layer_tokens.values()}
        for reason, number in skipped.items():
            log.info(f"isoload: in shadow {number} layers of {state.model_name} are not counted: {reason}")
        if len(kinds) != 1:
            log.error(
                f"isoload: in shadow {state.model_name} is not counted: all of its layers must hold tokens "
                "in the same way"
            )
            return {}
        self.record = record = EngineRecord(
            self.settings, self.engine, state.model_name, group.rank_in_group, state.physical_to_logical_map.cpu(),
            state.model.num_logical_experts, engine_topology(group.world_size, get_node_count(), self.settings.times),
            "own" if kinds.pop() else "same", state.physical_to_logical_map.device,
            most_decoded(parallel, "gathered" in layer_tokens.values()),
        )  # fmt: skip
        self.measure(name, "engine", {})
        if not record.rank:
            stays = f"vLLM's EPLB of {state.model_name}, which chooses and rebalances as without isoload"
            log.info(f"isoload: in shadow mode with {stays}: {record.summary(len(layer_tokens))}")
            self.warn_unused({})
        return {i: Counted(record, i, tokens == "gathered") for i, tokens in layer_tokens.items()}

    def follow(self, rows: Tensor, layer: int | None = None) -> None:
        if not self.refresh(replaced(self.tables, rows, layer)):
            raise RuntimeError(f"vLLM must keep its {list(self.tables.shape)} slots, got {list(rows.shape)}")

    def detach(self) -> str:
        MODELS.by_map = {at: layer for at, layer in MODELS.by_map.items() if layer not in self.by_id.values()}
        return super().detach()

    def announce(self, name: str, skipped: Counter[str]) -> None:
        if self.engine_rank():
            return
        ways = " and ".join(sorted({layer.describe() for layer in self.by_id.values()}))
        dispatch = f"replicas ({ways}), {self.describe()}; " if self.by_id else ""
        log.info(f"isoload: attached to vLLM's EPLB of {name}: {dispatch}placer {self.settings.placer}")
        for reason, number in skipped.items():
            log.info(f"isoload: vLLM's own choice of replicas stays on {number} layers of {name}: {reason}")
        if not self.draft:  # a draft model may hold other tokens than the served one
            self.warn_unused(self.unused())

    def unused(self) -> dict[Variable, str]:
        if not self.by_id:
            choice = "vLLM's own choice of replicas stays on every layer"
            how = "Start vLLM without the options that the lines above name"
            return dict.fromkeys((POLICY, LOADS), f"{choice}. {how}")
        if any(layer.tokens == "own" for layer in self.by_id.values()):
            return {}
        same = "all ranks route the same tokens, so each has the counts of all"
        return {
            LOADS: f"{same}. Pass --data-parallel-size and an --all2all-backend such as deepep_low_latency"
        }


def check_sizes(state: Any, parallel: Any, num_ranks: int) -> None:
    model, redundant = state.model, parallel.eplb_config.num_redundant_experts
    sizes = EngineSizes(
        len(model.moe_layers), model.num_logical_experts, redundant, num_ranks, REDUNDANT, False
    )
    sizes.check(f"vLLM's map of {state.model_name}", *state.physical_to_logical_map.shape)


def replaced(tables: Tensor, rows: Tensor, layer: int | None) -> Tensor:
    """Return tables [L, P] on the host with new rows: [L, P] of all layers, or [P] of one."""
    rows = rows.cpu().to(tables.dtype)
    return rows if layer is None else tables.index_copy(0, torch.tensor([layer]), rows.unsqueeze(0))


def most_decoded(parallel: Any, gathered: bool) -> int:
    """Return the most tokens of a pass without prefill: one token and its drafts for each request served at a time."""
    from vllm.config import get_current_vllm_config

    config = get_current_vllm_config()
    drafts = getattr(config.speculative_config, "num_speculative_tokens", None) or 0
    ranks = parallel.data_parallel_size if gathered else 1
    return int(config.scheduler_config.max_num_seqs) * (1 + drafts) * ranks


def tokens_of(runner: Any, parallel: Any, loads: str) -> tuple[RankTokens | None, str]:
    """Return which tokens a rank holds when it routes, or None with the reason; the same on all ranks. "own": rows of
    its own, which an all-to-all exchanges afterwards and `loads` plan; "same": the rows that all ranks hold;
    "gathered": the rows of all ranks, gathered before in one order."""
    name = type(runner).__name__
    if not hasattr(runner, "do_naive_dispatch_combine"):
        return None, f"{name} routes by itself"
    if runner.is_monolithic:
        return None, "their kernel routes by itself"
    if parallel.enable_elastic_ep:
        return None, "ranks join and leave with elastic expert parallelism"
    if parallel.prefill_context_parallel_size > 1:
        return None, "prefill context parallelism is on"
    sequence_parallel = runner.moe_config.is_sequence_parallel
    if runner.do_naive_dispatch_combine:
        return "gathered", ""
    if parallel.data_parallel_size == 1 and not sequence_parallel:
        return "same", ""
    if parallel.use_ubatching and loads in JOINED_BY_ALL:
        return None, f"two micro-batches would gather their loads at once with {LOADS.name}={loads}"
    if parallel.tensor_parallel_size > 1 and not sequence_parallel:
        # Some backends exchange rows only among data-parallel ranks, once for each tensor-parallel one: no rank would
        # compute a copy for which these ranks chose each other's slots.
        return None, "tensor-parallel ranks hold the same tokens, others do not"
    return "own", ""


def tokens_by_layer(state: Any, parallel: Any, loads: str) -> tuple[dict[int, RankTokens], Counter[str]]:
    layer_tokens, skipped = dict[int, RankTokens](), Counter[str]()
    for i, runner in enumerate(state.model.moe_layers):
        tokens, reason = tokens_of(runner, parallel, loads)
        if tokens is None:
            skipped[reason] += 1
        else:
            layer_tokens[i] = tokens
    return layer_tokens, skipped


def is_draft(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether EplbState.add_model is called for a draft. Since 0.32 vLLM names only drafts; before, their
    configuration states it."""
    config = kwargs.get("model_config", args[1] if len(args) > 1 else None)
    named_draft = kwargs.get("model_name", args[2] if len(args) > 2 else None) is not None
    return named_draft or getattr(config, "runner_type", None) == "draft"


def served_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    config = kwargs.get("model_config", args[1] if len(args) > 1 else None)
    return str(getattr(config, "served_model_name", None) or "")


class Counted(NamedTuple):
    """A layer in shadow mode; gathered: its rows are those of all ranks, whose padding vLLM does not give."""

    record: EngineRecord
    layer: int
    gathered: bool


class Models:
    """All models of this process, and the layer of each of vLLM's maps, until vLLM drops a model."""

    def __init__(self) -> None:
        self.start(Settings.read({}))

    def start(self, settings: Settings) -> None:
        if settings.phased:
            raise ValueError(
                f"{POLICY.name} with a policy for each phase was removed in vLLM, whose batches mix "
                f"phases: use one policy, got {settings.policy!r}"
            )
        self.settings, self.in_shadow = settings, settings.mode == "shadow"
        seconds = 0 if self.in_shadow else settings.report_seconds
        self.meter = Meter("vLLM", seconds) if seconds else None
        self.watch = Watchdog("vLLM", 0 if self.in_shadow else settings.stalled_seconds)
        self.by_state: dict[int, ModelLayers] = {}  # by id of EplbModelState
        # Key: address of the layer's logical_to_physical_map, which does not change.
        self.by_map: dict[int, Layer | Counted] = {}

    def add(self, state: Any, parallel: Any, draft: bool = False, name: str = "") -> None:
        """Add a model whose experts vLLM has placed; all ranks call it together. Drafts, which come first, have no
        measured plans. `name`: as served; empty: the state's."""
        layers, name = ModelLayers(), name or state.model_name
        layers.settings, layers.draft = self.settings, draft
        if self.in_shadow:
            if not draft:
                self._register(state, layers, layers.count(state, parallel, name))
            return
        layers.meter = None if draft else self.meter
        skipped = layers.make(state, parallel)
        self._register(state, layers, layers.by_id)
        layers.announce(state.model_name, skipped)
        weights = dict(enumerate(state.model.expert_weights)) if self.settings.report_seconds else {}
        layers.measure(name, self.settings.placer, weights, sum(skipped.values()))
        if not draft:
            self.watch.metrics = layers.metrics
            if self.settings.rebalance is not None:
                layers.window = int(parallel.eplb_config.window_size)
                layers.decide(
                    dict(enumerate(state.model.expert_weights)), int(parallel.eplb_config.step_interval)
                )
        if self.settings.check_weights:
            layers.check_loaded(dict(enumerate(state.model.expert_weights)))

    def _register(self, state: Any, layers: ModelLayers, by_layer: Mapping[int, Layer | Counted]) -> None:
        """Keep the layers until vLLM drops the model, after which other tensors may have its addresses."""
        maps = {state.logical_to_physical_map[i].data_ptr(): layer for i, layer in by_layer.items()}
        self.by_state[id(state)] = layers
        self.by_map.update(maps)
        weakref.finalize(state, self._forget, id(state), list(maps))

    def placed_as(self, tables: Tensor | None) -> ModelLayers | None:
        """Return the layers of the model with experts in these slots [L, P], if ISOLOAD_REBALANCE decides for it."""
        if tables is not None:
            for layers in self.by_state.values():
                if layers.new_maps is not None and torch.equal(layers.tables, tables.cpu().to(layers.tables)):
                    return layers
        return None

    def layers(self, state: Any) -> ModelLayers | None:
        return self.by_state.get(id(state))

    def _forget(self, state: int, maps: list[int]) -> None:
        if (layers := self.by_state.pop(state, None)) is not None and layers.record is not None:
            layers.record.close()
        for address in maps:
            self.by_map.pop(address, None)


MODELS = Models()
