"""What shadow mode recorded, judged: imbalance as an engine routed and as planned, and what a step takes either way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from isoload.advise.candidates import Candidate
from isoload.analysis.advice import Question, Run, run_of
from isoload.analysis.judge import Floats, exact_imbalance, routed_imbalance
from isoload.analysis.loads import JUDGED
from isoload.analysis.rank_loads import Recorded
from isoload.balancing.planning import plan_layers, share_routed
from isoload.traces import Trace
from isoload.traces.record import counts_of_slots

SERVED, PLANNED = (Candidate("as served", 0, split) for split in ("none", "exact"))
QUANTILES = {"half": 0.5, "nine_in_ten": 0.9, "worst": 1.0}  # of the layers, each a mean over passes


@dataclass(frozen=True, eq=False)
class Phase:
    """The recorded passes of prefill, or of decode.

    batches  their positions in the record
    tokens   of a rank in a pass, in the mean
    routed, planned  [L] mean max/mean rank load, on the placement that each pass had
    """

    name: str
    batches: tuple[int, ...]
    tokens: int
    routed: Floats
    planned: Floats

    def quantiles(self, of: Floats) -> dict[str, float]:
        """Of routed or planned: the mean, and what so many of the layers are at most."""
        return {"mean": float(of.mean())} | {key: float(np.quantile(of, q)) for key, q in QUANTILES.items()}


def phases(recorded: Recorded) -> list[Phase]:
    """Those with copies, the one of most passes first."""
    found = []
    for name in ("prefill", "decode"):
        held = [b for b, of in enumerate(recorded.phases) if of == name and recorded.trace.counts[b].any()]  # type: ignore[index]
        if held:
            means = [
                np.mean(both, axis=0)
                for both in zip(*map(lambda b: imbalances(recorded, b), held), strict=True)
            ]
            found.append(Phase(name, tuple(held), tokens_of(recorded, held), means[0], means[1]))
    return sorted(found, key=lambda phase: -len(phase.batches))


def imbalances(recorded: Recorded, batch: int) -> tuple[Floats, Floats]:
    """[L] as routed and as policy exact plans the same copies on the same placement."""
    placement, counts = recorded.placement(batch), recorded.trace.batch_counts()[batch : batch + 1]
    routed = routed_imbalance(placement, recorded.slot_copies(batch)[None])
    return routed[0], exact_imbalance(placement, counts)[0]


def tokens_of(recorded: Recorded, batches: list[int]) -> int:
    """Of a rank in a pass, in the mean; all ranks' over R where they hold the same."""
    copies = recorded.trace.batch_counts()[batches].sum(-1).max(1).mean()
    return max(1, round(float(copies) / max(recorded.trace.top_k, 1) / recorded.topology.num_ranks))


def trace_of(recorded: Recorded, phase: Phase) -> Trace:
    """Its passes, for :func:`judge_by`."""
    whole = recorded.trace
    counts = whole.batch_counts()[list(phase.batches)]
    return replace(whole, name=f"{whole.name}, {phase.name}", counts=counts, cluster=None)


def served_runs(recorded: Recorded, phase: Phase, question: Question) -> tuple[Run, Run]:
    """At most JUDGED passes on the engine's own placement, as routed and as planned."""
    number = min(JUDGED, len(phase.batches))
    chosen = [phase.batches[i * len(phase.batches) // number] for i in range(number)]
    return (
        run_of(SERVED, (sent_by_rank(recorded, b) for b in chosen), question),
        run_of(PLANNED, _planned(recorded, chosen), question),
    )


def sent_by_rank(recorded: Recorded, batch: int) -> NDArray[np.integer]:
    """[L, R, P] copies from each rank to each slot; where all hold the same tokens, an equal part from each."""
    if not recorded.same_tokens:
        return np.stack([of[batch].astype(np.int64) for of in recorded.sent], axis=1)
    ranks, copies = recorded.topology.num_ranks, recorded.slot_copies(batch)
    whole, rest = np.divmod(copies[:, None], ranks)
    turn = (np.arange(ranks)[:, None] - np.arange(copies.shape[1])) % ranks  # who has what is left: by turns
    return whole + (turn < rest)


def _planned(recorded: Recorded, batches: list[int]) -> Iterator[NDArray[np.integer]]:
    for batch in batches:
        placement, sent = recorded.placement(batch), sent_by_rank(recorded, batch)
        table, experts = recorded.tables[recorded.table_of[batch]], recorded.trace.num_experts
        loads = np.stack([counts_of_slots(table, of, experts) for of in sent.transpose(1, 0, 2)], axis=1)
        given = torch.from_numpy(loads.astype(np.int32))
        yield share_routed(given, plan_layers(given, placement, "exact"), None).numpy()
