"""What a command may write to: nothing that it reads, and nothing else of value without --force."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from isoload.files.reading import parse_json, read_text
from isoload.files.writing import check_target, descriptor_of
from isoload.placement.files import recognise
from isoload.report import check_drawing, is_page

FIGURES = (  # keys of what --json writes, by which it is known again
    {"policies"},  # replay, demo
    {"placers", "calibrate"},  # place
    {"verdict", "answers"},  # advise
    {"trace", "layers"},  # inspect
    {"phases", "left_out"},  # report
    {"name", "on", "detail"},  # doctor, each row
    {"format", "experts", "points"},  # measure
)


def check_targets(
    reads: Sequence[str | Path | None],
    force: bool,
    json: str | None = None,
    output: str | None = None,
    html: str | None = None,
) -> None:
    """Refuses what a command must not write to, before any work is done for it.

    Args:
        reads: files and folders that the command reads. What lies in a folder belongs to it, and to an .npz the .json
            of the same stem.
        force: whether a placement may be replaced, by a placement alone, and any file by figures or a page.
        json, output, html: where figures go, a placement, and a page, for which what draws it must be there.
    """
    named = {"output": output, "json": json, "html": html}
    given = {name: target for name, target in named.items() if target is not None}
    if html is not None:
        check_drawing()
    for name, target in given.items():
        check_target(target, name)
        if descriptor_of(target) is not None:
            continue
        for path in (path for path in reads if path is not None):
            if _belongs(target, Path(path)):
                raise ValueError(
                    f"{name} must be no file that is read, got {target!r}, which belongs to {path}"
                )
        if os.path.isfile(target) and os.path.getsize(target):
            _check_old(name, target, force)
    for one, other in combinations(given, 2):
        if _place(given[one]) == _place(given[other]):
            raise ValueError(f"{one} and {other} must be two files, got {given[one]!r} and {given[other]!r}")


def _belongs(target: str, path: Path) -> bool:
    there, owned = Path(os.path.realpath(target)), [path]
    if path.suffix == ".npz":
        owned += [path.with_suffix(".json"), path.resolve().with_suffix(".json")]
    return any(
        own.resolve() in (there, *there.parents) or _place(str(own)) == _place(target) for own in owned
    )


def _check_old(name: str, target: str, force: bool) -> None:
    """Raise ValueError for a file that must not be replaced.

    Figures and pages can be made again, so they are replaced without --force; a placement may be in use.
    """
    kind, holds = KINDS[name]
    try:
        same = bool(holds(read_text(Path(target))))
    except ValueError:
        same = False
    if name == "output":
        if not force:
            raise ValueError(
                f"{name} must be a new file, or --force be given to replace {kind}, got {target!r}"
            )
        if not same:
            raise ValueError(f"{name} must be a new file or replace {kind}, got {target!r} of another kind")
    elif not (same or force):
        raise ValueError(
            f"{name} must be a new file or replace {kind}, got {target!r} of another kind, which takes --force"
        )


def _holds_figures(content: Any) -> bool:
    rows = content if isinstance(content, list) and content else [content]
    return any(all(isinstance(row, dict) and kind <= row.keys() for row in rows) for kind in FIGURES)


KINDS: dict[str, tuple[str, Callable[[str], object]]] = {  # what an option's file holds, and what knows it
    "output": ("a placement", recognise),
    "json": ("figures", lambda text: _holds_figures(parse_json(text))),
    "html": ("a page", is_page),
}


def _place(target: str) -> object:
    """The same for two names of one file, or of one stream."""
    number = descriptor_of(target)
    if number is not None:
        return number
    return os.stat(target)[1:3] if os.path.exists(target) else os.path.realpath(target)
