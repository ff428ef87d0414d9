"""Prefill or decode: what SGLang's ranks agree about a pass, and about a graph that is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isoload.engines.settings import POLICY

UNAGREED = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"


def phase_of(batch: Any) -> str:
    """Of a ForwardBatch, the same on all ranks: prefill wherever one has some, as SGLang's all-to-all has it. A mixed
    batch is prefill, a draft's verification decode."""
    mode = batch.forward_mode
    prefill = batch.is_extend_in_batch or (mode.is_extend() and not mode.is_target_verify())
    return "prefill" if prefill else "decode"


def prefill_graphs() -> Callable[[], bool]:
    """SGLang's own word whether what runs now is captured for prefill, where each phase has a policy.

    Raises:
        ValueError: ranks would not agree, or this SGLang says no such word.
    """
    from sglang.srt.utils import get_bool_env_var

    one = f"{POLICY.name} must be one for prefill and decode"
    if get_bool_env_var(UNAGREED):
        raise ValueError(f"{one} where {UNAGREED} is set, by which ranks agree on no phase")
    try:
        from sglang.srt.model_executor.runner_utils.prefill_graph import is_in_prefill_graph_scope
    except ImportError:
        raise ValueError(f"{one} with this SGLang, which does not say which graphs are of prefill") from None
    found: Callable[[], bool] = is_in_prefill_graph_scope
    return found
