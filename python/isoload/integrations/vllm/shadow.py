"""Hooks of ISOLOAD_MODE=shadow: what vLLM's EPLB chose goes on as it is, its rebalances too, and is counted."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from isoload.integrations.engine_record import EngineRecord
from isoload.integrations.engine_tables import engine_topology
from isoload.integrations.vllm.layers import MODELS, is_draft, most_decoded, served_name, tokens_of

Original = Callable[..., Any]
log = logging.getLogger("isoload")


class Counted(NamedTuple):
    """A layer that is counted; gathered: its rows are those of all ranks, of which vLLM says no padding."""

    record: EngineRecord
    layer: int
    gathered: bool


class Records:
    """The served model's, and the layer behind each of its maps; until vLLM drops the model."""

    def __init__(self) -> None:
        self.of: EngineRecord | None = None
        self.state = 0  # id of its EplbModelState
        self.by_map: dict[int, Counted] = {}  # by address of a layer's logical_to_physical_map, which stays

    def forget(self) -> None:
        if self.of is not None:
            self.of.close()
        self.of, self.state, self.by_map = None, 0, {}


RECORDS = Records()


def add_model(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Around EplbState.add_model; drafts are not counted."""
    before = set(self.model_states)
    original(self, *args, **kwargs)
    for key, state in self.model_states.items():
        if key not in before and not is_draft(args, kwargs):
            take(state, self.parallel_config, served_name(args, kwargs) or state.model_name)


def take(state: Any, parallel: Any, name: str) -> None:
    """Makes the record of a model whose experts vLLM has placed; name: as served."""
    from vllm.distributed.parallel_state import get_ep_group, get_node_count

    held, kept = {}, Counter[str]()
    for i, runner in enumerate(state.model.moe_layers):
        tokens, reason = tokens_of(runner, parallel, "own")
        if tokens is None:
            kept[reason] += 1
        else:
            held[i] = tokens
    group, kinds = get_ep_group(), {of == "own" for of in held.values()}
    for reason, number in kept.items():
        log.info(f"isoload: in shadow {number} layers of {state.model_name} are not counted: {reason}")
    if len(kinds) != 1:
        log.error(f"isoload: in shadow {state.model_name} is not counted: its layers must hold tokens alike")
        return
    device = state.physical_to_logical_map.device
    record = EngineRecord(
        MODELS.settings, "vLLM", state.model_name, group.rank_in_group, state.physical_to_logical_map.cpu(),
        state.model.num_logical_experts, engine_topology(group.world_size, get_node_count()),
        "own" if kinds.pop() else "same", device, most_decoded(parallel, "gathered" in held.values()),
    )  # fmt: skip
    record.measure(name)
    RECORDS.of, RECORDS.state = record, id(state)
    for i, tokens in held.items():
        address = state.logical_to_physical_map[i].data_ptr()
        RECORDS.by_map[address] = Counted(record, i, tokens == "gathered")
    weakref.finalize(state, RECORDS.forget)
    if not record.rank:
        stays = f"vLLM's EPLB of {state.model_name}, which chooses and rebalances as ever"
        log.info(f"isoload: in shadow behind {stays}: {record.kept(len(held))}")


def commit(
    original: Original,
    model_state: Any,
    new_physical_to_logical_map: Tensor,
    layer: int | None = None,
    **named: Any,
) -> None:
    """Around _commit_eplb_maps and _commit_eplb_maps_for_layer, behind a pass."""
    original(model_state, new_physical_to_logical_map, *([] if layer is None else [layer]), **named)
    if (record := RECORDS.of) is None or id(model_state) != RECORDS.state:
        return
    rows = new_physical_to_logical_map.cpu().to(record.tables.dtype)
    if layer is not None:
        rows = record.tables.index_copy(0, torch.tensor([layer]), rows.unsqueeze(0))
    record.moved(rows)


def map_and_record(
    original: Original,
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor,
    num_unpadded_tokens: Tensor | None = None,
    **named: Any,
) -> Tensor:
    """Around eplb_map_to_physical_and_record."""
    maps = logical_to_physical_map, logical_replica_count
    slots = original(topk_ids, expert_load_view, *maps, record_enabled, num_unpadded_tokens, **named)
    if (of := RECORDS.by_map.get(logical_to_physical_map.data_ptr())) is not None:
        of.record.add(of.layer, slots, None if of.gathered else num_unpadded_tokens)
    return cast(Tensor, slots)


def step(
    original: Original, self: Any, is_dummy: bool = False, is_profile: bool = False, **kwargs: Any
) -> None:
    """Around EplbState.step, behind every pass; what a profiling one counted is forgotten."""
    original(self, is_dummy, is_profile, **kwargs)
    if (record := RECORDS.of) is None:
        return
    if is_profile:
        record.clear()
    else:
        record.step_ended()


HOOKS: dict[str, Callable[..., Any]] = {
    "add_model": add_model,
    "_commit_eplb_maps": commit,
    "_commit_eplb_maps_for_layer": commit,
    "eplb_map_to_physical_and_record": map_and_record,
    "step": step,
}
