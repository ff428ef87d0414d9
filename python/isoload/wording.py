"""Wording of messages and descriptions: counted nouns, ranges, tables, and choices with the nearest one named."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import floor, log10
from typing import Any


def amount(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def span(values: Iterable[int]) -> str:
    """Return the only value, or "least to largest"."""
    ordered = sorted(set(values))
    return f"{ordered[0]:,}" if len(ordered) == 1 else f"{ordered[0]:,} to {ordered[-1]:,}"


def two_digits(value: float, decimals: int = 2) -> str:
    """Return a figure of a model with two significant digits and at most `decimals` decimals: 0.28, 5.9, 16, 110."""
    if round(value, decimals) == 0:
        return "0"
    places = 1 - floor(log10(abs(value)))
    value = round(value, places)
    places = 1 - floor(log10(abs(value)))  # 9.96 has become 10
    return f"{round(value, decimals):.{min(max(places, 0), decimals)}f}"


def between(low: float, high: float, decimals: int = 2) -> str:
    """Return a range of a model's figures, "16 to 17", or one figure if both ends round to it."""
    ends = two_digits(low, decimals), two_digits(high, decimals)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def saving(low: float, high: float, unit: str, more: str = "") -> str:
    """Return a range of savings: "saves 16 to 17 ms", "takes 1.8 ms longer"; `more`: follows "saves", as "another"."""
    saves = f"saves {more} ".replace("  ", " ")
    least, largest = two_digits(low), two_digits(high)
    if least == largest == "0":
        return f"changes less than 0.01 {unit}"
    if low >= 0:
        return f"{saves}up to {largest} {unit}" if least == "0" else f"{saves}{between(low, high)} {unit}"
    if high <= 0:
        longer = f"up to {two_digits(-low)}" if largest == "0" else between(-high, -low)
        return f"takes {longer} {unit} longer"
    if least == "0":
        return f"{saves}up to {largest} {unit}"
    if largest == "0":
        return f"takes up to {two_digits(-low)} {unit} longer"
    return f"{saves}up to {largest} {unit} or takes up to {two_digits(-low)} {unit} longer"


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


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 100
_repr.maxlevel = 3


def shown(value: Any) -> str:
    """Return repr of a value of a file, shortened: nested lists that share parts would print exponentially long."""
    text = _repr.repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
