"""Placement of vLLM's experts: by the policy of its rebalances, and at the start by ISOLOAD_PLACEMENT.

vLLM loads all layers by one default map. A file is compared with a model after vLLM has made the model and before it
loads weights. The experts move once, at the end of EplbState.add_model, before any forward pass, with synchronous and
with asynchronous EPLB: no window of loads has counted a pass, and Balancers and records are made afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.engines.settings import PLACEMENT, Settings
from isoload.engines.tables import EngineSizes, engine_topology
from isoload.engines.vllm.dispatch import plan_rebalance
from isoload.engines.vllm.layers import MODELS, is_draft
from isoload.placement.engine_files import REDUNDANT, UnknownRanks, engine_slots
from isoload.placement.files import read_placement
from isoload.placement.placement import Placement
from isoload.topology import Topology
from isoload.traces.identity import Identity, matching_rows, spans
from isoload.transport.group import checksum, raise_unlike

log = logging.getLogger("isoload")
Original = Callable[..., Any]
# Keys by which vLLM's pull requests 41141 and 49572 and vllm-ascend take a file; no release of vLLM up to 0.33 has one.
STARTS = ("initial_mapping_path", "initial_expert_map_path", "expert_map_path")


class Start:
    """The placement file of this process; START is the only one."""

    def __init__(self) -> None:
        self.path, self.depth = "", 0  # depth: nested calls of initialize_model

    def start(self, settings: Settings) -> None:
        """Read the file that settings name, if any: a damaged file ends the starting process, not its workers."""
        self.path, self.depth = settings.placement or "", 0
        if self.path:
            self.read()

    def read(self) -> tuple[Placement, bool]:
        """Return the file's placement, and whether it states the number of ranks: most engines' files do not."""
        try:
            return read_placement(Path(self.path)), True
        except UnknownRanks:
            return read_placement(Path(self.path), Topology(1)), False

    @property
    def source(self) -> str:
        return f"{PLACEMENT.name}={self.path:.200}"

    def check_options(self, parallel: Any, additional: Any = None) -> None:
        """Raise ValueError for options with which vLLM moves no experts, or which also set the experts' start.
        `parallel` is vLLM's ParallelConfig; `additional` is the content of --additional-config."""
        eplb = additional.get("eplb_config") if isinstance(additional, dict) else None
        for option, keys in (("--eplb-config", vars(parallel.eplb_config)), ("--additional-config", eplb)):
            for name in STARTS:
                if isinstance(keys, dict) and keys.get(name):
                    raise ValueError(
                        f"{self.source} must come without {name} in {option}, which sets where experts start, too: "
                        f"leave {name} out, or unset {PLACEMENT.name}"
                    )
        if not parallel.enable_eplb:
            raise ValueError(
                f"{self.source} needs vLLM's EPLB: pass --enable-eplb --enable-expert-parallel, or unset "
                f"{PLACEMENT.name}"
            )
        if parallel.enable_elastic_ep:
            raise ValueError(
                f"{self.source} must come without --enable-elastic-ep, whose ranks join and leave: unset "
                f"{PLACEMENT.name}"
            )

    def rows(self, model: Any, model_config: Any, parallel: Any, num_ranks: int) -> Tensor:
        """Return the file's [L, P] expert in each slot for a MixtureOfExperts, layers in the model's order. Raises
        ValueError, with both numbers and what to type, if the file does not fit the model and num_ranks."""
        self.check_options(parallel)
        redundant, experts = parallel.eplb_config.num_redundant_experts, int(model.num_logical_experts)
        numbers = [int(runner.layer_id) for runner in model.moe_layers]
        sizes = EngineSizes(len(numbers), experts, redundant, num_ranks, REDUNDANT, True)
        placement, states_ranks = self.read()
        if placement.num_routed != experts:
            raise ValueError(
                f"{self.source} has {placement.num_routed} experts but the model has {experts}: pass a file of this "
                "model"
            )
        size = f"isoload place --ranks {num_ranks} --slots-per-rank {(experts + redundant) // num_ranks}"
        if states_ranks and placement.topology.num_ranks != num_ranks:
            ranks = placement.topology.num_ranks
            raise ValueError(
                f"{self.source} has {ranks} ranks but the engine has {num_ranks} expert-parallel ranks: start {ranks}, "
                f"or pass a file made by {size}"
            )
        try:
            num_slots = engine_slots(placement).shape[1]
        except ValueError as error:  # spare, dead or absent slots
            raise ValueError(f"{self.source}: {error}: pass a file made by {size}") from None
        sizes.check(self.source, len(numbers), num_slots)
        self.check_name(placement, model_config)
        return torch.from_numpy(engine_slots(self.of_layers(placement, numbers, parallel)))

    def check_name(self, placement: Placement, model_config: Any) -> None:
        """Raise ValueError for a file that states another model. A name without its ending is the same model's:
        qwen3-235b and Qwen/Qwen3-235B-A22B-FP8."""
        served = getattr(model_config, "served_model_name", None) or []
        engine = [str(model_config.model), *([served] if isinstance(served, str) else served)]
        if not placement.identity.model:
            return
        model = plain(placement.identity.model)
        if not any(same_model(model, plain(name)) for name in engine):
            raise ValueError(
                f"{self.source} is of the model {placement.identity.model} but vLLM serves {engine[0]}: pass a file of "
                f"this model, or if both are the same pass --served-model-name {placement.identity.model}"
            )

    def of_layers(self, placement: Placement, numbers: Sequence[int], parallel: Any) -> Placement:
        """Return the placement of the layers with these numbers of the model's own, in this order."""
        try:
            if parallel.pipeline_parallel_size == 1:
                placement = placement.for_model(sorted(numbers))
            rows = matching_rows(
                Identity("model"), numbers, "the model", placement.identity, placement.layer_ids, "it"
            )
        except ValueError as error:
            raise ValueError(
                f"{self.source}: {error}; the model has {len(numbers)} MoE layers, {spans(numbers)}: pass a file of "
                f"these layers (isoload convert {self.path} -o NEW --format isoload takes --first-moe-layer and "
                "--model, and adds layers that were not recorded by --extra-layers)"
            ) from None
        return placement.with_rows(rows, numbers, Identity("model"))


