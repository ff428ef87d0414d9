"""LastCounts: what a Balancer keeps with loads="last", where a batch is not even planned by its own counts.

At an exchange the sums of all ranks' decayed counts are split exactly. Until the next one every rank cuts its copies of
an expert in the proportions of that split, from a start of its own on a golden-ratio grid, so that the roundings of
many ranks nearly cancel. Before the first exchange, and after a load, an expert's replicas share alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isoload import ops
from isoload.own_counts.counts import OwnCounts
from isoload.placed_layers import PlacedLayers
from isoload.placement import Placement
from isoload.results import RECENT_LOSS
from isoload.transport import Group


class LastCounts(OwnCounts):
    """One layer's counts of the ranks that this process owns, and the split of all ranks' counts before.

    quota [P] int32: says proportions, alike on all ranks; 0 for all replicas of an expert: level. As the rest it stays
    where it is. Offsets are not used, and of ``sent`` not the first row.
    """

    def __init__(self, placement: Placement, group: Group) -> None:
        super().__init__(placement, group, "last", price=False)
        num_slots = placement.topology.num_ranks * placement.slots_per_rank
        with torch.inference_mode(False):  # else only inference could write it
            self.quota = torch.zeros(num_slots, dtype=torch.int32)

    def reset(self) -> None:
        super().reset()
        self.quota.zero_()

    def send(
        self, i: int, counts: Tensor, fixed: Tensor | None, placed: PlacedLayers, layer: int, is_new: bool
    ) -> Tensor:
        recent, to = self.recent[i] if is_new else None, self.sent[i]
        sent = ops.share_alone(counts, self.quota, placed.tables, self.sources[i], past=True, recent=recent)
        if is_new:
            torch.sum(sent.view(to.shape[1], -1), 1, out=to[2])
            if fixed is not None:
                to[1].add_((fixed.long() << 16) - (to[1] * RECENT_LOSS >> 16))
                to[2].add_(fixed)
        return sent

    def move(self, device: torch.device) -> None:
        super().move(device)
        with torch.inference_mode(False):
            self.quota = self.quota.to(device)
