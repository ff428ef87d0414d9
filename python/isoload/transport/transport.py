"""Transport: a group and the dispatcher over it, as a layer takes them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from isoload.topology import Topology
from isoload.transport.collective import CollectiveGroup
from isoload.transport.dispatcher import Dispatcher
from isoload.transport.group import Group
from isoload.transport.local import LocalGroup
from isoload.transport.row_dispatcher import RowDispatcher
from isoload.transport.shared import Shared


@dataclass(frozen=True, eq=False)
class Transport(Shared):
    """What joins the ranks of a layer: loads and weights travel by the group, rows by the dispatcher."""

    group: Group
    dispatcher: Dispatcher


class LocalTransport(Transport):
    """R virtual ranks in one process.

    Args:
        topology: R ranks.
        max_tokens_per_rank, max_copies_per_rank: see :class:`RowDispatcher`.
    """

    def __init__(
        self,
        topology: Topology,
        max_tokens_per_rank: int | None = None,
        max_copies_per_rank: int | None = None,
    ) -> None:
        group = LocalGroup(topology)
        super().__init__(group, RowDispatcher(group, max_tokens_per_rank, max_copies_per_rank))


class CollectiveTransport(Transport):
    """One rank per process over torch.distributed. All ranks of the group construct it together.

    Args:
        topology: R ranks, as many as the process group has.
        group: the process group; None = the default one.
        max_tokens_per_rank, max_copies_per_rank: see :class:`RowDispatcher`.
    """

    def __init__(
        self,
        topology: Topology,
        group: dist.ProcessGroup | None = None,
        max_tokens_per_rank: int | None = None,
        max_copies_per_rank: int | None = None,
    ) -> None:
        joined = CollectiveGroup(topology, group)
        super().__init__(joined, RowDispatcher(joined, max_tokens_per_rank, max_copies_per_rank))
