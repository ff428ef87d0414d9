"""The page of ``isoload advise --html``: what it recommends, and what that rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from isoload.analysis import pages
from isoload.cli.pages import MEAN, ROWS, leaving, lines, over_mean, rank_heats, sending_heat
from isoload.report import code, figure, page, prose, section
from isoload.wording import two_digits

if TYPE_CHECKING:
    from isoload.advise import Advice, Judged, Question
    from isoload.analysis.advice import Run
    from isoload.analysis.details import Saving
    from isoload.times import LayerTime

COLOURS = {"without isoload": pages.LINES[1], "isoload": pages.OWN}
ENDS = ("var(--c5)", "var(--c3)")  # half and double


def named_runs(advice: Advice, judged: Judged) -> dict[str, Run]:
    """What runs now, the best without isoload, isoload's best; each candidate once."""
    from isoload.analysis.advice import run

    found: dict[str, Run] = {}
    answers = {"now": advice.now, "without isoload": advice.theirs, "isoload": advice.ours}
    for name, answer in answers.items():
        if answer is not None and answer.candidate not in [of.candidate for of in found.values()]:
            found[name] = run(answer.candidate, judged, advice.question)
    if len(found) == 1:  # nothing beats it: beside it stands what comes next
        found["without isoload"] = run(advice.answers[1].candidate, judged, advice.question)
    return found


def loads_section(runs: Mapping[str, Run], best: str, layers: Sequence[int], of_phase: str) -> str:
    """Imbalance by layer, rank loads of now and of the best, where their rows go."""
    loads = {name: run.copies.sum(-1) for name, run in runs.items()}
    series = {name: over_mean(of).max(-1).mean(0) for name, of in loads.items()}
    shown = dict.fromkeys(("now", best))
    parts = [
        lines("Imbalance by layer", MEAN, series, layers, best="isoload"),
        leaving("Where rows go", ROWS, {name: (_leaving(run), run.node_rows) for name, run in runs.items()}),
        *(part for name in shown for part in rank_heats(name, loads[name], layers)),
        *(sending_heat(name, runs[name].rows.sum((0, 1))) for name in shown),
    ]
    said = ". ".join(f"{name}: {run.candidate.label}" for name, run in runs.items())
    return section(f"Where the load is{of_phase}", *parts, said=f"{said}.")


def _leaving(run: Run) -> float:
    """Of all rows, those to another rank."""
    return 1 - float(run.rows.diagonal(axis1=-2, axis2=-1).sum() / run.rows.sum())


def saving_section(
    advice: Advice,
    runs: Mapping[str, Run],
    best: str,
    layers: Mapping[str, LayerTime],
    judge: Callable[[int], Judged],
    of_phase: str,
) -> str:
    """What would change the answer: the tokens of a rank, and each constant."""
    from isoload.analysis.details import by_tokens
    from isoload.cli.arguments import progress

    asked, other = advice.question, best if best != "now" else list(runs)[-1]
    pairs = [(runs["now"], runs[other])]
    if {"without isoload", "isoload"} <= runs.keys():
        pairs.append((runs["without isoload"], runs["isoload"]))
    with progress("token counts") as on_count:
        found = by_tokens(asked, layers, (pairs[0][0].candidate, pairs[0][1].candidate), judge, on_count)
    every = [end for rows in found.values() for row in rows for end in row.share]
    extent = min(0.0, *every) - 0.05, max(0.0, *every) + 0.08
    said = f"{runs[other].candidate.label} over now; points in ms a step. Hollow: beyond what was measured."
    parts = [_by_tokens(phase, said, rows, extent, COLOURS[other]) for phase, rows in found.items()]
    parts += [_sensitivity(before, after, asked) for before, after in pairs]
    return section(f"What would change the answer{of_phase}", *parts)


