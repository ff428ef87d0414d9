"""The command ``isoload``: replay, place, demo, inspect, doctor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from isoload import __version__
from isoload.cli import demo, doctor
from isoload.cli.errors import in_options
from isoload.cli.given import given_placement, read_given, unseen_part
from isoload.cli.place import PlaceSettings, run_place
from isoload.cli.processes import RankError
from isoload.cli.targets import check_targets
from isoload.cli.traces import load_trace, progress
from isoload.cost import CostModel, read_cost
from isoload.files.writing import descriptor_of, write_json
from isoload.formats import FORMATS, check_format, write_placement
from isoload.placers import PLACERS
from isoload.policies import POLICIES
from isoload.replay.batches import ASSIGNMENTS
from isoload.replay.calibration import CALIBRATIONS
from isoload.replay.inspection import inspect_trace
from isoload.replay.placement_inspection import inspect_placement
from isoload.replay.prediction import PREDICTIONS
from isoload.replay.simulate import DEFAULT_POLICIES, SHARED_POLICIES, ReplaySettings
from isoload.replay.simulate import replay as replay_trace
from isoload.report.cost import print_cost
from isoload.report.inspection import inspect_json, print_inspection
from isoload.report.placement_inspection import placement_json, print_placement
from isoload.report.placing import place_json, placement_line, print_place
from isoload.report.replay import print_replay, replay_json
from isoload.report.tables import print_lines
from isoload.topology import Topology

app = typer.Typer(
    name="isoload",
    help="Equal load for the ranks of expert-parallel Mixture-of-Experts layers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

CALIBRATE_DEFAULT = (
    "Default: leave-cluster-out where batches have clusters, else first-half; of one batch all."
)
JSON_HELP = "Write the figures as JSON to this file, or to stdout (-) in place of the table."
POLICIES_HELP = (
    f"Some of {', '.join(POLICIES)}, each with options as name:option=value. "
    f"Default: {','.join(DEFAULT_POLICIES)}; with shared experts {','.join(SHARED_POLICIES)}."
)
COST_HELP = "A cost file (bench/bench_cost.py measures one), or: default."
SLOTS_HELP = "S, shared and spare slots included. 0: E/R, an eighth of it (at least 1) more, and those."
TOP_K_HELP = "K, experts of a token, or the model's name: where the record does not say K."
LAYERS_HELP = "Only these layers, by position: 0-3,7."

TracePath = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="An npz trace, or a record of SGLang, TensorRT-LLM, vLLM, vllm-ascend."
    ),
]
JsonTarget = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help=JSON_HELP)]
CostFile = Annotated[str | None, typer.Option("--cost", metavar="FILE|default", help=COST_HELP)]
Force = Annotated[bool, typer.Option("--force", help="Replace the file, if it holds the same kind of thing.")]
SlotsPerRank = Annotated[int, typer.Option(help=SLOTS_HELP)]
TopK = Annotated[str | None, typer.Option("--top-k", metavar="K|MODEL", help=TOP_K_HELP)]
Wide = Annotated[bool, typer.Option("--wide", help="Show all figures; without it the table fits 80 columns.")]
LayersText = Annotated[str | None, typer.Option("--layers", metavar="LIST", help=LAYERS_HELP)]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"isoload {__version__}")
        raise typer.Exit


@app.command()
def replay(
    context: typer.Context,
    trace: TracePath,
    ranks: Annotated[int, typer.Option(help="R, ranks of the expert-parallel group.")] = 8,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that share a node. 0: all.")] = 0,
    slots_per_rank: SlotsPerRank = 0,
    spare_slots: Annotated[int, typer.Option(help="Slots of every rank that stay empty.")] = 0,
    shared_experts: Annotated[
        int, typer.Option(help="Shared experts that every token gets besides; every rank holds each.")
    ] = 0,
    placer: Annotated[
        str, typer.Option(help=f"One of {', '.join(PLACERS)}, with options as name:option=value.")
    ] = "eplb",
    placement: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Replay this placement instead of making one."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help=f"Batches to place on: {', '.join(CALIBRATIONS)}. The rest is replayed. {CALIBRATE_DEFAULT}"
        ),
    ] = None,
    top_k: TopK = None,
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens per batch. Default: the trace's own, else 1024 (drawn: at most 4096)."),
    ] = None,
    max_batches: Annotated[
        int, typer.Option(help="Batches replayed per calibration, the first ones. 0: all.")
    ] = 0,
    assign: Annotated[
        str, typer.Option(help=f"How whole sequences go to source ranks: {', '.join(ASSIGNMENTS)}.")
    ] = "contiguous",
    seed: Annotated[int, typer.Option(help="Of drawn tokens and of policies that draw.")] = 0,
    predict: Annotated[
        str,
        typer.Option(
            help=f"What policies that fill spare slots ahead know: {', '.join(PREDICTIONS)}, or a number: the part of "
            "the choices that is predicted right."
        ),
    ] = "last",
    policies: Annotated[str | None, typer.Option(help=POLICIES_HELP)] = None,
    layers: LayersText = None,
    cost: CostFile = None,
    wide: Wide = False,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """Replay recorded routing over virtual ranks, under several policies.

    Experts are placed on one part of the trace, the rest is routed.

    Every figure is counted from routed slots. Imbalance is max/mean rank load;
    the standard deviation is relative to the mean, too, and idle share to R*max;
    planning time is in microseconds per layer, on one CPU thread.

    From a trace of counts alone tokens are drawn, layer by layer:
    K distinct experts each, in the shares of the counts; without K copy by copy.

    With --cost a second table predicts times and memory of a layer by constants, which are printed;
    policies that price imports use them where their options set no others.
    """
    with _one_line_errors():
        check_targets([trace, placement, cost], force, json)
        placed = None if placement is None else given_placement(context, placement)
        if placed is not None:
            ranks, ranks_per_node = placed.topology.num_ranks, placed.topology.ranks_per_node
            spare_slots, shared_experts = placed.spare_slots, placed.num_shared
            slots_per_rank = placed.slots_per_rank
        chosen: tuple[str, ...] = SHARED_POLICIES if shared_experts else DEFAULT_POLICIES
        if policies is not None:
            chosen = tuple(name.strip() for name in policies.split(",") if name.strip())
        settings = ReplaySettings(
            num_ranks=ranks,
            ranks_per_node=ranks_per_node,
            slots_per_rank=slots_per_rank,
            spare_slots=spare_slots,
            shared_experts=shared_experts,
            placer=placer,
            calibrate=calibrate,
            batch_tokens=batch_tokens,
            max_batches=max_batches,
            assign=assign,
            seed=seed,
            predict=predict,
            cost=_cost_model(cost),
            policies=chosen,
        )
        loaded, note = load_trace(trace, layers, top_k), ""
        if placed is not None:
            settings, placed, note = unseen_part(placed, str(placement), loaded, settings)
        with progress("replaying batches") as on_batch:
            found = replay_trace(loaded, settings, on_batch, placed)
        if json:
            write_json(replay_json(found), json)
        if json != "-":
            console = Console(highlight=False)
            print_replay(found, console, wide, note)
            if settings.cost:
                print_cost(found.costs, settings.cost, console, wide)


@app.command("place")
def run_placing(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="What was recorded; traces weigh alike.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The placement file.")],
    ranks: Annotated[int, typer.Option(help="R, ranks of the expert-parallel group.")],
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that share a node. 0: all.")] = 0,
    slots_per_rank: SlotsPerRank = 0,
    placer: Annotated[
        str, typer.Option(help=f"One of {', '.join(PLACERS)}, with options as name:option=value.")
    ] = "scenario",
    file_format: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")] = "isoload",
    before: Annotated[str | None, typer.Option(metavar="FILE", help="A placement to start from.")] = None,
    against: Annotated[str | None, typer.Option(metavar="FILE", help="A placement to compare with.")] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(
            help=f"Batches of the first trace held back to judge: {', '.join(CALIBRATIONS)}. {CALIBRATE_DEFAULT}"
        ),
    ] = None,
    expert_bytes: Annotated[int, typer.Option(help="Of one expert's weights; 0: not known.")] = 0,
    replica_memory: Annotated[
        int, typer.Option(help="Bytes of a rank for replicas of all layers: fewer, where they help. Ragged.")
    ] = 0,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """Turn recorded loads into a placement file, and print what it buys.

    Experts are placed on all batches; the figures are of placements made without the batches they are judged on.
    """
    with _one_line_errors():
        check_targets([*traces, before, against], force, json, str(output))
        check_format(file_format, output, "output")
        settings = PlaceSettings(
            ranks,
            ranks_per_node,
            slots_per_rank,
            placer,
            before,
            against,
            calibrate,
            expert_bytes,
            replica_memory,
        )
        found = run_place([load_trace(trace) for trace in traces], settings)
        write_placement(found.placement, output, file_format)
        if json:
            write_json(place_json(found.placement, found.calibrate, found.rows), json)
        if json != "-":
            console = Console(highlight=False, stderr=descriptor_of(str(output)) == 1)
            print_place(found.placement, str(output), found.calibrate, found.rows, console)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="FILE", help="A placement file, of any format.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The new file.")],
    file_format: Annotated[str, typer.Option("--format", help=f"One of {', '.join(FORMATS)}.")],
    ranks: Annotated[int | None, typer.Option(help="R, where the file does not say it.")] = None,
    force: Force = False,
) -> None:
    """Write a placement file in another format."""
    with _one_line_errors():
        check_targets([source], force, output=str(output))
        check_format(file_format, output, "output")
        found = read_given(str(source), None if ranks is None else Topology(ranks))
        write_placement(found, output, file_format)
        if str(output) != "-":
            line = f"{placement_line(found, str(output))}, format {file_format}"
            print_lines(Console(highlight=False), [line])


@app.command()
def inspect(
    context: typer.Context,
    trace: TracePath,
    ranks: Annotated[
        int, typer.Option(help="R, ranks that hold the experts in order, without replicas.")
    ] = 8,
    placement: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="What this placement's replicas bring, in place of how skewed it is."
        ),
    ] = None,
    top_k: TopK = None,
    layers: LayersText = None,
    wide: Wide = False,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """How skewed a trace is: per layer its hottest expert, and what that costs on 8, 16, 32 and R ranks.

    With --placement the balance of each layer instead: experts in order, placed without replicas, and as in the file;
    and what so many replicas bring to each.
    """
    with _one_line_errors():
        check_targets([trace, placement], force, json)
        placed = None if placement is None else given_placement(context, placement)
        loaded = load_trace(trace, layers, top_k)
        console = Console(highlight=False)
        if placed is not None:
            view = inspect_placement(loaded, placed)
            if json:
                write_json(placement_json(loaded, str(placement), placed, view), json)
            if json != "-":
                print_placement(loaded, str(placement), placed, view, console)
            return
        found = inspect_trace(loaded, ranks)
        if json:
            write_json(inspect_json(loaded, ranks, found), json)
        if json != "-":
            print_inspection(loaded, ranks, found, console, wide)


@app.command("demo")
def run_demo(
    trace: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Default: the shipped one.")] = None,
    ranks: Annotated[int, typer.Option(help="R, processes to start.")] = 4,
    layer: Annotated[int, typer.Option(help="Layer whose routing is used, by position.")] = 12,
    stall_seconds: Annotated[
        float, typer.Option(help="A rank that ends no batch for so long has stalled, which ends the demo.")
    ] = demo.STALL_SECONDS,
    json: JsonTarget = None,
    force: Force = False,
) -> None:
    """Run one MoE layer over local processes, once per policy, and compare it with the dense layer."""
    with _one_line_errors():
        check_targets([trace], force, json)
        found = demo.run_demo(trace, ranks, layer, stall_seconds)
        if json:
            write_json(demo.demo_json(found), json)
        if json != "-":
            demo.print_demo(ranks, found, Console(highlight=False))


@app.command("doctor")
def run_doctor(cost: CostFile = None, json: JsonTarget = None, force: Force = False) -> None:
    """What this machine offers, what is off, and why; which engines isoload attaches to, with this environment.

    Exit code 1 if a variable asks for an engine (ISOLOAD_SGLANG=1, ISOLOAD_VLLM=1) that isoload would stay out of.
    """
    with _one_line_errors():
        check_targets([cost], force, json)
        items = doctor.report(_cost_model(cost))
        if json:
            write_json(doctor.doctor_json(items), json)
        if json != "-":
            doctor.print_doctor(items, Console(highlight=False))
        if any(item.asked and not item.on for item in items):
            raise typer.Exit(1)


def _cost_model(given: str | None) -> CostModel | None:
    """The constants of a file, the built-in ones, or none."""
    if given is None:
        return None
    return CostModel() if given == "default" else read_cost(given)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Errors in what the user gave end in one red line and exit code 2, a lost process in exit code 1, all others in a
    traceback."""
    code = 2
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        text = f"{error.filename}: {error.strerror}"
    except ValueError as error:
        text = in_options(str(error), PARAMETERS)
    except RankError as error:
        text, code = str(error), 1
    else:
        return
    Console(stderr=True, highlight=False).print(Text(f"error: {text}", style="red"), soft_wrap=True)
    raise typer.Exit(code)


PARAMETERS = {
    name
    for command in app.registered_commands
    if command.callback is not None
    for name in signature(command.callback).parameters
}


def main() -> None:
    """Entry point."""
    app(prog_name="isoload")
