"""Output of ``isoload advise`` and ``isoload report``, and the page of ``isoload advise --html``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.text import Text

from isoload.analysis import pages
from isoload.analysis.details import placeholders
from isoload.analysis.pages import code, figure, page, prose, section
from isoload.cli.pages import MEAN, ROWS, leaving, lines, rank_heats, sending_heat
from isoload.cli.tables import Column, Figure, Row, columns_of, say
from isoload.files import printable
from isoload.topology import over_mean
from isoload.wording import between, saving, two_digits

if TYPE_CHECKING:
    from isoload.analysis.advice import Advice, Question, Run, Span, Step
    from isoload.analysis.details import Saving, SlotsAnswer
    from isoload.analysis.judge import Judged
    from isoload.times import LayerTime


GIB = 2.0**30
SHOWN_ROWS = 6  # of the table, in addition to what runs now
FIGURES = (
    Figure("label", "", "placement, replicas by"),
    Figure("layer", "ms", "a layer", wide=True),
    Figure("prefill", "ms a step", "prefill"),
    Figure("decode", "ms a step", "decode"),
    Figure("mean", "ms a step", "mean"),
    Figure("step", "ms", "a step"),
    Figure("saved", "ms", "saved"),
    Figure("imbalance", "", "max/mean", ".3f"),
    Figure("gib", "slots", "GiB"),
    Figure("requests", "slots", "requests"),
    Figure("rank_rows", "rows to other", "ranks", "%"),
    Figure("node_rows", "rows to other", "nodes", "%"),
)
MODELLED = (
    "Times are modelled from measured kernels, as the mean over {batches} batches that no placement has seen, and have "
    "two significant digits. A step is its MoE layers alone, with planning. Where a time is a range, the low end takes "
    "the all-to-all at the time of even rows, and the high end at that of the busiest rank's rows."
)
SHIPPED_PLANS = (
    "Planning takes {low:g} to {high:g} µs a layer: its kernels on an H100, and 10 to 25 µs for a gather of "
    "loads."
)
REQUESTS = (
    '"requests" counts requests of {context} tokens whose KV cache would take as much memory as the slots.'
)
WHOLE = (
    "Percentages are of a modelled whole step: the MoE layers and {dense:g} ms for attention and the dense part "
    "(--dense-ms), one after the other, without scheduling and sampling. --step-ms takes a measured step instead. "
    'Stages are those of a rank in the mean; "waiting" is waiting for slower ranks. "in two halves" is a step in '
    "which one half of the batch computes while the other half exchanges, as in SGLang's two-batch overlap of prefill; "
    "the model lets neither slow the other."
)
UPPER = (
    "Percentages are of the MoE layers alone, without attention and the engine's own work, so they are an upper "
    "limit."
)
ALONE = (
    "Every rank then computes its own tokens with all experts, which it stores (data parallelism) or reads from its "
    "peers a layer ahead (DWDP: SGLang's --dwdp-size, for servers of prefill)."
)
MEASURED = "--step-ms takes a step that you have measured."


def step_columns(now: Step, best: Step) -> list[Column]:
    """Return the columns of a whole step: a row for each stage that takes any time."""
    figures = [name for name in now.stages if any((*now.stages[name], *best.stages[name]))]

    def cells(step: Step) -> list[str]:
        return [between(*span) for span in (*map(step.stages.__getitem__, figures), step.ms, step.halved_ms)]

    group, stages = "ms, mean rank", Column("", "stage", [*figures, "a whole step", "in two halves"])
    return [stages, Column(group, "now", cells(now)), Column(group, "best", cells(best))]


def rows_of(advice: Advice, phases: Mapping[str, Advice]) -> list[Row]:
    """Return a row for each candidate of the table, with the figures that --json writes."""
    asked, first = advice.question, list(advice.answers[:SHOWN_ROWS])
    shown = [*first, *([] if advice.now in first else [advice.now]), *advice.alone]
    of_phases = {
        name: {answer.candidate: between(*answer.ms) for answer in (*part.answers, *part.alone)}
        for name, part in phases.items()
    }
    rows = []
    for answer in shown:
        size, time = answer.slots_bytes, between(*answer.ms)
        row = answer.to_json() | {
            "label": answer.candidate.label,
            "saved": "now" if answer is advice.now else between(*answer.saved_ms),
            "gib": f"{size / GIB:.1f}" if size else "-",
            "rank_rows": answer.rank_rows if asked.topology.num_nodes > 1 else None,
            "node_rows": answer.node_rows if asked.topology.num_nodes > 1 else None,
        }
        if len(phases) > 1:
            row |= {name: of_phases[name][answer.candidate] for name in ("prefill", "decode")}
            row |= dict.fromkeys(("layer", "step", "requests", "imbalance")) | {"mean": time}
        else:
            requests = f"{size / asked.context / asked.model.kv_bytes:.0f}" if size else "-"
            row |= {"layer": two_digits(answer.ms_per_layer, 3), "step": time, "requests": requests}
            row |= dict.fromkeys(("prefill", "decode", "mean"))
        rows.append(row)
    return rows


def verdict_lines(advice: Advice, phases: Mapping[str, Advice]) -> list[str]:
    """Return what can be saved without isoload, what isoload adds, and the same by the other comparison of slots."""
    from isoload.analysis.advice import less

    ours, theirs, asked, is_server = advice.ours, advice.theirs, advice.question, len(phases) > 1
    whole = "a modelled step" if advice.steps else "the MoE layers, at most"
    whole = "a step" if advice.question.step_ms else whole
    step = "a mean step" if is_server else "a step"

    def sentence(saved: Span, more: str = "") -> str:
        small, large = sorted(100 * abs(end) for end in advice.share(saved))
        percent = f" ({between(small, large)} % of {whole})" if saved[0] * saved[1] >= 0 else ""
        return f"{saving(*saved, 'ms', more)} {step}{percent}"

    first = f"Without isoload: {theirs.candidate.label} {sentence(theirs.saved_ms)}."
    if theirs is advice.now:
        first = "Without isoload: no candidate takes less time than experts in order do."
    alone = min(advice.alone, key=lambda answer: answer.ms, default=None)
    last = []
    if alone is not None and sum(saved := less(advice.answers[0].ms, alone.ms)) > 0:
        gain = f"{alone.candidate.label} {sentence(saved, 'another')}"
        last = [f"Without an exchange nothing is to be balanced: {gain}. {ALONE}"]
    if ours is None:
        alone_on_rank = asked.topology.num_ranks == 1
        reason = "Every rank holds all experts" if alone_on_rank else "There is no memory for more slots"
        return [first, f"{reason}, so that isoload has no choice.", *last]
    second = f"isoload: {advice.verdict}. {ours.candidate.label} {sentence(advice.gain_ms, 'another')}"
    if is_server:
        gains = [f"{saving(*part.gain_ms, 'ms')} a step of {name}" for name, part in phases.items()]
        second += f": it {' and '.join(gains)}"
    other, more = advice.rival(not asked.like_for_like), ours.candidate.more
    compared = f"isoload {sentence(advice.gain_over(other))} against {other.candidate.label}."
    third = f"Both sides choose their number of slots. With +{more} slots on both sides {compared}"
    if asked.like_for_like:
        third = f"Both sides have +{more} slots. Where both choose their number of slots {compared}"
    elif other is theirs:
        third = f"Both sides choose their number of slots, and both choose +{more}."
    return [first, f"{second}.", third, *last]


def question_lines(advice: Advice, phases: Mapping[str, Advice], weights: Mapping[str, float]) -> list[str]:
    """Return lines about the setting: the model, the ranks and tokens, the GPU and its kernels."""
    model, topology = advice.question.model, advice.question.topology
    experts = f"{model.experts} experts, top-{model.top_k}"
    shape = f"{model.name}, {model.layers} layers of {experts}, {model.dtype}"
    ranks, nodes = topology.num_ranks, topology.num_nodes
    where = f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"
    parts = list[str]()
    if len(phases) == 1:
        where += f", {advice.question.tokens} tokens a rank"
    else:
        sizes = {name: f"{part.question.tokens} tokens a rank" for name, part in phases.items()}
        parts = [
            f"{name}: {text} in {100 * weights[name]:.3g} % of the steps" for name, text in sizes.items()
        ]
    kernels = dict.fromkeys(part.question.layer.experts.kernel for part in phases.values())
    return [shape, where, *parts, f"{advice.question.layer.experts.gpu}, {' and '.join(kernels)}"]


def unit_notes(advice: Advice, batches: int, is_server: bool) -> list[str]:
    """Return notes on the figures: how they were modelled, and to what percentages refer."""
    from isoload.analysis.advice import PLAN_US

    asked, low, high = advice.question, PLAN_US["own"][0], PLAN_US["exact"][1]
    planning = SHIPPED_PLANS.format(low=low, high=high)
    if asked.plan_us is not None:
        measured = ", ".join(f"{us:.3g} µs for {name}" for name, us in asked.plan_us.items())
        planning = f"Planning takes, as measured for a layer: {measured}."
    notes = [f"{MODELLED.format(batches=batches)} {planning}"]
    if is_server:
        return [*notes, UPPER]
    notes.append(REQUESTS.format(context=asked.context))
    if not asked.step_ms:
        notes.append(WHOLE.format(dense=asked.dense_ms) if advice.steps else f"{UPPER} {MEASURED}")
    return notes


def warnings(advice: Advice, notes: list[str], guessed: bool = False) -> list[str]:
    """Return sentences about inputs of the figures that were not measured for this setting."""
    sentences = [f"{note[0].upper()}{note[1:]}." for note in notes]
    if guessed:
        sentences.append("No trace was given: the loads of the experts are a guess, and so are all figures.")
    elif advice.drawn:
        sentences.append("Tokens were drawn from the counts of whole batches: bursts are understated.")
    if advice.extrapolated:
        sentences.append(
            "This number of copies per rank was not measured on this GPU: times are extrapolated."
        )
    if advice.question.rebalance_s == 0 and advice.answers[0].candidate.placer != "trivial":
        sentences.append("These times contain no rebalance: --rebalance-seconds and --every add it.")
    return sentences


SLOTS = (
    Figure("label", "", "placement of SGLang's slots"),
    Figure("ms", "ms", "a step"),
    Figure("saved", "ms", "saved"),
    Figure("imbalance", "", "max/mean", ".3f"),
    Figure("gib", "", "GiB", ".2f"),
    Figure("kv_tokens", "KV", "tokens", ","),
    Figure("exports", "experts", "sent", ".1f"),
)
SENT = (
    '"sent" counts the experts that the busiest rank sends in a layer and batch; "a step" contains what the dispatch '
    "does not hide of their weights. "
)
KV_TOKENS = (
    '"KV tokens" are tokens of bfloat16 KV cache that fit into what is left of the memory of one slot more.'
)


def slots_parts(answers: Sequence[SlotsAnswer]) -> tuple[list[Column], list[str], list[str]]:
    """Return the table of ways to use memory for slots, a sentence on the one with the least memory, and notes."""
    from isoload.analysis.advice import NO_DIFFERENCE
    from isoload.analysis.details import least_memory

    within = f"at most {100 * NO_DIFFERENCE:.0f} % longer than"
    best = least_memory(answers)
    rows = [answer.to_json() | {"gib": answer.slots_bytes / GIB} for answer in answers]
    for row in rows:
        row |= {"ms": between(*row["ms"]), "saved": between(*row["saved_ms"])}
    advice = f"Slots: {best.label} takes {within} the fastest of these, with the least memory."
    if not best.slots_bytes:
        advice = f"Slots: no replicas are needed. Without them a step takes {within} with the best of these."
    travels = any(answer.exports is not None for answer in answers)
    return columns_of(SLOTS, rows), [advice], [f"{SENT if travels else ''}{KV_TOKENS}"]


def print_advice(
    advice: Advice,
    phases: Mapping[str, Advice],
    weights: Mapping[str, float],
    batches: int,
    launch: list[str],
    warned: list[str],
    slots: Sequence[SlotsAnswer],
    console: Console,
    wide: bool = False,
) -> None:
    columns = columns_of(FIGURES, rows_of(advice, phases), wide)
    lines = question_lines(advice, phases, weights)
    say(console, ("bold", lines), columns, ("green", verdict_lines(advice, phases)))
    if advice.steps:
        say(console, step_columns(*advice.steps))
    if launch:
        say(console, ("", [f"To run {advice.answers[0].candidate.label}:"]))
        for line in launch:  # not wrapped, so that it can be copied
            console.print(Text(f"  {printable(line)}"), soft_wrap=True)
        say(console, ("", [placeholders(launch)]))
    notes = unit_notes(advice, batches, len(phases) > 1)
    if slots:
        columns, sentences, more = slots_parts(slots)
        say(console, columns, ("green", sentences))
        notes += more
    say(console, ("dim", notes), ("yellow", warned))


COLOURS = {"without isoload": pages.LINES[1], "isoload": pages.OWN}
ENDS = ("var(--c5)", "var(--c3)")  # half and double


def named_runs(advice: Advice, judged: Judged) -> dict[str, Run]:
    """Return the runs of now, of the best without isoload and of isoload's best; each candidate once."""
    from isoload.analysis.advice import run

    runs: dict[str, Run] = {}
    answers = {"now": advice.now, "without isoload": advice.theirs, "isoload": advice.ours}
    for name, answer in answers.items():
        if answer is not None and answer.candidate not in [named.candidate for named in runs.values()]:
            runs[name] = run(answer.candidate, judged, advice.question)
    if len(runs) == 1:  # nothing is better: the second best is shown, too
        runs["without isoload"] = run(advice.answers[1].candidate, judged, advice.question)
    return runs