START = Start()


def plain(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def same_model(name: str, other: str) -> bool:
    """Return whether two plain names differ only by parts at their end. deepseek-v3 and deepseek-v3-0324 are the same
    model, deepseek-v3.2 is another."""
    short, long = sorted((name, other), key=len)
    return long == short or (long.startswith(short) and long[len(short)] in "-_")


def initialize_model(original: Original, vllm_config: Any, **kwargs: Any) -> Any:
    """Wrap vLLM's function, which makes a model that has no weights yet, and the parts of a composed model."""
    from vllm.distributed.parallel_state import get_ep_group
    from vllm.model_executor.models.interfaces import get_mixture_of_experts_model

    model_config = kwargs.get("model_config") or vllm_config.model_config
    checks = not START.depth and getattr(model_config, "runner_type", "") != "draft"
    if checks:
        START.check_options(vllm_config.parallel_config, vllm_config.additional_config)
    START.depth += 1
    try:
        model = original(vllm_config, **kwargs)
    finally:
        START.depth -= 1
    if checks:
        experts = get_mixture_of_experts_model(model)
        if experts is None:
            raise ValueError(
                f"{START.source} needs a model whose experts vLLM's EPLB moves, got {type(model).__name__}: unset "
                f"{PLACEMENT.name}"
            )
        START.rows(experts, model_config, vllm_config.parallel_config, get_ep_group().world_size)
    return model


def add_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap EplbState.add_model, at whose end a loaded model's experts are in vLLM's default map, on all ranks."""
    before = set(self.model_states)
    original(self, *args, **kwargs)
    draft = is_draft(args, kwargs)
    config = kwargs.get("model_config", args[1] if len(args) > 1 else None)
    for key, state in self.model_states.items():
        if key not in before and not draft:
            move(state, config, self.parallel_config)


def move(state: Any, model_config: Any, parallel: Any) -> None:
    """Move the experts of an EplbModelState to the file's locations; all ranks call it together. Raises ValueError on
    all ranks if the file of one does not fit or is another file."""
    from vllm.distributed.eplb import eplb_state, rebalance_execute
    from vllm.distributed.parallel_state import get_ep_group

    group, rows, fault = get_ep_group(), torch.empty(0, 0), ""
    try:
        rows = START.rows(state.model, model_config, parallel, group.world_size)
    except (OSError, ValueError) as error:
        fault = str(error)
    known: list[Any] = [None] * group.world_size
    dist.all_gather_object(known, (fault, checksum(rows.tolist())), group=group.cpu_group)
    if faults := [f"rank {rank}: {text}" for rank, (text, _) in enumerate(known) if text]:
        raise ValueError(fault or faults[0])
    raise_unlike(f"the file of {START.source}", [f"checksum {number}" for _, number in known])
    changed = int((state.physical_to_logical_map.cpu() != rows).sum())
    rebalance_execute.rearrange_expert_weights_inplace(
        state.physical_to_logical_map, rows, state.model.expert_weights, state.expert_buffer, group.device_group,
        state.communicator,
    )  # fmt: skip
    eplb_state._commit_eplb_maps(state, rows)
    state.expert_load_pass.zero_()
    state.expert_load_window.zero_()
    if group.rank_in_group == 0:
        log.info(
            f"isoload: vLLM's EPLB of {state.model_name} starts from {START.source}: {len(rows)} layers, {changed} of "
            f"{rows.numel()} slots differ from vLLM's default map"
        )


def make_policy(placer: str) -> type[Any]:
    from vllm.distributed.eplb.policy import AbstractEplbPolicy

    class IsoloadEplbPolicy(AbstractEplbPolicy):  # type: ignore[misc]
        @classmethod
        def rebalance_experts(
            cls,
            weight: Tensor,
            num_replicas: int,
            num_groups: int,
            num_nodes: int,
            num_ranks: int,
            old_global_expert_indices: Tensor | None = None,
        ) -> Tensor:
            topology = engine_topology(num_ranks, num_nodes, MODELS.settings.times)
            if num_replicas % num_ranks:
                raise ValueError(f"num_replicas must be a multiple of {num_ranks} ranks, got {num_replicas}")
            return plan_rebalance(
                weight, topology, num_replicas // num_ranks, placer, old_global_expert_indices
            )

    return IsoloadEplbPolicy
