"""Attaches isoload to SGLang: all seams are as expected and a known batch passed every hook, or nothing is hooked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from isoload.integrations.seams import Seam, faults, read_seams
from isoload.integrations.settings import Settings
from isoload.integrations.sglang import dispatch, placement, self_check
from isoload.integrations.sglang.layers import LAYERS
from isoload.integrations.sglang.waterfill import WaterfillBalancer

log = logging.getLogger("isoload")
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
    """What the entry point calls. SGLang logs an Exception of a plug-in and goes on, so a refusal leaves the process.

    Raises:
        SystemExit: a variable has a value that it must not have; or, with ISOLOAD_STRICT=1, SGLang is not as expected.
    """
    try:
        settings = Settings.read()
        found = attach(settings) if settings.enabled else []
    except ValueError as error:
        raise SystemExit(f"isoload: {error}") from None
    if found:
        reason = f"isoload: not attached to SGLang, which is not as isoload expects: {'; '.join(found)}"
        if settings.strict:
            raise SystemExit(f"{reason} (ISOLOAD_STRICT=1 refuses to start)")
        log.error(f"{reason}. SGLang runs as without isoload")


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
    if found := faults(seams):
        return found
    LAYERS.start(settings)
    found = self_check.faults()
    LAYERS.start(settings)  # forgets the known batch
    if found:
        return found
    for seam in seams:
        if seam.kind in ("replace", "around") and (seam.name != "forward" or settings.report_seconds):
            HookRegistry.register(seam.target, HOOKS[seam.name], HookType(seam.kind))
    return []
