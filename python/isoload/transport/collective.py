"""One rank per process over torch.distributed: gloo on CPU, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from isoload.topology import Topology
from isoload.transport.base import Transport

# the name since torch 2.13, and the one before
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class CollectiveTransport(Transport):
    """Owns this process's rank of a process group. All ranks of the group construct it together.

    A peer that dies makes each call fail with a RuntimeError that names the stage: at once where the backend sees the
    connection close, else after the group's timeout.

    Args:
        topology: R ranks, as many as the group has.
        group: None = the default group.
        max_tokens_per_rank: see :class:`Transport`.

    Raises:
        ValueError: on all ranks alike, if the topology does not fit the group or differs between the ranks.
    """

    def __init__(
        self,
        topology: Topology,
        group: dist.ProcessGroup | None = None,
        max_tokens_per_rank: int | None = None,
    ) -> None:
        self.group = group if group is not None else dist.group.WORLD
        super().__init__(topology, [dist.get_rank(self.group)], max_tokens_per_rank)
        size = dist.get_world_size(self.group)
        given = [None] * size
        with self._named("construction"):
            dist.all_gather_object(given, (topology, max_tokens_per_rank), group=self.group)
        for name, values in zip(("topology", "max_tokens_per_rank"), zip(*given, strict=True), strict=True):
            for rank, value in enumerate(values):
                if value != values[0]:
                    raise ValueError(
                        f"{name} must be the same on all ranks, got {values[0]} on rank 0 and {value} on rank {rank}"
                    )
        if topology.num_ranks != size:
            raise ValueError(f"topology must have the group's {size} ranks, got {topology.num_ranks}")

    def _gather(self, stage: str, rows: list[Tensor]) -> Tensor:
        gathered = rows[0].new_empty(self.topology.num_ranks * len(rows[0]))
        with self._named(stage):
            _all_gather(gathered, rows[0], group=self.group)
        return gathered.view(self.topology.num_ranks, -1)

    def _swap(
        self, stage: str, buffers: list[Tensor], sent: list[list[int]], got: list[list[int]]
    ) -> list[Tensor]:
        arrived = buffers[0].new_empty(sum(got[0]), *buffers[0].shape[1:])
        with self._named(stage):
            dist.all_to_all_single(arrived, buffers[0].contiguous(), got[0], sent[0], group=self.group)
        return [arrived]

    @contextmanager
    def _named(self, stage: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"stage {stage} failed on rank {self.ranks[0]}: {error} (most likely another rank failed first; its "
                "own error says why)"
            ) from error
