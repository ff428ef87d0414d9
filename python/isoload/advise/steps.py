"""A whole step of a candidate: its MoE layers by their timeline, with attention and the dense part between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isoload.replay.timeline import ENDS, Floats, rows_between, timeline
from isoload.times import LayerTime
from isoload.topology import Topology

Span = tuple[float, float]


@dataclass(frozen=True)
class Step:
    """Milliseconds from the low to the high end of the all-to-all's range, a mean over batches.

    stages: of a rank in the mean, in the order of :class:`isoload.replay.timeline.Timeline`, then "waiting"; their sum
    is the step's. halved_ms: of the step in two half batches, of which one computes while the other exchanges.
    """

    ms: Span
    stages: dict[str, Span]
    halved_ms: Span

    def to_json(self) -> dict[str, Any]:
        stages = {name: list(span) for name, span in self.stages.items()}
        return {"ms": list(self.ms), "stages": stages, "halved_ms": list(self.halved_ms)}


def modelled_step(
    layer: LayerTime,
    batches: Sequence[NDArray[np.integer]],
    tokens: int,
    topology: Topology,
    layers: int,
    dense_ms: float,
    plan_us: Span,
    gather_us: Span,
) -> Step:
    """The mean of several batches.

    Args:
        layer, tokens, topology: as :func:`timeline` takes them.
        batches: [L, R, P] copies that each rank sends to each slot.
        layers: of the model; all are as the mean of the L that are known.
        dense_ms: of a step, all layers: spread evenly over those with experts.
        plan_us, gather_us: of a layer at both ends.
    """
    found: dict[str, Floats] = defaultdict(lambda: np.zeros(2))  # seconds at both ends
    for sent in batches:
        rows = rows_between(sent, tokens, topology.num_ranks)
        for at, end in enumerate(ENDS):
            gather_s, plan_s = 1e-6 * gather_us[at], 1e-6 * plan_us[at]
            of_batch = partial(timeline, layer, sent, tokens, topology, end=end, rows=rows)
            step = partial(of_batch, dense_s=1e-3 * dense_ms / layers, gather_s=gather_s, plan_s=plan_s)
            whole = step()
            found["whole"][at] += whole.seconds
            found["halved"][at] += step(two_batch=True).seconds
            for name, of in whole.stages().items():
                found[name][at] += of["mean"]
    to_ms = 1e3 * layers / len(batches[0]) / len(batches)
    spans = {name: (to_ms * float(both[0]), to_ms * float(both[1])) for name, both in found.items()}
    return Step(spans.pop("whole"), halved_ms=spans.pop("halved"), stages=spans)
