"""``isoload convert``: a placement file in another format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from isoload.cli.options import ExtraLayers, FirstMoeLayer, Force, FormatName, ModelLayers, Range
from isoload.cli.place import placement_line, say_start, start_of
from isoload.cli.tables import say


def convert(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A placement file, of any format.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The new file.")],
    file_format: FormatName,
    ranks: Annotated[int | None, Range(1), typer.Option(help="R, where the file does not say it.")] = None,
    first_moe_layer: FirstMoeLayer = None,
    model: ModelLayers = None,
    extra_layers: ExtraLayers = None,
    force: Force = False,
) -> None:
    """Write a placement file in another format.

    SGLang and TensorRT-LLM number layers as the model does, vLLM and vllm-ascend number the MoE layers from 0.
    """
    from isoload.cli.arguments import Reading, read_given, with_extra
    from isoload.cli.targets import check_targets
    from isoload.placement.files import check_format, write_placement
    from isoload.topology import Topology

    check_targets([source], force, output=str(output))
    check_format(file_format, output, "output")
    found = read_given(str(source), None if ranks is None else Topology(ranks))
    found = with_extra(Reading(first_moe_layer=first_moe_layer, model=model).stated(found), extra_layers)
    write_placement(found, output, file_format)
    if str(output) != "-":
        line = f"{placement_line(found, str(output))}, format {file_format}"
        console = Console(highlight=False)
        say(console, ("", [line]))
        say_start(start_of(found, str(output), file_format), console)
