"""R virtual ranks in one process: exchanges by indexing. For tests, simulation and a machine without peers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.topology import Topology
from isoload.transport.base import Transport
from isoload.transport.peers import Peers, SameProcess


class LocalTransport(Transport):
    """Owns all ranks of the topology; the same results as a process group, bit for bit."""

    def __init__(self, topology: Topology, max_tokens_per_rank: int | None = None) -> None:
        super().__init__(topology, range(topology.num_ranks), max_tokens_per_rank)

    def _gather(self, stage: str, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows)

    def _swap(
        self, stage: str, buffers: list[Tensor], sent: list[list[int]], got: list[list[int]]
    ) -> list[Tensor]:
        parts = [buffer.split(sizes) for buffer, sizes in zip(buffers, sent, strict=True)]
        return [torch.cat(from_all) for from_all in zip(*parts, strict=True)]

    def _gather_objects(self, stage: str, given: object) -> list[Any]:
        return [given]

    def peers(self, device: torch.device) -> Peers:
        return SameProcess()
