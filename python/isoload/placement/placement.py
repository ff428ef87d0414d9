"""Placement: which expert's weights are in which slot. It changes rarely, a Plan with every batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload import ops
from isoload.checks import may_be_kept
from isoload.placement.placed_layers import PlacedLayers
from isoload.topology import Topology, as_topology
from isoload.traces import Trace
from isoload.traces.identity import Identified, Identity, Numbering, joined, matching_rows, spans
from isoload.wording import amount, span, text_table

IntArray = np.ndarray[Any, np.dtype[np.int32]]
FloatArray = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, eq=False)
class Placement(Identified):
    """The slots of all experts of every layer. Slot p is on rank ``p // S``; P = R*S.

    A host record with its own memory, validated at construction; :meth:`layers` derives the tensors of a device, once.

    Args:
        slot_to_expert: [L, P] integers, expert in each slot; -1 = empty (a spare slot) or absent (without memory).
        topology: R ranks, or the number R; R divides P.
        num_experts: E, shared experts included (they follow the routed ones).
        home_slot: [L, E] slot that owns the expert's weights. Default: its lowest slot.
        spare_slots: number of empty slots at the end of every rank, for experts borrowed for one batch.
        num_shared: number of shared experts, which are in order in the last slots before the spare ones of every live
            rank.
        layer_ids: [L] numbers of the layers, distinct. Default: 0..L-1.
        replica_weight: [L, P] float32, intended fraction of each replica, not negative; None = equal.
        provenance: how it was made: JSON values.
        identity: meaning of layer_ids. Default: the model's own numbers if layer_ids are given, else unknown.
    """

    slot_to_expert: Tensor
    topology: Topology
    num_experts: int
    home_slot: Tensor = None  # type: ignore[assignment]  # filled in below
    spare_slots: int = 0
    num_shared: int = 0
    layer_ids: tuple[int, ...] = ()
    replica_weight: Tensor | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    identity: Identity = None  # type: ignore[assignment]  # filled in below
    arrays: tuple[IntArray, IntArray] = field(init=False, repr=False)  # slot_to_expert, home_slot as NumPy
    weight_array: FloatArray | None = field(init=False, repr=False)  # [L, P] float64 replica_weight as NumPy

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", as_topology(self.topology))
        slots = _int32("slot_to_expert", self.slot_to_expert)
        object.__setattr__(self, "slot_to_expert", slots)
        if slots.dim() != 2 or not slots.shape[0]:
            raise ValueError(f"slot_to_expert must be [L, P] with L >= 1, got shape {list(slots.shape)}")
        if self.num_experts < 1:
            raise ValueError(f"num_experts must be at least 1, got {self.num_experts}")
        if 0 < slots.shape[1] < self.num_experts:  # before memory is allocated for them
            raise ValueError(
                f"num_experts must be at most the {slots.shape[1]} slots of a layer, got {self.num_experts}"
            )
        pinned = self.home_slot is not None
        home = _int32("home_slot", self.home_slot) if pinned else lowest_slots(slots, self.num_experts)
        object.__setattr__(self, "home_slot", home)
        # Kept, because a real tensor's .numpy() fails under FakeTensorMode.
        object.__setattr__(self, "arrays", (slots.numpy(), home.numpy()))
        if self.identity is None:
            object.__setattr__(self, "identity", Identity("model" if self.layer_ids else "order"))
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids) or tuple(range(slots.shape[0])))
        weights = None
        if self.replica_weight is not None:
            weight = torch.as_tensor(self.replica_weight, device="cpu").to(torch.float32, copy=True)
            object.__setattr__(self, "replica_weight", weight)
            weights = weight.double().numpy()
        object.__setattr__(self, "weight_array", weights)
        if errors := placement_errors(self):
            raise ValueError("; ".join(errors))

    @property
    def num_layers(self) -> int:
        return self.slot_to_expert.shape[0]

    @property
    def num_routed(self) -> int:
        """E minus the shared experts."""
        return self.num_experts - self.num_shared

    @property
    def num_slots(self) -> int:
        return self.slot_to_expert.shape[1]

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.topology.num_ranks

    def home_experts(self, layer: int, rank: int) -> list[int]:
        """Return a rank's home experts, ascending, for a layer by position: the rows of the rank's Shard."""
        owner = self.arrays[1][layer] // self.slots_per_rank
        return list(map(int, (owner == rank).nonzero()[0]))

    @cached_property
    def has_freedom(self) -> tuple[bool, ...]:
        """[L] whether a policy has anything to decide: a replicated expert, a spare slot or a shared expert."""
        split = self.layers("cpu").tables.field("header")[:, 0].tolist()
        free = self.spare_slots > 0 or (self.num_shared > 0 and self.topology.num_ranks > 1)
        return tuple(free or n > 0 for n in split)

    @cached_property
    def _by_device(self) -> dict[tuple[torch.device, int | None], PlacedLayers]:
        return {}

    def layers(self, device: torch.device | str) -> PlacedLayers:
        """Return all layers on a device; derived on the first call, then cached."""
        key = (torch.device(device), None)
        if key in self._by_device:
            return self._by_device[key]
        # From lists, because FakeTensorMode, which proves that planning never syncs, rejects other ways.
        slots, home = (torch.tensor(rows.tolist(), dtype=torch.int32, device=device) for rows in self.arrays)
        # Ids of shared experts follow those of the routed ones, so their slots count as empty here.
        tables = ops.replica_tables(slots, self.topology.num_ranks, self.num_routed)
        whole = PlacedLayers.of(self, None, slots, home, tables)
        return self._remember(key, whole)

    def layer(self, index: int, device: torch.device | str) -> PlacedLayers:
        """Return one layer on a device, by position (not by the model's layer number)."""
        key = (torch.device(device), index)
        if key in self._by_device:
            return self._by_device[key]
        if not 0 <= index < self.num_layers:
            if self.identity.numbering == "order":
                raise ValueError(f"layer must be in 0..{self.num_layers - 1}, got {index}")
            hint = f": pass layer_id={index}" if index in self.layer_ids else ""
            raise ValueError(
                f"layer must be a position in 0..{self.num_layers - 1}, of layers "
                f"{self.identity.describe(self.layer_ids)}, got {index}{hint}"
            )
        whole = self.layers(device)
        slots, home = whole.slot_to_expert.select(0, index), whole.home_slot.select(0, index)
        placed = PlacedLayers.of(self, index, slots, home, whole.tables[index])
        return self._remember(key, placed)

    def position_of(self, layer_id: int) -> int:
        """Return the position of the layer with a number of the model's own."""
        wanted, name = Identity("model"), f"layer_id={layer_id}"
        return matching_rows(wanted, [layer_id], name, self.identity, self.layer_ids, "placement")[0]

    def for_trace(self, trace: Trace, name: str = "placement") -> Placement:
        """Return the placement of a trace's layers, in its order and numbering; name: of the placement, in messages."""
        what = f"trace {trace.name}"
        rows = matching_rows(trace.identity, trace.layer_ids, what, self.identity, self.layer_ids, name)
        identity = joined(trace.identity, self.identity, what, name)
        return self.with_rows(rows, trace.layer_ids, identity)

    def with_layers(self, layer_ids: Sequence[int]) -> Placement:
        """Return the placement of some of its layer_ids, in this order."""
        mine = self.identity, self.layer_ids, "placement"
        rows = matching_rows(self.identity, layer_ids, "layer_ids", *mine)
        return self.with_rows(rows, layer_ids, self.identity)

    def with_rows(self, rows: Sequence[int], layer_ids: Sequence[int], identity: Identity) -> Placement:
        """Return the placement of some layers by position, under these layer_ids."""
        picked, weight = list(rows), self.replica_weight
        return replace(
            self,
            slot_to_expert=self.slot_to_expert[picked],
            home_slot=self.home_slot[picked],
            layer_ids=tuple(layer_ids),
            replica_weight=None if weight is None else weight[picked],
            identity=identity,
        )

    def moe_layers_by(self, numbering: Numbering, what: str = "placement") -> Placement:
        """Return the MoE layers alone, ascending, numbered "model" or "moe"; what: name for messages."""
        rows = self.identity.moe_rows(self.layer_ids, what, numbering)
        layers, identity = sorted(rows), replace(self.identity, numbering=numbering)
        return self.with_rows([rows[layer] for layer in layers], layers, identity)

    def for_model(self, moe_layers: Sequence[int]) -> Placement:
        """Return the placement of all MoE layers of a model, in order; ValueError if it is of another model or lacks a
        layer.

        Args:
            moe_layers: the model's own numbers of its MoE layers, ascending; draft layers may follow the last one.
        """
        model = Identity("model", tuple(moe_layers))
        if self.identity.numbering == "order":  # rows in the order of the blocks, as the caller made them
            if self.num_layers != len(moe_layers):
                raise ValueError(
                    f"placement must have a layer for each of the {len(moe_layers)} MoE blocks, got {self.num_layers}"
                )
            return self
        last = moe_layers[-1]
        known = tuple(layer for layer in self.identity.moe_layers if layer <= last)
        identity = replace(self.identity, moe_layers=known)
        rows = matching_rows(model, moe_layers, "model", identity, self.layer_ids, "placement")
        others = [layer for row, layer in enumerate(self.layer_ids) if row not in rows]
        end = len(moe_layers) - 1 if identity.numbering == "moe" else last
        if identity.numbering != "hidden" and any(layer < end for layer in others):
            raise ValueError(
                f"placement is of layers {self.identity.describe(self.layer_ids)}, but the model's MoE layers are "
                f"{spans(moe_layers)}"
            )
        return self.with_rows(rows, moe_layers, model)

    def with_extra_layers(self, layer_ids: Sequence[int]) -> Placement:
        """Return the placement with more layers, in which experts are in order and fill every resident slot.

        Args:
            layer_ids: the model's own numbers of layers that were not recorded, such as draft (MTP) layers.
        """
        wanted, has = list(layer_ids), self.identity.moe_rows(self.layer_ids, "placement", "model")
        if not wanted or len(set(wanted)) < len(wanted) or set(wanted) & set(has) or min(wanted) < 0:
            raise ValueError(
                f"extra_layers must be distinct layers that the placement lacks, it has {spans(list(has))}, "
                f"got {wanted}"
            )
        live, experts = self.topology.live_ranks, self.num_routed
        routed = self.slots_per_rank - self.spare_slots - self.num_shared
        rows = np.full((self.topology.num_ranks, self.slots_per_rank), -1)
        if (self.arrays[0].reshape(self.num_layers, self.topology.num_ranks, -1)[:, live, :routed] < 0).any():
            for rank, part in zip(live, np.array_split(np.arange(experts), len(live)), strict=True):
                rows[rank, : len(part)] = part  # a ragged placement has replicas only where they pay
        else:
            rows[live, :routed] = (np.arange(len(live) * routed) % experts).reshape(len(live), routed)
        rows[live, routed : routed + self.num_shared] = np.arange(experts, self.num_experts)
        extra = torch.from_numpy(rows.reshape(1, -1)).expand(len(wanted), -1)
        known = tuple(sorted({*self.identity.moe_layers, *wanted})) if self.identity.moe_layers else ()
        ids = wanted if self.identity.numbering != "moe" else [known.index(layer) for layer in wanted]
        weight = self.replica_weight
        return replace(
            self,
            slot_to_expert=torch.cat([self.slot_to_expert, extra]),
            home_slot=torch.cat([self.home_slot, lowest_slots(extra, self.num_experts)]),
            layer_ids=(*self.layer_ids, *ids),
            replica_weight=None if weight is None else torch.cat([weight, torch.ones(extra.shape)]),
            identity=replace(self.identity, moe_layers=known),
        )

    def __repr__(self) -> str:
        parts = [
            amount(self.num_layers, "layer"),
            f"{self.num_routed:,} experts",
            f"{amount(self.topology.num_ranks, 'rank')} x {amount(self.slots_per_rank, 'slot')}",
            f"{span(self._replicas)} replicas per layer",
            *([f"{self.spare_slots} spare slots per rank"] if self.spare_slots else []),
            *([amount(self.num_shared, "shared expert")] if self.num_shared else []),
        ]
        return f"Placement({', '.join(parts)})"

    def describe(self) -> str:
        """Return the line of :func:`repr` and a table of each layer's replicas, most replicated expert, empty slots."""
        slots, rows = self.arrays[0], []
        for layer_id, row, replicas in zip(self.layer_ids, slots, self._replicas, strict=True):
            copies = np.bincount(row[row >= 0], minlength=self.num_experts)[: self.num_routed]
            hottest = int(copies.argmax())
            figures = int((copies > 1).sum()), hottest, int(copies[hottest])
            rows.append((str(layer_id), replicas, *figures, int((row < 0).sum())))
        head = ("layer", "replicas", "replicated experts", "most slots: expert", "slots", "empty slots")
        return f"{self!r}\n{text_table(head, rows)}"

    @property
    def _replicas(self) -> list[int]:
        """[L] slots of routed experts beyond one for each."""
        routed = (self.arrays[0] >= 0) & (self.arrays[0] < self.num_routed)
        return [int(slots) - self.num_routed for slots in routed.sum(1)]

    def _remember(self, key: tuple[torch.device, int | None], placed: PlacedLayers) -> PlacedLayers:
        if may_be_kept(placed.home_slot):
            self._by_device[key] = placed
        return placed


def position(placement: Placement, layer: int, layer_id: int | None) -> int:
    """Return the position of a layer that is given by its position or by the model's own number; both must agree."""
    if layer_id is None:
        return layer
    index = placement.position_of(layer_id)
    if layer not in (0, index):
        raise ValueError(
            f"layer must be {index}, the position of layer_id={layer_id}, or not be given, got {layer}"
        )
    return index


def lowest_slots(slot_to_expert: Tensor, num_experts: int) -> Tensor:
    """Return the [L, E] int32 lowest slot of every expert, -1 for an expert without one."""
    slots = slot_to_expert.numpy()
    home = np.full((slots.shape[0], num_experts), -1, dtype=np.int32)
    for p in reversed(range(slots.shape[1])):
        valid = (slots[:, p] >= 0) & (slots[:, p] < num_experts)
        home[valid, slots[valid, p]] = p
    return torch.from_numpy(home)


def _int32(name: str, value: Any) -> Tensor:
    """Return a private copy on the host, so that no caller can change validated values."""
    tensor = torch.as_tensor(value, device="cpu")
    if tensor.dtype not in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        raise ValueError(f"{name} must be integers, got {tensor.dtype}")
    narrow = tensor.to(torch.int32, copy=True).contiguous()
    if not torch.equal(narrow, tensor):
        raise ValueError(f"{name} must fit in int32, got {tensor.min()}..{tensor.max()}")
    return narrow


def check_same_shape(now: Placement, new: Placement) -> None:
    """Raise ValueError if a placement cannot replace another in its memory."""
    for name in ("topology", "num_layers", "num_experts", "num_shared", "slots_per_rank", "spare_slots"):
        if getattr(new, name) != getattr(now, name):
            raise ValueError(
                f"placement must have the layer's {name}={getattr(now, name)}, got {getattr(new, name)}"
            )


def placement_errors(placement: Placement) -> list[str]:
    """Return the errors of a placement, one sentence each; empty if there are none."""
    slots, home = placement.arrays
    layers, num_slots = slots.shape
    experts, ranks = placement.num_experts, placement.topology.num_ranks
    if num_slots == 0 or num_slots % ranks:
        return [f"slot_to_expert must have a multiple of num_ranks={ranks} slots, got {num_slots}"]
    errors = _shape_errors(placement)
    if errors:
        return errors
    if slots.min() < -1 or slots.max() >= experts:
        return [f"slot_to_expert must be in -1..{experts - 1}, got {slots.min()}..{slots.max()}"]
    if (missing := np.argwhere(lowest_slots(placement.slot_to_expert, experts).numpy() < 0)).size:
        layer, expert = missing[0]
        return [f"slot_to_expert must hold every expert, layer {layer} has no replica of expert {expert}"]
    per_rank, spare = slots.reshape(layers, ranks, -1), placement.spare_slots
    if placement.num_shared:
        errors += _shared_errors(placement, per_rank)
    if spare and (per_rank[:, :, -spare:] >= 0).any():
        errors.append(f"slot_to_expert must be -1 in the last spare_slots={spare} slots of a rank")
    dead = sorted(set(range(ranks)) - set(placement.topology.live_ranks))
    if (per_rank[:, dead] >= 0).any():
        errors.append(f"slot_to_expert must be -1 on ranks that are not alive ({dead})")
    in_range = (home >= 0) & (home < num_slots)
    home_expert = np.take_along_axis(slots, np.where(in_range, home, 0), axis=1)
    if (wrong := np.argwhere(~in_range | (home_expert != np.arange(experts)))).size:
        layer, expert = wrong[0]
        slot = home[layer, expert]
        errors.append(
            f"home_slot must hold its expert, slot {slot} does not hold expert {expert} in layer {layer}"
        )
    elif (merged := _merged_homes(per_rank, home)).size:
        layer, expert = merged[0]
        errors.append(
            f"home_slot must be the expert's lowest slot on its rank, expert {expert} of layer {layer} "
            "has a lower one"
        )
    return errors


def _shape_errors(placement: Placement) -> list[str]:
    layers, num_slots = placement.slot_to_expert.shape
    experts, per_rank = placement.num_experts, num_slots // placement.topology.num_ranks
    errors = []
    if not 0 <= placement.num_shared <= experts:
        errors.append(f"num_shared must be in 0..{experts}, got {placement.num_shared}")
    if not 0 <= placement.spare_slots <= per_rank:
        errors.append(f"spare_slots must be in 0..{per_rank} (slots per rank), got {placement.spare_slots}")
    if tuple(placement.home_slot.shape) != (layers, experts):
        errors.append(f"home_slot must be [{layers}, {experts}], got {list(placement.home_slot.shape)}")
    if len(placement.layer_ids) != layers:
        errors.append(f"layer_ids must have {layers} entries, got {len(placement.layer_ids)}")
    elif len(set(placement.layer_ids)) != layers:
        errors.append(f"layer_ids must be distinct, got {list(placement.layer_ids)}")
    weight = placement.replica_weight
    if weight is not None and tuple(weight.shape) != (layers, num_slots):
        errors.append(f"replica_weight must be [{layers}, {num_slots}], got {list(weight.shape)}")
    elif weight is not None and not (weight.isfinite() & (weight >= 0)).all():
        bad = weight[~(weight.isfinite() & (weight >= 0))][0]
        errors.append(f"replica_weight must be finite and not negative, got {bad}")
    return errors


def _shared_errors(placement: Placement, per_rank: IntArray) -> list[str]:
    """Return an error unless shared experts are in the last resident slots of every live rank, and nowhere else."""
    num, live = placement.num_shared, placement.topology.live_ranks
    last = per_rank.shape[2] - placement.spare_slots
    wanted = np.arange(placement.num_routed, placement.num_experts)
    there = per_rank[:, live, last - num : last] if last >= num else per_rank[:, live, :0]
    num_held = int((per_rank >= placement.num_routed).sum())
    if there.shape[2] == num and (there == wanted).all() and num_held == there.size:
        return []
    return [
        f"slot_to_expert must hold the num_shared={num} shared experts ({wanted[0]}..{wanted[-1]}) in order in the "
        "last slots before the spare ones of every rank that is alive, and nowhere else"
    ]


def _merged_homes(per_rank: IntArray, home: IntArray) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return [n, 2] (layer, expert) whose home slot has a lower slot of the same expert on its rank."""
    layers, _, size = per_rank.shape
    experts = np.arange(home.shape[1])
    rank, place = np.divmod(home, size)
    row = per_rank[np.arange(layers)[:, None], rank]  # [L, E, S] slots of the rank of each home slot
    first = (row == experts[None, :, None]).argmax(-1)
    return np.argwhere(first < place)
