"""Times as isoload measure writes them, without a measurement: four ranks on one node, experts of 64 x 32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isoload.times import AllToAllTime, ExpertTime, Times
from isoload.times.exchanges import Curve


def step(name: str, ranks: int = 4) -> AllToAllTime:
    curve = Curve(30.0, 0.1, 1.5)
    return AllToAllTime("GPU", "isoload", name, ranks, 1, curve, curve, 4096.0, 0.02, source="given")


def times(**changes: Any) -> Times:
    experts = ExpertTime(
        "GPU", "isoload", "bfloat16", 64, 32, 5.0, 2.0, 0.1, 0.01, 2.0, copies_from=1, copies_to=100
    )
    parts: dict[str, Any] = {
        "device": "GPU",
        "software": {"torch": "2.13"},
        "ranks": 4,
        "nodes": 1,
        "experts": experts,
        "dispatch": step("dispatch"),
        "combine": step("combine"),
        "move_us": 12.0,
        "plan_us": {"exact": 30.0, "own": 20.0},
        "speeds": (1.0, 1.0, 1.1, 1.0),
        "points": {"experts": [[1.0, 2.0]], "exchange": []},
    }
    return Times(**parts | changes)


def written(path: Path, **changes: Any) -> Path:
    path.write_text(json.dumps(times().to_json() | changes))
    return path
