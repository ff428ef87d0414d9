"""Tables of fixed-width columns, printed line by line."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

WIDTH = 110


class Column(NamedTuple):
    """A table column; neighbours of one group share a heading above their titles."""

    group: str
    title: str
    cells: Sequence[str]


def table(columns: Sequence[Column]) -> tuple[list[str], list[str]]:
    """Two heading lines and a line per row: the first column left, the others right."""
    blocks: list[list[str]] = []
    for group, members in groupby(columns, key=lambda column: column.group):
        inside = []
        for column in members:
            width = max(map(len, (column.title, *column.cells)))
            lines = [column.title, *column.cells]
            inside.append([f"{line:<{width}}" if not blocks else f"{line:>{width}}" for line in lines])
        joined = [" ".join(parts) for parts in zip(*inside, strict=True)]
        width = max(len(group), len(joined[0]))
        blocks.append([f"{group:^{width}}", *(f"{line:>{width}}" for line in joined)])
    lines = ["  ".join(parts).rstrip() for parts in zip(*blocks, strict=True)]
    return lines[:2], lines[2:]


def percent(share: float) -> str:
    """0% is exactly zero, 0.0% is not."""
    return "0%" if share == 0 else f"{100 * share:.1f}%"


def print_table(console: Console, heading: list[str], rows: list[str]) -> None:
    console.print()
    for line in heading:
        _print(console, line, "cyan")
    for line in rows:
        _print(console, line)
    console.print()


def print_lines(console: Console, lines: Sequence[str], style: str = "") -> None:
    """Prints lines broken at 110 columns."""
    for line in lines:
        for part in textwrap.wrap(line, WIDTH):
            _print(console, part, style)


def _print(console: Console, line: str, style: str = "") -> None:
    # Text and soft_wrap: no markup in names, and a pipe gets the line as it is.
    console.print(Text(line, style), soft_wrap=True)
