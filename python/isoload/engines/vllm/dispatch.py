"""Hooks of vLLM's EPLB: rebalances, their commit, the choice of replicas, and the state for the Balancers.

plan_rebalance, on_layer_committed and map_and_record are what vLLM's pull request 49700 proposes as hooks for
out-of-tree EPLB. In shadow mode vLLM's choice and its rebalances are unchanged, and the choice is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from isoload.engines.tables import keep_slots, lay_out, running
from isoload.engines.vllm.layers import MODELS, Counted, is_draft, padding, replaced, served_name
from isoload.topology import Topology

Original = Callable[..., Any]


def add_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    before = set(self.model_states)
    original(self, *args, **kwargs)
    for key, state in self.model_states.items():
        if key not in before:
            draft = is_draft(args, kwargs)
            MODELS.add(state, self.parallel_config, draft, "" if draft else served_name(args, kwargs))


def plan_rebalance(
    loads: Tensor, topology: Topology, slots_per_rank: int, placer: str, before: Tensor | None
) -> Tensor:
    """Return [L, P] expert in each slot; experts that stay on their rank stay in their slots."""
    before = running(before, topology.num_ranks * slots_per_rank)
    model = MODELS.placed_as(before)
    decision = (None, 1) if model is None else (model.new_maps, model.window)
    slots = lay_out(loads, topology, slots_per_rank, placer, before, *decision).physical_to_logical
    return slots if before is None else keep_slots(slots, before.cpu(), topology.num_ranks)


def on_layer_committed(
    original: Original,
    model_state: Any,
    new_physical_to_logical_map: Tensor,
    layer: int | None = None,
    **kwargs: Any,
) -> None:
    """Wrap _commit_eplb_maps and _commit_eplb_maps_for_layer: a rebalance has moved all layers, or one."""
    original(model_state, new_physical_to_logical_map, *([] if layer is None else [layer]), **kwargs)
    MODELS.watch.progressed()
    layers = MODELS.layers(model_state)
    if layers is not None and layers.by_id:
        layers.follow(new_physical_to_logical_map, layer)
        layers.check_moved(None if layer is None else [layer])
    elif layers is not None and layers.record is not None:
        layers.record.moved(replaced(layers.record.tables, new_physical_to_logical_map, layer))


def map_and_record(
    original: Original,
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor,
    num_unpadded_tokens: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    layer = MODELS.by_map.get(logical_to_physical_map.data_ptr())
    maps = logical_to_physical_map, logical_replica_count
    if layer is None or isinstance(layer, Counted):
        theirs = original(topk_ids, expert_load_view, *maps, record_enabled, num_unpadded_tokens, **kwargs)
        if layer is not None:
            layer.record.add(layer.layer, theirs, None if layer.gathered else num_unpadded_tokens)
        return cast(Tensor, theirs)
    replaces_padding = num_unpadded_tokens is not None and layer.tokens != "gathered"
    theirs = None
    if replaces_padding or layer.switch is not None:
        unrecorded = torch.zeros_like(record_enabled)
        theirs = original(topk_ids, expert_load_view, *maps, unrecorded, num_unpadded_tokens, **kwargs)
    batch = topk_ids, expert_load_view, record_enabled, num_unpadded_tokens
    slots = layer.map_and_record(*batch, None if layer.switch is None else theirs)
    if num_unpadded_tokens is None or not replaces_padding:
        return slots
    # Rows of padding keep vLLM's own replica: some of its kernels do not accept -1.
    assert theirs is not None
    return torch.where(padding(slots, num_unpadded_tokens), theirs, slots)


def step(
    original: Original, self: Any, is_dummy: bool = False, is_profile: bool = False, **kwargs: Any
) -> None:
    """Wrap EplbState.step, which every rank calls after every forward pass, also after a dummy pass without requests.
    Reports wait for the device, once per interval. The counts of a profiling pass are dropped."""
    if is_profile:
        original(self, is_dummy, is_profile, **kwargs)
        for record in filter(None, (layers.record for layers in MODELS.by_state.values())):
            record.clear()
        return
    # Synchronous rebalances have no thread; a missing thread of asynchronous ones would stall, which is logged, too.
    MODELS.watch.worker = getattr(self, "async_worker", None)
    MODELS.watch.enter()
    original(self, is_dummy, is_profile, **kwargs)
    MODELS.watch.leave(pending=any(state.rebalanced for state in self.model_states.values()))
    for layers in filter(None, map(MODELS.layers, self.model_states.values())):
        layers.step_ended()
    if MODELS.meter is not None and MODELS.meter.report_if_due():
        for layers in MODELS.by_state.values():
            layers.check_device()
