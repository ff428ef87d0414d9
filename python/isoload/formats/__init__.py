"""Placement files: isoload's own format, which holds every field, one module per format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isoload.formats import own
from isoload.formats.json_files import read_json
from isoload.placement import Placement
from isoload.report.files import write_json
from isoload.topology import Topology


@dataclass(frozen=True)
class Format:
    """How placements are written in one format, and read from it.

    matches  whether a file's content is of this format
    read     content -> placement; ValueError names key and layer
    write    placement -> content; ValueError where the format cannot hold it
    """

    matches: Callable[[Any], bool]
    read: Callable[[Any], Placement]
    write: Callable[[Placement], Any]


FORMATS = {"isoload": Format(own.matches, own.from_json, own.to_json)}


def write_placement(placement: Placement, path: str | Path, format: str = "isoload") -> None:
    """Writes a placement. The file appears whole or not at all.

    Args:
        placement: of all layers.
        path: the file.
        format: one of ``isoload.FORMATS``.

    Raises:
        ValueError: an unknown format; a placement that the format cannot hold.
        OSError: naming the file.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {format!r}")
    write_json(FORMATS[format].write(placement), str(path))


def read_placement(path: str | Path, topology: Topology | None = None) -> Placement:
    """Reads a placement by what the file holds, not by its name.

    Args:
        path: the file; nothing in it is executed.
        topology: in place of the file's: the same ranks, of which others may be alive. Ranks that hold experts must be.

    Raises:
        ValueError: naming the file, the key and the layer.
        OSError: a file that cannot be opened.
    """
    path = Path(path)
    content = read_json(path)
    reading = [form for form in FORMATS.values() if form.matches(content)]
    if not reading:
        raise ValueError(f"{path}: is no placement file; formats are {', '.join(FORMATS)}")
    try:
        placement = reading[0].read(content)
        if topology is None:
            return placement
        if topology.num_ranks != placement.topology.num_ranks:
            raise ValueError(f"num_ranks must be {topology.num_ranks}, got {placement.topology.num_ranks}")
        return replace(placement, topology=topology)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


__all__ = ["FORMATS", "Format", "read_placement", "write_placement"]
