"""Attaches isoload to SGLang: all seams are as expected and a known batch passed every hook, or nothing is hooked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from isoload.integrations import attaching
from isoload.integrations.seams import Seam, read_seams
from isoload.integrations.settings import SGLANG, Settings
from isoload.integrations.sglang import dispatch, placement, self_check
from isoload.integrations.sglang.layers import LAYERS
from isoload.integrations.sglang.waterfill import WaterfillBalancer

HOOKS: dict[str, Callable[..., Any]] = {
    "set_global_expert_location_metadata": dispatch.set_metadata,
    "update": dispatch.update_metadata,
    "init_lplb_solvers": dispatch.init_lplb_solvers,
    "resolve_routing_inputs": dispatch.resolve_routing_inputs,
    "_topk_ids_logical_to_physical_dynamic": dispatch.map_dynamic,
    "_topk_ids_logical_to_physical_probability": dispatch.map_solved,
    "WaterfillBalancer": WaterfillBalancer,
    "compute_algorithm": placement.compute_algorithm,
    "rebalance_experts": placement.rebalance_experts,
    "initialize": dispatch.initialize,
    "forward": dispatch.forward,
}


def attach_or_leave() -> None:
    """What the entry point calls."""
    attaching.attach_or_leave("SGLang", SGLANG, attach)


def attach(settings: Settings, seams: Sequence[Seam] | None = None) -> list[str]:
    """Registers the hooks, unless a seam is not as expected or a known batch does not come out right.

    Args:
        settings: what the environment says.
        seams: None = those of the data file.

    Returns:
        What is not as expected, one line each; empty: attached.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams = read_seams("sglang") if seams is None else seams
    if found := attaching.not_as_expected(seams, LAYERS.start, self_check.faults, settings):
        return found
    for seam in seams:
        if seam.kind in ("replace", "around"):
            HookRegistry.register(seam.target, HOOKS[seam.name], HookType(seam.kind))
    return []
