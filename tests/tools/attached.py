"""Writes python/isoload/engines/attached.json: by engine, version and hook why the hook does not attach.

Read from the wheels that `make test-wheels` unpacks. Afterwards `python bench/tables.py` writes the table of
docs/support.md.

Usage: PYTHONPATH=python:tests python tests/tools/attached.py
"""

from __future__ import annotations

import json
from pathlib import Path

from support.wheels import BUILD, UNPACKED, reasons, unpacked, version_of

FILE = Path(__file__).parents[2] / "python" / "isoload" / "engines" / "attached.json"


def number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def main() -> None:
    attached = {}
    for engine, (folder, _) in UNPACKED.items():
        roots = [root for path in (BUILD / folder).iterdir() if (root := unpacked(engine, path.name))]
        by_version = {version_of(root): root for root in roots}
        attached[engine] = {v: reasons(by_version[v], engine) for v in sorted(by_version, key=number)}
    FILE.write_text(json.dumps(attached, indent=1) + "\n")


if __name__ == "__main__":
    main()
