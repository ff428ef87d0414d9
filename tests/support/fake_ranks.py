"""Ranks of a GPU on any machine: fake tensors, peers that are not there, and what the host then waits for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import isoload
from isoload.placement.placed_layers import PlacedLayers
from isoload.transport import CollectiveGroup, Group, Transport
from isoload.transport.row_dispatcher import RowDispatcher

RANKS, EXPERTS, HIDDEN, TOKENS, CAPACITY = 4, 16, 8, (5, 0, 7, 9), 13
TOPOLOGY = isoload.Topology(RANKS, 2)
VIRTUAL = isoload.Topology(
    2, 1
)  # where one process owns all ranks: one with tokens, one without, on two nodes


class OneRank(CollectiveGroup):
    """One rank of several, as a process has it, whose peers are not there: what they send is fake, too."""

    def __init__(self, rank: int, topology: isoload.Topology) -> None:
        Group.__init__(self, topology, [rank])
        self.process_group = None

    def _gather(self, stage: str, rows: list[Tensor], in_node: bool = False) -> Tensor:
        return rows[0].unsqueeze(0).expand(self.topology.num_ranks, -1)

    def join_node(self) -> None:
        pass

    _start_gather = Group._start_gather

    def _swap(self, stage: str, buffers: list[Tensor], sent: Any, got: Any, begun: bool = False) -> Any:
        arrived = buffers[0].new_empty(sum(got[0]), *buffers[0].shape[1:])
        return lambda: [arrived]

    def gather_objects(self, stage: str, given: object) -> list[Any]:
        return [given] * self.topology.num_ranks

    def peers(self, device: torch.device) -> str:
        return "peers are not there"

    def named(self, stage: str) -> Any:
        return nullcontext()


def answer(tensor: Tensor, num_counts: int = 2) -> list[Any]:
    """What the host reads: three rows and copies between every two ranks, no errors, no facts that differ, expert 0
    borrowed. num_counts: that a dispatcher sends and gets."""
    if tensor.dim() == 3:
        counts = [3] * 2 * num_counts
        return [[counts + [0] * (tensor.shape[2] - len(counts))] * tensor.shape[1]] * len(tensor)
    return [[0] * tensor.shape[1]] * len(tensor) if tensor.dim() == 2 else [0] * len(tensor)


def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = rows.float().cumsum(1).repeat(1, 2).softmax(-1).topk(2)
    return ids, weights


class Everything(set[Any]):
    """Facts that have all been agreed on."""

    def __contains__(self, _fact: object) -> bool:
        return True


@contextmanager
def kept_memos() -> Iterator[None]:
    """Tables of fake tensors are not kept; those of real ones are."""
    made: dict[Any, Any] = {}

    def memo(placed: PlacedLayers, key: Any, make: Any) -> Any:
        if (placed.layer, key) not in made:
            made[placed.layer, key] = placed.stacked(make)
        return made[placed.layer, key]

    with patch.object(PlacedLayers, "memo", memo):
        yield


def wanted(capacity: int | None) -> tuple[list[str], int]:
    return (["tolist in transport/group.py"], 1) if capacity is None else ([], 0)


def short(found: tuple[list[str], int]) -> tuple[list[str], int]:
    """Without line numbers."""
    return [wait.rsplit(":", 1)[0] for wait in found[0]], found[1]


def one_rank(
    rank: int, capacity: int | None, topology: isoload.Topology = TOPOLOGY, max_copies: int | None = None
) -> Transport:
    group = OneRank(rank, topology)
    return Transport(group, RowDispatcher(group, capacity, max_copies))
