"""A step of a model as events on every rank's streams: which rank computes, exchanges or waits, and when.

A collective (gather, dispatch) begins when all ranks have arrived. A combine begins on a rank when the experts of every
rank that has tokens of it are done. A stream runs one stage after the other, in issue order. No link of a node has a
stream of its own: exchanges over nodes were measured at their ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isoload.times import LayerTime
from isoload.times.experts import numbers
from isoload.topology import NOMINAL_TICKS, Topology, as_topology
from isoload.wording import not_one_of

Floats = NDArray[np.float64]
ENDS = ("low", "high")
EVENT = np.dtype(
    [("rank", "i4"), ("stream", "i1"), ("layer", "i4"), ("stage", "i1"), ("start", "f8"), ("end", "f8")]
)


@dataclass(frozen=True, eq=False)
class Timeline:
    """Events of the ranks in a step; with two half batches a stage has two events."""

    events: NDArray[Any]  # [N] of EVENT, by rank and start, in seconds; none for a stage without time
    rows: Floats  # [L, R, R] distinct tokens that the dispatch carries from source to rank, itself included

    STREAMS: ClassVar[tuple[str, ...]] = ("compute", "exchange", "weights")
    STAGES: ClassVar[tuple[str, ...]] = ("dense", "gather", "plan", "move", "dispatch", "experts", "combine")

    @property
    def seconds(self) -> float:
        """Seconds until the last rank's last event has ended."""
        return float(self.events["end"].max(initial=0.0))

    def stages(self) -> dict[str, dict[str, float]]:
        """Return seconds by stage and "waiting" (idle), of the rank that waits least ("slowest") and the "mean"."""
        spent = np.zeros((self.rows.shape[-1], len(self.STAGES)))
        took = self.events["end"] - self.events["start"]
        np.add.at(spent, (self.events["rank"], self.events["stage"]), took)
        waiting = self._waiting()
        slowest = int(waiting.argmin())
        columns = dict(zip((*self.STAGES, "waiting"), (*spent.T, waiting), strict=True))
        return {
            name: {"slowest": float(of_rank[slowest]), "mean": float(of_rank.mean())}
            for name, of_rank in columns.items()
        }

    def _waiting(self) -> Floats:
        """Return [R] seconds in which all streams of a rank are idle."""
        ranks = self.rows.shape[-1]
        waiting = np.full(ranks, self.seconds)
        cuts = np.searchsorted(self.events["rank"], np.arange(ranks + 1))
        for rank in range(ranks):
            of_rank = self.events[cuts[rank] : cuts[rank + 1]]
            ended = np.maximum.accumulate(of_rank["end"])
            before = np.concatenate([[0.0], ended[:-1]])  # the end of all earlier events
            waiting[rank] -= (ended - np.maximum(of_rank["start"], before)).clip(min=0).sum()
        return waiting

    def to_json(self) -> dict[str, Any]:
        return {
            "streams": list(self.STREAMS),
            "stages": list(self.STAGES),
            "seconds": self.seconds,
            "fields": list(EVENT.names or ()),
            "events": [list(event) for event in self.events.tolist()],
        }


