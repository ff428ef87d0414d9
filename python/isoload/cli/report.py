"""``isoload report``: the engine's routing that shadow mode recorded, compared with isoload's plans; and advice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, Option

from isoload.cli import options
from isoload.cli.advise import Answered, PhaseQuestion, answer, one_placement
from isoload.cli.place import device_of
from isoload.cli.tables import Figure, Row, columns_of, page_table, say, write_out
from isoload.wording import amount, between

if TYPE_CHECKING:
    from isoload.analysis.rank_loads import Recorded
    from isoload.analysis.server import Phase
    from isoload.times import Times

FIGURES = (
    Figure("phase", "", "phase"),
    Figure("passes", "", "passes"),
    Figure("tokens_per_rank", "", "tokens"),
    *(
        Figure(f"{kind}.{key}", group, title, ".3f")
        for kind, group in (("routed", "max/mean as routed"), ("planned", "as isoload plans"))
        for key, title in (("mean", "mean"), ("half", "half"), ("nine_in_ten", "9 in 10"), ("worst", "worst"))
    ),
    Figure("saved", "ms", "saved"),
)
UNITS = (
    "Rank loads on the engine's own placement, each layer a mean over the recorded passes: half of the layers are at "
    "most at the first figure, nine in ten at the second. isoload: policy exact on the same copies."
)
SAVED = (
    "ms saved: of a step's MoE layers if isoload chose the replicas and no expert moved, planning included; modelled "
    "from measured kernels as in advise. The advice below also moves experts."
)
SAME = (
    "All ranks have the same tokens, so no rank is the source of a copy: times assume an equal part on each rank, "
    "as with an all-to-all."
)


def rows_of(recorded: Recorded, phases: list[Phase], saved: dict[str, tuple[float, float]]) -> list[Row]:
    """Return a row for each phase, as --json writes it."""
    return [
        {
            "phase": part.name,
            "passes": len(part.batches),
            "tokens_per_rank": part.tokens,
            "routed": part.quantiles(part.routed),
            "planned": part.quantiles(part.planned),
            "layers": list(recorded.trace.layer_ids),
            "routed_by_layer": part.routed.tolist(),
            "planned_by_layer": part.planned.tolist(),
            "saved_ms": saved.get(part.name),
            "saved": between(*saved[part.name]) if part.name in saved else None,
        }
        for part in phases
    ]


def section_of(rows: list[Row], notes: list[str]) -> str:
    """Return the section of the page: the table, and a chart for each phase."""
    from isoload.analysis.pages import prose, section
    from isoload.cli.pages import MEAN, lines

    charts = [
        lines(f"Imbalance by layer, {row['phase']}", MEAN,
              {"as routed": row["routed_by_layer"], "isoload": row["planned_by_layer"]}, row["layers"], best="isoload")
        for row in rows
    ]  # fmt: skip
    return section("As recorded", page_table(columns_of(FIGURES, rows, wide=True)), *charts, prose(notes))


def report(
    recorded: Annotated[
        Path, Argument(metavar="FOLDER|FILE", help="Folder of ISOLOAD_RECORD, or one of its files.")
    ],
    gpu: Annotated[
        str | None, Option(help="Kind of GPU, as for advise; with --model step times are modelled.")
    ] = None,
    times: Annotated[
        str | None,
        Option(metavar="FILE", help="File of isoload measure with times of your GPUs; replaces --gpu."),
    ] = None,
    model: Annotated[
        str | None, Option(metavar="NAME|FILE", help="A model's name, or its config.json.")
    ] = None,
    engine: Annotated[str, Option(help="sglang or vllm.")] = "sglang",
    phase: Annotated[
        str | None, Option(help="prefill or decode, for advice on one phase. Default: all recorded phases.")
    ] = None,
    dtype: Annotated[str | None, Option(help="Dtype of the experts' weights, as for advise.")] = None,
    step_ms: Annotated[
        float | None,
        options.Range(0.001, 10**7),
        Option(help="Time of a whole step that you measured, in milliseconds."),
    ] = None,
    trace: Annotated[
        str | None,
        Option(metavar="FILE", help="Write all ranks' counts to this new .npz, which replay and place read."),
    ] = None,
    wide: options.Wide = False,
    json: options.JsonTarget = None,
    html: options.HtmlTarget = None,
    force: options.Force = False,
) -> None:
    """Report what isoload would have saved on traffic that an engine recorded in shadow mode."""
    from isoload.analysis.rank_loads import read_recorded
    from isoload.analysis.server import phases
    from isoload.cli.arguments import Reading, check_targets
    from isoload.traces import write_trace

    check_targets([recorded, times], force, json, html=html)
    if trace is not None and not force and Path(trace).exists():
        raise ValueError(f"trace must be a new file, or --force be given, got {trace!r}")
    device = device_of(gpu, times)
    if (device is None) != (model is None):
        raise ValueError(f"gpu must come with model, got {gpu or times} and {model}")
    if html is not None and device is None:
        raise ValueError("html must come with --gpu and --model, got neither")
    recording = read_recorded(recorded)
    recorded_phases = phases(recording)
    names = [part.name for part in recorded_phases]
    if phase is not None and phase not in names:
        raise ValueError(f"phase must be one that was recorded, {' or '.join(names)}, got {phase!r:.40}")
    if trace is not None:
        write_trace(recording.trace, trace)
    saved: dict[str, tuple[float, float]] = {}
    advice, gaps = None, list[str]()
    if device is not None and model is not None:
        chosen = [part for part in recorded_phases if phase in (None, part.name)]
        source = None if trace is None else Reading().shell_words([Path(trace)], recording.trace, model)
        saved, advice, gaps = modelled(
            recording, recorded_phases, chosen, device, model, engine, dtype, step_ms, source
        )
    rows, (passes, files) = rows_of(recording, recorded_phases, saved), recording.left_out
    notes = [UNITS, *([SAVED] if advice else [])]
    possible_warnings = {
        f"{passes} passes are skipped, because not every rank recorded them.": passes,
        f"{files} files of earlier runs are skipped.": files,
        SAME: advice and recording.same_tokens,
    }
    warnings = [*(text for text, holds in possible_warnings.items() if holds), *gaps]
    figures: dict[str, Any] = {"phases": rows, "left_out": {"passes": passes, "files": files}}
    figures |= {"warnings": warnings, "advice": None if advice is None else advice.figures}

    def show(console: Console) -> None:
        say(console, columns_of(FIGURES, rows, wide), ("dim", notes), ("yellow", warnings))
        if advice is not None:
            advice.show(console, wide=wide)

    def page() -> str:
        assert advice is not None
        return advice.page(section_of(rows, [*notes, *warnings]), figures=figures)

    write_out(json, figures, show, html=html, page=page, more=[trace] if trace else [])


def modelled(
    recorded: Recorded,
    recorded_phases: list[Phase],
    chosen: list[Phase],
    gpu: str | Times,
    model: str,
    engine: str,
    dtype: str | None,
    step_ms: float | None,
    source: str | None,
) -> tuple[dict[str, tuple[float, float]], Answered, list[str]]:
    """Return by phase the milliseconds of a step that isoload saves, the advice, and sentences on missing constants."""
    from isoload.analysis.advice import Question, saved_ms
    from isoload.analysis.judge import judge_by
    from isoload.analysis.models import find_model, layer_times, measured_layer
    from isoload.analysis.server import served_runs, step_weights, trace_of
    from isoload.cli.advise import phase_times
    from isoload.times import LayerTime

    described, topology = find_model(model, dtype), recorded.topology
    constants, gaps = dict[str, LayerTime](), list[str]()
    if isinstance(gpu, str):
        constants, gaps = layer_times(gpu, engine, chosen[0].name, described, topology)
    else:
        layer, _ = measured_layer(gpu, described, topology)
        constants = {part.name: layer for part in recorded_phases}
    with_constants = [part for part in chosen if part.name in constants]  # the gaps are printed as warnings
    if not with_constants:
        raise ValueError(f"phase {chosen[0].name} has no constants: {' '.join(gaps)}")
    chosen = with_constants
    timed = phase_times(gpu, engine, [part.name for part in chosen], described, topology)
    constants |= {name: layer for name, (layer, _) in timed.items()}
    more: dict[str, Any] = {"gathers": engine == "vllm" or described.is_deepseek}
    more["plan_us"] = None if isinstance(gpu, str) else gpu.plan_us
    questions_by_phase, by_phase, questions = {}, {}, {}
    for part in recorded_phases:
        if part.name in constants:
            question = Question(described, constants[part.name], topology, part.tokens, step_ms, **more)
            questions_by_phase[part.name] = question
            by_phase[part.name] = saved_ms(*served_runs(recorded, part, question), question)
    for part in sorted(chosen, key=lambda phase: phase.name, reverse=True):  # prefill first
        trace, question = trace_of(recorded, part), questions_by_phase[part.name]
        judged = judge_by(trace, described, topology.num_ranks, question.tokens)
        basis = f"the advice on {part.name} is from {amount(len(part.batches), 'pass', 'passes')}"
        questions[part.name] = PhaseQuestion(question, trace, judged, [basis, *timed[part.name][1]])
    passes = {part.name: len(part.batches) for part in chosen}
    weights = step_weights(passes.get("prefill", 0) / sum(passes.values()))
    advice = answer(one_placement(questions), engine, gpu, None, source, weights=weights)
    return by_phase, advice, gaps
