"""Placement files: isoload's own format, which holds every field, and those of serving engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoload.files.reading import parse_json, read_text
from isoload.files.writing import to_json_text, write_text
from isoload.formats import own, tensorrt_llm
from isoload.formats.launch import launch_line
from isoload.placement import engine_files
from isoload.placement.engine_files import UnknownRanks
from isoload.placement.placement import Placement
from isoload.topology import Topology, as_topology
from isoload.traces.identity import Numbering
from isoload.wording import not_one_of


@dataclass(frozen=True)
class Format:
    """How placements are written in one format, and read from it."""

    matches: Callable[[Any], bool]  # whether content, of the type that the format has, is of this format
    read: Callable[[Any, Topology | None], Placement]  # of content and the caller's topology
    write: Callable[[Placement], Any]  # ValueError where the format cannot hold it
    dumps: Callable[[Any], str] = to_json_text
    suffix: str = ""  # of the file's name, where the reader goes by it
    holds: type = dict
    numbering: Numbering | None = None  # of the engine's layers; None: the file states it


FORMATS = {
    "isoload": Format(lambda c: c.get("format") == own.NAME, own.from_json, own.to_json),
    "tensorrt-llm": Format(
        lambda c: engine_files.ASSIGNMENTS in c and "record_type" not in c,
        tensorrt_llm.read,
        tensorrt_llm.write,
        tensorrt_llm.to_text,
        numbering="model",
    ),
    "sglang": Format(
        lambda c: engine_files.SGLANG in c,
        engine_files.sglang_read,
        engine_files.sglang_write,
        suffix=".json",
        numbering="hidden",
    ),
    "vllm": Format(
        lambda c: c.get("record_type") == engine_files.VLLM,
        engine_files.vllm_read,
        engine_files.vllm_write,
        numbering="moe",
    ),
    "vllm-list": Format(
        lambda c: c and isinstance(c[0], list),
        engine_files.vllm_list_read,
        engine_files.vllm_list_write,
        holds=list,
        numbering="moe",
    ),
    "vllm-ascend": Format(
        lambda c: "layer_list" in c, engine_files.ascend_read, engine_files.ascend_write, numbering="moe"
    ),
}


def check_format(format: str, path: str | Path, name: str = "path") -> None:
    """Refuses an unknown format, and a name by which the format's reader would take the file for another kind.

    SGLang takes a .pt for a torch file, and any name but .json for the JSON itself.
    """
    if format not in FORMATS:
        raise ValueError(not_one_of("format", FORMATS, format))
    suffix = FORMATS[format].suffix
    if not str(path).endswith(suffix) and str(path) != "-":
        raise ValueError(f"{name} must end in {suffix} for format {format}, got {str(path)!r}")


def write_placement(placement: Placement, path: str | Path, format: str = "isoload") -> None:
    """Writes a placement. The file appears whole or not at all.

    Args:
        placement: of all MoE layers. An engine's file needs to know which layers of the model they are:
            :meth:`Placement.with_moe_layers` states it.
        path: the file.
        format: one of ``isoload.placement.files.FORMATS``.

    Raises:
        ValueError: an unknown format; a placement that the format cannot hold, or a name that its reader does not open.
        OSError: naming the file.
    """
    check_format(format, path)
    form = FORMATS[format]
    if form.numbering is not None:
        engine_files.engine_slots(
            placement
        )  # whether any engine's file can hold it, before what its layers are
        placement = engine_files.by_moe_layers(placement, form.numbering)
    write_text(form.dumps(form.write(placement)), str(path))


def read_placement(path: str | Path, topology: Topology | int | None = None) -> Placement:
    """Reads a placement by what the file holds, not by its name.

    Args:
        path: the file; nothing in it is executed.
        topology: R ranks, or the number R. An engine's file needs it, because the file does not contain it. For
            isoload's own file it replaces the file's topology: the same ranks, of which others may be alive. Ranks
            that hold experts must be alive.

    Raises:
        ValueError: naming the file, the key and the layer.
        OSError: a file that cannot be opened.
    """
    path, topology = Path(path), None if topology is None else as_topology(topology)
    text = read_text(path)
    try:
        content, form = recognise(text)
        return form.read(content, topology)
    except UnknownRanks as error:
        raise UnknownRanks(f"{path}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def format_of(path: str | Path) -> str:
    """Return the name of a placement file's format, by what the file holds."""
    form = recognise(read_text(Path(path)))[1]
    return next(name for name, kind in FORMATS.items() if kind is form)


def recognise(text: str) -> tuple[Any, Format]:
    """The content of a placement file, and its format."""
    content = tensorrt_llm.from_text(text) if tensorrt_llm.looks_like(text) else parse_json(text)
    for form in FORMATS.values():
        if isinstance(content, form.holds) and form.matches(content):
            return content, form
    raise ValueError(f"is no placement file; formats are {', '.join(FORMATS)}")


__all__ = [
    "FORMATS",
    "UnknownRanks",
    "check_format",
    "format_of",
    "launch_line",
    "read_placement",
    "recognise",
    "write_placement",
]
