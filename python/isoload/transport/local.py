"""R virtual ranks in one process: exchanges by indexing. For tests, simulation and a machine without peers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.topology import Topology
from isoload.transport.group import Group, PerRank
from isoload.transport.peers import Peers, SameProcess


class LocalGroup(Group):
    """Owns all ranks of the topology; the same results as a process group, bit for bit."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology, range(topology.num_ranks))

    def __reduce__(self) -> Any:
        return LocalGroup, (self.topology,)

    def _gather(self, stage: str, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows)

    def _swap(self, stage: str, buffers: list[Tensor], sent: PerRank, got: PerRank) -> list[Tensor]:
        parts = [buffer.split(sizes) for buffer, sizes in zip(buffers, sent, strict=True)]
        return [torch.cat(from_all) for from_all in zip(*parts, strict=True)]

    def gather_objects(self, stage: str, given: object) -> list[Any]:
        return [given]

    def peers(self, device: torch.device) -> Peers:
        return SameProcess()
