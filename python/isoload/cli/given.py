"""Traces and placement files given to commands: their layers, whose ranks they are of, which batches are unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from isoload.files.reading import shown
from isoload.formats import UnknownRanks, read_placement
from isoload.options import parse_layers
from isoload.placers import make_placer, place
from isoload.records.placement import Placement
from isoload.replay.calibration import strictest
from isoload.replay.simulate import ReplaySettings
from isoload.topology import Topology
from isoload.trace import Trace, read_trace
from isoload.trace.top_k import with_top_k


def read_given(path: str, topology: Topology | None) -> Placement:
    """The placement of a file; the topology is for engines' files, which do not say it."""
    try:
        found = read_placement(path)
    except UnknownRanks as error:
        if topology is None:
            raise ValueError(str(error).replace("topology must be given", "--ranks must be given")) from None
        return read_placement(path, topology)
    if topology is not None and topology.num_ranks != found.topology.num_ranks:
        raise ValueError(
            f"ranks must be {found.topology.num_ranks} with placement {path}, got {topology.num_ranks}"
        )
    return found


def given_placement(context: typer.Context, path: str) -> Placement:
    """The placement of a file, which no option of the command may contradict."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name: context.params[name] for name, of in sources.items() if of and of.name == "COMMANDLINE"}
    ranks = given.get("ranks")
    found = read_given(path, None if ranks is None else Topology(ranks, given.get("ranks_per_node", 0)))
    has = {
        "ranks_per_node": found.topology.ranks_per_node,
        "slots_per_rank": found.slots_per_rank,
        "spare_slots": found.spare_slots,
        "shared_experts": found.num_shared,
        "placer": "not given",
    }
    for name, value in has.items():
        if name in given and given[name] != value:
            raise ValueError(f"{name} must be {value} with placement {path}, got {given[name]}")
    return found


def unseen_part(
    placement: Placement, path: str, trace: Trace, settings: ReplaySettings
) -> tuple[ReplaySettings, Placement | None, str]:
    """Return the settings of a replay of a file, the placement if the file itself is replayed, and a line about both.

    The file itself is replayed on all batches, unless ``calibrate`` asks for unseen ones: then the file's placer makes
    placements without the batches that each is replayed on.
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
        seen = "seen: " if trace.name in names else ""
        return settings, placement, f"{seen}{path}, placed on {source}"
    if settings.calibrate in (None, "all"):
        unseen = "" if strict == "all" else f"; --calibrate {strict} judges its placer on unseen batches"
        return settings, placement, f"seen: {path}, placed on these batches{unseen}"
    placer, slots = remade
    note = f", as {path} was on all"
    return replace(settings, placer=placer, slots_per_rank=slots), None, note


def made_by(placement: Placement, trace: Trace) -> tuple[str, int] | None:
    """Return the placer, with options, that makes this placement of all batches of the trace, and its slots per rank.

    The slots are 0 where the placer chooses them. None: no placer is known to make the placement.
    """
    name, options = placement.provenance.get("placer"), placement.provenance.get("options")
    topology = placement.topology
    if not isinstance(name, str) or not isinstance(options, dict) or topology.alive or topology.speeds:
        return None
    others = placement.spare_slots, placement.num_shared
    try:
        planner, default = make_placer(name, options), asdict(make_placer(name, {}))
        slots = 0 if planner.has_budget else placement.slots_per_rank
        counts = trace if planner.needs_tokens else trace.batch_counts()
        again = place(counts, topology, slots or None, name, *others, **options)
        same = again.slot_to_expert.equal(placement.with_layers(trace.layer_ids).slot_to_expert)
    except (ValueError, TypeError, ImportError):
        return None  # made of another trace, by another version, by a placer that is not installed
    given = [f"{key}={value}" for key, value in options.items() if value != default[key]]
    return (":".join([name, *given]), slots) if same else None


def load_trace(path: Path, layers: str | None = None, top_k: str | None = None) -> Trace:
    """The trace of some layers, with K where it is known."""
    with Console(stderr=True).status(f"reading {escape(str(path))}"):
        trace = with_top_k(read_trace(path), top_k)
    return trace if layers is None else trace.select_layers(parse_layers(layers, trace.num_layers))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr, gone when done and absent where stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
