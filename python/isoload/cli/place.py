"""``isoload place``: traces to a placement file and its gain; ``isoload convert``: a file in another format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.text import Text
from typer import Argument, Option

from isoload.cli import options
from isoload.cli.options import ExtraLayers, FirstMoeLayer, Force, FormatName, ModelLayers, Range
from isoload.cli.tables import NO_FREEDOM, Figure, Row, columns_of, page_table, say, write_out
from isoload.files import descriptor_of, printable
from isoload.wording import saving

if TYPE_CHECKING:
    from isoload.analysis.advice import Span
    from isoload.placement.placement import Placement
    from isoload.times import Times
    from isoload.topology import Topology
    from isoload.traces import Trace


BOTH = ("eplb", "scenario")  # the default placers; if they are equal, the last
UNITS = (
    "max/mean rank load, mean over batches and layers. even: copies spread evenly over replicas; exact: the best "
    "split, as policy exact makes it. The file is made from all batches; files given with --before or --against may "
    "have been made from the judged ones."
)
FIGURES = (
    Figure("placer", "", "placer"),
    Figure("even", "imbalance", "even", ".3f"),
    Figure("exact", "imbalance", "exact", ".3f"),
    Figure("replicas", "", "replicas"),
    Figure("replica_bytes", "replicas on a rank", "MiB", "MiB"),
    Figure("changed", "slots", "changed", "%"),
)


def placement_line(placement: Placement, path: str) -> str:
    slots = f"{placement.slots_per_rank} slots on each of {placement.topology.num_ranks} ranks"
    return f"{path}: {placement.num_layers} layers, {placement.num_routed} experts, {slots}"


def start_of(placement: Placement, path: str, file_format: str) -> dict[str, str] | None:
    """Return the engine that starts from the file, and the command; None if no engine can, or there is no file."""
    from isoload.placement.engine_files import ENGINES, launch_line

    if descriptor_of(path) is not None:
        return None
    text = launch_line(placement, file_format, path, placement.topology.num_ranks)
    return {"engine": ENGINES[file_format], "type": text} if text else None


def say_start(start: dict[str, str] | None, console: Console) -> None:
    """Print the command in one line, so that it can be copied."""
    if start is not None:
        console.print(Text(printable(f"Start {start['engine']}: {start['type']}")), soft_wrap=True)


BY_COUNTS = (
    "The trace's per-token choices are not those of its batches: placements are judged as made from counts alone, and "
    "the written one is made from the choices, too."
)


def near_line(rows: tuple[float, float], peaks: tuple[float, float], saved: Span | None = None) -> str:
    """Return what the placer's option near saves and costs; all pairs are without near and with it."""
    if rows[1] >= rows[0]:
        none = f"; near saves none of the {rows[0]:.2f} rows to other nodes"
        return f"{none}: no exchange of slots sends fewer under the load caps"
    modelled = "" if saved is None else f"; near {saving(*saved, 'ms')} a step"
    return (
        f"; a seen token sends about {rows[1]:.2f} rows to other nodes (with near=False {rows[0]:.2f}), and the "
        f"busiest rank has {peaks[1]:.3f} times the mean load (with near=False {peaks[0]:.3f}){modelled}"
    )


def near_ms(
    trace: Trace,
    placements: tuple[Placement, Placement],
    rows: tuple[float, float],
    device: str | Times,
    model: str,
    tokens: int,
) -> Span:
    """Return the milliseconds of a prefill step that the second placement saves, see advice.near_saves."""
    from isoload.analysis.advice import Question, near_saves
    from isoload.analysis.judge import judge_by
    from isoload.analysis.models import find_model
    from isoload.cli.advise import phase_times

    topology = placements[0].topology
    chosen = find_model(model, None if isinstance(device, str) else device.experts.dtype)
    layer, _ = phase_times(device, "sglang", ["prefill"], chosen, topology)["prefill"]
    judged = judge_by(trace, chosen, topology.num_ranks, tokens)
    return near_saves(Question(chosen, layer, topology, tokens), judged, placements, rows)


def without_lost(ranks: int, lost: Sequence[int]) -> tuple[bool, ...] | None:
    """Return which ranks are alive; None = all."""
    for rank in lost:
        if not 0 <= rank < ranks:
            raise ValueError(f"lost_rank must be in 0..{ranks - 1}, got {rank}")
    return tuple(rank not in lost for rank in range(ranks)) if lost else None


def read_before(path: str, ranks: int) -> Placement:
    """Return the placement of a file; if the file states a number of ranks, that number is used."""
    from isoload.placement.engine_files import UnknownRanks
    from isoload.placement.files import read_placement

    try:
        return read_placement(path)
    except UnknownRanks:
        return read_placement(path, ranks)


