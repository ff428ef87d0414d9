"""Traces and placement files given to commands, and the files that a command may write.

A command never overwrites a file that it reads, and overwrites another valuable file only with --force.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from isoload.analysis.batches import strictest
from isoload.analysis.models import find_moe_layers
from isoload.analysis.pages import check_drawing, is_page
from isoload.analysis.simulate import ReplaySettings
from isoload.checks import parse_layers
from isoload.files import check_target, descriptor_of, parse_json, printable, read_text
from isoload.placement.engine_files import UnknownRanks
from isoload.placement.files import read_placement, recognise
from isoload.placement.placement import Placement
from isoload.placers import make_placer, place
from isoload.topology import Topology
from isoload.traces import READ_AS, Trace, check_layers, joined_trace, read_recordings
from isoload.traces.identity import spans
from isoload.traces.record import with_top_k
from isoload.wording import shown

Record = TypeVar("Record", Trace, Placement)
WAYS = ("stages", "same_layers", "allow_missing_ranks")  # options of read_recordings


def read_given(path: str, topology: Topology | None) -> Placement:
    """Return the placement of a file; the topology is for engines' files, which do not state it."""
    try:
        placement = read_placement(path)
    except UnknownRanks as error:
        if topology is None:
            raise ValueError(str(error).replace("topology must be given", "--ranks must be given")) from None
        return read_placement(path, topology)
    if topology is not None and topology.num_ranks != placement.topology.num_ranks:
        raise ValueError(
            f"ranks must be {placement.topology.num_ranks} with placement {path}, got {topology.num_ranks}"
        )
    return placement


