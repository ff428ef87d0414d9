"""What serving engines load by entry point. Outside of the package, so that a process which has no model, or wants no
isoload, does not import it."""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

SCHEDULER = "sglang.srt.managers.scheduler"  # imported already in every process that runs a model, and in their parent


def asked(switch: str) -> bool:
    """Whether a variable turns isoload on, or names a placement to start from, which must not be passed over."""
    return os.environ.get(switch, "") not in ("", "0") or bool(
        os.environ.get("ISOLOAD_PLACEMENT", "").strip()
    )


def sglang() -> None:
    """Entry point of the group ``sglang.srt.plugins``; SGLang calls it in all of its processes."""
    if SCHEDULER not in sys.modules:
        if asked("ISOLOAD_SGLANG"):
            check_options()
        return
    if asked("ISOLOAD_SGLANG"):
        from isoload.engines.sglang import attach_or_leave

        attach_or_leave()
    if trace := os.environ.get("ISOLOAD_ROUTING", "").strip():
        from isoload.engines.recorded_skew import attach_to

        attach_to("SGLang", trace)


def check_options() -> None:
    """Hook SGLang's check of elastic ranks in the process that reads the options, which then starts the others."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def check(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
        from isoload.engines.sglang.placement import check_elastic

        return check_elastic(original, server_args, *args, **kwargs)

    module = "sglang.srt.arg_groups.parallel_hook"
    try:
        hooks = find_spec(module) is not None
    except ModuleNotFoundError:  # before 0.5.20 SGLang's own assertion ends the start
        return
    if hooks:
        HookRegistry.register(f"{module}.handle_elastic_ep", check, HookType.AROUND)


def vllm() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it in all of its processes."""
    if asked("ISOLOAD_VLLM"):
        from isoload.engines.vllm import attach_or_leave

        attach_or_leave()
    kind, _, trace = os.environ.get("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "").partition(":")
    if kind == "isoload":
        from isoload.engines.recorded_skew import attach_to

        attach_to("vLLM", trace)
