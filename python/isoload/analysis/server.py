"""Advice on a server that runs prefill and decode: both phases use one placement, so one answer must serve both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from isoload.advise.candidates import Candidate
from isoload.analysis.advice import Advice, Answer, Question, Span, advise
from isoload.analysis.loads import Judged
from isoload.placement.placement import Placement


@dataclass(frozen=True)
class ServerAdvice:
    """Advice on the mean step of a server.

    whole: the candidates, ordered by milliseconds of the mean step. phases: the same candidates in the same order, with
    the milliseconds of a step of one phase. weights: by phase its part of all steps; they add up to 1.
    """

    whole: Advice
    phases: dict[str, Advice]
    weights: dict[str, float]


def step_weights(prefill_share: float) -> dict[str, float]:
    """Return by phase its part of all steps.

    Raises:
        ValueError: a share outside of 0..1.
    """
    if not 0 <= prefill_share <= 1:
        raise ValueError(f"prefill_share must be in 0..1, got {prefill_share:g}")
    return {"prefill": prefill_share, "decode": 1 - prefill_share}


def advise_server(
    asked: Mapping[str, tuple[Question, Judged]],
    weights: Mapping[str, float],
    on_candidate: Callable[[int, int], None] = lambda done, total: None,
) -> ServerAdvice:
    """Order the candidates by the milliseconds of the mean step.

    Args:
        asked: by phase a question and its batches. Their counts to place by (`seen`) must be the same, so that both
            phases have the same placements.
        weights: by phase its part of all steps.
        on_candidate: is called with how many candidates of how many are done.

    Raises:
        ValueError: questions with a measured step or a dense part, which are of one phase.
    """
    for question, _ in asked.values():
        if question.step_ms is not None or question.dense_ms is not None:
            raise ValueError(
                "step_ms and dense_ms must be given with one phase, whose step they are (--phase, or the tokens of "
                f"one), got {' and '.join(asked)}"
            )
    placements: dict[tuple[str, int], Placement] = {}
    count, phases = len(asked), {}
    for turn, (name, (question, judged)) in enumerate(asked.items()):

        def on_phase(done: int, total: int, turn: int = turn) -> None:
            on_candidate(turn * total + done, count * total)

        phases[name] = advise(question, judged, on_phase, placements)
    by_phase = {name: {entry.candidate: entry for entry in advice.answers} for name, advice in phases.items()}
    first = next(iter(phases.values()))
    means = {entry.candidate: _mean(entry.candidate, by_phase, weights) for entry in first.answers}
    order = sorted(means.values(), key=lambda answer: sum(answer.ms))
    whole = replace(first, answers=tuple(order), now=means[first.now.candidate])
    whole = replace(whole, extrapolated=any(entry.extrapolated for entry in phases.values()))
    whole = replace(whole, drawn=any(entry.drawn for entry in phases.values()))
    ordered = {
        name: replace(advice, answers=tuple(by_phase[name][entry.candidate] for entry in order))
        for name, advice in phases.items()
    }
    return ServerAdvice(whole, ordered, dict(weights))


def _mean(
    candidate: Candidate, by_phase: Mapping[str, Mapping[Candidate, Answer]], weights: Mapping[str, float]
) -> Answer:
    """A candidate's figures of the mean step; its additional slots take the same memory in every phase."""
    answers = {name: answers_of[candidate] for name, answers_of in by_phase.items()}

    def number(field: str) -> float:
        return sum(weights[name] * float(getattr(answer, field)) for name, answer in answers.items())

    def span(field: str) -> Span:
        low, high = (
            sum(weights[name] * getattr(answer, field)[end] for name, answer in answers.items())
            for end in (0, 1)
        )
        return low, high

    return Answer(
        candidate,
        number("ms_per_layer"),
        span("ms"),
        span("saved_ms"),
        number("imbalance"),
        next(iter(answers.values())).slots_bytes,
        number("node_rows"),
    )
