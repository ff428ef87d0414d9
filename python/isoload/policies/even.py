"""Policies ``even`` and ``dynamic``: equal parts for all replicas, as a quota and as SGLang samples it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from isoload.placement import PlacedLayers
from isoload.policies.base import Demand, Policy, Split, even_split
from isoload.replica_tables import ReplicaTables


@dataclass(frozen=True)
class EvenPolicy(Policy):
    """Every replica takes load / replicas copies, the remainder in turn."""

    name = "even"

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        return Split(*even_split(demand, tables, placed))


@dataclass(frozen=True)
class DynamicPolicy(Policy):
    """Each copy draws one of its expert's replicas at random, all equally likely (SGLang ``dynamic``).

    Options: seed, and step (the batch's number), which together with layer and rank select the random stream.
    """

    name = "dynamic"
    seed: int = 0
    step: int = 0

    def split(self, demand: Demand, tables: ReplicaTables, placed: PlacedLayers) -> Split:
        bound = even_split(demand, tables, placed).bound
        return Split(None, None, bound, weights=tables.is_replica().to(torch.float32))
