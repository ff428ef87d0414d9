"""Placement files: isoload's own format, TensorRT-LLM's, and the choice of a format by name or by content.

isoload's format is one JSON object with every field of a Placement. TensorRT-LLM's moe_config.load_balancer file is
YAML of three keys with each list on one line; YAML of another style is rejected by line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from isoload import __version__
from isoload.files import check_keys, integer_rows, is_number, parse_json, read_text, to_json_text, write_text
from isoload.placement import engine_files as engine
from isoload.placement.engine_files import ASSIGNMENTS, UnknownRanks, assignments, engine_slots, made
from isoload.placement.placement import Placement
from isoload.topology import Topology, as_topology
from isoload.traces.identity import Identity, Numbering, identity_from_json, identity_to_json
from isoload.wording import not_one_of, shown

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
    recorded = _topology(content["topology"])
    if topology is not None and topology.num_ranks != recorded.num_ranks:
        raise ValueError(f"num_ranks must be {topology.num_ranks}, got {recorded.num_ranks}")
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
        topology or recorded,
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
    """Reject a file of another version before its keys are compared with this version's."""
    version = content.get("version")
    if type(version) is int and version > VERSION:
        provenance = content.get("provenance")
        writer = provenance.get(WRITER) if isinstance(provenance, dict) else None
        by = f"isoload {shown(writer)[1:-1]} or newer" if isinstance(writer, str) else "a newer isoload"
        raise ValueError(
            f"version {version} is read by {by}, this isoload {__version__} reads versions 1 and {VERSION}: install "
            "the newer one, or write the file again with this one"
        )
    if type(version) is not int or version < 1:
        raise ValueError(f"version must be 1 or {VERSION}, got {shown(version)}")


def _identity(content: dict[str, Any]) -> Identity:
    """Return the identity; in files of version 1, layers 0..L-1 may be positions or model numbers."""
    if content["version"] == VERSION:
        return identity_from_json(content["identity"])
    ids = content["layer_ids"]
    return Identity("order" if ids == list(range(len(ids))) else "model")


def _topology(fields: Any) -> Topology:
    if not isinstance(fields, dict):
        raise ValueError(f"topology must be an object, got {shown(fields)}")
    check_keys(fields, TOPOLOGY, "topology")
    for key in ("num_ranks", "ranks_per_node"):
        if type(fields[key]) is not int or fields[key] < 1:
            raise ValueError(f"topology {key} must be an integer from 1 on, got {shown(fields[key])}")
    for key in ("speeds", "alive", "bandwidths"):
        value, words = fields[key], "true or false" if key == "alive" else "numbers"
        fits = is_number if key != "alive" else lambda v: type(v) is bool
        if value is not None and not (isinstance(value, list) and all(map(fits, value))):
            raise ValueError(f"topology {key} must be null or a list of {words}, got {shown(value)}")
    return Topology(**fields)


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


TENSORRT_LLM_KEYS = {"num_slots", ASSIGNMENTS, "layer_updates_per_iter"}
SCALAR = re.compile(r"(\w+): *(\d{1,9}) *")
ROW = re.compile(r" +(\d{1,9}): *(\[[-\d, ]*\]) *")


def write(placement: Placement) -> Any:
    """Return the content: layers by the model's own numbers; no updates while serving."""
    slots = engine_slots(placement)
    rows = dict(zip(placement.layer_ids, slots.tolist(), strict=True))
    return {"num_slots": slots.shape[1], ASSIGNMENTS: rows, "layer_updates_per_iter": 0}


def to_text(content: dict[str, Any]) -> str:
    rows = [f"  {layer}: {json.dumps(row)}" for layer, row in content[ASSIGNMENTS].items()]
    head = [f"{key}: {content[key]}" for key in ("num_slots", "layer_updates_per_iter")]
    return "\n".join([*head, f"{ASSIGNMENTS}:", *rows, ""])


def from_text(text: str) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    rows: dict[str, Any] | None = None  # while inside of the assignments
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if rows is not None and (row := ROW.fullmatch(line)):
            try:
                slots = json.loads(row[2])
            except ValueError:
                raise ValueError(f"line {number} must have a list of integers, got {shown(row[2])}") from None
            _add(rows, row[1], slots, number)
            continue
        rows = None
        if line.rstrip() == f"{ASSIGNMENTS}:":
            rows = {}
            _add(fields, ASSIGNMENTS, rows, number)
        elif scalar := SCALAR.fullmatch(line):
            _add(fields, scalar[1], int(scalar[2]), number)
        else:
            raise ValueError(
                f"line {number} must be a key and a number, or a layer and its list, got {shown(line)}"
            )
    return fields


