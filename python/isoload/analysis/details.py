"""What stands behind an answer: the saving by tokens of a rank, how far each constant carries it, a step's events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from isoload.advise.candidates import Candidate, placed, sent_batches
from isoload.analysis.advice import Question, Run, Span, planning_us, run, saved_ms, step_ms
from isoload.analysis.loads import Judged
from isoload.analysis.timeline import Timeline, timeline
from isoload.times import AllToAllTime, LayerTime

TOKENS = (16, 64, 256, 1024, 4096)  # of a rank in a step

EXPERTS = {
    "a kernel's launch": "a_us",
    "reading a slot's weights": "b_us",
    "multiplying a copy": "c_us",
    "handling a row": "rho_us",
    "how far reading hides": "p",
}
EXCHANGE = {"an all-to-all's start": "a_us", "a token in the all-to-all": "s_us"}
PLANNING = "planning"


def scaled(layer: LayerTime, name: str, factor: float) -> LayerTime:
    """Constants of which the one of this name, of EXPERTS or EXCHANGE, is so many times what it was.

    The power of EXPERTS stays at 1 or above, where reading and multiplying add up.
    """
    if name in EXPERTS:
        field = EXPERTS[name]
        value = max(factor * getattr(layer.experts, field), 1.0 if field == "p" else 0.0)
        return replace(layer, experts=replace(layer.experts, **{field: value}))

    def times(step: AllToAllTime | None) -> AllToAllTime | None:
        if step is None:
            return None
        field = EXCHANGE[name]
        low, high = (
            curve._replace(**{field: factor * getattr(curve, field)}) for curve in (step.low, step.high)
        )
        return replace(step, low=low, high=high)

    return replace(layer, dispatch=times(layer.dispatch), combine=times(layer.combine))


def sensitivity(before: Run, after: Run, question: Question) -> dict[str, tuple[Span, Span]]:
    """By constant, the saving where it is half and where it is double; those that matter most first."""
    found = {PLANNING: (saved_ms(before, after, question, 0.5), saved_ms(before, after, question, 2.0))}
    for name in (*EXPERTS, *EXCHANGE):
        half, double = (
            saved_ms(before, after, replace(question, layer=scaled(question.layer, name, factor)))
            for factor in (0.5, 2.0)
        )
        found[name] = half, double
    width = {name: abs(sum(half) - sum(double)) for name, (half, double) in found.items()}
    return dict(sorted(found.items(), key=lambda item: -width[item[0]]))


class Saving(NamedTuple):
    """What a candidate saves with so many tokens on a rank."""

    tokens: int
    ms: Span  # of a step, saved
    share: Span  # of what the step's MoE layers take without it
    extrapolated: bool  # whether the constants were measured on fewer or more tokens


def by_tokens(
    question: Question,
    layers: Mapping[str, LayerTime],
    pair: tuple[Candidate, Candidate],
    judge: Callable[[int], Judged],
    on_count: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[Saving]]:
    """By phase, what the second of a pair saves over the first, for TOKENS and the question's own count.

    Args:
        layers: constants by phase.
        judge: batches with so many tokens on a rank, as :func:`judge_by` makes them. Two of them are taken, of the
            question's own count all, so that its figures are those of the answer.
    """
    counts = sorted({*TOKENS, question.tokens})
    found: dict[str, list[Saving]] = {phase: [] for phase in layers}
    for done, tokens in enumerate(counts):
        judged = judge(tokens)
        if tokens != question.tokens:
            judged = replace(judged, loads=judged.loads[:2])
        asked = replace(question, tokens=tokens)
        before, after = (run(candidate, judged, asked) for candidate in pair)
        for phase, layer in layers.items():
            timed = replace(asked, layer=layer)
            ms = saved_ms(before, after, timed)
            both = zip(step_ms(before, timed), step_ms(after, timed), strict=True)
            share = sorted(1 - new / old for old, new in both)
            copies = [tokens * question.model.top_k]
            beyond = any(step.extrapolated(tokens) for step in (layer.dispatch, layer.combine) if step)
            found[phase].append(
                Saving(tokens, ms, (share[0], share[1]), bool(layer.experts.extrapolated(copies)) or beyond)
            )
        on_count(done + 1, len(counts))
    return found


def few_layers(candidate: Candidate, question: Question, judged: Judged, layers: int = 3) -> Timeline:
    """The first layers of the first judged batch, at the high end of every range; without dense_ms no dense part."""
    sent = next(sent_batches(candidate, placed(candidate, judged, question.topology), judged))
    (_, plan), (_, gather) = planning_us(candidate.split, question)
    dense = 1e-3 * (question.dense_ms or 0.0) / question.model.layers
    of = question.layer, sent[:layers], question.tokens, question.topology
    return timeline(*of, end="high", dense_s=dense, plan_s=1e-6 * plan, gather_s=1e-6 * gather)
