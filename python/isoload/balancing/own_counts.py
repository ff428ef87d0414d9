"""Own counts: plans of a Balancer with loads="own" or "node", where not all ranks exchange counts in the forward.

A source, a rank or by node a node, splits its own copies by :func:`isoload.ops.plan_own` towards targets and keeps
decayed counts. From time to time, outside of graphs, all ranks exchange these counts and split the sums exactly, which
gives the part of each rank's load that each source should cause. A source that levelled only its own copies would undo
what other sources compensate. With loads="node" the ranks of a node gather their counts in each batch and divide the
node's split exactly. Shared experts stay on their token's rank and are counted before a source splits the routed ones.
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
    return f"{type(failure).__name__}: {failure}"


class OwnSplit(NamedTuple):
    """Copies that the owned sources sent in a batch. Peak and bound are of each source alone, not of all ranks."""

    placed: PlacedLayers
    counts: list[Tensor]  # [E] int32 of every owned source, routed experts
    fixed: list[Tensor | None]  # [R] int32 shared copies; None without shared experts
    copies: Tensor  # [n, R] int64 to every rank, shared included; the next batch overwrites it

    @property
    def own_peak(self) -> Tensor:
        """[n] int64 largest cost that each source causes on a rank, in units of isoload.policies.plan.Plan.peak."""
        ticks = self.placed.ticks
        return (self.copies if ticks is None else self.copies * ticks).amax(1)

    @property
    def own_bound(self) -> Tensor:
        """[n] int64 lower bound of that cost for each source's own copies; targets may require a higher cost."""
        ticks = self.placed.ticks
        pairs = zip(self.counts, self.fixed, strict=True)
        return torch.stack([ops.plan_exact(n, self.placed.tables, f, ticks=ticks).bound for n, f in pairs])


