"""What several commands take: the types of their options, and the names that their help lists.

A command's file imports torch, and what needs it, inside of its functions alone, so that its help is there at once.
Hence the names here; tests/cli/test_help.py compares them with the registries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer

MAX_COUNT = 2**31 - 1  # counts of tokens, slots and batches are int32


class Range(NamedTuple):
    """Bounds of a numeric option, both included: ``Annotated[int, Range(1), typer.Option(...)]``.

    typer's own min and max accept nan.
    """

    least: float
    most: float = MAX_COUNT


@cache
def ranges(command: Callable[..., None]) -> dict[str, Range]:
    """Return the ranges of a command's numeric options, by parameter."""
    hints = get_type_hints(command, include_extras=True)
    parts = [(name, part) for name, hint in hints.items() for part in get_args(hint)]
    return {name: part for name, part in parts if isinstance(part, Range)}


def check_ranges(command: Callable[..., None], given: Mapping[str, Any]) -> None:
    """Raise ValueError for a number outside its option's range; nan and infinities are outside every range."""
    for name, (least, most) in ranges(command).items():
        value = given[name]
        if value is None or least <= value <= most:
            continue
        rule = f"at least {least}" if value < least and most == MAX_COUNT else f"in {least}..{most}"
        raise ValueError(f"--{name.replace('_', '-')} must be {rule}, got {value!s:.40}")


POLICIES = (
    "none, static, even, dynamic, exact, exact_active, lp, lp_affine, lp_sampled, shared_local, waterfill, "
    "waterfill_sampled, joint, llep, llep_published, spill_cost, libra, libra_published, hedge, grace, grace_sampled"
)
BASELINE = "in order, no replicas"  # experts in order, E/R slots per rank: what tables compare with
DEFAULT_POLICIES = "in-order,static,even,dynamic,exact"
SHARED_POLICIES = "in-order,shared_local,waterfill_sampled,exact,waterfill,joint"
PLACERS = "trivial, eplb, graph, craft, scenario, grace"
FORMATS = "isoload, tensorrt-llm, sglang, vllm, vllm-list, vllm-ascend"
CALIBRATIONS = "first-half, interleaved, all, leave-one-out, leave-cluster-out"
ASSIGNMENTS = "contiguous, round-robin"
PREDICTIONS = "perfect, last, linear, path, popularity, none"
LOADS = "gathered, node, own, last"
CALIBRATE_DEFAULT = (
    "Default: leave-cluster-out where batches have clusters, else first-half; of one batch all."
)

TracePaths = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE...",
        help="An npz trace, or a record of SGLang, TensorRT-LLM, vLLM or vllm-ascend: a file, a folder, or the files "
        "of all ranks. Files of several recordings are batches.",
    ),
]
Stages = Annotated[
    bool,
    typer.Option(
        "--stages", help="The files are stages of one pipeline, in this order, each with layers from 0."
    ),
]
SameLayers = Annotated[
    bool,
    typer.Option(
        "--same-layers", help="The files, each with layers from 0, are recordings of the same layers."
    ),
]
AllowMissingRanks = Annotated[
    bool, typer.Option("--allow-missing-ranks", help="Read a recording that lacks the files of some ranks.")
]
FirstMoeLayer = Annotated[
    int | None,
    Range(0),
    typer.Option(
        metavar="N",
        help="Number of the model's first MoE layer, as many dense layers lie before it (DeepSeek-V3: 3).",
    ),
]
ModelLayers = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME|FILE",
        help="The model's name or its config.json, which states the layers that are MoE layers.",
    ),
]
ExtraLayers = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Layers to add that were not recorded, by the model's numbers (61,62), such as draft (MTP) layers: "
        "experts in order, as many slots.",
    ),
]
Experts = Annotated[
    int | None,
    Range(1, 2**20),
    typer.Option(help="Routed experts of a layer, where the config.json lacks them."),
]
ExpertsPerToken = Annotated[
    int | None,
    Range(1, 2**10),
    typer.Option("--top-k", help="Experts of a token, where the config.json lacks them."),
]
MoeLayers = Annotated[
    int | None, Range(1, 2**12), typer.Option(help="Number of MoE layers, where the config.json lacks it.")
]
RanksPerNode = Annotated[int, Range(0), typer.Option(help="Ranks that share a node. 0: all.")]
SlotsPerRank = Annotated[
    int,
    Range(0),
    typer.Option(
        help="S, shared and spare slots included. 0: E/R, an eighth of it (at least 1) more, and those."
    ),
]
PlacerName = Annotated[str, typer.Option(help=f"One of {PLACERS}, with options as name:option=value.")]
FormatName = Annotated[str, typer.Option("--format", help=f"One of {FORMATS}.")]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        help="A Python file that registers policies or placers of your own; may be given several times.",
    ),
]
TopK = Annotated[
    str | None,
    typer.Option(
        metavar="K|MODEL", help="K, experts of a token, or the model's name: where the record does not say K."
    ),
]
LayersText = Annotated[
    str | None, typer.Option(metavar="LIST", help="Only these layers, by position: 0-3,7.")
]
CostFile = Annotated[
    str | None,
    typer.Option(metavar="FILE|default", help="A cost file (bench/bench_cost.py measures one), or: default."),
]
Wide = Annotated[bool, typer.Option("--wide", help="Show all figures; without it the table fits 80 columns.")]
JsonTarget = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|-",
        help="Write the figures as JSON to this file, or to stdout (-) in place of the table.",
    ),
]
HtmlTarget = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Write a page with charts to this file; needs isoload[report]."),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace a placement (-o), or a file of any kind (--json, --html).")
]
