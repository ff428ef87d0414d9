"""Transport: a group and its dispatcher, as a layer takes them; the group of R virtual ranks of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from isoload.ops import number_rows, pack_rows
from isoload.ops.results import PackedRows, RowLayout
from isoload.topology import Topology, as_topology
from isoload.transport.collective import CollectiveGroup
from isoload.transport.dispatcher import Dispatcher, Received, RowMap, pack, unpack
from isoload.transport.exchanges import Owned, Peers, PerRank, Shared
from isoload.transport.group import DTYPES, Group
from isoload.transport.row_dispatcher import NodeDispatcher, RowDispatcher, RowHandle
from isoload.wording import not_one_of

Dispatch = Literal["rank", "node"]


@dataclass(frozen=True, eq=False)
class Transport(Shared):
    """Communication of a layer's ranks: loads and weights travel by the group, rows by the dispatcher."""

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

    def gather_objects(self, stage: str, value: object) -> list[Any]:
        return [value]

    def peers(self, device: torch.device) -> Peers:
        return Peers()


def make_dispatcher(
    group: Group, max_tokens_per_rank: int | None, max_copies_per_rank: int | None, dispatch: Dispatch
) -> RowDispatcher:
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
        max_tokens_per_rank, max_copies_per_rank, dispatch: see :class:`CollectiveTransport`.
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
    """One rank per process over torch.distributed. All ranks construct it together, with the same arguments.

    Args:
        topology: R ranks, or the number R, as many as the process group has.
        group: the process group; None = the default group.
        max_tokens_per_rank, max_copies_per_rank: see :class:`RowDispatcher`.
        dispatch: "rank": a token travels once to every rank that has one of its experts; "node": once to every node and
            from there to its ranks, and each node returns one sum.
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


FACTS = ("hidden size of x", "dtype of x", "top-k", "dtype of weights")


@dataclass(frozen=True, eq=False)
class GatheredTokens:
    """Tokens of all ranks, C each, by one all-gather in place of a dispatch; zeros follow a rank's own tokens."""

    rows: list[Tensor]  # [R][C, H]
    ids: list[Tensor]  # [R][C, K] int64 experts, -1 = none
    weights: list[Tensor]  # [R][C, K]

    def received(
        self, ranks: Sequence[int], num_tokens: Sequence[int], slots: Sequence[Tensor], slots_per_rank: int
    ) -> list[Received]:
        """Return what a dispatch of copies to `slots` [R][C, K] would bring to `ranks` with num_tokens own tokens."""
        num_ranks, capacity = len(self.rows), len(self.rows[0])
        equal = [capacity] * num_ranks
        sent = []
        for s, weights in zip(slots, self.weights, strict=True):
            numbers = number_rows(s, slots_per_rank, num_ranks)
            no_values = weights.narrow(1, 0, 0)  # rows and weights are on this rank already
            sent.append(
                pack_rows(no_values, s, weights, numbers, slots_per_rank, num_ranks * capacity, capacity)
            )
        batches = []
        for rank, tokens in zip(ranks, num_tokens, strict=True):
            parts = [take_part(*tensors, rank) for tensors in zip(self.rows, self.weights, sent, strict=True)]
            rows, local, weights = (torch.cat(column) for column in zip(*parts, strict=True))
            _, *maps = sent[rank]
            row_map = RowMap(equal, equal, maps[0], maps[1], maps[2][:tokens], rank)
            batches.append(Received(rows, local, weights, RowHandle(row_map, self.rows[0].new_empty(()))))
        return batches


def take_part(rows: Tensor, weights: Tensor, sent: PackedRows, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return [C, H] rows, [C, K] local slots and [C, K] weights that one source, of rows [C, H], sends to a rank."""
    capacity, no_values = len(rows), weights.narrow(1, 0, 0)
    part = sent.payload.narrow(0, rank * capacity, capacity)
    _, local, gates = RowLayout.of(no_values, weights).parts(part, no_values, weights)
    tokens = sent.row_to_token.narrow(0, rank * capacity, capacity)  # C where the row is padding
    taken_rows = rows.index_select(0, tokens.clamp(max=capacity - 1))
    return taken_rows.masked_fill((tokens == capacity).unsqueeze(1), 0), local, gates


def start_gather_tokens(
    group: Group, capacity: int, x: list[Tensor], ids: list[Tensor], weights: list[Tensor]
) -> Callable[[], GatheredTokens]:
    """Begin to gather x [T, H], ids and weights [T, K] of all ranks, T <= C; return a function that waits for them."""
    facts: list[tuple[int, ...]] = [
        (row.shape[1], DTYPES.index(row.dtype), row_ids.shape[1], DTYPES.index(gates.dtype))
        for row, row_ids, gates in zip(x, ids, weights, strict=True)
    ]
    group.agree_new("dispatch", FACTS, facts, x[0].device)
    packed = []
    for row, row_ids, gates in zip(x, ids, weights, strict=True):
        padding = (0, 0, 0, capacity - len(row))
        columns = F.pad(row, padding), F.pad(row_ids.int(), padding, value=-1), F.pad(gates, padding)
        packed.append(pack(*(column.contiguous() for column in columns)).flatten())
    finish = group.start_gather("tokens", packed)
    width, top_k = x[0].shape[1], ids[0].shape[1]
    layout = [(width, x[0].dtype), (top_k, torch.int32), (top_k, weights[0].dtype)]

    def wait() -> GatheredTokens:
        columns = [unpack(tokens.view(capacity, -1), layout) for tokens in finish().unbind()]
        rows, chosen, gates = (list(column) for column in zip(*columns, strict=True))
        return GatheredTokens(rows, [row_ids.long() for row_ids in chosen], gates)

    return wait
