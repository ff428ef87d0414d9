"""Own counts: how a Balancer plans with loads="own" or "node", where ranks do not all meet in the forward.

Every source, a rank or a node, splits its own copies by :func:`isoload.ops.plan_own` towards targets. It keeps its
counts, decayed. From time to time, outside of any graph, all ranks exchange their counts (one gather for all
layers), split the sums exactly, and take from that split the part of each rank's load that a source should cause. A
source that levelled only its own copies would undo what sources of other domains make up for. Between exchanges no
source waits for another, and none can change another's plans. The ranks of a node gather their counts in each batch
and divide the node's split exactly.

Shared experts stay on the rank of their token: their copies are counted before a source splits the routed ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from isoload import ops
from isoload.balancing.routing import fixed_copies
from isoload.ops.tables import ReplicaTables
from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.policies.exact import ExactPolicy
from isoload.policies.plan import in_backward, shared_copies, widened
from isoload.transport import Call, Group

Loads = Literal["gathered", "node", "own"]


def described(failure: BaseException) -> str:
    """As the other ranks read it."""
    return f"{type(failure).__name__}: {failure}"


class OwnSplit(NamedTuple):
    """What the owned sources sent in a batch, each judged by its own copies alone; of all ranks nothing is proved.

    counts  [E] int32     of every owned source: copies of the routed experts
    fixed   [R] int32     its shared copies, by rank; None without shared experts
    copies  [n, R] int64  what each sent to every rank, shared copies included; the next batch writes it
    """

    placed: PlacedLayers
    counts: list[Tensor]
    fixed: list[Tensor | None]
    copies: Tensor

    @property
    def own_peak(self) -> Tensor:
        """[n] int64 largest cost that each source causes on a rank, in units of isoload.policies.plan.Plan.peak."""
        ticks = self.placed.ticks
        return (self.copies if ticks is None else self.copies * ticks).amax(1)

    @property
    def own_bound(self) -> Tensor:
        """[n] int64 the least that a source could have caused; its targets may want more."""
        ticks = self.placed.ticks
        pairs = zip(self.counts, self.fixed, strict=True)
        return torch.stack([ops.plan_exact(n, self.placed.tables, f, ticks=ticks).bound for n, f in pairs])


class OwnCounts:
    """One layer's counts and targets of the n sources that this process plans for: its ranks, or their nodes.

    recent [n, E] int64      their decayed counts of routed experts, as :func:`isoload.ops.plan_own` keeps them
    sent   [n, 3, R] int64   what they sent to ranks, as it keeps that. The last row is of the last batch, planned or
                             not; over the ranks of a node it adds up to ``size`` times what the node sent
    offset [n, R] int32      what each takes ranks to carry already; 0 before the first exchange and after a load
    last                     of the last batch; None where it was not planned

    All stay where they are once a batch has been on a device, so captured graphs read what an exchange writes.
    """

    def __init__(self, placement: Placement, group: Group, loads: Loads) -> None:
        self.group, self.loads, self.by_node = group, loads, loads == "node"
        self.size = placement.topology.ranks_per_node if self.by_node else 1  # ranks of a source
        self.sources = list(dict.fromkeys(rank // self.size for rank in group.ranks))
        self.last: OwnSplit | None = None
        # Views of the first source, of which each would cost a batch a microsecond; a copy makes its own.
        self._first: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        # Of a batch since the last exchange, where other sources have not heard of it.
        self.failure: str | None = None
        self.num_experts = placement.num_experts
        n, num_ranks = len(self.sources), placement.topology.num_ranks
        with torch.inference_mode(False):  # else only inference could write them
            self.recent = torch.zeros(n, placement.num_routed, dtype=torch.int64)
            self.sent = torch.zeros(n, 3, num_ranks, dtype=torch.int64)
            self.offset = torch.zeros(n, num_ranks, dtype=torch.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": None}

    def check(self, policy: Policy) -> None:
        """Raises ValueError for a policy that is not ``exact`` by spread: nothing else is split by own counts."""
        if type(policy) is not ExactPolicy or policy.objective != "spread":
            raise ValueError(
                f"policy must be exact, of objective spread, for loads={self.loads!r}, got {policy}; others need "
                "loads='gathered'"
            )

    def join(self) -> None:
        """Joins the ranks of every node. All ranks call it together, once they hold the same placement."""
        if self.by_node:
            self.group.join_node()
            self.group.note_agreed(("length of counts",), [(self.num_experts,)] * len(self.group.ranks))

    def reset(self) -> None:
        """Forgets what is of the placement: targets, and where copies went."""
        self.last = None
        for state in (self.offset, self.sent[:, 0], self.sent[:, 2]):
            state.zero_()

    def gather(self, rows: list[Tensor], call: Call) -> Tensor:
        """Counts for :meth:`split`: [n, E] of the owned ranks or, by node, [R, E], of the owned nodes' ranks.

        Args:
            rows: [E] of every owned rank, shared experts included; not read where the call has failed.
            call: whose failure the ranks of the node hear of here. Where no later exchange carries it to the others,
                the next :func:`exchange` names it.
        """
        if call.failure is not None and call.later is None:
            self.failure = described(call.failure)
        if self.by_node:
            call.device = self.recent.device if call.device is None else call.device
            return call.gather_loads(rows, self.num_experts, in_node=True)
        if call.failure is not None:
            call.stop()
        return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)

    def split(self, loads: Tensor, placed: PlacedLayers, layer: int) -> list[Tensor]:
        """[P] copies that every owned rank sends to each slot, from what :meth:`gather` returned."""
        is_new = not in_backward()  # a checkpoint's recompute counts no batch again
        if self.recent.device != loads.device:
            self.move(loads.device)
        split = OwnSplit(placed, [], [], self.sent[:, 2])
        send_counts: list[Tensor] = []
        for i, source in enumerate(self.sources):
            source_loads = loads.narrow(0, source * self.size if self.by_node else i, self.size)
            routed = source_loads.narrow(1, 0, placed.tables.num_experts)
            counts = routed.sum(0, dtype=torch.int32) if self.by_node else routed[0]
            fixed = None if placed.shared_home is None else at_home(source_loads, source, placed)
            split.counts.append(counts)
            split.fixed.append(fixed)
            sent = ops.plan_own(
                counts,
                placed.tables,
                self.offset[i],
                source,
                fixed=fixed,
                ticks=placed.ticks,
                recent=self.recent[i] if is_new else None,
                sent=self.sent[i] if is_new else None,
                layer=layer,
            )
            if self.by_node:
                send_counts += share_in_node(routed, sent, placed.tables, source, self.group.ranks)
            else:
                send_counts.append(sent)
        self.last = split
        return send_counts

    def note_unplanned(self, counts: Sequence[Tensor], placed: PlacedLayers) -> None:
        """Record in ``sent`` where an unplanned batch goes, so that an exchange returns its imbalance.

        Nothing is gathered. Where each rank of a node has a process of its own, a rank writes its own copies times
        ``size``: a planned batch writes the copies of the whole node on each of the ``size`` ranks.

        Args:
            counts: [E] int32 copies of every owned rank, shared experts included.
            placed: the layer on the counts' device.
        """
        if in_backward():  # a checkpoint's recompute is not the last batch
            return
        self.last = None
        self.move(counts[0].device)
        ranks = self.group.ranks
        owned = len(ranks) // len(self.sources)  # ranks of a source: one, or all of a node
        self.sent[:, 2].zero_()
        for rank, rank_counts in zip(ranks, counts, strict=True):
            copies = fixed_copies(rank_counts, placed, rank)
            self.sent[self.sources.index(rank // self.size), 2].add_(copies, alpha=self.size // owned)

    def balance(self, topk_ids: Tensor, placed: PlacedLayers, layer: int) -> tuple[Tensor, Tensor]:
        """[T, K] slots of the only owned rank's topk_ids by one op, and their counts [E]; without shared experts."""
        self.move(topk_ids.device)
        recent, sent, offset, copies = self._views()
        is_new = not in_backward()
        try:
            slots, counts = ops.balance_own(
                topk_ids,
                placed.tables,
                offset,
                self.sources[0],
                ticks=placed.ticks,
                recent=recent if is_new else None,
                sent=sent if is_new else None,
                layer=layer,
            )
        except BaseException as error:
            self.failure = described(error)
            raise
        self.last = OwnSplit(placed, [counts], [None], copies)
        return slots, counts

    def _views(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # In this order: a graph guards what it reads, and an eager batch sets it.
        if not torch.compiler.is_compiling() and self._first is not None:
            return self._first
        views = self.recent[0], self.sent[0], self.offset[0], self.sent[:, 2]
        if not torch.compiler.is_compiling():  # which would compile anew for what is kept
            self._first = views
        return views

    def move(self, device: torch.device) -> None:
        """To where the batches are; the first batch there does it, if nobody has before."""
        if self.recent.device != device:
            self._first = None
            with torch.inference_mode(False):
                self.recent, self.sent, self.offset = (
                    state.to(device) for state in (self.recent, self.sent, self.offset)
                )


def at_home(counts: Tensor, source: int, placed: PlacedLayers) -> Tensor:
    """[R] int32 shared copies that a source's ranks send home, from their counts [n, E], shared experts included."""
    assert placed.shared_home is not None
    copies = shared_copies(widened(counts.select(1, placed.host.num_routed)), placed.num_shared)
    home = placed.shared_home.narrow(0, source * len(counts), len(counts))
    return copies.new_zeros(placed.topology.num_ranks).scatter_add_(0, home, copies)


def share_in_node(
    counts: Tensor, send_counts: Tensor, tables: ReplicaTables, node: int, ranks: Sequence[int]
) -> list[Tensor]:
    """[P] int32 what each of these ranks sends to every slot, so that all ranks of the node send its send_counts.

    Args:
        counts: [n, E] int32 copies of the node's ranks.
        send_counts: [P] int32 of the node; for every expert they sum to the node's copies.
        tables: of the layer.
        node: which.
        ranks: of which those of the node are meant. Copies stay on their own rank as far as the node sends any there.
    """
    size, num_ranks = len(counts), tables.num_ranks
    if len(ranks) > 1:
        ranks = [rank for rank in ranks if rank // size == node]
    loads = torch.nn.functional.pad(counts, (0, 0, node * size, num_ranks - (node + 1) * size))
    if len(ranks) == 1:
        return [ops.share(loads, send_counts, tables, size, ranks[0])]
    rows = ops.share(loads, send_counts, tables, size)
    return [rows[rank] for rank in ranks]


REMOVED_LOADS = {"last": "loads='last' was removed: use loads='own'"}


def make_own_counts(loads: Loads, tokens: str, placement: Placement, group: Group) -> OwnCounts | None:
    """What a Balancer with these loads keeps; None where all ranks' loads are gathered."""
    per_node, ranks = placement.topology.ranks_per_node, placement.topology.num_ranks
    if loads in REMOVED_LOADS:
        raise ValueError(REMOVED_LOADS[loads])
    if loads not in get_args(Loads) or (loads != "gathered" and tokens == "same"):
        raise ValueError(
            f"loads must be gathered or, where tokens are own, node or own, got {loads!r} for {tokens!r} tokens"
        )
    if loads == "node" and per_node in (1, ranks):
        rule = "own where a node has one rank" if per_node == 1 else "gathered where one node has all ranks"
        raise ValueError(f"loads must be {rule}, got 'node' for ranks_per_node={per_node}")
    if loads == "gathered":
        return None
    if loads == "node" and group.topology.ranks_per_node != per_node:
        raise ValueError(
            f"placement must have the group's ranks_per_node={group.topology.ranks_per_node} for loads='node', got "
            f"{per_node}"
        )
    return OwnCounts(placement, group, loads)
