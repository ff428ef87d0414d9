"""A whole step of a candidate: its MoE layers by their timeline, with attention and the dense part between them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoload.replay.timeline import ENDS, Timeline, timeline
from isoload.replay.traffic import rows_between
from isoload.times import LayerTime
from isoload.topology import Topology

Span = tuple[float, float]


@dataclass(frozen=True)
class Step:
    """Milliseconds from the low to the high end of the all-to-all's range, a mean over batches.

    stages: of a rank in the mean, in the order of :class:`Timeline`, then "waiting"; their sum is the step's.
    """

    ms: Span
    stages: dict[str, Span]

    def to_json(self) -> dict[str, Any]:
        return {"ms": list(self.ms), "stages": {name: list(span) for name, span in self.stages.items()}}


def modelled_step(
    layer: LayerTime,
    batches: Iterable[NDArray[np.integer]],
    tokens: int,
    topology: Topology,
    layers: int,
    dense_ms: float,
    plan_us: Span,
    gather_us: Span,
) -> Step:
    """The mean of several batches, none of which overlaps anything.

    Args:
        layer, tokens, topology: as :func:`timeline` takes them.
        batches: [L, R, P] copies that each rank sends to each slot.
        layers: of the model; all are as the mean of the L that are known.
        dense_ms: of a step, all layers: spread evenly over those with experts.
        plan_us, gather_us: of a layer at both ends.
    """
    found: list[list[Timeline]] = [[], []]
    for sent in batches:
        rows = rows_between(sent, tokens, topology.num_ranks)
        for of_end, end, plan, gather in zip(found, ENDS, plan_us, gather_us, strict=True):
            of_end.append(
                timeline(
                    layer,
                    sent,
                    tokens,
                    topology,
                    end=end,
                    rows=rows,
                    dense_s=1e-3 * dense_ms / layers,
                    gather_s=1e-6 * gather,
                    plan_s=1e-6 * plan,
                )
            )
    to_ms = 1e3 * layers / len(found[0][0].rows)

    def span(low: list[float], high: list[float]) -> Span:
        return to_ms * float(np.mean(low)), to_ms * float(np.mean(high))

    ms = span(*([line.seconds for line in of_end] for of_end in found))
    stages = [[line.stages() for line in of_end] for of_end in found]
    means = {name: span(*([of[name]["mean"] for of in end] for end in stages)) for name in stages[0][0]}
    return Step(ms, means)
