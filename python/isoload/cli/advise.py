"""``isoload advise``: whether to turn it on, with which slots and flags, and how many milliseconds it saves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from isoload.cli import options
from isoload.cli.tables import Column, Figure, Row, columns_of, page_table, say, write_out
from isoload.files.writing import printable

if TYPE_CHECKING:
    from isoload.advise import Advice, Judged, Question
    from isoload.advise.advice import Step
    from isoload.trace import Trace

GIB = 2.0**30
SHOWN = 6  # rows of the table, beside what runs now
FIGURES = (
    Figure("label", "", "placement, replicas by"),
    Figure("ms_per_layer", "ms", "a layer", ".3f", wide=True),
    Figure("ms", "ms", "a step"),
    Figure("saved", "ms", "saved"),
    Figure("imbalance", "", "max/mean", ".3f"),
    Figure("gib", "slots", "GiB"),
    Figure("requests", "slots", "requests"),
    Figure("node_rows", "rows", "to nodes", "%"),
)
UNITS = (
    "Modelled from measured kernels, mean over {batches} batches that no placement has seen. A step: the MoE layers "
    "alone, planning included; ranges from an all-to-all that even ranks take to one that follows the busiest. "
    "Planning takes {low:g} to {high:g} µs a layer: its kernels on an H100, and 10 to 25 for a gather of loads. "
    "requests: of {context} tokens, whose KV cache the slots take the room of."
)
WHOLE = (
    "Percentages are of a whole step that is modelled: these layers and {dense:g} ms for attention and the dense part, "
    "as --dense-ms says, one after the other; scheduling and sampling are not in it. --step-ms takes a measured one. "
    "Stages are those of a rank in the mean; waiting is for slower ranks. In two halves: half a batch computes while "
    "the other exchanges, as SGLang's two-batch overlap orders prefill, and neither slows the other."
)
UPPER = (
    "Percentages are of these layers alone, without attention and the engine's own work: an upper end. "
    "--step-ms takes a step that you have measured."
)


def span_of(ends: tuple[float, float], sign: str = "") -> str:
    """Milliseconds or percent: two digits behind the point of what is below 100."""
    low, high = (format(end, f"{sign}.{0 if max(map(abs, ends)) >= 100 else 2}f") for end in ends)
    return low if low == high else f"{low} .. {high}"


def step_columns(now: Step, best: Step) -> list[Column]:
    """A row for each stage that takes any time."""
    shown = [name for name in now.stages if any((*now.stages[name], *best.stages[name]))]

    def cells(step: Step) -> list[str]:
        return [*(span_of(step.stages[name]) for name in shown), span_of(step.ms), span_of(step.halved_ms)]

    group, stages = "ms, a rank in the mean", Column("", "stage", [*shown, "a whole step", "in two halves"])
    return [stages, Column(group, "now", cells(now)), Column(group, "best", cells(best))]


def rows_of(advice: Advice) -> list[Row]:
    """A row per answer, as --json writes it and the table shows it."""
    asked, rows = advice.question, []
    kept = [*advice.answers[:SHOWN], *([] if advice.now in advice.answers[:SHOWN] else [advice.now])]
    for answer in kept:
        size = answer.slots_bytes
        rows.append(
            {
                **answer.to_json(),
                "label": answer.candidate.label,
                "ms": span_of(answer.ms),
                "saved": "now" if answer is advice.now else span_of(answer.saved_ms, "+"),
                "gib": f"{size / GIB:.1f}" if size else "-",
                "requests": f"{size / asked.context / asked.model.kv_bytes:.0f}" if size else "-",
                "node_rows": answer.node_rows if asked.topology.num_nodes > 1 else None,
            }
        )
    return rows


def verdict_lines(advice: Advice) -> list[str]:
    """Two sentences: what is to be had without isoload, and what it adds."""
    ours, theirs = advice.ours, advice.theirs
    whole = "a modelled step" if advice.steps else "these layers, at most"
    of = "a step" if advice.question.step_ms else whole

    def said(saved: tuple[float, float]) -> str:
        low, high = advice.share(saved)
        return f"{span_of(saved)} ms a step ({span_of((100 * low, 100 * high))} % of {of})"

    first = f"Without isoload: {theirs.candidate.label} saves {said(theirs.saved_ms)}."
    if theirs is advice.now:
        first = "Without isoload nothing in the grid takes less than experts in order do."
    if ours is None:
        return [first, "There is no memory for more slots, so that isoload has no choice."]
    low, high = advice.gain_ms
    gain = f"saves another {said((low, high))}" if low + high > 0 else f"takes {said((-high, -low))} more"
    return [first, f"isoload: {advice.verdict}. {ours.candidate.label} {gain}."]


def asked_lines(advice: Advice) -> list[str]:
    asked, model = advice.question, advice.question.model
    shape = (
        f"{model.name}, {model.layers} layers of {model.experts} experts, top-{model.top_k}, {model.dtype}"
    )
    nodes = asked.topology.num_nodes
    where = (
        f"{asked.topology.num_ranks} ranks on {nodes} node{'s' * (nodes > 1)}, {asked.tokens} tokens a rank"
    )
    return [shape, where, f"{asked.layer.experts.gpu}, {asked.layer.experts.kernel}"]


def units(advice: Advice, batches: int) -> list[str]:
    from isoload.advise.advice import PLAN_US

    asked, low, high = advice.question, PLAN_US["own"][0], PLAN_US["exact"][1]
    notes = [UNITS.format(batches=batches, low=low, high=high, context=asked.context)]
    if not asked.step_ms:
        notes.append(WHOLE.format(dense=asked.dense_ms) if advice.steps else UPPER)
    return notes


def print_advice(
    advice: Advice, batches: int, launch: list[str], said: list[str], console: Console, wide: bool = False
) -> None:
    columns = columns_of(FIGURES, rows_of(advice), wide)
    say(console, ("bold", asked_lines(advice)), columns, ("green", verdict_lines(advice)))
    if advice.steps:
        say(console, step_columns(*advice.steps))
    if launch:
        say(console, ("", [f"To run {advice.answers[0].candidate.label}:"]))
        for line in launch:  # to be copied: never broken
            console.print(Text(f"  {printable(line)}"), soft_wrap=True)
    say(console, ("dim", units(advice, batches)), ("yellow", said))


def warnings(advice: Advice, notes: list[str], guessed: bool = False) -> list[str]:
    found = [f"{note[0].upper()}{note[1:]}." for note in notes]
    if guessed:
        found.append(
            "No trace was given: how experts are loaded is a guess, and so is all that follows from it."
        )
    elif advice.drawn:
        found.append("Tokens were drawn from the counts of whole batches: bursts are understated.")
    if advice.extrapolated:
        found.append("So many copies a rank were not measured on this GPU: times are extrapolated.")
    if advice.question.rebalance_s == 0 and advice.answers[0].candidate.placer != "trivial":
        found.append("No rebalance is in these times: --rebalance-seconds and --every add it.")
    return found


class Answered(NamedTuple):
    """Advice as --json writes it, as a terminal and as a page show it."""

    figures: dict[str, Any]
    show: Callable[..., None]  # of a console, and whether wide
    page: Callable[..., str]  # of sections to stand first


def answer(
    question: Question,
    trace: Trace,
    judged: Judged,
    kernels: tuple[str, str, str | None],
    notes: list[str],
    source: str | None,
    guessed: bool = False,
) -> Answered:
    """The advice on a question.

    kernels: engine, phase and kernel, as the options name them. notes: what of the constants stands for others. source:
    the trace's file; None: there is none.
    """
    from isoload.advise import advise as search
    from isoload.advise import judge_by
    from isoload.advise.constants import layer_times
    from isoload.advise.launch import flags
    from isoload.cli.given import progress

    (engine, phase, kernel), model, topology = kernels, question.model, question.topology
    with progress("candidates") as on_candidate:
        found = search(question, judged, on_candidate)
    best = found.answers[0]
    slots = -(-model.experts // topology.num_ranks) + best.candidate.more
    launch = [] if best is found.now else flags(engine, best.candidate, topology, slots, source, phase)
    said = warnings(found, notes, guessed=guessed)
    times = question.layer.experts
    figures = {
        "model": model.name,
        "gpu": times.gpu,
        "kernel": times.kernel,
        "verdict": found.verdict,
        "gain_ms": found.gain_ms,
        "gain_share": found.share(found.gain_ms),
        "answers": [answer.to_json() for answer in found.answers],
        "steps": dict(zip(("now", "best"), map(vars, found.steps or ()), strict=False)),
        "flags": launch,
        "warnings": said,
    }

    def drawn(*first: str, figures: dict[str, Any] = figures) -> str:
        from isoload.cli.advise_page import Said, advise_page

        kinds, gaps = layer_times(times.gpu, engine, phase, model, topology, kernel)
        candidates = page_table(columns_of(FIGURES, rows_of(found), wide=True), [0])
        notes = [*units(found, len(judged.loads)), *said, *gaps]
        words = Said(asked_lines(found), verdict_lines(found), candidates, launch, notes)
        judge = partial(judge_by, trace, model, topology.num_ranks)
        return advise_page(found, judged, trace.layer_ids, kinds, judge, words, figures, first)

    return Answered(figures, partial(print_advice, found, len(judged.loads), launch, said), drawn)


def advise(
    gpu: Annotated[str, typer.Option(help="The GPU, as isoload.times.available() names it.")],
    model: Annotated[str, typer.Option(metavar="NAME|FILE", help="A model's name, or its config.json.")],
    ranks: Annotated[int, options.Range(1), typer.Option(help="R, ranks of the expert-parallel group.")],
    tokens_per_rank: Annotated[
        int, options.Range(1), typer.Option(help="Of a step: its prompts' tokens, or its requests.")
    ],
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[TRACE...]", help="Recorded routing, as replay takes it. Without one: --skew."
        ),
    ] = None,
    ranks_per_node: options.RanksPerNode = 0,
    engine: Annotated[str, typer.Option(help="sglang or vllm.")] = "sglang",
    phase: Annotated[str, typer.Option(help="prefill or decode: whose kernels run.")] = "prefill",
    dtype: Annotated[
        str | None, typer.Option(help="Of the experts' weights. Default: the published model's.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Of the experts, as isoload.times.available() names it.")
    ] = None,
    step_ms: Annotated[
        float | None,
        options.Range(0.001, 10**7),
        typer.Option(help="A whole step's time as you measured it; percentages are of it."),
    ] = None,
    dense_ms: Annotated[
        float | None,
        options.Range(0.001, 10**7),
        typer.Option(help="Attention and the dense part of a step, all layers: models a whole one."),
    ] = None,
    memory_per_rank: Annotated[
        float | None,
        options.Range(0, 10**6),
        typer.Option(help="GiB of a rank that more slots may take, all layers."),
    ] = None,
    rebalance_seconds: Annotated[
        float, options.Range(0, 10**6), typer.Option(help="What a rebalance takes.")
    ] = 0.0,
    every: Annotated[int, options.Range(0), typer.Option(help="Steps between two rebalances.")] = 0,
    context: Annotated[
        int, options.Range(1), typer.Option(help="Tokens of a request, for what its KV cache takes.")
    ] = 4096,
    skew: Annotated[
        str | None,
        typer.Option(metavar="zipf:POWER", help="In place of a trace, a guess: how shares of experts fall."),
    ] = None,
    drift: Annotated[
        float,
        options.Range(0, 1),
        typer.Option(help="Of --skew: the part of a batch whose experts are others."),
    ] = 0.3,
    stages: options.Stages = False,
    same_layers: options.SameLayers = False,
    allow_missing_ranks: options.AllowMissingRanks = False,
    wide: options.Wide = False,
    json: options.JsonTarget = None,
    html: options.HtmlTarget = None,
    force: options.Force = False,
) -> None:
    """Whether balancing pays on your GPUs: milliseconds of a step, and the flags for the best way to run."""
    from isoload.advise import Question, find_model, guessed_trace, judge_by
    from isoload.advise.constants import layer_time
    from isoload.cli.given import Reading, load_trace
    from isoload.cli.targets import check_targets
    from isoload.topology import Topology

    check_targets(traces or [], force, json, html=html)
    chosen = find_model(model, dtype)
    topology = Topology(ranks, ranks_per_node)
    if bool(traces) == (skew is not None):
        raise ValueError(f"skew must be given in place of a trace, got {skew!r} and {traces}")
    reading = Reading(stages, same_layers, allow_missing_ranks)
    loaded = load_trace(traces, reading=reading) if traces else guessed_trace(str(skew), drift, chosen)
    times, notes = layer_time(gpu, engine, phase, chosen, topology, kernel)
    memory = None if memory_per_rank is None else memory_per_rank * GIB
    question = Question(
        chosen, times, topology, tokens_per_rank, step_ms, memory, rebalance_seconds, every, context
    )
    question = replace(question, gathers=engine == "vllm" or chosen.is_deepseek, dense_ms=dense_ms)
    judged = judge_by(loaded, chosen, ranks, tokens_per_rank)
    source = reading.shell_words(traces, loaded, model) if traces else None
    made = answer(question, loaded, judged, (engine, phase, kernel), notes, source, guessed=not traces)
    write_out(json, made.figures, partial(made.show, wide=wide), html=html, page=made.page)
