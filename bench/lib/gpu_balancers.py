"""Balancers on the layers of gpu_layers, eager and captured; their gather is a copy, so that no network is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

import isoload
from isoload.transport import Group
from lib.gpu_jobs import Job, chain
from lib.gpu_layers import EXPERTS, RANK, TOP_K, Layer, per_node


class OthersAreReady(Group):
    """One rank, whose peers' loads [R, E] are on its device: a gather copies them and the other columns of its row."""

    def __init__(self, topology: isoload.Topology, loads: Tensor) -> None:
        super().__init__(topology, [RANK])
        self._loads = loads
        self._rows: Tensor | None = None  # [R, E and more]

    def _gather(self, stage: str, rows: list[Tensor], in_node: bool = False) -> Tensor:
        ranks, experts = self._loads.shape
        if stage != "gather":
            return rows[0].expand(ranks, -1)
        if self._rows is None:
            self._rows = rows[0].repeat(ranks, 1)
            self._rows[:, :experts] = self._loads
        return self._rows.clone()

    def _swap(self, *_given: Any) -> list[Tensor]:
        raise NotImplementedError("a Balancer swaps nothing")

    def gather_objects(self, stage: str, given: object) -> list[Any]:
        return [given] * self.topology.num_ranks


def make_balancer(x: Layer) -> isoload.Balancer:
    """One rank's, under exact, of a layer on any device."""
    topology = isoload.Topology(len(x.loads), per_node(x))
    group = OthersAreReady(topology, x.loads)
    placement = isoload.Placement(x.slot_to_expert.cpu().unsqueeze(0), topology, EXPERTS)
    return isoload.Balancer(placement, policy="exact", group=group)


def make_captured(x: Layer) -> isoload.CapturedBalancer:
    """The same as a graph, which its first two batches make."""
    balancer = make_balancer(x)
    captured = isoload.CapturedBalancer(balancer, len(x.ids), TOP_K, x.ids.dtype, x.ids.device)
    captured(x.ids), captured(x.ids)
    return captured


def balanced(name: str, make: Callable[[Layer], Callable[[Tensor], Any]], captured: bool) -> Job:
    """From ids to slots, which are the chain's; making the Balancer is no part of it."""
    how: dict[str, Any] = {"prepare": lambda x: partial(make(x), x.ids), "captured": captured}
    return Job(name, chain, ("ids", "loads", "tables"), of="route", **how)


BALANCERS = (
    balanced("balancer", make_balancer, False),
    balanced("balancer, captured", make_captured, True),
)
