"""Plug-in for SGLang: it implements SGLang's own options; SGLang's plug-in loader attaches it. See docs/sglang.md.

This module maps hooks to functions, and tests them on a known batch, where they need no model, before it installs any.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from isoload.engines.record import EngineRecord
from isoload.engines.seams import EXTRA, PAGES, SHADOW, PlugIn, Seam, extra_options
from isoload.engines.settings import PLACEMENT, SGLANG, SPARE, Settings
from isoload.engines.sglang import borrowing, dispatch, pages, placement
from isoload.engines.sglang.dispatch import DeepEPWaterfillBalancer, WaterfillBalancer
from isoload.engines.sglang.layers import EPLB, LAYERS, Layer
from isoload.engines.tables import IDS, SLOTS, is_right, known_balancer, known_placement, replica_lists


def move_weights(original: Any, **kwargs: Any) -> Any:
    """Wrap _update_expert_weights for absent or spare slots; settings with both are rejected."""
    return (pages.update_weights if LAYERS.settings.ragged else borrowing.update_expert_weights)(
        original, **kwargs
    )


HOOKS = {
    "set_global_expert_location_metadata": dispatch.set_metadata,
    "update": placement.update_metadata,
    "init_lplb_solvers": dispatch.init_lplb_solvers,
    "resolve_routing_inputs": dispatch.resolve_routing_inputs,
    "_post_process_topk_ids": dispatch.post_process,  # in shadow mode, with four of the other hooks; spare slots
    "_topk_ids_logical_to_physical_dynamic": dispatch.map_dynamic,
    "_topk_ids_logical_to_physical_probability": dispatch.map_solved,
    "WaterfillBalancer": WaterfillBalancer,
    "DeepEPWaterfillBalancer": DeepEPWaterfillBalancer,  # the older name
    "compute_algorithm": placement.compute_algorithm,
    "rebalance_experts": placement.rebalance_experts,
    "rebalance": placement.rebalance,
    "handle_elastic_ep": placement.check_elastic,
    "_handle_elastic_ep": placement.check_elastic,  # a method in older versions
    "init_by_mapping": pages.by_mapping,
    "_compute_logical_to_all_physical_map": pages.lists_without_holes,
    "_convert_global_physical_count_to_logical_count": pages.counts_without_holes,
    "update_expert_weights_single_layer": pages.update_layer,
    "load_model": pages.load_model,
    "initialize": dispatch.initialize,
    "forward": dispatch.forward,
    "_update_expert_weights": move_weights,
    **dict.fromkeys(
        ("run_moe_core", "forward_cutlass_w4afp8", "forward_cutlass_w4afp8_masked"), borrowing.wait_for_experts
    ),
    **dict.fromkeys(
        (
            "update_weights_from_disk", "load_weights_from_distributed", "update_weights_from_tensor",
            "update_weights_from_ipc", "end_weight_update",
        ),
        borrowing.update_weights,
    ),
}  # fmt: skip


def dispatch_info(algorithm: str) -> Any:
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    lists = replica_lists(known_placement())
    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,  # type: ignore[arg-type]
        partial_logical_to_rank_dispatch_physical_map=None,
        partial_logical_to_all_physical_map=lists.logical_to_physical[0],
        partial_logical_to_all_physical_map_num_valid=lists.num_replicas[0],
        num_physical_experts=SLOTS.shape[1],
        rank_invariant=True,
    )


def check_dynamic() -> bool:
    from sglang.srt.eplb.expert_location_dispatch import _topk_ids_logical_to_physical_dynamic as stock

    info, right = dispatch_info("dynamic"), True
    for valid in (None, torch.tensor(3)):
        info.isoload_layer, info.isoload_num_valid = Layer(known_balancer(), None), valid
        slots = dispatch.map_dynamic(stock, IDS, info)
        right &= is_right(slots, len(IDS) if valid is None else 3) and bool((slots >= 0).all())
    info.isoload_layer = None
    return right and torch.equal(dispatch.map_dynamic(stock, IDS, info), stock(IDS, info)) and check_resolve()


def check_lp() -> bool:
    layer = Layer(known_balancer(), None)
    solved = layer.solve(IDS)
    return is_right(dispatch.map_solved(IDS, dispatch_info("lp"), solved), len(IDS)) and check_resolve()


def check_waterfill() -> bool:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    ids = torch.tensor([[0, 3], [-1, -1], [2, -1]], dtype=torch.int32)
    routed = StandardTopKOutput(torch.ones(3, 2), ids, torch.zeros(3, 4))
    want = torch.tensor([[0, 3, 4], [-1, -1, -1], [2, -1, 4]], dtype=torch.int32)
    right = True
    for weight in ({"shared_weight": 0.5}, {"routed_scaling_factor": 2.0}):
        output = WaterfillBalancer(4, 1, 0, -1, **weight).expand_topk(routed, 3)
        right &= torch.equal(output.topk_ids, want)
        right &= torch.equal(output.topk_weights, torch.tensor([[1, 1, 0.5], [0, 0, 0], [1, 0, 0.5]]))
    return right


def check_placement() -> bool:
    """Check that tables have the shapes and types of SGLang's own, which other algorithm names still get."""
    from sglang.srt.eplb.eplb_algorithms import compute_algorithm, rebalance_experts

    counts = torch.tensor([[[90, 30, 5, 5, 5, 5]]])
    tables = {}
    for name in ("auto", placement.NAME):
        chosen = placement.compute_algorithm(compute_algorithm, name, None, 1)
        tables[name] = placement.rebalance_experts(rebalance_experts, counts, 8, 4, None, 1, chosen)
    ours, theirs = tables[placement.NAME], tables["auto"]
    same = all(a.dtype == b.dtype and a.dim() == b.dim() for a, b in zip(ours, theirs, strict=True))
    experts = ours[0].gather(1, ours[1].flatten(1).clamp(min=0)).view_as(ours[1])
    right = torch.where(ours[1] < 0, torch.arange(6).view(1, 6, 1), experts) == torch.arange(6).view(1, 6, 1)
    return same and bool(right.all()) and int(ours[2].sum()) == 8


