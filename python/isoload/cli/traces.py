"""Traces given to commands, and the progress of what is done with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isoload.files.reading import shown
from isoload.trace import Trace, read_trace
from isoload.trace.top_k import with_top_k


def load_trace(path: Path, layers: str | None = None, top_k: str | None = None) -> Trace:
    """The trace of some layers, with K where it is known."""
    with Console(stderr=True).status(f"reading {escape(str(path))}"):
        trace = with_top_k(read_trace(path), top_k)
    return trace if layers is None else trace.select_layers(parse_layers(layers, trace.num_layers))


def parse_layers(text: str, num_layers: int) -> list[int]:
    """Positions of layers from a list of numbers and ranges: "0-3,7" -> [0, 1, 2, 3, 7]."""
    ends = [part.split("-") for part in text.replace(" ", "").split(",")]
    if not all(len(pair) <= 2 and all(map(str.isdecimal, pair)) for pair in ends):
        raise ValueError(f"layers must be numbers and ranges such as 0-3,7, got {shown(text)}")
    # Before a range is laid out, and before int() refuses too many digits.
    if any(len(end) > 9 or int(end) >= num_layers for pair in ends for end in pair):
        raise ValueError(f"layers must be some of 0..{num_layers - 1}, got {shown(text)}")
    layers = {layer: None for pair in ends for layer in range(int(pair[0]), int(pair[-1]) + 1)}
    if not layers or len(layers) < sum(int(pair[-1]) + 1 - int(pair[0]) for pair in ends):
        raise ValueError(f"layers must be distinct and at least one, got {shown(text)}")
    return list(layers)


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, gone when done and absent where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
