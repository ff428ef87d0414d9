"""Ranks that are gone, behind --elastic-ep-backend: no copy is sent to what lies on them.

SGLang finds them in a forward pass, has its own placer lay experts out over the others, and runs the pass again. In its
map the slots of ranks that are gone then hold expert 0, which says nothing of what is there.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from isoload.engines.sglang.runtime import moe, parallel

log = logging.getLogger("isoload")


def backend() -> str | None:
    """SGLang's --elastic-ep-backend."""
    given: str | None = moe().elastic_ep_backend
    return given


def joined_behind() -> int:
    """By how much this process's rank is larger than SGLang counts it, where it has joined a running engine."""
    return int(parallel().ep_join_rank_offset) if moe().is_ep_scale_joiner else 0


def live_tables(metadata: Any) -> Tensor:
    """[L, P] the expert in each slot of an ExpertLocationMetadata, on the host; -1 on ranks that are gone.

    An expert of which no copy is left keeps its slots there, and the log names it.
    """
    tables: Tensor = metadata.physical_to_logical_map_cpu
    if backend() is None:
        return tables
    from sglang.srt.elastic_ep.elastic_ep import ElasticEPStateManager

    state = ElasticEPStateManager.instance()
    if state is None or bool((alive := state.active_ranks_cpu[: metadata.ep_size] != 0).all()):
        return tables
    gone = ~alive.repeat_interleave(tables.shape[1] // metadata.ep_size)
    live = tables.masked_fill(gone, -1)
    for layer, (row, left) in enumerate(zip(tables, live, strict=True)):
        if lost := sorted(set(range(metadata.num_logical_experts)) - set(left.tolist())):
            live[layer] = torch.where(torch.isin(row, torch.tensor(lost)), row, left)
            ranks = (~alive).nonzero().flatten().tolist()
            log.error(f"isoload: layer {layer} has no copy left of experts {lost}: ranks {ranks} are gone")
    return live
