"""Layers of a placement on one device, as policies read them, and their slots filled for one batch."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
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
class Filled:
    """The slots of one batch: the placement's, with spare slots filled. Fields may have a leading L.

    slot_to_expert  [P] int32   the expert in each slot, -1 = none
    tables                      of slot_to_expert's routed experts
    placed                      the layers of the placement it was made for
    quota           [P] int32   copies per slot by the split that made the fill; None without one
    telemetry                   of the fill, see :class:`isoload.ops.Spill`
    """

    slot_to_expert: Tensor
    tables: ReplicaTables
    placed: PlacedLayers
    quota: Tensor | None = None
    telemetry: Tensor | None = None

    def __getitem__(self, layer: int) -> Filled:
        """One layer of a batch of layers."""
        placed = self.placed.host.layer(layer, self.slot_to_expert.device)
        slots = self.slot_to_expert.select(0, layer)
        found = pick_layer(self.quota, layer), pick_layer(self.telemetry, layer)
        return Filled(slots, self.tables[layer], placed, *found)


@dataclass(frozen=True, eq=False)
class PlacedLayers:
    """One layer of a placement ([P], [E]) or all of them ([L, P], [L, E]) on a device, as policies read them.

    The tables are of the routed experts alone: shared ones lie on every rank, in slots ``first_shared`` and on.
    """

    slot_to_expert: Tensor
    home_slot: Tensor
    tables: ReplicaTables
    host: Placement
    layer: int | None
    memos: dict[Any, Memo] = field(
        default_factory=dict
    )  # what policies derive once per placement, see memo()

    # Made with the record: a cached_property takes a lock on its first call, which torch.compile cannot trace.
    topology: Topology = field(init=False)
    spare_slots: int = field(init=False)
    filled: Filled = field(init=False)  # with empty spare slots
    shape_of_sums: tuple[int, ...] = field(init=False)  # of loads summed over sources: [..., E]
    shape_per_source: tuple[int, ...] = field(init=False)  # of loads per source rank: [..., R, E]
    replicated: bool = field(init=False)  # whether some routed expert has more than one slot
    shared_home: Tensor | None = field(init=False)  # [R] int64, see isoload.shared_experts.shared_home
    shared_limits: Tensor | None = field(
        init=False
    )  # [R] int32 most shared copies of a rank; None = any number

    def __post_init__(self) -> None:
        topology, device = self.host.topology, self.home_slot.device
        ranks, live = topology.num_ranks, topology.live_ranks
        *batch, experts = self.home_slot.shape
        home = torch.tensor(shared_home(live, ranks), device=device) if self.num_shared else None
        limits = [2**31 - 1 if rank in live else 0 for rank in range(ranks)]
        limited = self.num_shared and len(live) < ranks
        slots = self.host.arrays[0] if self.layer is None else self.host.arrays[0][self.layer]
        resident = ((slots >= 0) & (slots < self.host.num_routed)).sum()
        derived = {
            "replicated": int(resident) > self.host.num_routed * (slots.size // self.host.num_slots),
            "topology": topology,
            "spare_slots": self.host.spare_slots,
            "filled": Filled(self.slot_to_expert, self.tables, self),
            "shape_of_sums": (*batch, experts),
            "shape_per_source": (*batch, ranks, experts),
            "shared_home": home,
            "shared_limits": torch.tensor(limits, dtype=torch.int32, device=device) if limited else None,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def memo(self, key: Any, derive: Callable[[PlacedLayers], Tensor]) -> Tensor:
        """What `derive` makes of these layers, kept; :func:`refreshing` rewrites it in place.

        The last MEMOS are kept, so that a key which changes with every batch costs time, not memory.
        """
        if key in self.memos:
            return self.memos[key].value
        with torch.inference_mode(False):  # else only inference could write it
            value = derive(self)
        if may_be_kept(value):
            while len(self.memos) >= MEMOS:
                del self.memos[next(iter(self.memos))]
            self.memos[key] = Memo(value, derive)
        return value

    @property
    def num_shared(self) -> int:
        return self.host.num_shared

    def home_rank(self, rank: int) -> int:
        """The rank that computes a source's shared experts unless a policy moves them."""
        return shared_home(self.topology.live_ranks, self.topology.num_ranks)[rank]

    @property
    def first_shared(self) -> int:
        """Place of the first shared expert among a rank's slots."""
        return self.host.slots_per_rank - self.spare_slots - self.num_shared

    def fill(
        self, slot_to_expert: Tensor, quota: Tensor | None = None, telemetry: Tensor | None = None
    ) -> Filled:
        """These layers with other experts in their spare slots, see :class:`Filled`."""
        tables = ops.replica_tables(slot_to_expert, self.topology.num_ranks, self.host.num_routed)
        return Filled(slot_to_expert, tables, self, quota, telemetry)


def own_layers(placed: PlacedLayers) -> PlacedLayers:
    """Layers with memory of their own, which :func:`refreshing` may write."""
    with torch.inference_mode(False):  # else only inference could
        tables = replace(placed.tables, data=placed.tables.data.clone())
        slots, home = placed.slot_to_expert.clone(), placed.home_slot.clone()
        return PlacedLayers(slots, home, tables, placed.host, placed.layer)


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
    fresh = copy(own)  # keeps what depends on the topology alone, on its memory
    object.__setattr__(fresh, "host", placed.host)
    object.__setattr__(fresh, "replicated", placed.replicated)
    object.__setattr__(fresh, "filled", Filled(own.slot_to_expert, own.tables, fresh))

    def write() -> PlacedLayers:
        for kept, new in written:
            kept.copy_(new)
        return fresh

    return write


def pick_layer(tensor: Tensor | None, layer: int) -> Tensor | None:
    """One layer of a tensor that may be missing."""
    return None if tensor is None else tensor.select(0, layer)
