"""Policy ``libra``: every rank borrows what its own tokens choose most, local copies stay (papers/004), mended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from isoload import ops
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import Demand, Policy
from isoload.policies.borrowing import EXACT, BorrowPolicy, fill_spare, routed_homes
from isoload.policies.exact import ExactPolicy
from isoload.policies.keeping import held_experts, split_above_local
from isoload.policies.plan import Plan

MILLION = 1_000_000


@dataclass(frozen=True)
class LibraPolicy(BorrowPolicy):
    """Every rank borrows what its tokens choose most; then experts are borrowed that level the copies which can move.

    Copies whose expert has a slot on their own rank stay there. The rest is split exactly above them.

    Options: alpha (part of the slots for what the rank's tokens choose), tolerance (of the split, relative), slots
    (most that are filled per rank; None = all spare ones).
    """

    name = "libra"
    ahead = True
    keeps_local = True
    needs = "per_source"
    removed: ClassVar[Mapping[str, str]] = {
        "printed": "policy libra_published runs both algorithms as printed in the paper",
        "split_by": "copies that may leave their rank are split exactly, libra_published shards them as the paper",
    }
    alpha: float = 0.5
    tolerance: float = 0.0
    slots: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must be in 0..1, got {self.alpha}")
        if not 0 <= self.tolerance <= 1000:
            raise ValueError(f"tolerance must be in 0..1000, got {self.tolerance}")

    @property
    def splitter(self) -> Policy:
        return EXACT

    def fill(self, demand: Demand, placed: PlacedLayers) -> PlacedLayers:
        slots = placed.spare_slots if self.slots is None else self.slots
        # 0.3 of 10 are 3, although the float is a little less.
        local = round(self.alpha * MILLION) * slots // MILLION
        filled = borrow_local(demand, placed, slots, local)
        if slots > local:
            begun = placed.fill(filled) if local else placed
            local_loads = held_experts(begun) * demand.loads
            stay = local_loads.sum(-1, dtype=torch.int32)
            fixed = stay if demand.at_home is None else demand.at_home + stay
            remote = Demand(demand.loads - local_loads, at_home=fixed)
            filled = fill_spare(ops.plan_fill, remote, begun, slots - local).slot_to_expert
        return placed.fill(filled, telemetry=count_borrowed(filled, placed))

    def split(self, demand: Demand, placed: PlacedLayers) -> Plan:
        plan = split_above_local(ExactPolicy(self.tolerance), demand, placed)
        return replace(plan, policy=self, telemetry=placed.telemetry)


def borrow_local(demand: Demand, placed: PlacedLayers, slots: int, local: int) -> Tensor:
    """Return [..., P] slots where every rank borrows the experts that its own tokens choose most.

    Args:
        slots: the last ones of every rank that may be filled.
        local: how many of them are filled, from the first on. Equal loads go by the lowest expert.
    """
    wanted = torch.where(held_experts(placed) > 0, 0, demand.loads)  # [..., R, E]
    if placed.alive is not None:
        wanted = wanted * placed.alive.unsqueeze(-1)
    ranks, experts = wanted.shape[-2:]
    # No two keys of a rank are equal, so that topk chooses the same on every device.
    key = wanted.long() * experts + torch.arange(experts - 1, -1, -1, device=wanted.device)
    chosen = key.topk(min(local, experts), dim=-1).indices
    chosen = torch.where(wanted.gather(-1, chosen) > 0, chosen, -1).to(torch.int32)
    per_rank = placed.slot_to_expert.view(*placed.slot_to_expert.shape[:-1], ranks, -1)
    size, taken = per_rank.shape[-1], chosen.shape[-1]
    resident, empty = (
        per_rank.narrow(-1, 0, size - slots),
        per_rank.narrow(-1, size - slots + taken, slots - taken),
    )
    return torch.cat([resident, chosen, empty], dim=-1).flatten(-2)


def count_borrowed(filled: Tensor, placed: PlacedLayers) -> Tensor:
    """[..., 5] telemetry of filled slots, see :class:`isoload.ops.SlotFill`."""
    ranks, per_node, size = (
        placed.topology.num_ranks,
        placed.topology.ranks_per_node,
        placed.host.slots_per_rank,
    )
    borrowed = ((filled >= 0) & (placed.slot_to_expert < 0)).long()
    owner = routed_homes(placed).gather(-1, (filled * borrowed).long()).long() // size
    taker = torch.arange(filled.shape[-1], device=filled.device) // size
    imports = borrowed.view(*borrowed.shape[:-1], ranks, size).sum(-1)
    exports = torch.zeros_like(imports).scatter_add_(-1, owner, borrowed)
    far = borrowed * (owner // per_node != taker // per_node)
    counts = [borrowed.sum(-1), imports.amax(-1), exports.amax(-1), far.sum(-1)]
    return pad(torch.stack(counts, dim=-1), (0, 1)).to(torch.int32)