def loads_section(runs: Mapping[str, Run], best: str, layers: Sequence[int], of_phase: str) -> str:
    """Return the section on imbalance by layer, rank loads of now and of the best, and where rows go."""
    loads = {name: run.copies.sum(-1) for name, run in runs.items()}
    series = {name: over_mean(rows).max(-1).mean(0) for name, rows in loads.items()}
    shown = dict.fromkeys(("now", best))
    leave = {name: (run.rank_rows, run.node_rows) for name, run in runs.items()}
    parts = [
        lines("Imbalance by layer", MEAN, series, layers, best="isoload"),
        leaving("Rows by destination", ROWS, leave),
        *(part for name in shown for part in rank_heats(name, loads[name], layers)),
        *(sending_heat(name, runs[name].rows) for name in shown),
    ]
    said = ". ".join(f"{name}: {run.candidate.label}" for name, run in runs.items())
    return section(f"Loads by rank{of_phase}", *parts, said=f"{said}.")


def saving_section(
    advice: Advice,
    runs: Mapping[str, Run],
    best: str,
    layers: Mapping[str, LayerTime],
    judge: Callable[[int], Judged],
    of_phase: str,
) -> str:
    """Return the section on changes of the answer with the tokens per rank and with each constant."""
    from isoload.analysis.details import by_tokens
    from isoload.cli.arguments import progress

    asked, other = advice.question, best if best != "now" else list(runs)[-1]
    pairs = [(runs["now"], runs[other])]
    if {"without isoload", "isoload"} <= runs.keys():
        pairs.append((runs["without isoload"], runs["isoload"]))
    with progress("token counts") as on_count:
        savings = by_tokens(asked, layers, (pairs[0][0].candidate, pairs[0][1].candidate), judge, on_count)
    every = [end for rows in savings.values() for row in rows for end in row.share]
    extent = min(0.0, *every) - 0.05, max(0.0, *every) + 0.08
    said = f"{runs[other].candidate.label} over now; points in ms a step. Hollow: beyond what was measured."
    parts = [_by_tokens(phase, said, rows, extent, COLOURS[other]) for phase, rows in savings.items()]
    parts += [_sensitivity(before, after, asked) for before, after in pairs]
    return section(f"What would change the answer{of_phase}", *parts)