def check_resolve() -> bool:
    """Check that a draft model's layers, which have no dispatch, stay as they are."""
    from sglang.srt.layers.moe.topk import resolve_routing_inputs

    rows = torch.tensor(3)
    result = dispatch.resolve_routing_inputs(
        resolve_routing_inputs, layer_id=0, is_draft=True, num_token_non_padded=rows
    )
    return result == (rows, None)


def check_shadow() -> bool:
    before, slots, known = LAYERS.record, torch.tensor([[4, 1], [0, 2], [-1, -1]]), known_placement()
    device = torch.device("cpu")
    record = EngineRecord(
        LAYERS.settings, "", "", 0, SLOTS, known.num_experts, known.topology, "same", device
    )
    routed, LAYERS.record = (slots, object(), slots), record
    try:
        results = [
            dispatch.post_process(
                lambda *_, **__: routed, slots, layer_id=0, expert_location_dispatch_info=info
            )
            for info in (object(), None)
        ]
    finally:
        LAYERS.record = before
        record.close()
    counted = torch.bincount(torch.tensor([4, 1, 0, 2]), minlength=SLOTS.shape[1])
    return all(result is routed for result in results) and torch.equal(record.recorder._now[0], counted)


def check_spare() -> bool:
    """Check that SGLang's recorder gets home slots, and that a layer without spare slots is computed as it is."""
    slots, experts = torch.tensor([[4, 1], [-1, -1]]), object()
    computed = borrowing.wait_for_experts(lambda layer, batch: (layer, batch), experts, slots)
    return computed == (experts, slots) and borrowing.home_slots(0, slots) is slots


def check_pages() -> bool:
    from sglang.srt.eplb import expert_distribution, expert_location

    table = torch.tensor([[0, 1, -1, 1, 2, -1]])
    want = torch.tensor([[[0, -1], [1, 3], [4, -1]]])
    lists = expert_location._compute_logical_to_all_physical_map
    count = expert_distribution._convert_global_physical_count_to_logical_count
    mapped = pages.lists_without_holes(lists, table, 3, ep_size=2, moe_ep_rank=None)
    copies = pages.counts_without_holes(count, torch.tensor([[[5, 2, 0, 3, 1, 0]]]), 1, 3, table)
    return torch.equal(mapped, want) and copies.tolist() == [[[5, 5, 1]]]


CHECKS = {
    "dynamic": check_dynamic,
    "lp": check_lp,
    "Waterfill": check_waterfill,
    EPLB: check_placement,
    SHADOW: check_shadow,
    SPARE.name: check_spare,
    PAGES: check_pages,
}


def hook(seams: list[Seam], settings: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    unused = {SHADOW, *EXTRA} - extra_options(settings)
    LAYERS.lost = frozenset(CHECKS) - unused - {option for seam in seams for option in seam.serves}
    for seam in seams:
        HookRegistry.register(seam.target, HOOKS[seam.name], HookType(seam.kind))


PLUG_IN = PlugIn("SGLang", SGLANG, LAYERS.start, CHECKS, hook)
attach = PLUG_IN.attach


def attach_or_leave() -> None:
    """Attach to SGLang; its entry point calls this. Every refusal is a SystemExit."""
    if path := os.environ.get(PLACEMENT.name, "").strip():
        raise SystemExit(
            f"isoload: {PLACEMENT.name}={path:.200} starts vLLM; SGLang starts from --init-expert-location: pass "
            f"--init-expert-location FILE.json, made by isoload convert {path:.200} -o FILE.json --format sglang, and "
            f"unset {PLACEMENT.name}"
        )
    PLUG_IN.attach_or_leave()
