"""Advice on a server that runs prefill and decode with one placement, and on recorded shadow mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from isoload.analysis.advice import Advice, Answer, Candidate, Question, Run, Span, advise, run_of
from isoload.analysis.details import without_exchange
from isoload.analysis.judge import JUDGED, Floats, Judged, exact_imbalance, routed_imbalance
from isoload.analysis.rank_loads import Recorded
from isoload.balancing.planning import plan_layers, share_routed
from isoload.placement.placement import Placement
from isoload.traces import Trace
from isoload.traces.record import counts_of_slots


@dataclass(frozen=True)
class ServerAdvice:
    """Advice on the mean step of a server."""

    whole: Advice  # candidates by milliseconds of the mean step
    phases: dict[str, Advice]  # the same candidates in the same order, by a step of one phase
    weights: dict[str, float]  # by phase its part of all steps; they add up to 1


def step_weights(prefill_share: float) -> dict[str, float]:
    if not 0 <= prefill_share <= 1:
        raise ValueError(f"prefill_share must be in 0..1, got {prefill_share:g}")
    return {"prefill": prefill_share, "decode": 1 - prefill_share}


def advise_server(
    asked: Mapping[str, tuple[Question, Judged]],
    weights: Mapping[str, float],
    on_candidate: Callable[[int, int], None] = lambda done, total: None,
) -> ServerAdvice:
    """Order the candidates by the mean step; asked: by phase, with the same `calibration` for the same placements."""
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
    guessed, drawn = (any(getattr(e, name) for e in phases.values()) for name in ("extrapolated", "drawn"))
    now = means[first.now.candidate]
    whole = replace(first, answers=tuple(order), now=now, extrapolated=guessed, drawn=drawn)
    ordered = {
        name: replace(advice, answers=tuple(by_phase[name][entry.candidate] for entry in order))
        for name, advice in phases.items()
    }
    return ServerAdvice(whole, ordered, dict(weights))


def _mean(
    candidate: Candidate, by_phase: Mapping[str, Mapping[Candidate, Answer]], weights: Mapping[str, float]
) -> Answer:
    """Return a candidate's figures for the mean step."""
    answers = {name: answers_of[candidate] for name, answers_of in by_phase.items()}

    def number(field: str) -> float:
        return sum(weights[name] * float(getattr(answer, field)) for name, answer in answers.items())

    def span(field: str) -> Span:
        ends = [[weights[name] * end for end in getattr(answer, field)] for name, answer in answers.items()]
        low, high = map(sum, zip(*ends, strict=True))
        return low, high

    spans, memory = (span("ms"), span("saved_ms")), next(iter(answers.values())).slots_bytes
    rows = number("node_rows"), number("rank_rows")
    return Answer(candidate, number("ms_per_layer"), *spans, number("imbalance"), memory, *rows)


def with_alone(
    server: ServerAdvice, asked: Mapping[str, tuple[Question, Judged]], move_us: float | None
) -> tuple[ServerAdvice, list[str]]:
    """Return the advice with the ways to run without an exchange, and sentences on missing ones; asked: by phase."""
    by_phase, phases, notes = dict[str, dict[Candidate, Answer]](), dict[str, Advice](), list[str]()
    for name, (question, judged) in asked.items():
        answers, left_out = without_exchange(question, judged, server.phases[name].now, move_us)
        by_phase[name] = {answer.candidate: answer for answer in answers}
        phases[name] = replace(server.phases[name], alone=tuple(answers))
        notes += left_out
    first = next(iter(by_phase.values()))
    means = tuple(_mean(candidate, by_phase, server.weights) for candidate in first)
    whole = replace(server.whole, alone=means)
    return replace(server, whole=whole, phases=phases), list(dict.fromkeys(notes))


SERVED, PLANNED = (Candidate("as served", 0, split) for split in ("none", "exact"))
QUANTILES = {"half": 0.5, "nine_in_ten": 0.9, "worst": 1.0}  # of the layers, each a mean over passes


