"""Own counts: what a Balancer plans by with loads="own", where nothing is exchanged in the forward.

Every rank splits its own copies by :func:`isoload.ops.plan_own`, towards targets. It keeps its counts, decayed; now and
then, outside of any graph, all ranks exchange them (one gather for all layers), split the sums exactly, and take from
that split which part of each rank's load a source is to cause. A source that alone levelled its own copies would undo
what sources of other domains make up for. Between exchanges no rank waits for another, nor can it change their plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from isoload import ops
from isoload.placed_layers import PlacedLayers
from isoload.placement import Placement
from isoload.policies import Policy
from isoload.policies.exact import ExactPolicy
from isoload.replica_tables import ReplicaTables
from isoload.results import ONE_OFFSET
from isoload.steps import in_backward
from isoload.topology import Topology
from isoload.transport import Group
from isoload.value_checks import capturing

MOST = 2**29  # copies of a layer over all ranks as the split of targets takes them; more are scaled down


class OwnCounts:
    """One layer's counts and targets of the ranks that this process owns.

    recent [ranks, E] int64   their decayed counts, as :func:`isoload.ops.plan_own` keeps them
    offset [ranks, R] int32   what each takes ranks to carry already; 0 before the first exchange and after a load

    Both stay where they are once a batch has been on a device, so captured graphs read what an exchange writes.
    """

    def __init__(self, placement: Placement, ranks: Sequence[int]) -> None:
        if placement.num_shared:
            raise ValueError(f"num_shared must be 0 for loads='own', got {placement.num_shared}")
        self.ranks = tuple(ranks)
        with torch.inference_mode(False):  # else only inference could write them
            self.recent = torch.zeros(len(ranks), placement.num_experts, dtype=torch.int64)
            self.offset = torch.zeros(len(ranks), placement.topology.num_ranks, dtype=torch.int32)

    def check(self, policy: Policy) -> None:
        """Raises ValueError for a policy that is not ``exact`` by spread: nothing else is split by own counts."""
        if type(policy) is not ExactPolicy or policy.objective != "spread":
            raise ValueError(f"policy must be exact, of objective spread, for loads='own', got {policy}")

    def split(self, counts: Tensor, placed: PlacedLayers, layer: int) -> list[Tensor]:
        """[P] copies that every owned rank sends to each slot, from their counts [ranks, E]."""
        if self.recent.device != counts.device:
            with torch.inference_mode(False):
                self.recent, self.offset = self.recent.to(counts.device), self.offset.to(counts.device)
        ticks = placed.topology.ticks_on(counts.device)
        is_new = not in_backward()  # a checkpoint's recompute counts no batch again
        return [
            ops.plan_own(
                counts[i],
                placed.tables,
                self.offset[i],
                rank,
                ticks=ticks,
                recent=self.recent[i] if is_new else None,
                layer=layer,
            )
            for i, rank in enumerate(self.ranks)
        ]


class OwnLayer(Protocol):
    """What an exchange needs of a Balancer."""

    group: Group | None
    own_counts: OwnCounts | None

    @property
    def facts(self) -> dict[str, int]: ...
    def placed_on(self, device: torch.device) -> PlacedLayers: ...


def exchange(balancers: Sequence[OwnLayer]) -> None:
    """Renews the targets of layers with loads="own", in one gather of their counts. All ranks call it together.

    Every 16 batches or so, outside of CUDA graphs, at a step's boundary; ranks without tokens, too. Until the next one
    no batch waits for another rank.

    Args:
        balancers: of one group and one shape of placement, in the same order on all ranks.

    Raises:
        ValueError: on all ranks, naming the argument, the rule and the value, or the layer or placement that differs.
    """
    group = balancers[0].group
    assert group is not None
    with group.agreeing("exchange") as facts:
        if None in (layers := [of.own_counts for of in balancers]):
            raise ValueError("loads must be own where targets are exchanged, got gathered")
        owned = [of for of in layers if of is not None]
        recent = torch.stack([of.recent for of in owned], 1)  # [ranks, L, E]
        if capturing(recent.device):
            raise ValueError("exchange must be outside of a CUDA graph: it waits for the other ranks")
        placed = [of.placed_on(recent.device) for of in balancers]
        known = [{k: v for k, v in of.facts.items() if k != "batch number"} for of in balancers]
        facts["layers of exchange"] = known  # ranks may differ in batches: those without tokens run none
    gathered = group.gather("exchange", [of.flatten() for of in recent])
    of_all = gathered.view(-1, *recent.shape[1:]).transpose(0, 1)  # [L, R, E]
    first = placed[0].tables
    data = torch.stack([of.tables.data for of in placed])
    tables = ReplicaTables(data, first.num_ranks, first.num_experts, first.num_slots)
    slots = torch.stack([of.slot_to_expert for of in placed])
    for i, rank in enumerate(group.ranks):
        for of, renewed in zip(owned, offsets(of_all, rank, tables, slots, placed[0].topology), strict=True):
            of.offset[i].copy_(renewed)


def offsets(
    recent: Tensor, source: int, tables: ReplicaTables, slot_to_expert: Tensor, topology: Topology
) -> Tensor:
    """What one source takes ranks to carry already, [L, R] int32, for :func:`isoload.ops.plan_own`.

    With T_s[r] the copies that source s sends to rank r in the exact split of all sources' recent counts, its offset is
    ``sum_t T_t[r] / R - T_s[r]``, in parts of its own copies and from the least rank on. The 1 / R matters: if each
    source made up for the whole of what the others leave, all would, and their loads would swing.

    Args:
        recent: [L, R, E] int64 decayed counts of every source.
        source: s.
        tables: of the same L layers.
        slot_to_expert: [L, P].
        topology: R ranks, with their speeds.
    """
    num_ranks = tables.num_ranks
    recent = recent // (recent.sum((1, 2)) // MOST + 1)[:, None, None]
    loads = recent.sum(1)
    ticks = topology.ticks_on(recent.device)
    quota = ops.plan_exact(loads.to(torch.int32), tables, ticks=ticks).quota.long()
    expert = slot_to_expert.long().clamp(min=0)  # of an empty slot any: its quota is 0
    own = recent.select(1, source).gather(1, expert)
    sent = own * quota // loads.gather(1, expert).clamp(min=1)
    wanted, mine = (x.view(len(x), num_ranks, -1).sum(-1) for x in (quota, sent))
    gap = wanted - num_ranks * mine
    gap = gap - gap.amin(1, keepdim=True)
    parts = gap * ONE_OFFSET // (num_ranks * mine.sum(1, keepdim=True)).clamp(min=1)
    return parts.clamp(max=ONE_OFFSET).to(torch.int32)
