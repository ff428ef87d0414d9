"""What several commands take: the types of their options, and the names that their help lists.

A command's file imports torch, and what needs it, inside of its functions alone, so that its help is there at once.
Hence the names here; tests/cli/test_help.py compares them with the registries.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

POLICIES = (
    "none, static, even, dynamic, exact, exact_active, lp, lp_sampled, shared_local, waterfill, waterfill_sampled, "
    "joint, llep, llep_published, spill_cost, libra, hedge, grace, grace_sampled"
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

TracePath = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="An npz trace, or a record of SGLang, TensorRT-LLM, vLLM, vllm-ascend."
    ),
]
RanksPerNode = Annotated[int, typer.Option(help="Ranks that share a node. 0: all.")]
SlotsPerRank = Annotated[
    int,
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
Force = Annotated[bool, typer.Option("--force", help="Replace the file, if it holds the same kind of thing.")]
