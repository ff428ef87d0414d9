"""Layers of a placement on one device, as policies read them, optionally with the spare slots of a batch filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.checks import may_be_kept
from isoload.ops.tables import ReplicaTables
from isoload.topology import Topology

if TYPE_CHECKING:
    from isoload.placement.placement import Placement

MEMOS = 8  # tensors that policies keep per placement and device
OfLayer: TypeAlias = "Callable[[Placement, int], np.ndarray[Any, Any]]"


@dataclass(frozen=True, eq=False)
class PlacedLayers:
    """One layer of a placement ([P], [E]) or all of them ([L, P], [L, E]) on a device, as policies read them."""

    slot_to_expert: Tensor  # [P] int32, -1 = none; spare slots may be filled for one batch
    home_slot: Tensor  # [E] int32
    tables: ReplicaTables  # of routed experts; shared experts are on every rank, from slot `first_shared` on
    host: Placement  # the placement, with the fields below
    layer: int | None  # position of the layer in it; None = all
    topology: Topology
    spare_slots: int
    num_shared: int
    ticks: Tensor | None  # [R] int32, the topology's
    alive: Tensor | None  # [R] bool, the topology's; None = all
    shape_per_source: tuple[int, ...]  # of loads per source rank, [..., R, E]
    replicated: bool  # whether some routed expert has more than one slot in the placement
    shared_home: Tensor | None  # [R] int64, see the function shared_home; None without shared experts
    shared_limits: Tensor | None  # [R] int32 largest number of shared copies; None = no limit
    memos: dict[Any, tuple[Tensor, OfLayer]] = field(default_factory=dict)  # see memo()
    unfilled: PlacedLayers | None = None  # with empty spare slots; None if they are empty here
    quota: Tensor | None = None  # [P] int32 copies per slot by the split that made the fill, if any
    telemetry: Tensor | None = None  # of the fill, see isoload.ops.SlotFill

    @classmethod
    def of(
        cls, host: Placement, layer: int | None, slots: Tensor, home: Tensor, tables: ReplicaTables
    ) -> PlacedLayers:
        topology, device, (*batch, experts) = host.topology, home.device, home.shape
        ranks, live = topology.num_ranks, topology.live_ranks
        limits = [2**31 - 1 if rank in live else 0 for rank in range(ranks)]
        limited = host.num_shared and len(live) < ranks
        slot_ids = host.arrays[0] if layer is None else host.arrays[0][layer]
        resident = int(((slot_ids >= 0) & (slot_ids < host.num_routed)).sum())
        return cls(
            slots,
            home,
            tables,
            host,
            layer,
            topology,
            host.spare_slots,
            host.num_shared,
            ticks=topology.ticks_on(device),
            alive=None if topology.alive is None else torch.tensor(topology.alive, device=device),
            shape_per_source=(*batch, ranks, experts),
            replicated=resident > host.num_routed * (slot_ids.size // host.num_slots),
            shared_home=torch.tensor(shared_home(live, ranks), device=device) if host.num_shared else None,
            shared_limits=torch.tensor(limits, dtype=torch.int32, device=device) if limited else None,
        )

    def __repr__(self) -> str:
        which = "all layers" if self.layer is None else f"layer {self.layer}"
        return f"PlacedLayers({which} of {self.host!r}, on {self.home_slot.device})"

    def memo(self, key: Any, derive: OfLayer) -> Tensor:
        """Return derive's result for each layer, [L, ...] or for the one layer, on the device; cached.

        :func:`refreshing` rewrites it in place. The last MEMOS results are kept, which bounds the memory of changing
        keys.
        """
        if key in self.memos:
            return self.memos[key][0]
        with torch.inference_mode(False):  # otherwise only inference mode could write it
            value = self.stacked(derive)
        if may_be_kept(value):
            while len(self.memos) >= MEMOS:
                del self.memos[next(iter(self.memos))]
            self.memos[key] = value, derive
        return value

    def stacked(self, derive: OfLayer) -> Tensor:
        """Return :meth:`memo` without caching."""
        layers = range(self.host.num_layers) if self.layer is None else [self.layer]
        table = torch.tensor(np.stack([derive(self.host, i) for i in layers]), device=self.home_slot.device)
        return table if self.layer is None else table.select(0, 0)

    def __getitem__(self, layer: int) -> PlacedLayers:
        resident = self.host.layer(layer, self.slot_to_expert.device)
        if self.unfilled is None:
            return resident
        slots, tables = self.slot_to_expert.select(0, layer), self.tables[layer]
        return resident.fill(slots, pick_layer(self.quota, layer), pick_layer(self.telemetry, layer), tables)

    @property
    def resident(self) -> PlacedLayers:
        """Return these layers with empty spare slots."""
        return self.unfilled or self

    @property
    def first_shared(self) -> int:
        """Position of the first shared expert among a rank's slots."""
        return self.host.slots_per_rank - self.spare_slots - self.num_shared

    def home_rank(self, rank: int) -> int:
        return shared_home(self.topology.live_ranks, self.topology.num_ranks)[rank]

    def fill(
        self,
        slot_to_expert: Tensor,
        quota: Tensor | None = None,
        telemetry: Tensor | None = None,
        tables: ReplicaTables | None = None,
    ) -> PlacedLayers:
        """Return these layers with other experts in their spare slots; tables: of these slots, if already made."""
        if tables is None:
            tables = ops.replica_tables(slot_to_expert, self.topology.num_ranks, self.host.num_routed)
        fields = {"slot_to_expert": slot_to_expert, "tables": tables, "quota": quota, "telemetry": telemetry}
        return replace(self, unfilled=self, **fields)  # type: ignore[arg-type]

    def moved_to(self, placed: PlacedLayers) -> PlacedLayers:
        """Return the slots of this batch in layers of another placement, whose memory contains them."""
        if self.unfilled is None:
            return placed
        return placed.fill(self.slot_to_expert, self.quota, self.telemetry, self.tables)


def own_layers(placed: PlacedLayers) -> PlacedLayers:
    """Return layers with memory of their own, which :func:`refreshing` may write."""
    with torch.inference_mode(False):  # otherwise only inference mode could
        tables = replace(placed.tables, data=placed.tables.data.clone())
        slots, home = placed.slot_to_expert.clone(), placed.home_slot.clone()
        return replace(placed, slot_to_expert=slots, home_slot=home, tables=tables, memos={})


def refreshing(mine: PlacedLayers, placed: PlacedLayers) -> Callable[[], PlacedLayers]:
    """Return a function that writes another placement into own layers, in the same memory, cached tensors included.

    Every step that can fail runs here; the result only copies. Plans made before that become invalid.
    """
    written = [
        (mine.slot_to_expert, placed.slot_to_expert),
        (mine.home_slot, placed.home_slot),
        (mine.tables.data, placed.tables.data),
        *((value, placed.stacked(derive).expand_as(value)) for value, derive in mine.memos.values()),
    ]
    fresh = replace(mine, host=placed.host, replicated=placed.replicated)  # the topology is the same

    def write() -> PlacedLayers:
        for buffer, new in written:
            buffer.copy_(new)
        return fresh

    return write


def pick_layer(tensor: Tensor | None, layer: int) -> Tensor | None:
    return None if tensor is None else tensor.select(0, layer)


def shared_home(live_ranks: list[int], num_ranks: int) -> list[int]:
    """Return [R] the rank that computes a source's shared copies unless a policy moves them: itself if it is alive."""
    return [r if r in live_ranks else live_ranks[r % len(live_ranks)] for r in range(num_ranks)]
