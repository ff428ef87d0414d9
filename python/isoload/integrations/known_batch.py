"""A batch whose best split is known, for a plug-in's check of its own hooks before any is in place.

Six experts on two ranks of four slots; experts 0 and 1 have a replica on each rank. All tokens choose expert 0, so an
optimal split halves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.balancing.balancer import Balancer
from isoload.engines.tables import placement_of
from isoload.placement.placement import Placement
from isoload.topology import Topology

SLOTS = torch.tensor([[0, 1, 2, 3, 0, 1, 4, 5]])
IDS = torch.tensor([[0, 1], [0, 2], [0, 4], [0, 1]], dtype=torch.int32)
NUM_EXPERTS, NUM_RANKS = 6, 2


def known_placement() -> Placement:
    return placement_of(SLOTS, NUM_EXPERTS, Topology(NUM_RANKS))


def known_balancer() -> Balancer:
    return Balancer(known_placement(), 0, "exact", tokens="same")


def is_right(slots: Tensor, valid: int) -> bool:
    """Whether the valid rows are split as well as can be, over slots of their experts."""
    rows = slots[:valid]
    per_rank = torch.bincount(rows.flatten().long() // 4, minlength=NUM_RANKS)
    half = -(-int(per_rank.sum()) // NUM_RANKS)
    held = SLOTS[0][rows.long()]
    return slots.dtype == IDS.dtype and torch.equal(held.int(), IDS[:valid]) and int(per_rank.max()) == half
