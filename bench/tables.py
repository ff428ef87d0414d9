"""Writes the tables of README.md and docs/*.md that come from bench/results, each between its two markers:

    <!-- table: NAME -->
    | ... |
    <!-- end -->

Usage: python bench/tables.py            # after a bench has written its results file
       python bench/tables.py --check    # writes nothing; exit status 1 and the names of tables that are not current
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import lib.cross_tables  # its tables are in TABLES, too
import lib.gpu_tables
import lib.paper_rows  # noqa: F401
from lib import table
from lib.result_tables import TABLES

ROOT = Path(__file__).parent.parent
START, END = re.compile(r"<!-- table: (.*) -->"), "<!-- end -->"


def pages(root: Path = ROOT) -> list[Path]:
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def markdown(name: str) -> list[str]:
    """Lines of a table as Markdown."""
    head, rows = TABLES[name]()
    width = head.count(" | ") + 1
    for row in rows:
        if len(row) != width:
            raise ValueError(f"table {name} has {width} columns, got a row of {len(row)}: {row}")
    return table.markdown(head, rows)


def renew(text: str, page: str) -> tuple[str, list[str], list[str]]:
    """(the page with current tables, names of all its tables, names of those that changed)

    Raises ValueError where a marker names no table or the other marker of a pair is missing.
    """
    lines, out, names, changed = text.split("\n"), [], [], []
    i = 0
    while i < len(lines):
        line = lines[i]
        out.append(line)
        i += 1
        if line == END:
            raise ValueError(f"{page}:{i}: {END} without <!-- table: NAME -->")
        if not (marker := START.fullmatch(line)):
            continue
        name = marker[1]
        if name not in TABLES:
            raise ValueError(f"{page}:{i}: no table {name!r}; there are {', '.join(TABLES)}")
        last = next((j for j in range(i, len(lines)) if lines[j] == END or START.fullmatch(lines[j])), None)
        if last is None or lines[last] != END:
            raise ValueError(f"{page}:{i}: table {name} has no {END}")
        current = markdown(name)
        names.append(name)
        if lines[i:last] != current:
            changed.append(name)
        out += [*current, END]
        i = last + 1
    return "\n".join(out), names, changed


def main(root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    old = []
    for page in pages(root):
        text = page.read_text()
        new, names, changed = renew(text, page.name)
        old += changed
        print(
            f"{page.relative_to(root)}: {len(names)} tables, {len(changed)} {'not current' if check else 'new'}"
        )
        for name in changed:
            print(f"  {name}")
        if not check and changed:
            page.write_text(new)
    return int(check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