@dataclass(frozen=True, eq=False)
class Phase:
    """The recorded passes of prefill, or of decode."""

    name: str
    batches: tuple[int, ...]  # their positions in the record
    tokens: int  # of a rank in a pass, in the mean
    routed: Floats  # [L] mean max/mean rank load, on the placement that each pass had
    planned: Floats

    def quantiles(self, values: Floats) -> dict[str, float]:
        """Return the mean of routed or planned, and the values that these fractions of the layers do not exceed."""
        quantiles = {key: float(np.quantile(values, q)) for key, q in QUANTILES.items()}
        return {"mean": float(values.mean())} | quantiles


def phases(recorded: Recorded) -> list[Phase]:
    """Return the phases with copies, the one with most passes first."""
    ordered = []
    for name in ("prefill", "decode"):
        counts = recorded.trace.counts
        batches = [b for b, phase in enumerate(recorded.phases) if phase == name and counts[b].any()]  # type: ignore[index]
        if batches:
            means = np.mean([imbalances(recorded, b) for b in batches], axis=0)
            ordered.append(Phase(name, tuple(batches), tokens_of(recorded, batches), means[0], means[1]))
    return sorted(ordered, key=lambda phase: -len(phase.batches))


def imbalances(recorded: Recorded, batch: int) -> tuple[Floats, Floats]:
    """Return [L] imbalance as routed, and as policy exact plans the same copies on the same placement."""
    placement, counts = recorded.placement(batch), recorded.trace.batch_counts()[batch : batch + 1]
    routed = routed_imbalance(placement, recorded.slot_copies(batch)[None])
    return routed[0], exact_imbalance(placement, counts)[0]


def tokens_of(recorded: Recorded, batches: list[int]) -> int:
    """Return the mean tokens of a rank in a pass; all ranks' tokens over R if they hold the same."""
    copies = recorded.trace.batch_counts()[batches].sum(-1).max(1).mean()
    return max(1, round(float(copies) / max(recorded.trace.top_k, 1) / recorded.topology.num_ranks))


def trace_of(recorded: Recorded, phase: Phase) -> Trace:
    whole = recorded.trace
    counts = whole.batch_counts()[list(phase.batches)]
    return replace(whole, name=f"{whole.name}, {phase.name}", counts=counts, cluster=None)


def served_runs(recorded: Recorded, phase: Phase, question: Question) -> tuple[Run, Run]:
    """Return at most JUDGED passes on the engine's own placement, as routed and as planned."""
    number = min(JUDGED, len(phase.batches))
    chosen = [phase.batches[i * len(phase.batches) // number] for i in range(number)]
    return (
        run_of(SERVED, [partial(sent_by_rank, recorded, batch) for batch in chosen], question),
        run_of(PLANNED, [partial(_planned, recorded, batch) for batch in chosen], question),
    )


def sent_by_rank(recorded: Recorded, batch: int) -> NDArray[np.integer]:
    """Return [L, R, P] copies from each rank to each slot; an equal part from each if all hold the same tokens."""
    if not recorded.same_tokens:
        return np.stack([slots[batch].astype(np.int64) for slots in recorded.sent], axis=1)
    ranks, copies = recorded.topology.num_ranks, recorded.slot_copies(batch)
    whole, remainder = np.divmod(copies[:, None], ranks)
    turn = np.arange(ranks)[:, None] - np.arange(copies.shape[1])  # ranks take the remainder by turns
    return whole + (turn % ranks < remainder)


def _planned(recorded: Recorded, batch: int) -> NDArray[np.integer]:
    """Return :func:`sent_by_rank` with the plan of `exact` in place of the engine's choice."""
    placement, sent = recorded.placement(batch), sent_by_rank(recorded, batch)
    table, experts = recorded.tables[recorded.table_of[batch]], recorded.trace.num_experts
    loads = np.stack([counts_of_slots(table, slots, experts) for slots in sent.transpose(1, 0, 2)], axis=1)
    tensor = torch.from_numpy(loads.astype(np.int32))
    return np.asarray(share_routed(tensor, plan_layers(tensor, placement, "exact"), None).numpy())