def timeline(
    layer: LayerTime,
    sent: ArrayLike,
    tokens: int,
    topology: Topology | int,
    *,
    end: str = "high",
    rows: ArrayLike | None = None,
    crossing: ArrayLike = 1.0,
    dense_s: ArrayLike = 0.0,
    gather_s: ArrayLike = 0.0,
    plan_s: ArrayLike = 0.0,
    moves_s: ArrayLike = 0.0,
    beside: bool = False,
    two_batch: bool = False,
) -> Timeline:
    """Return the step of one batch.

    Args:
        layer, tokens: times of experts, dispatch and combine; tokens of a source rank.
        sent: [L, R, P] copies that each source rank sends to each slot.
        topology: of R ranks, or the number R; with speeds, a slow rank's experts take longer.
        end: of the all-to-all's range: "low" or "high".
        rows: [L, R, R] distinct tokens from source to rank, if routing is known. Default: :func:`rows_between`.
        crossing: [L] rows to other nodes over those of even routing, see :meth:`isoload.times.AllToAllTime.seconds`.
        dense_s: seconds before the router's choice is used; all seconds are of every layer and rank ([L, R]).
        gather_s, plan_s: of the gather of loads (0: no waiting for it), and from the loads to the slots.
        moves_s: in which a rank's weights of a layer arrive; delays its experts.
        beside: weights travel from the plan of the previous layer on, as with a fill ahead; else after the layer's own
            plan.
        two_batch: one half of the batch computes while the other exchanges, in the order of SGLang's overlap in
            prefill. A half takes half of dense_s and all of gather_s and plan_s; weights move once.
    """
    if end not in ENDS:
        raise ValueError(not_one_of("end", ENDS, end))
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    topology = as_topology(topology)
    copies, ranks = numbers("sent", sent), topology.num_ranks
    if copies.ndim != 3 or copies.shape[1] != ranks or copies.shape[2] % ranks:
        raise ValueError(f"sent must be [layers, {ranks} ranks, slots of all], got {list(copies.shape)}")
    for step in filter(None, (layer.dispatch, layer.combine)):
        if step.ranks != ranks:
            raise ValueError(
                f"layer must be of the topology's {ranks} ranks, got {step.step} of {step.ranks}"
            )
    known = numbers("rows", rows_between(copies, tokens, ranks) if rows is None else rows)
    if known.shape != (len(copies), ranks, ranks):
        raise ValueError(f"rows must be {[len(copies), ranks, ranks]}, got {list(known.shape)}")
    halves = 1 + two_batch
    per_slot = copies.sum(1).reshape(len(copies), ranks, copies.shape[2] // ranks) / halves
    experts, *exchanges = layer.parts(per_slot, known.sum(1) / halves, tokens / halves, crossing)
    if topology.ticks is not None:
        experts *= topology.ticks.numpy() / NOMINAL_TICKS
    seconds = {"dense_s": dense_s, "gather_s": gather_s, "plan_s": plan_s, "moves_s": moves_s}
    spread = [_spread(name, values, experts.shape) for name, values in seconds.items()]
    took = dict(zip(("dense", "gather", "plan", "move"), spread, strict=True)) | {"experts": experts}
    took["dense"] = took["dense"] / halves
    for name, ends in zip(("dispatch", "combine"), exchanges, strict=True):
        took[name] = np.broadcast_to(ends[:, ENDS.index(end), None], experts.shape)
    return Timeline(_scheduled(took, known > 0, halves, beside), known)


def rows_between(sent: NDArray[np.number[Any]], tokens: int, groups: int) -> Floats:
    """Return [L, R, groups] rows that each source sends to each group of ranks (a rank, or a node) of sent [L, R, P].

    Slots' copies are assumed to be of independent tokens: this counts slightly too few rows.
    """
    return rows_by_size(sent, tokens, groups)[0]


def rows_by_size(sent: NDArray[np.number[Any]], tokens: int, *sizes: int) -> list[Floats]:
    """Return :func:`rows_between` for each number of groups; each number divides the one before."""
    rows, largest = [np.empty((*sent.shape[:2], groups)) for groups in sizes], int(sent.max(initial=0))
    # Logarithms cost most. If copies are whole and few, they are computed once for each number of them.
    few_numbers = sent.dtype.kind in "iu" and largest < sent[0].size
    table = _missing(np.arange(largest + 1), tokens) if few_numbers else None
    for layer, of_layer in enumerate(sent):  # one by one: with 256 ranks the array of all slots is large
        missed = _missing(of_layer, tokens) if table is None else table[of_layer]
        for result in rows:
            grouped = missed.reshape(*result.shape[1:], -1)
            # NumPy adds fewer than 8 numbers in their order; adding columns takes a fifth of the time.
            few = grouped.shape[-1] < 8
            missed = reduce(np.add, np.moveaxis(grouped, -1, 0)) if few else grouped.sum(-1)
            result[layer] = -tokens * np.expm1(missed)
    return rows


def _missing(copies: NDArray[np.number[Any]], tokens: int) -> Floats:
    """Return the logarithm of the chance that a token sends none of a slot's copies to it."""
    return np.asarray(np.log1p(-np.minimum(copies / tokens, 1 - 1e-12)))


def _spread(name: str, values: ArrayLike, shape: tuple[int, ...]) -> Floats:
    array = numbers(name, values)
    try:
        return np.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{name} must broadcast to {list(shape)}, got {list(array.shape)}") from None


def _scheduled(took: dict[str, Floats], visits: NDArray[np.bool_], halves: int, beside: bool) -> NDArray[Any]:
    """Return events of stages that take [L, R] seconds; visits: [L, R, R] whether tokens of source go to rank."""
    layers, ranks = took["experts"].shape
    streams, everyone = _Streams(took), np.ones((ranks, ranks), dtype=np.bool_)
    done = [np.zeros(ranks)] * halves  # end of the previous layer, of each half
    fetch = np.zeros(ranks)  # time from which this layer's weights may travel during compute
    for layer in range(layers):
        partners = visits[layer] | np.eye(ranks, dtype=np.bool_)
        arrived, moved = [], fetch
        if beside:
            moved = streams.run("weights", layer, "move", fetch)
        for half in range(halves):
            ready = streams.run("compute", layer, "dense", done[half])
            if took["gather"][layer].any():
                ready = streams.run("exchange", layer, "gather", ready, everyone)
            ready = streams.run("compute", layer, "plan", ready)
            if half == 0:
                fetch = ready
                if not beside:
                    moved = ready = streams.run("weights", layer, "move", ready)
            arrived.append(streams.run("exchange", layer, "dispatch", ready, everyone))
        for half in range(halves):
            ready = streams.run("compute", layer, "experts", np.maximum(arrived[half], moved))
            done[half] = streams.run("exchange", layer, "combine", ready, partners)
    return streams.events()


class _Streams:
    """When each stream of each rank is free, and its events."""

    def __init__(self, took: dict[str, Floats]) -> None:
        self._took, self._ranks = took, took["experts"].shape[1]
        self._free = dict.fromkeys(Timeline.STREAMS, np.zeros(self._ranks))
        self._ran: list[tuple[int, int, int, Floats, Floats]] = []

    def run(
        self, stream: str, layer: int, stage: str, ready: Floats, waits: NDArray[np.bool_] | None = None
    ) -> Floats:
        """Return [R] ends of a stage, which starts when a rank's stream is free and the ranks of waits are ready."""
        start = np.maximum(ready, self._free[stream])
        if waits is not None:
            start = np.where(waits, start, 0.0).max(1)
        ended: Floats = start + self._took[stage][layer]
        self._free[stream] = ended
        codes = Timeline.STREAMS.index(stream), layer, Timeline.STAGES.index(stage)
        self._ran.append((*codes, start, ended))
        return ended

    def events(self) -> NDArray[Any]:
        table = np.empty((len(self._ran), self._ranks), dtype=EVENT)
        table["rank"] = np.arange(self._ranks)
        for row, ran in zip(table, self._ran, strict=True):
            for name, value in zip(("stream", "layer", "stage", "start", "end"), ran, strict=True):
                row[name] = value
        events = table[table["end"] > table["start"]]
        return np.asarray(events[np.lexsort((events["start"], events["rank"]))])
