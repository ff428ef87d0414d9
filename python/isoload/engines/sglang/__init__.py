"""isoload inside of SGLang: behind its own options, attached by its plug-in loader. docs/sglang.md describes it.

layers      the Balancers of all layers, made once and refreshed in place
dispatch    hooks of --ep-dispatch-algorithm dynamic and lp
waterfill   stands for SGLang's WaterfillBalancer
placement   --eplb-algorithm isoload
phases      prefill or decode
self_check  a known batch through every hook
"""

from __future__ import annotations

import os

from isoload.engines.seams import SHADOW, PlugIn, Seam
from isoload.engines.settings import PLACEMENT, SGLANG, Settings
from isoload.engines.sglang import dispatch, placement, self_check
from isoload.engines.sglang.layers import LAYERS
from isoload.engines.sglang.waterfill import DeepEPWaterfillBalancer, WaterfillBalancer

HOOKS = {
    "set_global_expert_location_metadata": dispatch.set_metadata,
    "update": dispatch.update_metadata,
    "init_lplb_solvers": dispatch.init_lplb_solvers,
    "resolve_routing_inputs": dispatch.resolve_routing_inputs,
    "_post_process_topk_ids": dispatch.post_process,  # in shadow mode, with four of the others
    "_topk_ids_logical_to_physical_dynamic": dispatch.map_dynamic,
    "_topk_ids_logical_to_physical_probability": dispatch.map_solved,
    "WaterfillBalancer": WaterfillBalancer,
    "DeepEPWaterfillBalancer": DeepEPWaterfillBalancer,  # its older home
    "compute_algorithm": placement.compute_algorithm,
    "rebalance_experts": placement.rebalance_experts,
    "rebalance": dispatch.rebalance,
    "initialize": dispatch.initialize,
    "forward": dispatch.forward,
}


def hook(seams: list[Seam], settings: Settings) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    LAYERS.lost = frozenset(self_check.CHECKS) - {
        SHADOW,
        *(option for seam in seams for option in seam.serves),
    }
    for seam in seams:
        HookRegistry.register(seam.target, HOOKS[seam.name], HookType(seam.kind))


PLUG_IN = PlugIn("SGLang", SGLANG, LAYERS.start, self_check.CHECKS, hook)
attach = PLUG_IN.attach


def attach_or_leave() -> None:
    """What SGLang's entry point calls.

    Raises:
        SystemExit: as PlugIn.attach_or_leave; or ISOLOAD_PLACEMENT is set, which SGLang has an option for.
    """
    if path := os.environ.get(PLACEMENT.name, "").strip():
        raise SystemExit(
            f"isoload: {PLACEMENT.name}={path:.200} starts vLLM; SGLang starts from --init-expert-location: pass "
            f"--init-expert-location FILE.json, made by isoload convert {path:.200} -o FILE.json --format sglang, and "
            f"unset {PLACEMENT.name}"
        )
    PLUG_IN.attach_or_leave()
