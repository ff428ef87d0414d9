"""isoload's own format: one JSON object with every field of a Placement."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import torch

from isoload import __version__
from isoload.files.reading import check_keys, integer_rows, is_number
from isoload.placement.placement import Placement
from isoload.topology import Topology
from isoload.traces.identity import Identity, identity_from_json, identity_to_json
from isoload.wording import shown

NAME, VERSION = "isoload-placement", 2
WRITER = "isoload"  # key of provenance: the version of isoload that wrote the file
KEYS = {"format", "version", *(field.name for field in fields(Placement) if field.init)}
TOPOLOGY = {field.name for field in fields(Topology)}


def to_json(placement: Placement) -> dict[str, Any]:
    slots, home = placement.arrays
    weight = placement.replica_weight
    return {
        "format": NAME,
        "version": VERSION,
        "topology": asdict(placement.topology),
        "num_experts": placement.num_experts,
        "num_shared": placement.num_shared,
        "spare_slots": placement.spare_slots,
        "layer_ids": list(placement.layer_ids),
        "identity": identity_to_json(placement.identity),
        "provenance": placement.provenance | {WRITER: __version__},
        "slot_to_expert": slots.tolist(),
        "home_slot": home.tolist(),
        "replica_weight": None if weight is None else weight.tolist(),
    }


def from_json(content: dict[str, Any], topology: Topology | None) -> Placement:
    _check_version(content)
    check_keys(content, KEYS - {"identity"} if content["version"] == 1 else KEYS)
    own = _topology(content["topology"])
    if topology is not None and topology.num_ranks != own.num_ranks:
        raise ValueError(f"num_ranks must be {topology.num_ranks}, got {own.num_ranks}")
    for key in ("num_experts", "num_shared", "spare_slots"):
        if type(content[key]) is not int:
            raise ValueError(f"{key} must be an integer, got {shown(content[key])}")
    if not isinstance(content["provenance"], dict):
        raise ValueError(f"provenance must be an object, got {shown(content['provenance'])}")
    ids = content["layer_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError(f"layer_ids must be a list of integers from 0 on, got {shown(ids)}")
    slots = integer_rows("slot_to_expert", content["slot_to_expert"])
    if len(ids) != len(slots):  # an empty list would mean 0..L-1
        raise ValueError(f"layer_ids must have {len(slots)} entries, got {len(ids)}")
    return Placement(
        torch.from_numpy(slots),
        topology or own,
        content["num_experts"],
        torch.from_numpy(integer_rows("home_slot", content["home_slot"])),
        content["spare_slots"],
        content["num_shared"],
        tuple(ids),
        _weight(content["replica_weight"]),
        {key: value for key, value in content["provenance"].items() if key != WRITER},
        _identity(content),
    )


def _check_version(content: dict[str, Any]) -> None:
    """Raise ValueError for a file of another version, before its keys are compared with this one's."""
    version = content.get("version")
    if type(version) is int and version > VERSION:
        provenance = content.get("provenance")
        writer = provenance.get(WRITER) if isinstance(provenance, dict) else None
        by = f"isoload {shown(writer)[1:-1]} or newer" if isinstance(writer, str) else "a newer isoload"
        raise ValueError(
            f"version {version} is read by {by}, this isoload {__version__} reads versions 1 and {VERSION}: install "
            "the newer one, or make the file anew with this one"
        )
    if type(version) is not int or version < 1:
        raise ValueError(f"version must be 1 or {VERSION}, got {shown(version)}")


def _identity(content: dict[str, Any]) -> Identity:
    """Files of version 1 do not state it; layers 0..L-1 may have been positions or the model's own numbers."""
    if content["version"] == VERSION:
        return identity_from_json(content["identity"])
    ids = content["layer_ids"]
    return Identity("order" if ids == list(range(len(ids))) else "model")


def _topology(found: Any) -> Topology:
    if not isinstance(found, dict):
        raise ValueError(f"topology must be an object, got {shown(found)}")
    check_keys(found, TOPOLOGY, "topology")
    for key in ("num_ranks", "ranks_per_node"):
        if type(found[key]) is not int or found[key] < 1:
            raise ValueError(f"topology {key} must be an integer from 1 on, got {shown(found[key])}")
    for key in ("speeds", "alive", "bandwidths"):
        value, words = found[key], "true or false" if key == "alive" else "numbers"
        fits = is_number if key != "alive" else lambda v: type(v) is bool
        if value is not None and not (isinstance(value, list) and all(map(fits, value))):
            raise ValueError(f"topology {key} must be null or a list of {words}, got {shown(value)}")
    return Topology(**found)


def _weight(rows: Any) -> torch.Tensor | None:
    if rows is None:
        return None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"replica_weight must be null or a list of layers, got {shown(rows)}")
    for layer, row in enumerate(rows):
        if len(row) != len(rows[0]) or not all(map(is_number, row)):
            raise ValueError(
                f"replica_weight must have {len(rows[0])} numbers in every layer, not so layer {layer}"
            )
    return torch.tensor(rows, dtype=torch.float32)
