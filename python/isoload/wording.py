"""How messages and descriptions are written: counted nouns, ranges, tables, and choices with the nearest one named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def amount(number: int, noun: str, plural: str = "") -> str:
    """Return "1 layer" or "75 layers"."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def span(values: Iterable[int]) -> str:
    """Return the only value, or "least to largest"."""
    ordered = sorted(set(values))
    return f"{ordered[0]:,}" if len(ordered) == 1 else f"{ordered[0]:,} to {ordered[-1]:,}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return lines of right-aligned columns; integers have thousands separators, floats three decimals."""
    forms = {int: "{:,}", float: "{:.3f}"}
    cells = [[forms.get(type(value), "{}").format(value) for value in row] for row in rows]
    lines = [list(head), *cells]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