def given_placement(context: typer.Context, path: str) -> Placement:
    """Return the placement of a file; no option of the command may contradict it."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    chosen = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    options = {name: context.params[name] for name in chosen}
    ranks = options.get("ranks")
    placement = read_given(path, None if ranks is None else Topology(ranks, options.get("ranks_per_node", 0)))
    has = {
        "ranks_per_node": placement.topology.ranks_per_node,
        "slots_per_rank": placement.slots_per_rank,
        "spare_slots": placement.spare_slots,
        "shared_experts": placement.num_shared,
        "placer": "not given",
    }
    for name, value in has.items():
        if name in options and options[name] != value:
            raise ValueError(f"{name} must be {value} with placement {path}, got {options[name]}")
    return placement


def unseen_part(
    placement: Placement, path: str, trace: Trace, settings: ReplaySettings
) -> tuple[ReplaySettings, Placement | None, str]:
    """Return the settings of a replay of a file, the placement if the file itself is replayed, and a line about both.

    If ``calibrate`` requires unseen batches, the file's placer makes placements without the batches that are replayed.
    """
    remade = made_by(placement, trace)
    strict = strictest(trace.num_batches, trace.cluster)
    known = placement.provenance.get("traces")
    names = known if isinstance(known, list) else []
    if remade is None:
        if settings.calibrate not in (None, "all"):
            raise ValueError(
                f"calibrate must be all with placement {path}, which no placer makes of this trace alone, "
                f"got {settings.calibrate}"
            )
        source = ", ".join(map(shown, names)) or "loads that it does not name"
        label = "seen: " if trace.name in names else ""
        return settings, placement, f"{label}{path}, placed on {source}"
    if settings.calibrate in (None, "all"):
        unseen = "" if strict == "all" else f"; --calibrate {strict} judges its placer on unseen batches"
        return settings, placement, f"seen: {path}, placed on these batches{unseen}"
    placer, slots = remade
    note = f", as {path} was on all"
    return replace(settings, placer=placer, slots_per_rank=slots), None, note


def made_by(placement: Placement, trace: Trace) -> tuple[str, int] | None:
    """Return the placer that makes this placement of all batches, and its slots per rank (0: the placer's choice)."""
    name, options = placement.provenance.get("placer"), placement.provenance.get("options")
    topology = placement.topology
    if not isinstance(name, str) or not isinstance(options, dict) or topology.alive or topology.speeds:
        return None
    others = placement.spare_slots, placement.num_shared
    try:
        planner, default = make_placer(name, options), asdict(make_placer(name, {}))
        slots = 0 if planner.has_budget else placement.slots_per_rank
        counts = trace if planner.uses_tokens else trace.batch_counts()
        again = place(counts, topology, slots or None, name, *others, **options)
        same = again.slot_to_expert.equal(placement.for_trace(trace).slot_to_expert)
    except (ValueError, TypeError, ImportError):
        return None  # made of another trace, by another version, or by a placer that is not installed
    texts = [f"{key}={value}" for key, value in options.items() if value != default[key]]
    return (":".join([name, *texts]), slots) if same else None


class Reading(NamedTuple):
    """How the files of a command are read, see :func:`isoload.read_trace`, and the statement about their model."""

    stages: bool = False
    same_layers: bool = False
    allow_missing_ranks: bool = False
    first_moe_layer: int | None = None
    model: str | None = None

    def shell_words(self, paths: Sequence[Path], trace: Trace, model: str) -> str:
        """Return files, as TRACE if they are long, and options with which `isoload place` reads them for SGLang."""
        options = [f"--{name.replace('_', '-')}" for name in WAYS if getattr(self, name)]
        if trace.identity.numbering != "model":
            options += ["--model", model]
        files = shlex.join(min(str(path), os.path.relpath(path), key=len) for path in paths)
        return " ".join(["TRACE" if len(files) > LONGEST_FILES else files, *map(shlex.quote, options)])

    def stated(self, record: Record) -> Record:
        first = self.first_moe_layer
        if self.model is None:
            return record.with_moe_layers(first)
        if first is not None:
            raise ValueError(f"first_moe_layer must come without model, got {first} and {self.model}")
        name, moe_layers = find_moe_layers(self.model)
        return record.with_moe_layers(moe_layers=moe_layers, model=name)


LONGEST_FILES = 60  # characters of a trace's files in a printed command
AS_FOUND = Reading()


def load_traces(paths: Sequence[Path], reading: Reading, any_layers: bool = False) -> list[Trace]:
    """Return the trace of each recording; warnings go to stderr, a line each. any_layers: accept any number."""
    console = Console(stderr=True, highlight=False)
    shown_paths = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files"
    status = console.status(f"reading {escape(printable(shown_paths))}")
    with warnings.catch_warnings(record=True) as caught, status:
        warnings.simplefilter("always", UserWarning)
        traces = read_recordings(list(paths), **{name: getattr(reading, name) for name in WAYS})
    for warning in caught:
        console.print(Text(printable(f"warning: {warning.message}"), style="yellow"), soft_wrap=True)
    for trace in traces:
        if not any_layers:
            check_layers(trace, "--layers names the layers of a model with so many")
    return [reading.stated(trace) for trace in traces]


def load_trace(
    paths: Sequence[Path], layers: str | None = None, top_k: str | None = None, reading: Reading = AS_FOUND
) -> Trace:
    """Return one trace of all recordings, of some layers, with K where it is known."""
    trace = with_top_k(joined_trace(load_traces(paths, reading, layers is not None)), top_k)
    return trace if layers is None else trace.select_layers(parse_layers(layers, trace.num_layers))


def with_extra(placement: Placement, extra_layers: str | None) -> Placement:
    """Return the placement with the layers of --extra-layers, if any."""
    if extra_layers is None:
        return placement
    parts = extra_layers.split(",")
    numbers = [int(part) if part.strip().isdecimal() and len(part) < 9 else -1 for part in parts]
    if min(numbers) < 0:
        raise ValueError(f"extra_layers must be layer numbers such as 61,62, got {shown(extra_layers)}")
    return placement.with_extra_layers(numbers)


def record_facts(trace: Trace) -> dict[str, str]:
    """Return facts of a record, by label: its layers and their numbering, ranks, stages, dropped parts."""
    notes = trace.provenance
    model = trace.identity.model or notes.get("model")
    facts = {
        "layers": trace.identity.describe(trace.layer_ids),
        "batches": f"{trace.num_batches}, {trace.num_experts} experts, "
        + (f"top-{trace.top_k}" if trace.top_k else "top-k not recorded"),
        "model": shown(model).strip("'") if model else "not recorded",
    }
    if READ_AS in notes:
        facts["read as"] = str(notes[READ_AS])
    ranks = notes.get("ranks")
    if isinstance(ranks, list) and ranks and all(type(rank) is int for rank in ranks):
        facts["ranks"] = f"{spans(ranks)}, each with a file of its own"
    counted = {
        "runs": "runs of the engine in one file",
        "pipeline_stages": "pipeline stages",
        "incomplete_passes_dropped": "passes that not all ranks recorded",
        "empty_steps_dropped": "steps without copies",
        "empty_iterations_dropped": "iterations without copies",
        "torn_lines_dropped": "torn lines",
    }
    for key, what in counted.items():
        number = notes.get(key)
        if type(number) is int and number > (1 if key in ("runs", "pipeline_stages") else 0):
            facts["dropped" if key.endswith("dropped") else "holds"] = f"{number} {what}"
    return facts


def placement_facts(placement: Placement) -> dict[str, str]:
    made_by = placement.provenance.get("placer") or placement.provenance.get("format")
    spare = placement.spare_slots * placement.topology.num_ranks * placement.num_layers
    absent = int((placement.slot_to_expert < 0).sum()) - spare
    facts = {
        "layers": placement.identity.describe(placement.layer_ids),
        "experts": f"{placement.num_routed} routed, {placement.num_shared} shared",
        "slots": f"{placement.slots_per_rank} per rank, {placement.spare_slots} of them spare",
    }
    if absent:
        facts["absent slots"] = f"{absent} of {placement.slot_to_expert.numel()}, without memory"
    made_by = shown(made_by).strip("'") if made_by else "not recorded"
    return facts | {"model": placement.identity.model or "not recorded", "made by": made_by}


def source_line(traces: Sequence[Trace]) -> list[str]:
    """Return a line that states how several files were read; none for a single file."""
    readings = [str(trace.provenance[READ_AS]) for trace in traces if READ_AS in trace.provenance]
    if len(traces) > 1:
        readings = [f"{len(traces)} recordings", *dict.fromkeys(readings)]
    return [f"read as {': '.join(readings)}"] if readings else []


@contextmanager
def progress(what: str, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, which disappears when done; none if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    disable = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


FIGURES = (  # keys of the output of --json, by which such a file is recognised
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
    """Reject files that a command must not write, before any work is done: those in a folder that is read, the .json of
    the same stem as an .npz, and, without force, a placement or a file of another kind.
    """
    named = {"output": output, "json": json, "html": html}
    targets = {name: target for name, target in named.items() if target is not None}
    if html is not None:
        check_drawing()
    for name, target in targets.items():
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
    for (first, target), (other, another) in combinations(targets.items(), 2):
        if _place(target) == _place(another):
            raise ValueError(f"{first} and {other} must be two files, got {target!r} and {another!r}")


def _belongs(target: str, path: Path) -> bool:
    there, owned = Path(os.path.realpath(target)), [path]
    if path.suffix == ".npz":
        owned += [path.with_suffix(".json"), path.resolve().with_suffix(".json")]
    return any(
        file.resolve() in (there, *there.parents) or _place(str(file)) == _place(target) for file in owned
    )


def _check_old(name: str, target: str, force: bool) -> None:
    """Reject a file that must not be replaced: figures and pages can be made again, but a placement may be in use."""
    kind, holds = KINDS[name]
    try:
        same = bool(holds(read_text(Path(target))))
    except ValueError:
        same = False
    if name == "output" and not force:
        raise ValueError(f"{name} must be a new file, or --force be given to replace {kind}, got {target!r}")
    if not same and (name == "output" or not force):
        more = "" if name == "output" else ", which takes --force"
        raise ValueError(f"{name} must be a new file or replace {kind}, got {target!r} of another kind{more}")


def _holds_figures(content: Any) -> bool:
    rows = content if isinstance(content, list) and content else [content]
    return any(all(isinstance(row, dict) and kind <= row.keys() for row in rows) for kind in FIGURES)


# Content of an option's file, and a function that recognises it.
KINDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "output": ("a placement", recognise),
    "json": ("figures", lambda text: _holds_figures(parse_json(text))),
    "html": ("a page", is_page),
}


def _place(target: str) -> object:
    """Return a value that is equal for two names of one file, or of one stream."""
    number = descriptor_of(target)
    if number is not None:
        return number
    return os.stat(target)[1:3] if os.path.exists(target) else os.path.realpath(target)
