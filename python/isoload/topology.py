"""Topology: the ranks of an expert-parallel group, their nodes, speeds and links."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload.checks import may_be_kept

NOMINAL_TICKS = 1024  # cost of one token copy on a rank of speed 1.0
MAX_TICKS = 1 << 20  # loads stay below 2^31 copies, so a rank's cost stays below 2^51
MAX_RANKS = 1024  # the widest rank set the planners are compiled for


@dataclass(frozen=True)
class Topology:
    """The expert-parallel group. Rank r is on node ``r // ranks_per_node``.

    Args:
        num_ranks: R, 1..1024.
        ranks_per_node: ranks that share a fast link; divides R. Default (0): all of them.
        speeds: [R] relative speed of each rank (1.0 = nominal), 1/1024..1024; None = all equal. With speeds the load of
            a rank, and every peak, bound and imbalance, is a cost: copies times the rank's :attr:`ticks`.
        alive: [R] False for a rank that holds no experts (elastic EP); None = all alive.
        bandwidths: (inside a node, between nodes) in GB/s per rank, for cost models.
    """

    num_ranks: int
    ranks_per_node: int = 0
    speeds: tuple[float, ...] | None = None
    alive: tuple[bool, ...] | None = None
    bandwidths: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not self.ranks_per_node:
            object.__setattr__(self, "ranks_per_node", self.num_ranks)
        for name, kind in (("speeds", float), ("alive", bool), ("bandwidths", float)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, tuple(kind(v) for v in value))
        if errors := topology_errors(self):
            raise ValueError("; ".join(errors))

    @property
    def num_nodes(self) -> int:
        return self.num_ranks // self.ranks_per_node

    def node_of(self, rank: int) -> range:
        """Return all ranks on the node of the given rank."""
        first = rank // self.ranks_per_node * self.ranks_per_node
        return range(first, first + self.ranks_per_node)

    @property
    def live_ranks(self) -> list[int]:
        """Ranks that may hold experts, ascending."""
        return [r for r in range(self.num_ranks) if self.alive is None or self.alive[r]]

    @property
    def ticks(self) -> Tensor | None:
        """[R] int32 cost of one token copy per rank (1024 = nominal); None if no speeds are given."""
        return self.ticks_on(torch.device("cpu"))

    @cached_property
    def copies_per_cost(self) -> float:
        """Copies that the live ranks compute in one unit of cost, so that all copies over it are the mean load."""
        return float(sum(1 / self._costs[rank] for rank in self.live_ranks))

    @cached_property
    def _costs(self) -> list[int]:
        if self.speeds is None:
            return [1] * self.num_ranks
        return [round(NOMINAL_TICKS / speed) for speed in self.speeds]

    @cached_property
    def _ticks_by_device(self) -> dict[torch.device, Tensor]:
        return {}

    def ticks_on(self, device: torch.device) -> Tensor | None:
        """Return :attr:`ticks` on a device; made on the first call, then cached."""
        if self.speeds is None:
            return None
        ticks = self._ticks_by_device.get(device)
        if ticks is None:
            ticks = torch.tensor(self._costs, dtype=torch.int32, device=device)
            if may_be_kept(ticks):
                self._ticks_by_device[device] = ticks
        return ticks


def as_topology(topology: Topology | int) -> Topology:
    """Return the topology, or for an integer R the topology of R ranks on one node."""
    if isinstance(topology, Topology):
        return topology
    if isinstance(topology, Integral) and not isinstance(topology, bool):
        return Topology(int(topology))
    raise ValueError(f"topology must be a Topology or the number of ranks, got {topology!r:.60}")


def topology_errors(topology: Topology) -> list[str]:
    errors: list[str] = []
    ranks, per_node = topology.num_ranks, topology.ranks_per_node
    if not isinstance(ranks, Integral) or not 1 <= ranks <= MAX_RANKS:
        return [f"num_ranks must be an integer in 1..{MAX_RANKS}, got {ranks}"]
    if not isinstance(per_node, Integral) or per_node < 1 or ranks % per_node:
        errors.append(f"ranks_per_node must divide num_ranks={ranks}, got {per_node}")
    for name in ("speeds", "alive"):
        value = getattr(topology, name)
        if value is not None and len(value) != ranks:
            errors.append(f"{name} must have one entry per rank ({ranks}), got {len(value)}")
    if topology.alive is not None and not any(topology.alive):
        errors.append("alive must be True for at least one rank, got none")
    slowest = NOMINAL_TICKS / MAX_TICKS
    if topology.speeds is not None and not all(slowest <= s <= NOMINAL_TICKS for s in topology.speeds):
        errors.append(f"speeds must be in [{slowest:g}, {NOMINAL_TICKS}], got {list(topology.speeds)}")
    bandwidths = topology.bandwidths
    if bandwidths is not None and (len(bandwidths) != 2 or not all(0 < b < inf for b in bandwidths)):
        errors.append(f"bandwidths must be two positive numbers (node, network), got {bandwidths}")
    return errors


def over_mean(loads: Any, mean: Any = None) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return rank loads [..., R] over their mean, or over means of all ranks; 1 where there are no copies."""
    if mean is None:
        mean = np.asarray(loads, dtype=np.float64).mean(-1, keepdims=True)
    return np.where(mean > 0, loads / np.maximum(mean, 1e-300), 1.0)
