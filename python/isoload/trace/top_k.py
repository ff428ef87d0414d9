"""K, the experts of a token, for records of loads that do not hold it."""

from __future__ import annotations

import re
from dataclasses import replace

from isoload.traces import Trace
from isoload.wording import nearest, shown

# Part of a published model's name: routed experts E -> K.
MODELS = {
    "gpt-oss": {32: 4, 128: 4},
    "mixtral": {8: 2},
    "olmoe": {64: 8},
    "qwen3": {128: 8, 160: 8, 512: 10},
    "deepseek-v2": {64: 6, 160: 6},
    "deepseek-v3": {256: 8},
    "deepseek-r1": {256: 8},
    "glm-4.5": {128: 8, 160: 8},
    "glm-5": {256: 8},
    "kimi-k2": {384: 8},
}


def model_top_k(model: str, num_experts: int) -> int:
    """K of a model with so many routed experts; 0: not known."""
    name = re.sub(r"[\s_]+", "-", model.lower())
    return next((sizes.get(num_experts, 0) for part, sizes in MODELS.items() if part in name), 0)


def with_top_k(trace: Trace, given: str | None = None) -> Trace:
    """The trace with its own K; without one with the given (a number, or the name of a model), else with that of the
    model that the record names; K stays 0 where neither is known.
    """
    if given is None:
        return replace(
            trace, top_k=trace.top_k or model_top_k(str(trace.provenance.get("model")), trace.num_experts)
        )
    number = given.isdecimal() and len(given) < 9
    top_k = int(given) if number else model_top_k(given, trace.num_experts)
    if not top_k:
        other = "" if any(part in given.lower() for part in MODELS) else nearest(given, MODELS)
        raise ValueError(
            f"top_k must be a number from 1 on, or name a model of {trace.num_experts} experts that is one of "
            f"{', '.join(MODELS)}, got {shown(given)}{other}"
        )
    if trace.top_k not in (0, top_k):
        raise ValueError(f"top_k must be the record's {trace.top_k}, got {shown(given)}")
    return replace(trace, top_k=top_k)
