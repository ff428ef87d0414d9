"""Hooks of SGLang's dispatch: logical to physical ids, behind --ep-dispatch-algorithm dynamic and lp.

dynamic  Without an all-to-all backend all ranks hold the same tokens and compute the same plan. With one each plans its
         own, and SGLang calls nothing on a rank without tokens: no forward pass may hold an exchange.
lp       With one. SGLang calls the layer's solver before it maps ids, in the DeepSeek family also on ranks without
         tokens. The solver is a Layer, and what it returns are the physical ids already.

In shadow mode what SGLang chose goes on as it is, behind any algorithm, and is counted. SGLang records for its own
rebalances, too: `_post_process_topk_ids` returns the slots of the routed copies, padding masked, as a third result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from isoload.engines.layers import JOINED_BY_ALL
from isoload.engines.settings import CHECK, SWITCH
from isoload.engines.sglang.layers import LAYERS, Layer, model_name
from isoload.engines.sglang.phases import phase_of
from isoload.engines.sglang.placement import check_at_start, check_file
from isoload.engines.sglang.runtime import moe

Original = Callable[..., Any]
MOVED = "routed_experts_weights_of_layer"  # a model's weights that SGLang moves when experts move


def set_metadata(original: Original, value: Any, *more: Any, **named: Any) -> None:
    """Around set_global_expert_location_metadata: the Balancers of `dynamic`, and in shadow mode the record, are made
    here, before any batch and any graph."""
    original(value, *more, **named)
    if value is None:
        return
    if LAYERS.settings.mode == "shadow":
        LAYERS.count(value)
        return
    check_at_start(value)
    algorithm = moe().ep_dispatch_algorithm
    if algorithm == "dynamic" and "dynamic" not in LAYERS.lost:
        LAYERS.follow(value, "dynamic")
    elif LAYERS.settings.switch is not None:
        raise ValueError(
            f"{SWITCH.name} must come with --ep-dispatch-algorithm dynamic, with isoload behind it, got {algorithm!r}"
        )


def update_metadata(
    original: Original, self: Any, other: Any, update_layer_ids: list[int], *more: Any, **named: Any
) -> None:
    """Around ExpertLocationMetadata.update, SGLang's rebalancing behind a pass: the tables of the Balancers follow in
    place."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    original(self, other, update_layer_ids, *more, **named)
    if self is get_global_expert_location_metadata():
        if LAYERS.by_id:
            LAYERS.follow(self, moe().ep_dispatch_algorithm)
            LAYERS.check_moved(update_layer_ids)
        elif LAYERS.record is not None:  # in shadow mode
            LAYERS.record.moved(self.physical_to_logical_map_cpu)
    LAYERS.watch.progressed()


def rebalance(original: Original, self: Any, *more: Any, **named: Any) -> Iterator[None]:
    """Around EPLBManager.rebalance, a generator that comes back between two chunks of layers, once in a pass."""
    LAYERS.watch.enter()
    try:
        for _ in original(self, *more, **named):
            LAYERS.watch.leave(pending=True)
            yield
            LAYERS.watch.enter()
    finally:
        LAYERS.watch.leave(pending=False)


def init_lplb_solvers(*, model_config: Any) -> None:
    """Replaces SGLang's of this name: Layers for solvers. After a rebalance they are there already, and refreshed."""
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.eplb.lplb_solver import assert_lplb_supported_model, set_global_lplb_solver

    architectures = getattr(model_config.hf_config, "architectures", None)
    if architectures and LAYERS.loads_of("lp") in JOINED_BY_ALL:
        assert_lplb_supported_model(architectures[0])  # elsewhere ranks without tokens do not join a gather
    metadata = get_global_expert_location_metadata()
    if metadata is None:
        return
    LAYERS.follow(metadata, "lp")
    for layer_id, layer in LAYERS.by_id.items():
        set_global_lplb_solver(layer_id, layer)


