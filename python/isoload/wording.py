"""How messages and descriptions are written: counted nouns, ranges, tables, and choices with the nearest one named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


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


def nearest(got: object, choices: Iterable[object]) -> str:
    """Return "; did you mean exact?" for the choice that is spelled most like a refused one, or nothing."""
    names = {str(choice).lower(): str(choice) for choice in choices}
    close = get_close_matches(str(got).lower(), names, n=1, cutoff=0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""


def not_one_of(name: str, choices: Iterable[object], got: object, more: str = "") -> str:
    """Return the message for an argument whose value is none of the choices; `more` follows their list."""
    listed = [str(choice) for choice in choices]
    return f"{name} must be one of {', '.join(listed)}{more}, got {got!r:.100}{nearest(got, listed)}"