class OwnCounts:
    """One layer's counts and targets of the n sources that this process plans for: its ranks, or their nodes.

    recent [n, E] int64 has decayed counts and sent [n, 3, R] int64 copies sent to ranks, as plan_own keeps them. The
    last row of sent is the last batch, planned or not; over the ranks of a node it adds up to ``size`` times the node's
    copies. offset [n, R] int32 is the load that each source assumes on ranks, 0 before the first exchange and after a
    load; last is the OwnSplit of the last batch, None if it was not planned. The tensors keep their addresses after the
    first batch on a device, so captured graphs read the results of an exchange.
    """

    def __init__(self, placement: Placement, group: Group, loads: Loads) -> None:
        self.group, self.loads, self.by_node = group, loads, loads == "node"
        self.size = placement.topology.ranks_per_node if self.by_node else 1  # ranks per source
        self.sources = list(dict.fromkeys(rank // self.size for rank in group.ranks))
        self.last: OwnSplit | None = None
        # Views of the first source. Making them costs a microsecond each per batch; a copy of this object makes its
        # own.
        self._first: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        # Failure of a batch since the last exchange that was not transmitted to all sources.
        self.failure: str | None = None
        self.num_experts = placement.num_experts
        n, num_ranks = len(self.sources), placement.topology.num_ranks
        with torch.inference_mode(False):  # otherwise only inference mode could write them
            self.recent = torch.zeros(n, placement.num_routed, dtype=torch.int64)
            self.sent = torch.zeros(n, 3, num_ranks, dtype=torch.int64)
            self.offset = torch.zeros(n, num_ranks, dtype=torch.int32)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": None}

    def check(self, policy: Policy) -> None:
        if type(policy) is not ExactPolicy or policy.objective != "spread":
            raise ValueError(
                f"policy must be exact with objective spread for loads={self.loads!r}, got {policy}: pass "
                "loads='gathered' for other policies"
            )

    def join(self) -> None:
        """Join the ranks of every node. All ranks call it together, after they have loaded the same placement."""
        if self.by_node:
            self.group.join_node()
            self.group.note_agreed(("length of counts",), [(self.num_experts,)] * len(self.group.ranks))

    def reset(self) -> None:
        self.last = None
        for state in (self.offset, self.sent[:, 0], self.sent[:, 2]):
            state.zero_()

    def gather(self, rows: list[Tensor], call: Call) -> Tensor:
        """Return counts for :meth:`split`: [n, E] of the owned ranks or, by node, [R, E] of the owned nodes' ranks.

        `rows` are [E] of every owned rank with shared experts, not read if the call has failed. This gather transmits a
        failure to the ranks of the node; if no later exchange of the batch transmits it further, the next
        :func:`exchange` raises it.
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
        """Return the [P] copies that every owned rank sends to each slot, from the result of :meth:`gather`."""
        is_new = not in_backward()  # a checkpoint's recompute is not counted again
        if self.recent.device != loads.device:
            self.move(loads.device)
        split = OwnSplit(placed, [], [], self.sent[:, 2])
        send_counts: list[Tensor] = []
        for i, source in enumerate(self.sources):
            source_loads = loads.narrow(0, source * self.size if self.by_node else i, self.size)
            routed = source_loads.narrow(1, 0, placed.tables.num_experts)
            counts = routed.sum(0, dtype=torch.int32) if self.by_node else routed[0]
            fixed = None if placed.shared_home is None else local_shared(source_loads, source, placed)
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
        """Record in ``sent`` where an unplanned batch goes, by counts [E], so that an exchange returns its imbalance.
        Nothing is gathered. Where each rank of a node has a process of its own, a rank writes its own copies times
        ``size``: a planned batch writes the copies of the whole node on each of the ``size`` ranks."""
        if in_backward():  # a checkpoint's recompute is not the last batch
            return
        self.last = None
        self.move(counts[0].device)
        ranks = self.group.ranks
        owned = len(ranks) // len(self.sources)  # owned ranks per source: one, or all of a node
        self.sent[:, 2].zero_()
        for rank, rank_counts in zip(ranks, counts, strict=True):
            copies = fixed_copies(rank_counts, placed, rank)
            self.sent[self.sources.index(rank // self.size), 2].add_(copies, alpha=self.size // owned)

    def balance(self, topk_ids: Tensor, placed: PlacedLayers, layer: int) -> tuple[Tensor, Tensor]:
        """Return the [T, K] slots of the only owned rank and its counts [E], by one op; without shared experts."""
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
        # In this order: a graph guards the values it reads, and an eager batch sets _first.
        if not torch.compiler.is_compiling() and self._first is not None:
            return self._first
        views = self.recent[0], self.sent[0], self.offset[0], self.sent[:, 2]
        if not torch.compiler.is_compiling():  # the compiler would recompile for the stored value
            self._first = views
        return views

    def move(self, device: torch.device) -> None:
        """Move the state to the batches' device; the first batch on a device does it if nobody has before."""
        if self.recent.device != device:
            self._first = None
            with torch.inference_mode(False):
                self.recent, self.sent, self.offset = (
                    state.to(device) for state in (self.recent, self.sent, self.offset)
                )


def local_shared(counts: Tensor, source: int, placed: PlacedLayers) -> Tensor:
    assert placed.shared_home is not None
    copies = shared_copies(widened(counts.select(1, placed.host.num_routed)), placed.num_shared)
    home = placed.shared_home.narrow(0, source * len(counts), len(counts))
    return copies.new_zeros(placed.topology.num_ranks).scatter_add_(0, home, copies)


def share_in_node(
    counts: Tensor, send_counts: Tensor, tables: ReplicaTables, node: int, ranks: Sequence[int]
) -> list[Tensor]:
    """Return the [P] int32 copies of each given rank to every slot, whose sums over the node's ranks are send_counts.
    Copies, counts [n, E], stay on their own rank as far as the node sends any to it. Ranks of other nodes are
    skipped."""
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
    per_node, ranks = placement.topology.ranks_per_node, placement.topology.num_ranks
    if loads in REMOVED_LOADS:
        raise ValueError(REMOVED_LOADS[loads])
    if loads not in get_args(Loads) or (loads != "gathered" and tokens == "same"):
        raise ValueError(
            f"loads must be gathered or, where tokens are own, node or own, got {loads!r} for {tokens!r} tokens"
        )
    if loads == "node" and per_node in (1, ranks):
        use = "own, because each node has one rank"
        use = use if per_node == 1 else "gathered, because one node has all ranks"
        raise ValueError(f"loads must be {use}, got 'node' with ranks_per_node={per_node}")
    if loads == "gathered":
        return None
    if loads == "node" and group.topology.ranks_per_node != per_node:
        raise ValueError(
            f"placement must have the group's ranks_per_node={group.topology.ranks_per_node} for loads='node', got "
            f"{per_node}"
        )
    return OwnCounts(placement, group, loads)
