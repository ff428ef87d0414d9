"""JSON files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def check_target(target: str | None) -> None:
    """Refuses a JSON file in a folder that does not exist, before any work is done for it."""
    if target in (None, "-"):
        return
    path = Path(target)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"json must be a file in an existing folder or -, got {target!r}")


def write_json(value: Any, target: str) -> None:
    """Writes JSON to stdout ("-") or to a file, which appears whole or not at all."""
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if target == "-":
        print(text, end="")
        return
    path = Path(target)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