def _add(fields: dict[str, Any], key: str, value: Any, number: int) -> None:
    if key in fields:
        raise ValueError(f"line {number}: {key} must be there once")
    fields[key] = value


def read(content: Any, topology: Topology | None) -> Placement:
    check_keys(content, TENSORRT_LLM_KEYS)
    rows, layers = assignments(content)
    return made(rows, layers, "model", topology, ASSIGNMENTS, "TensorRT-LLM's file")


@dataclass(frozen=True)
class Format:
    """How placements are written in one format, and read from it."""

    matches: Callable[[Any], bool]  # whether content, of the format's type, is of this format
    read: Callable[[Any, Topology | None], Placement]  # from content and the caller's topology
    write: Callable[[Placement], Any]  # ValueError if the format cannot hold it
    dumps: Callable[[Any], str] = to_json_text
    suffix: str = ""  # of the file's name, if the reader depends on it
    holds: type = dict
    numbering: Numbering | None = None  # of the engine's layers; None: the file states it
    holes: bool = False  # whether the engine runs with absent slots


FORMATS = {
    "isoload": Format(lambda c: c.get("format") == NAME, from_json, to_json),
    "tensorrt-llm": Format(
        lambda c: ASSIGNMENTS in c and "record_type" not in c, read, write, to_text, numbering="model"
    ),
    "sglang": Format(
        lambda c: engine.SGLANG in c,
        engine.sglang_read,
        engine.sglang_write,
        suffix=".json",
        numbering="hidden",
        holes=True,
    ),
    "vllm": Format(
        lambda c: c.get("record_type") == engine.VLLM, engine.vllm_read, engine.vllm_write, numbering="moe"
    ),
    "vllm-list": Format(
        lambda c: c and isinstance(c[0], list),
        engine.vllm_list_read,
        engine.vllm_list_write,
        holds=list,
        numbering="moe",
    ),
    "vllm-ascend": Format(
        lambda c: "layer_list" in c, engine.ascend_read, engine.ascend_write, numbering="moe"
    ),
}


def check_format(format: str, path: str | Path, name: str = "path") -> None:
    """Reject an unknown format, and a name that its reader takes for another kind, such as SGLang's without .json."""
    if format not in FORMATS:
        raise ValueError(not_one_of("format", FORMATS, format))
    suffix = FORMATS[format].suffix
    if not str(path).endswith(suffix) and str(path) != "-":
        raise ValueError(f"{name} must end in {suffix} for format {format}, got {str(path)!r}")


def write_placement(
    placement: Placement, path: str | Path, format: str = "isoload", holes: bool = False
) -> None:
    """Write a placement; the file appears whole or not at all.

    Args:
        placement: of all MoE layers; :meth:`Placement.with_moe_layers` states their numbers, which engines' files need.
        path: the file.
        format: one of ``isoload.placement.files.FORMATS``.
        holes: whether an engine's file may have absent slots; SGLang's only, which then needs ISOLOAD_RAGGED=pages.

    Raises:
        ValueError: an unknown format, a placement that the format cannot hold, or a name that its reader does not open.
    """
    check_format(format, path)
    form = FORMATS[format]
    if form.numbering is not None:
        engine_slots(placement, holes and form.holes)  # rejects it before the layers' numbers are needed
        placement = engine.by_moe_layers(placement, form.numbering)
    write_text(form.dumps(form.write(placement)), str(path))


def read_placement(path: str | Path, topology: Topology | int | None = None) -> Placement:
    """Read a placement; the content of the file decides the format, not its name.

    Args:
        path: the file; nothing in it is executed. Errors name the file, the key and the layer.
        topology: R ranks, or the number R; required for an engine's file, which does not contain it. For isoload's own
            file it replaces the file's topology: the same ranks, of which others may be alive. Ranks with experts must
            be alive.
    """
    path, topology = Path(path), None if topology is None else as_topology(topology)
    text = read_text(path)
    try:
        content, form = recognise(text)
        return form.read(content, topology)
    except UnknownRanks as error:
        raise UnknownRanks(f"{path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def format_of(path: str | Path) -> str:
    form = recognise(read_text(Path(path)))[1]
    return next(name for name, kind in FORMATS.items() if kind is form)


def recognise(text: str) -> tuple[Any, Format]:
    is_yaml = re.search(rf"^(num_slots|{ASSIGNMENTS}):", text, re.M)
    content = from_text(text) if is_yaml else parse_json(text)
    for form in FORMATS.values():
        if isinstance(content, form.holds) and form.matches(content):
            return content, form
    raise ValueError(f"is no placement file; formats are {', '.join(FORMATS)}")
