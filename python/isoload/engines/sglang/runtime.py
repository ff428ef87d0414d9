"""SGLang's options and ranks as this process has them; its module is imported when they are asked for."""

from __future__ import annotations

from typing import Any


def moe() -> Any:
    """The options of MoE layers."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().moe


def parallel() -> Any:
    """Which ranks there are."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel()
