"""Transport: a group and the dispatcher over it, as a layer takes them; the group of R virtual ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.topology import Topology, as_topology
from isoload.transport.collective import CollectiveGroup
from isoload.transport.dispatcher import Dispatcher
from isoload.transport.exchanges import Owned, PerRank, Shared
from isoload.transport.group import Group
from isoload.transport.node_dispatcher import NodeDispatcher
from isoload.transport.peers import Peers
from isoload.transport.row_dispatcher import RowDispatcher
from isoload.wording import not_one_of

Dispatch = Literal["rank", "node"]


@dataclass(frozen=True, eq=False)
class Transport(Shared):
    """What joins the ranks of a layer: loads and weights travel by the group, rows by the dispatcher."""

    group: Group
    dispatcher: Dispatcher


class LocalGroup(Group):
    """R virtual ranks in one process, which owns them all; the same results as a process group, bit for bit."""

    def __init__(self, topology: Topology | int) -> None:
        topology = as_topology(topology)
        super().__init__(topology, range(topology.num_ranks))

    def __reduce__(self) -> Any:
        return LocalGroup, (self.topology,)

    def _gather(self, stage: str, rows: Owned, in_node: bool = False) -> Tensor:
        return torch.stack(rows)

    def _swap(
        self, stage: str, buffers: Owned, sent: PerRank, got: PerRank, begun: bool = False
    ) -> Callable[[], Owned]:
        parts = [buffer.split(sizes) for buffer, sizes in zip(buffers, sent, strict=True)]
        arrived = [torch.cat(from_all) for from_all in zip(*parts, strict=True)]
        return lambda: arrived

    def gather_objects(self, stage: str, given: object) -> list[Any]:
        return [given]

    def peers(self, device: torch.device) -> Peers:
        return Peers()


def make_dispatcher(
    group: Group, max_tokens_per_rank: int | None, max_copies_per_rank: int | None, dispatch: Dispatch
) -> RowDispatcher:
    """The dispatcher of a transport, for its arguments; all ranks of the group make it together."""
    with group.agreeing("construction") as facts:
        if dispatch not in get_args(Dispatch):
            raise ValueError(not_one_of("dispatch", get_args(Dispatch), dispatch))
        facts["dispatch"] = dispatch
    fans_out = group.topology.num_nodes > 1 and group.topology.ranks_per_node > 1
    kind = NodeDispatcher if dispatch == "node" and fans_out else RowDispatcher
    return kind(group, max_tokens_per_rank, max_copies_per_rank)


class LocalTransport(Transport):
    """R virtual ranks in one process.

    Args:
        topology: R ranks, or the number R.
        max_tokens_per_rank, max_copies_per_rank: see :class:`RowDispatcher`.
        dispatch: see :class:`CollectiveTransport`.
    """

    def __init__(
        self,
        topology: Topology | int,
        max_tokens_per_rank: int | None = None,
        max_copies_per_rank: int | None = None,
        dispatch: Dispatch = "rank",
    ) -> None:
        group = LocalGroup(topology)
        super().__init__(group, make_dispatcher(group, max_tokens_per_rank, max_copies_per_rank, dispatch))


class CollectiveTransport(Transport):
    """One rank per process over torch.distributed. All ranks of the group construct it together.

    Args:
        topology: R ranks, or the number R, as many as the process group has.
        group: the process group; None = the default one.
        max_tokens_per_rank, max_copies_per_rank: see :class:`RowDispatcher`.
        dispatch: "rank": a token travels once to every rank that holds an expert of its. "node": once to every node,
            where it fans out, and a node's sum comes back: :class:`NodeDispatcher`. On one node, and on nodes of one
            rank, they are the same. All ranks give the same.

    Raises:
        ValueError: on all ranks alike, naming the argument that is wrong or differs.
    """

    def __init__(
        self,
        topology: Topology | int,
        group: dist.ProcessGroup | None = None,
        max_tokens_per_rank: int | None = None,
        max_copies_per_rank: int | None = None,
        dispatch: Dispatch = "rank",
    ) -> None:
        joined = CollectiveGroup(topology, group)
        super().__init__(joined, make_dispatcher(joined, max_tokens_per_rank, max_copies_per_rank, dispatch))
