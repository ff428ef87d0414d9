"""Layers of a placement on one device, as policies read them; of a batch with its spare slots filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from isoload import ops
from isoload.replica_tables import ReplicaTables
from isoload.shared_experts import shared_home
from isoload.topology import Topology
from isoload.value_checks import may_be_kept

if TYPE_CHECKING:
    from isoload.placement import Placement

MEMOS = 8  # tensors that policies keep per placement and device


class Memo(NamedTuple):
    """A tensor that a policy derives from a placement, and how."""

    value: Tensor
    derive: Callable[[PlacedLayers], Tensor]


@dataclass(frozen=True, eq=False)
class PlacedLayers:
    """One layer of a placement ([P], [E]) or all of them ([L, P], [L, E]) on a device, as policies read them.

    slot_to_expert  [P] int32  the expert in each slot, -1 = none; spare slots may be filled for one batch
    home_slot       [E] int32
    tables                     of slot_to_expert's routed experts; shared ones lie on every rank, in slots
                               ``first_shared`` and on
    host, layer                the placement, and the position of the layer in it; None = all
    replicated                 whether some routed expert has more than one slot in the placement
    shared_home     [R] int64  see :func:`isoload.shared_experts.shared_home`; None without shared experts
    shared_limits   [R] int32  most shared copies of a rank; None = any number
    memos                      what policies derive once per placement, see :meth:`memo`
    unfilled                   the same layers with empty spare slots; None: these are, see :attr:`resident`
    quota           [P] int32  copies per slot by the split that made the fill; None without one
    telemetry                  of the fill, see :class:`isoload.ops.Spill`
    """

    slot_to_expert: Tensor
    home_slot: Tensor
    tables: ReplicaTables
    host: Placement
    layer: int | None
    replicated: bool
    shared_home: Tensor | None
    shared_limits: Tensor | None
    memos: dict[Any, Memo] = field(default_factory=dict)
    unfilled: PlacedLayers | None = None
    quota: Tensor | None = None
    telemetry: Tensor | None = None

    @classmethod
    def of(
        cls, host: Placement, layer: int | None, slots: Tensor, home: Tensor, tables: ReplicaTables
    ) -> PlacedLayers:
        """The layers with what follows from the placement."""
        ranks, live = host.topology.num_ranks, host.topology.live_ranks
        shared, limits = None, None
        if host.num_shared:
            shared = torch.tensor(shared_home(live, ranks), device=home.device)
        if host.num_shared and len(live) < ranks:
            most = [2**31 - 1 if rank in live else 0 for rank in range(ranks)]
            limits = torch.tensor(most, dtype=torch.int32, device=home.device)
        held = host.arrays[0] if layer is None else host.arrays[0][layer]
        resident = ((held >= 0) & (held < host.num_routed)).sum()
        replicated = int(resident) > host.num_routed * (held.size // host.num_slots)
        return cls(slots, home, tables, host, layer, replicated, shared, limits)

    def memo(self, key: Any, derive: Callable[[PlacedLayers], Tensor]) -> Tensor:
        """What `derive` makes of the placement's layers, kept; :func:`refreshing` rewrites it in place.

        The last MEMOS are kept, so that a key which changes with every batch costs time, not memory.
        """
        if key in self.memos:
            return self.memos[key].value
        with torch.inference_mode(False):  # else only inference could write it
            value = derive(self.resident)
        if may_be_kept(value):
            while len(self.memos) >= MEMOS:
                del self.memos[next(iter(self.memos))]
            self.memos[key] = Memo(value, derive)
        return value

    def __getitem__(self, layer: int) -> PlacedLayers:
        """One layer of a batch of layers."""
        one = self.host.layer(layer, self.slot_to_expert.device)
        if self.unfilled is None:
            return one
        slots, tables = self.slot_to_expert.select(0, layer), self.tables[layer]
        return one.with_slots(slots, tables, pick_layer(self.quota, layer), pick_layer(self.telemetry, layer))

    @property
    def resident(self) -> PlacedLayers:
        """These layers with empty spare slots."""
        return self.unfilled or self

    @property
    def topology(self) -> Topology:
        return self.host.topology

    @property
    def spare_slots(self) -> int:
        return self.host.spare_slots

    @property
    def num_shared(self) -> int:
        return self.host.num_shared

    @property
    def shape_of_sums(self) -> tuple[int, ...]:
        """Of loads summed over sources: [..., E]."""
        return tuple(self.home_slot.shape)

    @property
    def shape_per_source(self) -> tuple[int, ...]:
        """Of loads per source rank: [..., R, E]."""
        *batch, experts = self.home_slot.shape
        return (*batch, self.host.topology.num_ranks, experts)

    @property
    def first_shared(self) -> int:
        """Place of the first shared expert among a rank's slots."""
        return self.host.slots_per_rank - self.spare_slots - self.num_shared

    def home_rank(self, rank: int) -> int:
        """The rank that computes a source's shared experts unless a policy moves them."""
        return shared_home(self.topology.live_ranks, self.topology.num_ranks)[rank]

    def fill(
        self, slot_to_expert: Tensor, quota: Tensor | None = None, telemetry: Tensor | None = None
    ) -> PlacedLayers:
        """These layers with other experts in their spare slots."""
        tables = ops.replica_tables(slot_to_expert, self.topology.num_ranks, self.host.num_routed)
        return self.with_slots(slot_to_expert, tables, quota, telemetry)

    def with_slots(
        self, slot_to_expert: Tensor, tables: ReplicaTables, quota: Tensor | None, telemetry: Tensor | None
    ) -> PlacedLayers:
        """:meth:`fill` with tables that are there."""
        return replace(
            self,
            slot_to_expert=slot_to_expert,
            tables=tables,
            unfilled=self,
            quota=quota,
            telemetry=telemetry,
        )

    def moved_to(self, placed: PlacedLayers) -> PlacedLayers:
        """The slots of this batch in layers of another placement, in whose memory they are."""
        if self.unfilled is None:
            return placed
        return placed.with_slots(self.slot_to_expert, self.tables, self.quota, self.telemetry)


def own_layers(placed: PlacedLayers) -> PlacedLayers:
    """Layers with memory of their own, which :func:`refreshing` may write."""
    with torch.inference_mode(False):  # else only inference could
        tables = replace(placed.tables, data=placed.tables.data.clone())
        slots, home = placed.slot_to_expert.clone(), placed.home_slot.clone()
        return replace(placed, slot_to_expert=slots, home_slot=home, tables=tables, memos={})


def refreshing(own: PlacedLayers, placed: PlacedLayers) -> Callable[[], PlacedLayers]:
    """Own layers with another placement's content, in the same memory, what policies keep included.

    What may fail happens here; the layers are those of before until the result is called, which only copies. Plans
    made before that are void.
    """
    written = [
        (own.slot_to_expert, placed.slot_to_expert),
        (own.home_slot, placed.home_slot),
        (own.tables.data, placed.tables.data),
        *((memo.value, memo.derive(placed).expand_as(memo.value)) for memo in own.memos.values()),
    ]
    fresh = replace(own, host=placed.host, replicated=placed.replicated)  # the topology is the same

    def write() -> PlacedLayers:
        for kept, new in written:
            kept.copy_(new)
        return fresh

    return write


def pick_layer(tensor: Tensor | None, layer: int) -> Tensor | None:
    """One layer of a tensor that may be missing."""
    return None if tensor is None else tensor.select(0, layer)
