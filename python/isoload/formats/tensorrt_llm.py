"""TensorRT-LLM's moe_config.load_balancer file: YAML of three keys, its lists on one line each.

Only what this shape needs of YAML is read here; a file in another style is refused, by line.
"""

from __future__ import annotations

import json
import re
from typing import Any

from isoload.files.reading import check_keys
from isoload.placement.engine_files import ASSIGNMENTS, assignments, engine_slots, made
from isoload.placement.placement import Placement
from isoload.topology import Topology
from isoload.wording import shown

TENSORRT_LLM_KEYS = {"num_slots", ASSIGNMENTS, "layer_updates_per_iter"}
SCALAR = re.compile(r"(\w+): *(\d{1,9}) *")
ROW = re.compile(r" +(\d{1,9}): *(\[[-\d, ]*\]) *")


def write(placement: Placement) -> Any:
    """Layers by the model's own numbers; no updates while serving."""
    slots = engine_slots(placement)
    rows = dict(zip(placement.layer_ids, slots.tolist(), strict=True))
    return {"num_slots": slots.shape[1], ASSIGNMENTS: rows, "layer_updates_per_iter": 0}


def to_text(content: dict[str, Any]) -> str:
    rows = [f"  {layer}: {json.dumps(row)}" for layer, row in content[ASSIGNMENTS].items()]
    head = [f"{key}: {content[key]}" for key in ("num_slots", "layer_updates_per_iter")]
    return "\n".join([*head, f"{ASSIGNMENTS}:", *rows, ""])


def looks_like(text: str) -> bool:
    return re.search(rf"^(num_slots|{ASSIGNMENTS}):", text, re.M) is not None


def from_text(text: str) -> dict[str, Any]:
    """The content of a file."""
    found: dict[str, Any] = {}
    rows: dict[str, Any] | None = None  # while inside of the assignments
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if rows is not None and (row := ROW.fullmatch(line)):
            _add(rows, row[1], _list(row[2], number), number)
            continue
        rows = None
        if line.rstrip() == f"{ASSIGNMENTS}:":
            rows = {}
            _add(found, ASSIGNMENTS, rows, number)
        elif scalar := SCALAR.fullmatch(line):
            _add(found, scalar[1], int(scalar[2]), number)
        else:
            raise ValueError(
                f"line {number} must be a key and a number, or a layer and its list, got {shown(line)}"
            )
    return found


def _list(text: str, number: int) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError(f"line {number} must have a list of integers, got {shown(text)}") from None


def _add(found: dict[str, Any], key: str, value: Any, number: int) -> None:
    if key in found:
        raise ValueError(f"line {number}: {key} must be there once")
    found[key] = value


def read(content: Any, topology: Topology | None) -> Placement:
    check_keys(content, TENSORRT_LLM_KEYS)
    rows, layers = assignments(content)
    return made(rows, layers, "model", topology, ASSIGNMENTS, "TensorRT-LLM's file")