def slots_of_before(start: Placement, topology: Topology) -> int:
    """Return the default slots per rank: those of the placement, or the same total on another number of ranks."""
    if start.topology.num_ranks == topology.num_ranks:
        return start.slots_per_rank
    added = start.spare_slots + start.num_shared
    return -(-start.topology.num_ranks * (start.slots_per_rank - added) // topology.num_ranks) + added


def arrival_line(start: Placement, placement: Placement, expert_bytes: int) -> str:
    from isoload.analysis.judge import arrivals

    count = arrivals(start, placement)  # [L, R]
    busiest = int(count.sum(0).max())
    size = f", {busiest * expert_bytes / 2**30:.2f} GiB" if expert_bytes else ""
    return f"; {count.sum(1).mean():.1f} experts of a layer arrive, on the busiest rank {busiest} of all layers{size}"


def memory_budget(
    memory: int, size: int, name: str, options: dict[str, Any], num_layers: int, replicas: int | None = None
) -> dict[str, int]:
    """Return the placer's option ``replicas``, from bytes of a rank and of an expert or from their number."""
    from isoload.placers import PLACERS

    has_option = "replicas" in [option.name for option in fields(PLACERS[name])]
    if replicas is not None:
        if memory or "replicas" in options:
            other = f"replica_memory {memory}" if memory else "the placer's option replicas"
            raise ValueError(f"replicas {replicas} cannot be combined with {other}: leave one of them out")
        if not has_option:
            raise ValueError(
                f"replicas must be left out for placer {name}, which has no budget, got {replicas}"
            )
        return {"replicas": replicas}
    if memory == 0:
        return {}
    if memory < 0 or size < 1:
        raise ValueError(
            f"replica_memory must be at least 0 and come with expert_bytes, got {memory} and {size}"
        )
    if "replicas" in options:
        raise ValueError(
            f"replica_memory {memory} cannot be combined with the placer's option replicas: leave one of them out"
        )
    if not has_option:
        raise ValueError(f"replica_memory must be 0 for placer {name}, which has no budget, got {memory}")
    return {"replicas": min(memory // size, num_layers)}


def memory_line(memory: dict[str, Any]) -> str:
    replicas, more = (f"{memory[key] / 2**30:.2f} GiB" for key in ("replica_bytes", "one_slot_more_bytes"))
    line = f"replicas take {replicas} of the rank with most, one more slot in every layer {more}"
    if (tokens := memory["kv_tokens"]) is None:
        return line
    return f"{line}: the difference holds {tokens:,} tokens of KV cache in bfloat16"


def check_absent(holes: bool, rectangle: bool, file_format: str) -> None:
    """Raise ValueError if the options for absent slots do not fit each other or the format."""
    from isoload.placement.files import FORMATS

    if holes and rectangle:
        raise ValueError("holes must be left out with rectangle, which fills all slots")
    if holes and not FORMATS[file_format].holes:
        formats = ", ".join(name for name, form in FORMATS.items() if form.holes)
        raise ValueError(
            f"holes must come with a format that can have absent slots ({formats}; isoload's own always can), got "
            f"{file_format}"
        )


@dataclass(frozen=True, eq=False)
class Way:
    """A placer with its options, and the slots per rank (None: the placer chooses them): one row of the table."""

    label: str
    name: str
    slots: int | None
    options: dict[str, Any] = field(default_factory=dict)
    rectangle: bool = False  # whether absent slots get replicas

    def place(self, counts: Any, topology: Topology) -> Placement:
        from isoload.analysis.judge import without_replicas
        from isoload.placers import place, rectangle

        placement = place(counts, topology, self.slots, self.name, **self.options)
        if self.rectangle:
            return rectangle(placement, counts)
        return without_replicas(placement) if self.label == options.BASELINE else placement


def free_slots(name: str, options: dict[str, Any], trace: Trace, topology: Topology) -> int | None:
    """Return the default slots per rank, or None for a placer that chooses their number."""
    from isoload.analysis.simulate import default_slots_per_rank
    from isoload.placers import make_placer

    placer = make_placer(name, {key: value for key, value in options.items() if key != "before"})
    return None if placer.has_budget else default_slots_per_rank(trace.num_experts, topology.num_ranks)


@dataclass(frozen=True, eq=False)
class Comparison:
    """What ways are compared on. Figures are of placements made without the batches on which they are judged."""

    traces: Sequence[Trace]  # the first one is judged
    topology: Topology
    calibrate: str
    expert_bytes: int  # of one expert in one layer; 0 = unknown
    old: Placement | None  # of --before or --against, with which slots are compared
    judged: dict[str, tuple[Any, Any]] = field(default_factory=dict)  # results of imbalances, by label

    def imbalances(self, way: Way) -> tuple[Any, Any]:
        """Return the imbalance [batches, L] on unseen batches, copies spread evenly and split exactly."""
        from isoload.analysis.judge import unseen_imbalances
        from isoload.placers import PLACERS

        if way.label not in self.judged:
            kind = PLACERS[way.name]
            make = partial(way.place, topology=self.topology)
            self.judged[way.label] = unseen_imbalances(
                self.traces[0], self.calibrate, make, kind.needs_tokens, kind.uses_tokens
            )
        return self.judged[way.label]

    def best(self, ways: Sequence[Way]) -> Way:
        """Return the way with the lowest imbalance, split exactly; of equal ones the last."""
        return min(reversed(ways), key=lambda way: self.imbalances(way)[1].mean())

    def row(self, label: str, placement: Placement, even: Any, exact: Any, written: bool = False) -> Row:
        """Return a row of the table: means over unseen batches and layers, and under by_batch [batches][L]."""
        from isoload.analysis import judge

        replicas, changed = judge.most_replicas(placement), None
        if self.old is not None and self.old.num_slots == placement.num_slots:
            changed = judge.changed_slots(self.old, placement)
        return {
            "placer": label,
            "written": written,
            "even": float(even.mean()),
            "exact": float(exact.mean()),
            "replicas": judge.count_replicas(placement),
            "replica_bytes": round(replicas * self.expert_bytes) if self.expert_bytes else None,
            "changed": changed,
            "by_batch": {"even": even.tolist(), "exact": exact.tolist()},
        }

    def rows(
        self, ways: Sequence[Way], best: Way, written: Placement, keep_going: bool
    ) -> tuple[list[Row], dict[str, str]]:
        """Return the rows of the ways, and with keep_going by label why a placer cannot place this trace."""
        rows, refused = [], {}
        for way in {way.label: way for way in ways}.values():
            try:
                imbalances = self.imbalances(way)
                placement = written if way is best else way.place(self.traces, self.topology)
            except (ValueError, ImportError) as error:
                if not keep_going:
                    raise
                refused[way.label] = str(error)
            else:
                rows.append(self.row(way.label, placement, *imbalances, written=placement is written))
        return rows, refused


def device_of(gpu: str | None, times: str | None) -> str | Times | None:
    """Return the GPU whose shipped times are used, or the user's own times."""
    from isoload.times import load

    if gpu is not None and times is not None:
        raise ValueError("gpu must be left out with times, which are of your GPUs")
    return gpu if times is None else load(times)


def speeds_of(device: str | Times | None, ranks: int, times: str | None) -> Any:
    """Return the ranks' measured speeds, if they differ; else None."""
    speeds = None if device is None or isinstance(device, str) else device.rank_speeds
    if speeds is not None and len(speeds) != ranks:
        raise ValueError(
            f"times must be of {ranks} ranks, got {times}, where {len(speeds)} ranks have different speeds: run "
            "isoload measure on the ranks that will serve, or pass gpu"
        )
    return speeds


def place(
    traces: options.TracePaths,
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The placement file.")],
    ranks: options.Ranks,
    ranks_per_node: options.RanksPerNode = 0,
    slots_per_rank: options.SlotsPerRank = 0,
    placer: Annotated[
        str | None,
        Option(
            help=f"One of {options.PLACERS}, with options as name:option=value. Default: {' or '.join(BOTH)}, "
            "the one with the lower imbalance on unseen batches, split exactly."
        ),
    ] = None,
    placers: Annotated[
        str | None,
        Option(
            metavar="LIST|all",
            help="More placers to compare with, named as for --placer; all: every placer, with the reason if one "
            "cannot place this trace.",
        ),
    ] = None,
    plugin: options.Plugins = None,
    file_format: options.FormatName = "isoload",
    before: Annotated[
        str | None,
        Option(metavar="FILE", help="A placement to start from, on the same or another number of ranks."),
    ] = None,
    before_ranks: Annotated[
        int | None,
        options.Range(1),
        Option(help="R of the --before file, if the file does not state it. Default: --ranks."),
    ] = None,
    lost_rank: Annotated[
        list[int] | None,
        Option(metavar="RANK", help="A lost rank, which gets no expert; may be given several times."),
    ] = None,
    against: Annotated[str | None, Option(metavar="FILE", help="A placement to compare with.")] = None,
    calibrate: Annotated[
        str | None,
        Option(
            help=f"Batches of the first trace held out for judging: {options.CALIBRATIONS}. {options.CALIBRATE_DEFAULT}"
        ),
    ] = None,
    expert_bytes: Annotated[
        int, options.Range(0, 2**50), Option(help="Bytes of one expert's weights; 0: unknown.")
    ] = 0,
    replica_memory: Annotated[
        int,
        options.Range(0, 2**50),
        Option(
            help="Bytes per rank for replicas of all layers: fewer slots, where they help most. Ragged placement."
        ),
    ] = 0,
    replicas: Annotated[
        int | None,
        options.Range(0, 2**20),
        Option(metavar="N", help="As --replica-memory, as a number of replicas per rank over all layers."),
    ] = None,
    holes: Annotated[
        bool,
        Option(
            "--holes",
            help="Write a ragged placement for SGLang, which then needs ISOLOAD_RAGGED=pages to start.",
        ),
    ] = False,
    rectangle: Annotated[
        bool,
        Option(
            "--rectangle",
            help="Fill the absent slots of a ragged placement with the replicas that help most.",
        ),
    ] = False,
    stages: options.Stages = False,
    same_layers: options.SameLayers = False,
    allow_missing_ranks: options.AllowMissingRanks = False,
    first_moe_layer: options.FirstMoeLayer = None,
    model: options.ModelLayers = None,
    extra_layers: options.ExtraLayers = None,
    gpu: Annotated[
        str | None, Option(help="With --model: print the milliseconds that near saves on this GPU.")
    ] = None,
    times: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help="File of isoload measure with times of your GPUs; replaces --gpu. Faster ranks get more load.",
        ),
    ] = None,
    tokens_per_rank: Annotated[
        int, options.Range(1), Option(help="With --gpu or --times: tokens per rank in a step of prefill.")
    ] = 4096,
    json: options.JsonTarget = None,
    html: options.HtmlTarget = None,
    force: options.Force = False,
) -> None:
    """Turn recorded loads into a placement file, and print the imbalance that it achieves.

    Experts are placed by all batches; the figures are of placements made without the batches on which they are judged.
    All recordings have the same weight.
    """
    from isoload.analysis import judge
    from isoload.analysis.batches import strictest
    from isoload.analysis.models import find_model
    from isoload.cli.arguments import Reading, check_targets, load_traces, source_line, with_extra
    from isoload.cli.options import load_plugins
    from isoload.placement.files import check_format, read_placement, write_placement
    from isoload.placers import PLACERS, parse_placer
    from isoload.topology import Topology

    load_plugins(plugin)
    check_targets([*traces, before, against, times], force, json, str(output), html)
    device = device_of(gpu, times)
    if gpu is not None and model is None:
        raise ValueError(f"model must be given with gpu, whose experts are computed, got {gpu} alone")
    check_format(file_format, output, "output")
    check_absent(holes, rectangle, file_format)
    reading = Reading(stages, same_layers, allow_missing_ranks, first_moe_layer, model)
    loaded = load_traces(traces, reading)
    first = loaded[0]
    held_back = calibrate or strictest(first.num_batches, first.cluster)
    alive, speeds = without_lost(ranks, lost_rank or ()), speeds_of(device, ranks, times)
    topology = Topology(ranks, ranks_per_node, alive=alive, speeds=speeds)
    start, rival = (
        None if read is None else reading.stated(read).for_trace(first, option)
        for option, read in (
            ("before", read_before(before, before_ranks or ranks) if before else None),
            ("against", read_placement(against, topology) if against else None),
        )
    )
    has_budget = replica_memory > 0 or replicas is not None
    slots = slots_per_rank or (0 if start is None or has_budget else slots_of_before(start, topology))
    # Only scenario starts from a placement or keeps to a budget of replicas.
    either = BOTH if start is None and not has_budget else BOTH[-1:]
    tried = []
    for text in either if placer is None else [placer]:
        name, chosen = parse_placer(text)
        chosen |= memory_budget(replica_memory, expert_bytes, name, chosen, first.num_layers, replicas)
        if start is not None:
            chosen["before"] = start
        tried.append(Way(text, name, slots or free_slots(name, chosen, first, topology), chosen, rectangle))
    compared = Comparison(loaded, topology, held_back, expert_bytes, rival if start is None else start)
    best = compared.best(tried)
    placement = best.place(loaded, topology)
    near_rows = placement.provenance.get("rows_to_other_nodes")
    plain = replace(best, label=f"{best.label}, near=False", options=best.options | {"near": False})
    ways = [Way(options.BASELINE, "trivial", None), Way("eplb", "eplb", placement.slots_per_rank)]
    ways += [plain] if near_rows else []
    every = placers == "all"
    for text in PLACERS if every else filter(None, map(str.strip, (placers or "").split(","))):
        name, more = parse_placer(text)
        ways.append(Way(text, name, slots or free_slots(name, more, first, topology), more))
    rows, refused = compared.rows([*ways, *tried], best, placement, keep_going=every)
    if against is not None and rival is not None:
        if rival.num_routed != first.num_experts:
            raise ValueError(f"against must have {first.num_experts} routed experts, got {rival.num_routed}")
        even, exact = (f(rival, first.batch_counts()) for f in (judge.even_imbalance, judge.exact_imbalance))
        rows.append(compared.row(against, rival, even, exact))
    written = with_extra(placement, extra_layers)
    figures: dict[str, Any] = {"calibrate": held_back, "provenance": placement.provenance, "placers": rows}
    figures |= {"refused": refused} if refused else {}
    figures["start"] = start_of(written, str(output), file_format)
    line = f"{placement_line(placement, str(output))}, placer {best.label}"
    if near_rows:
        peaks = {row["placer"]: row["exact"] for row in rows}
        saved = None
        if device is not None and model is not None:
            pair = plain.place(loaded, topology), placement
            saved = near_ms(first, pair, near_rows, device, model, tokens_per_rank)
            figures["near_saved_ms"] = saved
        line += near_line(near_rows, (peaks[plain.label], peaks[best.label]), saved)
    known = find_model(model) if model is not None and (has_budget or holes) else None
    size = expert_bytes or (0 if known is None else round(known.expert_bytes))
    if size and (has_budget or holes):
        figures["memory"] = judge.replica_memory(placement, size, None if known is None else known.kv_bytes)
        line += f"; {memory_line(figures['memory'])}"
    if start is not None:
        line += arrival_line(start, placement, expert_bytes)
        figures["arrivals"] = judge.arrivals(start, placement).sum(0).tolist()
    batches = "Seen batches" if held_back == "all" else "Unseen batches"
    units = [f"{batches} (calibrate {held_back}): {UNITS}"]
    marked = [row | {"placer": row["placer"] + " (written)" * row["written"]} for row in rows]
    columns = columns_of(FIGURES, marked)
    notes = [f"{label}: n/a: {reason}" for label, reason in refused.items()]
    if near_rows and held_back != "all" and not judge.tokens_are_batches(first):
        notes.append(BY_COUNTS)

    def show(console: Console) -> None:
        say(console, ("", [line, *source_line(loaded)]), columns, ("", units), ("yellow", notes))
        if not any(placement.has_freedom):
            say(console, ("yellow", [NO_FREEDOM.format(more=placement.slots_per_rank + 1)]))
        say_start(figures["start"], console)

    text = ""
    if html:  # before anything is written, because it may fail
        from isoload.cli.pages import place_page

        text = place_page(first, placement, rows, line, page_table(columns), units, figures)
    write_placement(written, output, file_format, holes)
    console = Console(highlight=False, stderr=descriptor_of(str(output)) == 1)
    write_out(json, figures, show, console, html, lambda: text)


def convert(
    source: Annotated[Path, Argument(metavar="FILE", help="A placement file, of any format.")],
    output: Annotated[Path, Option("--output", "-o", metavar="FILE", help="The new file.")],
    file_format: FormatName,
    ranks: Annotated[int | None, Range(1), Option(help="R, if the file does not state it.")] = None,
    first_moe_layer: FirstMoeLayer = None,
    model: ModelLayers = None,
    extra_layers: ExtraLayers = None,
    force: Force = False,
) -> None:
    """Write a placement file in another format.

    SGLang and TensorRT-LLM number layers as the model does, vLLM and vllm-ascend number the MoE layers from 0.
    """
    from isoload.cli.arguments import Reading, check_targets, read_given, with_extra
    from isoload.placement.files import check_format, write_placement
    from isoload.topology import Topology

    check_targets([source], force, output=str(output))
    check_format(file_format, output, "output")
    placement = read_given(str(source), None if ranks is None else Topology(ranks))
    stated = Reading(first_moe_layer=first_moe_layer, model=model).stated(placement)
    placement = with_extra(stated, extra_layers)
    write_placement(placement, output, file_format)
    if str(output) != "-":
        line = f"{placement_line(placement, str(output))}, format {file_format}"
        console = Console(highlight=False)
        say(console, ("", [line]))
        say_start(start_of(placement, str(output), file_format), console)
