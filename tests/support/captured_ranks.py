"""NCCL's rule for CUDA graphs over gloo: a captured gather meets captured gathers of the other ranks and no others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.transport import CollectiveGroup
from isoload.transport import group as module

_graphs: list[dist.ProcessGroup] = []  # the process group of replayed gathers


@torch.library.custom_op("isoload_tests::captured_gather", mutates_args=())
def captured_gather(row: Tensor, num_ranks: int) -> Tensor:
    """[R, F] the rows of all ranks in a replay; a capture exchanges nothing."""
    if module.capturing(row.device):
        return row.repeat(num_ranks, 1)
    gathered = row.new_empty(num_ranks, len(row))
    dist.all_gather(list(gathered.unbind()), row, group=_graphs[0])
    return gathered


class GraphGroup(CollectiveGroup):
    """A CollectiveGroup whose captured gathers have a process group of their own, as `recorded` replays them."""

    def __init__(self, topology: int) -> None:
        super().__init__(topology)
        _graphs[:] = [dist.new_group()]

    def _gather(self, stage: str, rows: list[Tensor], in_node: bool = False) -> Tensor:
        if module.capturing(rows[0].device):
            return captured_gather(rows[0], self.topology.num_ranks)
        return super()._gather(stage, rows, in_node)
