"""What serving engines load by entry point. Outside of the package, so that a process which has no model, or wants no
isoload, does not import it."""

import os
import sys

SCHEDULER = "sglang.srt.managers.scheduler"  # imported already in every process that runs a model, and in their parent


def asked(switch: str) -> bool:
    """Whether a variable turns isoload on, or names a placement to start from, which must not be passed over."""
    return os.environ.get(switch, "") not in ("", "0") or bool(
        os.environ.get("ISOLOAD_PLACEMENT", "").strip()
    )


def sglang() -> None:
    """Entry point of the group ``sglang.srt.plugins``; SGLang calls it in all of its processes."""
    if not asked("ISOLOAD_SGLANG") or SCHEDULER not in sys.modules:
        return
    from isoload.engines.sglang import attach_or_leave

    attach_or_leave()


def vllm() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it in all of its processes."""
    if not asked("ISOLOAD_VLLM"):
        return
    from isoload.engines.vllm import attach_or_leave

    attach_or_leave()
