"""Targets: what a source evens out where each rank splits its own counts and loads are not gathered in the forward.

Every rank keeps its own counts, decayed. Now and then, outside of any graph, all ranks exchange them (one all-gather of
all layers), split the sums exactly, and take from that split which part of each rank's load a source is to cause. A
source that alone would level its own copies would undo what other sources, of other domains, make up for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isoload import ops
from isoload.placed_layers import PlacedLayers
from isoload.results import ONE_OFFSET

MOST = 2**29  # copies of a layer over all ranks as the split takes them; more are scaled down


def offsets(recent: Tensor, source: int, placed: PlacedLayers) -> Tensor:
    """What one source takes ranks to carry already, for :func:`isoload.ops.plan_own`.

    With T_s[r] the copies that source s sends to rank r in the exact split of all sources' recent counts, the offset of
    s is ``sum_t T_t[r] / R - T_s[r]``, in parts of its own copies and from the least rank on. The 1 / R matters: if
    each source made up for the whole of what the others leave, all would, and their loads would swing.

    Args:
        recent: [L, R, E] int64 decayed counts of every source, as the op keeps them.
        source: s.
        placed: the same L layers; tables and policies of a placement.

    Returns:
        [L, R] int32.
    """
    tables, num_ranks = placed.tables, placed.tables.num_ranks
    total = recent.sum((1, 2))
    recent = recent // (total // MOST + 1)[:, None, None]
    loads = recent.sum(1)
    ticks = placed.topology.ticks_on(recent.device)
    quota = ops.plan_exact(loads.to(torch.int32), tables, ticks=ticks).quota.long()
    expert = placed.slot_to_expert.long().clamp(min=0)  # of an empty slot any: its quota is 0
    own = recent.select(1, source).gather(1, expert)
    sent = own * quota // loads.gather(1, expert).clamp(min=1)
    wanted, mine = (x.view(len(x), num_ranks, -1).sum(-1) for x in (quota, sent))
    gap = wanted - num_ranks * mine
    gap = gap - gap.amin(1, keepdim=True)
    parts = gap * ONE_OFFSET // (num_ranks * mine.sum(1, keepdim=True)).clamp(min=1)
    return parts.clamp(max=ONE_OFFSET).to(torch.int32)