def _by_tokens(
    phase: str, said: str, rows: Sequence[Saving], extent: tuple[float, float], colour: str
) -> str:
    header = "tokens per rank", "ms saved, from", "to", "of the layers, from", "to", "measured"
    drawn, values = [], []
    for row in rows:
        drawn.append((row.tokens, *row.share, f"{two_digits(sum(row.ms) / 2)} ms", not row.extrapolated))
        parts = [f"{two_digits(100 * part)} %" for part in row.share]
        values.append((row.tokens, *map(two_digits, row.ms), *parts, "no" if row.extrapolated else "yes"))
    return figure(f"Kernels of {phase}", said, pages.by_tokens(drawn, extent, colour), header, values)


def _sensitivity(before: Run, after: Run, asked: Question) -> str:
    from isoload.analysis.advice import saved_ms
    from isoload.analysis.details import sensitivity

    savings, middle = sensitivity(before, after, asked), sum(saved_ms(before, after, asked)) / 2
    ends = {
        name: {"half": sum(half) / 2, "double": sum(double) / 2} for name, (half, double) in savings.items()
    }
    turning = [constant for constant, pair in ends.items() if any(end * middle < 0 for end in pair.values())]
    turns = f"The sign turns with {', '.join(turning)}." if turning else "None of them turns its sign."
    values = [(name, *map(two_digits, (*half, *double))) for name, (half, double) in savings.items()]
    header = "constant", "halved: ms, from", "to", "doubled: ms, from", "to"
    spec = pages.points(ends, "ms saved a step, middle of the range", ENDS, middle)
    said = f"What {after.candidate.label} saves over {before.candidate.label}. {turns}"
    return figure("Each constant halved and doubled", said, spec, header, values)


