"""Hooks of ISOLOAD_MODE=shadow: what SGLang chose goes on as it is, behind any --ep-dispatch-algorithm, and is counted.

SGLang records for its own rebalances, too: `_post_process_topk_ids` returns the slots of the routed copies, padding
masked, as a third result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoload.integrations.engine_record import EngineRecord
from isoload.integrations.sglang.layers import LAYERS, model_name, topology_of
from isoload.integrations.sglang.phases import phase_of

Original = Callable[..., Any]
log = logging.getLogger("isoload")


def set_metadata(original: Original, value: Any, *more: Any, **named: Any) -> None:
    """Around set_global_expert_location_metadata: memory is made here, before any batch and any graph."""
    from sglang.srt.runtime_context import get_exec

    original(value, *more, **named)
    if value is None:
        return
    moe = get_exec().moe
    if moe.eplb_algorithm == "isoload":
        raise ValueError(
            "--eplb-algorithm must be one of SGLang's where ISOLOAD_MODE is shadow, got 'isoload'"
        )
    tables = value.physical_to_logical_map_cpu
    if (record := LAYERS.record) is not None and record.tables.shape == tables.shape:
        record.moved(tables)
        return
    LAYERS.record = EngineRecord(
        LAYERS.settings, LAYERS.engine, "", LAYERS.own_rank(), tables, value.num_logical_experts,
        topology_of(value), "same" if moe.moe_a2a_backend == "none" else "own", value.physical_to_logical_map.device,
    )  # fmt: skip


def update_metadata(original: Original, self: Any, *given: Any, **named: Any) -> None:
    """Around ExpertLocationMetadata.update, SGLang's rebalancing, behind a pass."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    original(self, *given, **named)
    if LAYERS.record is not None and self is get_global_expert_location_metadata():
        LAYERS.record.moved(self.physical_to_logical_map_cpu)


def post_process(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Around _post_process_topk_ids."""
    result = original(*args, **kwargs)
    named = dict(zip(NAMES, args, strict=False)) | kwargs
    info, slots = named.get("expert_location_dispatch_info"), result[2]
    if LAYERS.record is not None and info is not None and slots is not None:
        # On AMD rows of padding are those of expert 0, elsewhere they are -1.
        num_valid = named.get("num_token_non_padded") if torch.version.hip else None
        LAYERS.record.add(named["layer_id"], slots, num_valid)
    return result


NAMES = (  # of _post_process_topk_ids
    "topk_ids", "topk_weights", "topk_config", "router_logits", "layer_id", "num_token_non_padded",
    "expert_location_dispatch_info", "padded_rows_masked",
)  # fmt: skip


def initialize(original: Original, self: Any, *more: Any, **named: Any) -> None:
    """Around ModelRunner.initialize, which runs and captures batches that no user sent."""
    original(self, *more, **named)
    if self.is_draft_worker or (record := LAYERS.record) is None:
        return
    from sglang.srt.runtime_context import get_exec

    record.clear()
    record.measure(model_name(self))
    if record.rank:
        return
    if (algorithm := get_exec().moe.ep_dispatch_algorithm) is None:
        log.error(
            "isoload: in shadow mode, where SGLang maps no ids: nothing is counted without --ep-dispatch-algorithm "
            "(static is what SGLang does without it)"
        )
        return
    stays = f"SGLang's --ep-dispatch-algorithm {algorithm}, which chooses as ever"
    log.info(f"isoload: in shadow behind {stays}: {record.kept()}")


def forward(original: Original, self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward, in which graphs are replayed and experts move."""
    record = None if self.is_draft_worker else LAYERS.record
    if record is not None:
        record.begin()
        record.phase = phase_of(forward_batch)
    result = original(self, forward_batch, *args, **kwargs)
    if record is not None:
        record.step_ended()
    return result


HOOKS = {
    "set_global_expert_location_metadata": set_metadata,
    "update": update_metadata,
    "_post_process_topk_ids": post_process,
    "initialize": initialize,
    "forward": forward,
}


def check() -> bool:
    """A known batch: the results of SGLang's function are those that come back, and a draft's copies are none."""
    from isoload.integrations.known_batch import NUM_EXPERTS, SLOTS, known_placement

    before, slots = LAYERS.record, torch.tensor([[4, 1], [0, 2], [-1, -1]])
    topology, device = known_placement().topology, torch.device("cpu")
    record = EngineRecord(LAYERS.settings, "", "", 0, SLOTS, NUM_EXPERTS, topology, "same", device)
    given = (slots, object(), slots)

    def stock(*_: Any, **__: Any) -> tuple[Tensor, object, Tensor]:
        return given

    LAYERS.record = record
    try:
        for info in (object(), None):
            if post_process(stock, slots, layer_id=0, expert_location_dispatch_info=info) is not given:
                return False
    finally:
        LAYERS.record = before
        record.close()
    counted = record.recorder._now[0]
    return torch.equal(counted, torch.bincount(torch.tensor([4, 1, 0, 2]), minlength=SLOTS.shape[1]))