def _by_tokens(
    phase: str, said: str, rows: Sequence[Saving], extent: tuple[float, float], colour: str
) -> str:
    drawn = [
        (row.tokens, *row.share, f"{two_digits(sum(row.ms) / 2)} ms", not row.extrapolated) for row in rows
    ]
    header = "tokens of a rank", "ms saved, from", "to", "of the layers, from", "to", "measured"
    values = []
    for row in rows:
        parts = [f"{two_digits(100 * part)} %" for part in row.share]
        values.append((row.tokens, *map(two_digits, row.ms), *parts, "no" if row.extrapolated else "yes"))
    return figure(f"Kernels of {phase}", said, pages.by_tokens(drawn, extent, colour), header, values)


def _sensitivity(before: Run, after: Run, asked: Question) -> str:
    from isoload.analysis.advice import saved_ms
    from isoload.analysis.details import sensitivity

    found, middle = sensitivity(before, after, asked), sum(saved_ms(before, after, asked)) / 2
    ends = {of: {"half": sum(half) / 2, "double": sum(double) / 2} for of, (half, double) in found.items()}
    turning = [of for of, both in ends.items() if any(end * middle < 0 for end in both.values())]
    turns = f"The sign turns with {', '.join(turning)}." if turning else "None of them turns its sign."
    values = [(of, *(two_digits(end) for pair in both for end in pair)) for of, both in found.items()]
    header = "constant", "halved: ms, from", "to", "doubled: ms, from", "to"
    spec = pages.points(ends, "ms saved a step, middle of the range", ENDS, middle)
    said = f"What {after.candidate.label} saves over {before.candidate.label}. {turns}"
    return figure("Each constant halved and doubled", said, spec, header, values)


def step_section(advice: Advice, judged: Judged, of_phase: str) -> str:
    """A few layers on their ranks, as they run now and as the best would."""
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
        events = [
            (int(rank), Timeline.STAGES[stage], 1e3 * float(start), 1e3 * float(end))
            for rank, _, _, stage, start, end in step.events
        ]
        rows = [(rank, stage, f"{start:.3f}", f"{end:.3f}") for rank, stage, start, end in events]
        title = f"{name}: {shown[name].label}, {two_digits(1e3 * step.seconds)} ms"
        spec = pages.gantt(events, stages, until)
        parts.append(figure(title, "Gaps are waiting for slower ranks.", spec, header, rows))
    said = "The first layers of one batch, rank by rank, at the high end of every range."
    return section(f"A step on its ranks{of_phase}", *parts, said=said)


class PageText(NamedTuple):
    """What the command prints, too."""

    asked: list[str]  # what the advice is about
    verdict: list[str]
    candidates: str  # the table
    launch: list[str]
    notes: list[str]


class PagePhase(NamedTuple):
    """The advice on one phase, and what its charts are drawn from.

    layers: the trace's numbers. times: constants by phase, see :func:`isoload.analysis.details.by_tokens`. judge: batches
    with so many tokens on a rank.
    """

    advice: Advice
    judged: Judged
    layers: Sequence[int]
    times: Mapping[str, LayerTime]
    judge: Callable[[int], Judged]

    def sections(self, of_phase: str = "") -> list[str]:
        """Return the sections of charts; of_phase follows their headings."""
        runs, best = named_runs(self.advice, self.judged), self.advice.answers[0].candidate
        winner = next(name for name, found in runs.items() if found.candidate == best)
        return [
            saving_section(self.advice, runs, winner, self.times, self.judge, of_phase),
            loads_section(runs, winner, self.layers, of_phase),
            step_section(self.advice, self.judged, of_phase),
        ]


def advise_page(
    advice: Advice, phases: Mapping[str, PagePhase], text: PageText, figures: Any, first: Sequence[str] = ()
) -> str:
    """Return the file's text.

    advice: on the only phase, or on the mean step of both. first: sections ahead.
    """
    best = advice.answers[0].candidate
    both = len(phases) > 1
    body = [
        *first,
        section("The candidates", text.candidates),
        section(f"To run {best.label}", code(text.launch)) if text.launch else "",
        *(part for name, of in phases.items() for part in of.sections(f", {name}" if both else "")),
        section("What these figures are", prose(text.notes)),
    ]
    heading = f"isoload: {advice.verdict}"
    lead = [line.replace(" %", "\N{NO-BREAK SPACE}%") for line in text.verdict]
    return page(heading, text.asked, heading, lead, body, figures)