def step_section(advice: Advice, judged: Judged, of_phase: str) -> str:
    """Return the section on a few layers on their ranks, now and with the best candidate."""
    from isoload.analysis.details import few_layers
    from isoload.analysis.timeline import Timeline

    header = "rank", "stage", "from ms", "to ms"
    shown = {"now": advice.now.candidate, "the best": advice.answers[0].candidate}
    steps = {name: few_layers(candidate, advice.question, judged) for name, candidate in shown.items()}
    used = {int(stage) for step in steps.values() for stage in step.events["stage"]}
    stages = [name for i, name in enumerate(Timeline.STAGES) if i in used]
    until = 1e3 * max(step.seconds for step in steps.values())
    parts = []
    for name, step in steps.items():
        fields = ((rank, stage, start, end) for rank, _, _, stage, start, end in step.events.tolist())
        events = [(rank, Timeline.STAGES[stage], 1e3 * a, 1e3 * b) for rank, stage, a, b in fields]
        rows = [(rank, stage, f"{start:.3f}", f"{end:.3f}") for rank, stage, start, end in events]
        title = f"{name}: {shown[name].label}, {two_digits(1e3 * step.seconds)} ms"
        spec = pages.gantt(events, stages, until)
        parts.append(figure(title, "Gaps are waiting for slower ranks.", spec, header, rows))
    said = "The first layers of one batch, rank by rank, at the high end of every range."
    return section(f"A step on its ranks{of_phase}", *parts, said=said)


