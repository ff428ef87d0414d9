"""Tables of fixed-width columns of the rows that --json writes; output of tables, JSON and pages."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from operator import getitem
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from isoload.files import descriptor_of, printable, write_json, write_text

WIDTH = 80  # width of a terminal, for tables without --wide
MIB = 2.0**20
NO_FREEDOM = (
    "Every expert has one slot, so no policy has a choice: --slots-per-rank {more} gives each rank a replica."
)


Row = dict[str, Any]  # figures, as --json writes them


class Column(NamedTuple):
    """A table column; neighbours of one group share a heading above their titles."""

    group: str
    title: str
    cells: Sequence[str]


@dataclass(frozen=True)
class Figure:
    """A column that shows one figure of the rows that --json writes."""

    key: str  # key in a row; a dot opens an inner object
    group: str
    title: str
    form: str = ""  # a format spec, "%" for :func:`percent` or "MiB" for bytes
    wide: bool = False  # whether only the wide table shows it

    def value(self, row: Row) -> Any:
        return reduce(getitem, self.key.split("."), row)

    def cell(self, row: Row) -> str:
        value = self.value(row)
        if value is None:
            return "-"
        if self.form == "%":
            return percent(value)
        return f"{value / MIB:.1f}" if self.form == "MiB" else format(value, self.form)


def write_out(
    json: str | None,
    figures: Any,
    show: Callable[[Console], None],
    console: Console | None = None,
    html: str | None = None,
    page: Callable[[], str] = str,
    more: Sequence[str] = (),
) -> None:
    """Write figures and a page to their targets, print a table unless stdout takes the figures, and name the files."""
    drawn = page() if html else ""  # before anything is written, because it may fail
    if json:
        write_json(figures, json)
    if html:
        write_text(drawn, html)
    shown = json != "-" and not (html and descriptor_of(html) == 1)
    console = (console or Console(highlight=False)) if shown else Console(stderr=True, highlight=False)
    if shown:
        show(console)
    if files := [target for target in (json, html, *more) if target and descriptor_of(target) is None]:
        console.print(Text(f"Wrote {' and '.join(map(printable, files))}."), soft_wrap=True)


def columns_of(figures: Sequence[Figure], rows: Sequence[Row], wide: bool = False) -> list[Column]:
    """Return the columns of figures that have a value in some row."""
    visible = [f for f in figures if (wide or not f.wide) and any(f.value(row) is not None for row in rows)]
    return [Column(f.group, f.title, [f.cell(row) for row in rows]) for f in visible]


def page_table(columns: Sequence[Column], marked: Sequence[int] = ()) -> str:
    """Return the table for a page; marked: highlighted rows."""
    from isoload.analysis.pages import table as html_table

    heading = [f"{column.group} {column.title}".strip() for column in columns]
    rows = list(zip(*(column.cells for column in columns), strict=True))
    return html_table(heading, rows, marked)


def table(columns: Sequence[Column]) -> tuple[list[str], list[str]]:
    """Return two heading lines and a line per row: the first column left-aligned, all others right-aligned."""
    blocks: list[list[str]] = []
    for group, members in groupby(columns, key=lambda column: column.group):
        inside = []
        for column in members:
            lines = [column.title, *map(printable, column.cells)]
            width = max(map(len, lines))
            inside.append([f"{line:<{width}}" if not blocks else f"{line:>{width}}" for line in lines])
        joined = [" ".join(parts) for parts in zip(*inside, strict=True)]
        width = max(len(group), len(joined[0]))
        blocks.append([f"{group:^{width}}", *(f"{line:>{width}}" for line in joined)])
    lines = ["  ".join(parts).rstrip() for parts in zip(*blocks, strict=True)]
    return lines[:2], lines[2:]


def percent(share: float) -> str:
    """Return a percentage: 0% is exactly zero, 0.0% is not."""
    return "0%" if share == 0 else f"{100 * share:.1f}%"


def say(console: Console, *parts: tuple[str, Sequence[str]] | list[Column]) -> None:
    """Print parts one after the other: a style and lines, wrapped at 80 columns; or tables."""
    for part in parts:
        if isinstance(part, tuple):
            style, lines = part
            styled = [(piece, style) for line in lines for piece in textwrap.wrap(printable(line), WIDTH)]
        else:
            heading, rows = table(part)
            lines = ["", *heading, *rows, ""]
            styled = [(line, "cyan" if 0 < i <= len(heading) else "") for i, line in enumerate(lines)]
        for line, style in styled:
            # Text and soft_wrap: names may contain markup characters, and a pipe gets unwrapped lines.
            console.print(Text(line, style), soft_wrap=True)
