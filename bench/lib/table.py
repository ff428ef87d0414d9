"""The one writer of tables: in documents and in terminals, always as Markdown.

A column is a heading and a cell: a format of the row's fields, or a function of the row. In a format a spec may end in
``*factor`` or ``/unit``: ``{share:.1f*100} %``, ``{bytes:.1f/1e6}``. A field that a row lacks leaves its place empty,
None is "-".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

Row = Mapping[str, Any]
Columns = Mapping[str, str | Callable[[Row], str]]
Table = tuple[str, list[list[str]]]  # "first column | second column", the rows' cells


class _Cell(Formatter):
    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except KeyError:
            return "", field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or value == "":
            return "-" if value is None else ""
        if scaled := re.fullmatch(r"(.*)([*/])([\d.e]+)", format_spec):
            format_spec, sign, number = scaled.groups()
            value = value * float(number) if sign == "*" else value / float(number)
        return format(value, format_spec)


def cell(how: str | Callable[[Row], str], row: Row) -> str:
    return _Cell().vformat(how, (), row) if isinstance(how, str) else how(row)


def table(columns: Columns, rows: Iterable[Row]) -> Table:
    return " | ".join(columns), [[cell(how, row) for how in columns.values()] for row in rows]


def same(headings: Iterable[str], how: str) -> dict[str, str]:
    """Columns of fields that are formatted alike, each under its name: ``same(names, "{NAME:.3f}")``."""
    return {heading: how.replace("NAME", heading) for heading in headings}


def markdown(head: str, rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table."""
    return [
        f"| {head} |",
        "|---" * (head.count(" | ") + 1) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


def show(title: str, head: str | Columns, rows: Iterable[Any]) -> None:
    """Prints a table, its columns aligned: of cells, or of rows and their columns."""
    if not isinstance(head, str):
        head, rows = table(head, rows)
    cells = [head.split(" | "), *rows]
    widths = [max(len(row[i]) if i < len(row) else 0 for row in cells) for i in range(len(cells[0]))]
    cells.insert(1, ["-" * width for width in widths])
    print(f"\n{title}" if title else "")
    for row in cells:
        others = (text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=False))
        print("|", " | ".join([row[0].ljust(widths[0]), *others]), "|")


def show_rows(title: str, rows: Sequence[Row], *leave_out: str) -> None:
    """All that flat rows say."""
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if name not in leave_out]
    show(title, {name: lambda row, name=name: short(row.get(name, "")) for name in names}, rows)


def short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def losses(rows: Iterable[Row]) -> None:
    """Names the rows whose goal is not met, after how many they are."""
    lost = [row for row in rows if row.get("met") is False]
    print(f"{len(lost)} goals missed", *(f"  LOSS {row}" for row in lost), sep="\n")
