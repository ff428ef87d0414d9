"""Replay of policy ``exact`` where not all ranks' loads are gathered: by own counts, a node's, or those of before."""

from __future__ import annotations

from time import perf_counter_ns

import torch
from torch import Tensor

from isoload.balancer import Balancer
from isoload.own_counts import Loads
from isoload.placement import Placement
from isoload.policies import Policy
from isoload.replay.batches import SourceBatch
from isoload.replay.metrics import Tally
from isoload.transport import LocalGroup


class LayersByLoads:
    """A Balancer for each layer, over virtual ranks; all exchange after every so many batches, as an engine would."""

    def __init__(self, placement: Placement, policy: Policy, loads: Loads, exchange_every: int) -> None:
        group = LocalGroup(placement.topology)
        layers = range(placement.num_layers)
        self.layers = [Balancer(placement, i, policy, group, loads=loads) for i in layers]
        self.exchange_every, self.batches = exchange_every, 0

    def route(self, batch: SourceBatch, tally: Tally) -> Tensor:
        """[L, T, K] slots of the next batch; adds what planning took, for one source of one layer."""
        slots, spent = [], []
        for i, layer in enumerate(self.layers):
            counted = layer.gather([batch.on_rank(i, rank) for rank in range(batch.num_ranks)])
            start = perf_counter_ns()
            planned = layer.plan(counted)
            spent.append((perf_counter_ns() - start) // batch.num_ranks)
            slots.append(torch.cat(layer.route(planned)))
        tally.layer_ns += spent
        tally.batched_ns.append(sum(spent) / len(spent))
        self.batches += 1
        if self.batches % self.exchange_every == 0:
            self.layers[0].exchange(*self.layers[1:])
        return torch.stack(slots)
