"""What to type so that an engine starts from a placement file, by the file's format."""

from __future__ import annotations

import json
import shlex

from isoload.placement.engine_files import engine_slots
from isoload.placement.placement import Placement
from isoload.traces.identity import HOW

REDUNDANT = "--eplb-config '{\"num_redundant_experts\": {}}'"
"""vLLM's option; {} stands for the number of redundant experts of a layer."""
ENGINES = {
    "isoload": "vLLM",
    "vllm": "vLLM",
    "vllm-list": "vLLM",
    "vllm-ascend": "vllm-ascend",
    "sglang": "SGLang",
    "tensorrt-llm": "TensorRT-LLM",
}
"""The engine that starts from a file of each format."""


def launch_line(placement: Placement, format: str, path: str, ranks: int | None = None) -> str:
    """Return the line that starts an engine from a file; empty where no engine can start from the placement.

    Args:
        placement: what the file holds.
        format: of the file, one of ``isoload.placement.files.FORMATS``.
        path: the file.
        ranks: of the expert-parallel group; None = the file does not state them, and the line has no number of ranks.

    The line names one arrangement of the ranks, tensor parallel; other arrangements take the same file.
    """
    try:
        redundant = engine_slots(placement).shape[1] - placement.num_routed
    except ValueError:  # spare, dead or absent slots
        return ""
    file = shlex.quote(path)
    if format == "sglang":
        size = f"--tp {ranks} --ep-size {ranks} " if ranks else ""
        return f"{size}--ep-num-redundant-experts {redundant} --init-expert-location {file}"
    if format == "tensorrt-llm":
        return f"moe_config: {{load_balancer: {path}}}"
    size = f"--tensor-parallel-size {ranks} " if ranks else ""
    if format == "vllm-ascend":
        config = json.dumps({"eplb_config": {"expert_map_path": path}})
        return f"{size}--enable-expert-parallel --additional-config {shlex.quote(config)}"
    if placement.identity.numbering == "order":
        return f"not before the file states which layers of the model its rows are: {HOW}"
    option = REDUNDANT.replace("{}", str(redundant))
    return f"ISOLOAD_PLACEMENT={file} vllm serve MODEL {size}--enable-expert-parallel --enable-eplb {option}"