def resolve_routing_inputs(original: Original, *, layer_id: int, **named: Any) -> tuple[Tensor | None, Any]:
    """Around SGLang's of this name, where a layer's batch, its padding and its number are known together."""
    num_valid, info = original(layer_id=layer_id, **named)
    layer = LAYERS.of(layer_id)
    if info is not None and layer is not None:
        if info.ep_dispatch_algorithm == "dynamic":
            layer.turn(LAYERS.phase_now)
            info.isoload_layer, info.isoload_num_valid = layer, num_valid
        else:
            layer.num_valid = num_valid
    return num_valid, info


def map_dynamic(original: Original, topk_ids: Tensor, info: Any, *more: Any, **named: Any) -> Tensor:
    """Around _topk_ids_logical_to_physical_dynamic."""
    layer: Layer | None = getattr(info, "isoload_layer", None)
    if layer is None or info.ep_dispatch_algorithm != "dynamic":
        return cast(Tensor, original(topk_ids, info, *more, **named))
    num_valid = info.isoload_num_valid
    rows = topk_ids if topk_ids.dim() == 2 else topk_ids.view(-1, 1)
    slots = layer.slots(rows, num_valid).view(topk_ids.shape)
    if num_valid is None and layer.switch is None:
        return slots
    theirs = original(topk_ids, info, *more, **named).to(slots.dtype)
    chosen = slots if layer.switch is None else layer.switch.choose(slots, theirs)
    # Rows of padding keep SGLang's own replica: some of its kernels take no -1.
    return chosen if num_valid is None else torch.where(slots < 0, theirs, chosen)


def map_solved(topk_ids: Tensor, info: Any, log2phy_prob: Tensor) -> Tensor:
    """Replaces _topk_ids_logical_to_physical_probability: the Layer's solve() has mapped these ids already."""
    if log2phy_prob.shape != topk_ids.shape:
        raise RuntimeError(
            f"solved ids must be those of topk_ids {list(topk_ids.shape)}, got {list(log2phy_prob.shape)}"
        )
    return log2phy_prob


def post_process(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Around _post_process_topk_ids, in shadow mode."""
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
    """Around ModelRunner.initialize, which reads --init-expert-location, runs and captures batches that no user sent,
    and at whose end it is known what every layer does."""
    if not self.is_draft_worker:
        check_file(getattr(self, "model_config", None))
    original(self, *more, **named)
    if self.is_draft_worker:
        return
    if LAYERS.settings.mode == "shadow":
        LAYERS.announce_shadow(model_name(self))
        return
    LAYERS.announce()
    if LAYERS.settings.report_seconds:
        placer = LAYERS.settings.placer if LAYERS.places() else "engine"
        moved = dict(getattr(self.model, MOVED, {}))  # SGLang's LazyValue has keys and items alone
        LAYERS.measure(model_name(self), placer, moved)
    if LAYERS.settings.check_weights:
        LAYERS.check_loaded(weights_of(self.model))


def weights_of(model: Any) -> Mapping[int, Sequence[Tensor]]:
    """By layer what SGLang moves when experts move."""
    weights = getattr(model, MOVED, None)
    if weights is None:
        raise ValueError(
            f"{CHECK.name} must be 0 where the model has no {MOVED}, got 1 with {type(model).__name__}"
        )
    return dict(weights)  # SGLang's LazyValue has keys and items, and cannot be iterated


def forward(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward, in which graphs are replayed and experts move: what is exchanged comes after it.

    SGLang counts the same passes towards its own rebalances: with attention data parallelism ranks without requests run
    idle ones. Reports wait for the device, once per interval.
    """
    if self.is_draft_worker:
        return original(self, *args, **kwargs)
    if LAYERS.record is not None or LAYERS.in_prefill_graph is not None:
        LAYERS.phase = phase_of(args[0] if args else kwargs["forward_batch"])
    if LAYERS.record is not None:
        LAYERS.record.begin()
        LAYERS.record.phase = LAYERS.phase
    try:
        result = original(self, *args, **kwargs)
    finally:
        LAYERS.phase = "decode"  # of graphs that are captured between passes
    LAYERS.step_ended()
    if LAYERS.meter is not None and LAYERS.meter.report_if_due():
        LAYERS.check_device()
    return result