class PageText(NamedTuple):
    """Text that the command prints, too."""

    asked: list[str]  # lines about the setting
    verdict: list[str]
    candidates: str  # the table
    launch: list[str]
    notes: list[str]


class PagePhase(NamedTuple):
    """The advice on one phase, and the data of its charts."""

    advice: Advice
    judged: Judged
    layers: Sequence[int]  # the trace's numbers
    times: Mapping[str, LayerTime]  # by phase, see analysis.details.by_tokens
    judge: Callable[[int], Judged]  # returns batches with a number of tokens per rank

    def sections(self, of_phase: str = "") -> list[str]:
        runs, best = named_runs(self.advice, self.judged), self.advice.answers[0].candidate
        winner = next(name for name, candidate_run in runs.items() if candidate_run.candidate == best)
        return [
            saving_section(self.advice, runs, winner, self.times, self.judge, of_phase),
            loads_section(runs, winner, self.layers, of_phase),
            step_section(self.advice, self.judged, of_phase),
        ]


def advise_page(
    advice: Advice, phases: Mapping[str, PagePhase], text: PageText, figures: Any, first: Sequence[str] = ()
) -> str:
    """Return the page of advice on the only phase, or on the mean step of both; first: sections that come first."""
    body = [*first, section("The candidates", text.candidates)]
    if text.launch:
        best, start = advice.answers[0].candidate, (code(text.launch), prose([placeholders(text.launch)]))
        body.append(section(f"To run {best.label}", *start))
    for name, page_phase in phases.items():
        body += page_phase.sections(f", {name}" if len(phases) > 1 else "")
    body.append(section("Definition of these figures", prose(text.notes)))
    heading = f"isoload: {advice.verdict}"
    lead = [line.replace(" %", "\N{NO-BREAK SPACE}%") for line in text.verdict]
    return page(heading, text.asked, heading, lead, body, figures)
