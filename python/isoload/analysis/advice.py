"""Advice: each candidate's time on the user's GPUs, by measured constants, on batches from which it was not made.

A candidate is a placement with a number of added slots, and the policy that chooses the replica of a copy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoload import ops
from isoload.analysis.judge import Judged
from isoload.analysis.models import Model
from isoload.analysis.timeline import ENDS, Floats, Timeline, rows_by_size, timeline
from isoload.balancing.planning import plan_layers, share_of_node, share_routed
from isoload.balancing.targets import offsets
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.times import LayerTime
from isoload.times.exchanges import rows_leaving, sends_copies
from isoload.topology import Topology, as_topology, over_mean
from isoload.traces import Ints

MORE_SLOTS = (0, 1, 2, 4)  # of a rank, in addition to one for each expert


class Candidate(NamedTuple):
    """One way to run."""

    placer: str  # "trivial" places experts in order, as engines do; "eplb" packs them by their loads
    more: int  # slots of a rank beyond those that hold each expert once
    split: str  # "none", an engine's "static" or "dynamic" (random), or one of ISOLOADS

    @property
    def ours(self) -> bool:
        return self.split in ISOLOADS

    @property
    def label(self) -> str:
        placed = LABELS.get(self.placer, f"{self.placer}, +{self.more} slots")
        return placed if self.split == "none" else f"{placed}, {self.split}"


# Those without an exchange are made by isoload.analysis.details.without_exchange.
LABELS = {"trivial": "in order, no replicas", "all": "no expert parallelism", "dwdp": "DWDP, prefetched"}
NOW = Candidate("trivial", 0, "none")
ISOLOADS = ("exact", "node", "own")


def grid(max_slots: int, gathers: bool = True, nodes: int = 1) -> list[Candidate]:
    """Return all candidates with at most max_slots more slots, experts in order first; gathers: as in Question."""
    ours = [split for split in ISOLOADS if gathers or split == "own"]
    splits = ("static", "dynamic", *(split for split in ours if nodes > 1 or split != "node"))
    replicated = (
        Candidate("eplb", more, split) for more in MORE_SLOTS[1:] if more <= max_slots for split in splits
    )
    return [NOW, Candidate("eplb", 0, "none"), *replicated]


Sent = NDArray[np.integer]  # [L, R, P] copies that each rank sends to each slot, in one batch
Batch = Callable[[], Sent]  # computes them: large groups hold few batches at a time


def placed(candidate: Candidate, judged: Judged, topology: Topology) -> Placement:
    slots = -(-judged.calibration.shape[-1] // topology.num_ranks) + candidate.more
    return place(judged.calibration, topology, slots, candidate.placer)


def sent(
    candidate: Candidate, loads: Tensor, placement: Placement, renewed: list[Tensor], seed: int
) -> Tensor:
    """Return [L, R, P] copies that each rank sends to each slot for loads [L, R, E]; renewed: of :func:`targets`."""
    split = candidate.split
    if split == "dynamic":
        return _dynamic(loads, placement, seed)
    if split == "node":
        return _node(loads, placement, renewed)
    if split == "own":
        tables, ranks = placement.layers("cpu").tables, enumerate(loads.unbind(1))
        return torch.stack([ops.plan_own(sums.contiguous(), tables, renewed[r], r) for r, sums in ranks], 1)
    policy = {"none": "static", "static": "static", "exact": "exact"}[split]
    return share_routed(loads, plan_layers(loads, placement, policy), None)


def sent_batches(candidate: Candidate, placement: Placement, judged: Judged) -> list[Batch]:
    """Return the copies of every judged batch, each computed when its element is called."""
    renewed = targets(candidate.split, torch.from_numpy(judged.calibration), placement)

    def batch(seed: int) -> Sent:
        return np.asarray(sent(candidate, judged.loads[seed], placement, renewed, seed).numpy())

    return [partial(batch, seed) for seed in range(len(judged.loads))]


def targets(split: str, counts: Tensor, placement: Placement) -> list[Tensor]:
    """Return the offsets [L, R] of every rank ("own") or node ("node") by counts [L, E]; [] for other splits."""
    layers, topology = placement.layers("cpu"), placement.topology
    sources = {"own": topology.num_ranks, "node": topology.num_nodes}.get(split, 0)
    recent = counts.unsqueeze(1).expand(-1, sources, -1)
    if not sources:
        return []
    # Sources with the same counts have the same offset.
    return [offsets(recent, recent.sum(2), 0, layers.tables, layers.slot_to_expert, topology)] * sources


def _node(loads: Tensor, placement: Placement, renewed: list[Tensor]) -> Tensor:
    """Return the copies if every node splits the loads of its own ranks."""
    layers, size = placement.layers("cpu"), placement.topology.ranks_per_node
    sent = loads.new_empty(*loads.shape[:2], placement.num_slots)
    for node, offset in enumerate(renewed):
        ranks = slice(node * size, (node + 1) * size)
        slots = slice(ranks.start * placement.slots_per_rank, ranks.stop * placement.slots_per_rank)
        wanted = ops.plan_own(loads[:, ranks].sum(1, dtype=torch.int32), layers.tables, offset, node)
        sent[:, ranks] = share_of_node(loads[:, ranks], wanted, layers.slot_to_expert, slots)
    return sent


def _dynamic(loads: Tensor, placement: Placement, seed: int) -> Tensor:
    """Return [L, R, P] copies if every copy draws a replica with equal chances."""
    # torch draws binomial numbers in half of NumPy's time; with NumPy they were most of an advice for 320 ranks.
    draw, slots = torch.Generator().manual_seed(seed), placement.arrays[0]
    drawn = np.zeros((*loads.shape[:2], slots.shape[1]), dtype=np.int32)
    for layer, row in enumerate(slots):
        order = np.argsort(row, kind="stable")  # the slots of an expert, one after the other
        order = order[row[order] >= 0]
        copies = np.bincount(row[order], minlength=loads.shape[2])
        first = np.cumsum(copies) - copies
        left = loads[layer].T.double()  # [E, R]
        taken = np.zeros((slots.shape[1], loads.shape[1]), dtype=np.int32)  # [P, R]
        for turn in range(int(copies.max())):  # a binomial part of the rest goes to the next replica
            more, last = np.flatnonzero(copies > turn + 1), np.flatnonzero(copies == turn + 1)
            undealt, chance = left[more], torch.from_numpy(1 / (copies[more] - turn)).unsqueeze(1)
            took = torch.binomial(undealt, chance.expand_as(undealt), generator=draw)
            taken[order[first[more] + turn]] = took
            taken[order[first[last] + turn]] = left[last]
            left[more] = undealt - took
        drawn[layer] = taken.T
    return torch.from_numpy(drawn)


Span = tuple[float, float]
NO_DIFFERENCE = 0.03  # of a step: a smaller difference is within the error of the model
# Microseconds until the slots of a layer are known, measured on one H100 (docs/results-gpu.md; 16 to 64 ranks, 128 to
# 16,384 tokens of each): own counts in one op; count, plan and route one after another. GATHER_US: the gather of loads
# before them, which takes several GPUs and was not measured.
GATHER_US = (10.0, 25.0)
SAME_PLAN = {"node": "exact"}  # whose measured time is taken for another split
PLAN_US = {
    "none": (0.0, 0.0),
    "static": (0.0, 0.0),
    "dynamic": (0.0, 0.0),
    "own": (20.0, 40.0),
    "node": (36.0, 92.0),
    "exact": (36.0, 92.0),
}


@dataclass(frozen=True)
class Question:
    """The setting of an advice."""

    model: Model
    layer: LayerTime  # constants of the GPU
    topology: Topology  # R ranks, or the number R
    tokens: int  # of a rank in a step
    step_ms: float | None = None  # measured; percentages refer to it, else to the modelled MoE layers alone
    memory: float | None = None  # bytes of a rank for more slots; None: no limit
    rebalance_s: float = 0.0  # seconds that a rebalance takes
    every: int = 0  # steps between two rebalances
    context: int = 4096  # tokens of a request
    gathers: bool = True  # whether the engine gathers all ranks' loads for this model, as "exact" needs
    dense_ms: float | None = None  # of attention and the dense part, all layers: a whole step is modelled
    plan_us: Mapping[str, float] | None = None  # measured, of a layer by split; None: PLAN_US
    like_for_like: bool = False  # compare isoload with a candidate of equally many slots

    def __post_init__(self) -> None:
        object.__setattr__(self, "topology", as_topology(self.topology))
        if self.dense_ms is not None and not (0 < self.dense_ms < float("inf") and self.step_ms is None):
            shown = f"{self.dense_ms:g} and {self.step_ms}"
            raise ValueError(f"dense_ms must be above 0, and in place of step_ms, got {shown}")
        if self.step_ms is not None and not self.step_ms > 0:
            raise ValueError(f"step_ms must be above 0, got {self.step_ms:g}")
        if self.tokens < 1:
            raise ValueError(f"tokens_per_rank must be at least 1, got {self.tokens}")
        if self.rebalance_s < 0 or (self.rebalance_s > 0 and self.every < 1):
            raise ValueError(
                f"rebalance_seconds must be at least 0 and come with every, got {self.rebalance_s:g} and {self.every}"
            )


class Run(NamedTuple):
    """A candidate's run on B judged batches."""

    candidate: Candidate
    copies: Ints  # [B, L, R, S] that each slot computes
    received: Floats  # [B, L, R] rows that each rank receives, its own included
    rows: Floats  # [R, R] that each rank sends to each, itself included, in all layers and batches
    node_rows: float  # fraction of all rows to another node
    crossing: Floats  # [B, L, 2] rows of a token to other nodes: once for each node, and once for each copy

    @property
    def rank_rows(self) -> float:
        """Fraction of all rows to another rank."""
        return 1 - float(self.rows.trace() / self.rows.sum())


@dataclass(frozen=True)
class Answer:
    """A candidate's figures; ranges are [from, to]."""

    candidate: Candidate
    ms_per_layer: float
    ms: tuple[float, float]  # of a step's MoE layers, with planning and moving
    saved_ms: tuple[float, float]  # against the present candidate
    imbalance: float  # max / mean copies of a rank, mean over layers and batches
    slots_bytes: float  # of a rank's additional slots
    node_rows: float  # fraction of all rows to another node
    rank_rows: float  # fraction of all rows to another rank

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "candidate": self.candidate._asdict()}


@dataclass(frozen=True)
class Step:
    """Milliseconds from the low to the high end of the all-to-all's range, a mean over batches."""

    ms: Span
    stages: dict[str, Span]  # of a mean rank: stages of a Timeline, and "waiting"; their sum is the step's
    halved_ms: Span  # if one half batch computes while the other exchanges


@dataclass(frozen=True)
class Advice:
    """Answers, fastest first; `now` is the candidate to which they are compared."""

    question: Question
    answers: tuple[Answer, ...]
    now: Answer
    extrapolated: bool  # whether the constants were measured on fewer or more tokens
    drawn: bool
    steps: tuple[Step, Step] | None = None  # whole steps, of now and of the best; with dense_ms
    alone: tuple[Answer, ...] = ()  # ways to run without an exchange, so with nothing to balance

    @property
    def ours(self) -> Answer | None:
        """The best candidate in which isoload chooses the replicas; None if memory allows no added slot."""
        return next((answer for answer in self.answers if answer.candidate.ours), None)

    @property
    def theirs(self) -> Answer:
        """The best candidate without isoload; with like_for_like, of as many slots as isoload's best."""
        return self.rival(self.question.like_for_like)

    def rival(self, like_for_like: bool) -> Answer:
        more = self.ours.candidate.more if self.ours and like_for_like else None
        engines = (answer for answer in self.answers if not answer.candidate.ours)
        return next(answer for answer in engines if more in (None, answer.candidate.more))

    @property
    def gain_ms(self) -> tuple[float, float]:
        """What isoload saves in addition to the best candidate without it."""
        return self.gain_over(self.theirs)

    def gain_over(self, other: Answer) -> tuple[float, float]:
        return less(other.ms, self.ours.ms) if self.ours else (0.0, 0.0)

    def share(self, saved_ms: tuple[float, float]) -> tuple[float, float]:
        """Return a saving as a fraction of the measured step, else of the modelled one."""
        modelled = self.steps[0].ms if self.steps else self.now.ms
        step = self.question.step_ms
        low, high = sorted(saved / (step or now) for saved, now in zip(saved_ms, modelled, strict=True))
        return low, high

    @property
    def verdict(self) -> str:
        low, high = self.share(self.gain_ms)
        if low + high <= 0:
            return "not worth it"
        if high < NO_DIFFERENCE:
            return "no difference"
        return "worth it" if low >= NO_DIFFERENCE else "may be worth it"


def advise(
    question: Question,
    judged: Judged,
    on_candidate: Callable[[int, int], None] = lambda done, total: None,
    placements: dict[tuple[str, int], Placement] | None = None,
) -> Advice:
    """Return the candidates of the grid on the judged batches, ordered by the middle of their range. `placements`, by
    placer and number of additional slots, are those that exist already; missing ones are added to it."""
    model = question.model
    per_slot = model.expert_bytes * model.layers
    # A rank has at most one slot for each expert.
    max_slots = model.experts - -(-model.experts // question.topology.num_ranks)
    max_slots = max_slots if question.memory is None else min(max_slots, int(question.memory // per_slot))
    in_order, placements = list[Answer](), {} if placements is None else placements
    candidates = grid(max_slots, question.gathers, question.topology.num_nodes)
    for done, candidate in enumerate(candidates):
        key = candidate.placer, candidate.more
        if key not in placements:
            placements[key] = placed(candidate, judged, question.topology)
        in_order.append(_answer(run(candidate, judged, question, placements[key]), question, per_slot))
        on_candidate(done + 1, len(candidates))
    now = in_order[0]
    assert now.candidate == NOW
    answers = [replace(answer, saved_ms=less(now.ms, answer.ms)) for answer in in_order]
    ranked = sorted(answers, key=lambda answer: sum(answer.ms))
    guessed = bool(question.layer.experts.extrapolated([question.tokens * model.top_k]))
    steps = None
    if question.dense_ms is not None:
        whole = [_whole(answer.candidate, placements, question, judged) for answer in (answers[0], ranked[0])]
        steps = whole[0], whole[1]
    return Advice(question, tuple(ranked), answers[0], guessed, judged.drawn, steps)


def _whole(
    candidate: Candidate, placements: dict[tuple[str, int], Placement], question: Question, judged: Judged
) -> Step:
    """Return the mean step of the judged batches, in which unknown layers are as the mean of known ones."""
    assert question.dense_ms is not None
    placement = placements[candidate.placer, candidate.more]
    batches = [batch() for batch in sent_batches(candidate, placement, judged)]
    plan_us, gather_us = planning_us(candidate.split, question)
    layers, dense_s = question.model.layers, 1e-3 * question.dense_ms / question.model.layers
    totals: dict[str, Floats] = defaultdict(lambda: np.zeros(2))  # seconds at both ends
    for sent in batches:
        of_batch = timeline_of(sent, question)
        for at, end in enumerate(ENDS):
            gather_s, plan_s = 1e-6 * gather_us[at], 1e-6 * plan_us[at]
            step = partial(of_batch, end=end, dense_s=dense_s, gather_s=gather_s, plan_s=plan_s)
            whole = step()
            totals["whole"][at] += whole.seconds
            totals["halved"][at] += step(two_batch=True).seconds
            for name, seconds in whole.stages().items():
                totals[name][at] += seconds["mean"]
    to_ms, moving = 1e3 * layers / len(batches[0]) / len(batches), _moving_ms(candidate, question)
    spans = {name: (to_ms * float(ends[0]), to_ms * float(ends[1])) for name, ends in totals.items()}
    ms, halved = ((low + moving, high + moving) for low, high in (spans.pop("whole"), spans.pop("halved")))
    return Step(ms, {**spans, "rebalance": (moving, moving)}, halved)


def timeline_of(sent: Sent, question: Question) -> partial[Timeline]:
    topology = question.topology
    rows, to_nodes = rows_by_size(sent, question.tokens, topology.num_ranks, topology.num_nodes)
    crossing = over_even(_crossing(sent, to_nodes, question), question)
    return partial(timeline, question.layer, sent, question.tokens, topology, rows=rows, crossing=crossing)


def planning_us(split: str, question: Question) -> tuple[Span, Span]:
    """Return microseconds of a layer, from and to: the plan's kernels, and the gather of loads if known separately."""
    low, high = _plan_us(split, question)
    gather = GATHER_US if split in ("exact", "node") and question.plan_us is None else (0.0, 0.0)
    return (low - gather[0], high - gather[1]), gather


def _plan_us(split: str, question: Question) -> Span:
    if question.plan_us is None or PLAN_US[split] == (0.0, 0.0):
        return PLAN_US[split]
    measured = question.plan_us.get(split, question.plan_us.get(SAME_PLAN.get(split, ""), 0.0))
    return measured, measured


def _moving_ms(candidate: Candidate, question: Question) -> float:
    moves = question.every and candidate.placer != "trivial"
    return 1e3 * question.rebalance_s / question.every if moves else 0.0


def run(candidate: Candidate, judged: Judged, question: Question, placement: Placement | None = None) -> Run:
    chosen = placement or placed(candidate, judged, question.topology)
    return run_of(candidate, sent_batches(candidate, chosen, judged), question)


def run_of(candidate: Candidate, batches: Iterable[Batch], question: Question) -> Run:
    """Return a candidate's run. Two threads take the batches by turns: NumPy and torch release Python's lock."""
    topology = question.topology

    def counted(batch: Batch) -> tuple[Ints, Floats, Floats, float, Floats]:
        moved = batch()
        rows, to_nodes = rows_by_size(moved, question.tokens, topology.num_ranks, topology.num_nodes)
        copies = moved.sum(1).reshape(len(moved), topology.num_ranks, -1)
        across = float(to_nodes[:, _other_nodes(topology)].sum() / to_nodes.sum())
        return copies, rows.sum(1), rows.sum(0), across, _crossing(moved, to_nodes, question)

    with ThreadPoolExecutor(2) as pool:
        copies, received, totals, across, crossing = zip(*pool.map(counted, batches), strict=True)
    counts = np.stack(copies), np.stack(received), np.sum(totals, axis=0)
    return Run(candidate, *counts, float(np.mean(across)), np.stack(crossing))


def layer_ms(result: Run, question: Question) -> Floats:
    """Return [2] from and to what a layer takes on average, without planning."""
    tokens = np.full(result.copies.shape[:2], question.tokens)
    crossing = over_even(result.crossing, question)
    seconds = question.layer.seconds(result.copies, result.received, tokens, crossing)
    return np.asarray(seconds.mean((0, 1)) * 1e3)


def step_ms(result: Run, question: Question, planning: float = 1.0) -> tuple[float, float]:
    """Return what a step's MoE layers take; planning: factor of the planning time."""
    moving, plan_us = _moving_ms(result.candidate, question), _plan_us(result.candidate.split, question)
    of_layer = layer_ms(result, question) + [planning * us * 1e-3 for us in plan_us]
    low, high = (question.model.layers * of_layer + moving).tolist()
    return low, high


def _answer(result: Run, question: Question, per_slot: float) -> Answer:
    layer, ms = float(layer_ms(result, question).mean()), step_ms(result, question)
    imbalance = float(over_mean(result.copies.sum(-1)).max(-1).mean())
    memory, rows = result.candidate.more * per_slot, (result.node_rows, result.rank_rows)
    return Answer(result.candidate, layer, ms, (0.0, 0.0), imbalance, memory, *rows)


def _other_nodes(topology: Topology) -> NDArray[np.bool_]:
    """Return [R, nodes] whether a node is not the rank's own."""
    node_of_rank = np.arange(topology.num_ranks) // topology.ranks_per_node
    return np.asarray(node_of_rank[:, None] != np.arange(topology.num_nodes))


def _crossing(sent: Sent, to_nodes: Floats, question: Question) -> Floats:
    """Return [L, 2] rows of a token to other nodes: once for each node (to_nodes [L, R, nodes]), once for each copy."""
    topology = question.topology
    copies = sent.reshape(*to_nodes.shape, -1).sum(-1)
    other = _other_nodes(topology)
    sums = [rows[:, other].sum(1) for rows in (to_nodes, copies)]
    return np.stack(sums, 1) / (question.tokens * topology.num_ranks)


def over_even(crossing: Floats, question: Question) -> Floats | float:
    """Return [...] of crossing [..., 2] what the question's dispatch sends, over the same of even routing."""
    nodes, dispatch, model = question.topology.num_nodes, question.layer.dispatch, question.model
    if nodes == 1 or dispatch is None:
        return 1.0
    if sends_copies(dispatch.kernel):
        return np.asarray(crossing[..., 1] / rows_leaving(dispatch.kernel, model.top_k, nodes))
    reached = 1 - (1 - model.top_k / model.experts) ** (model.experts / nodes)
    return np.asarray(crossing[..., 0] / ((nodes - 1) * reached))


def near_saves(
    question: Question, judged: Judged, placements: tuple[Placement, Placement], rows: tuple[float, float]
) -> Span:
    """Return the milliseconds of a step that the second placement saves, split exactly; rows: to other nodes."""
    even = rows_leaving("", question.model.top_k, question.topology.num_nodes)
    spans = []
    for placement, of_token in zip(placements, rows, strict=True):
        ran = run(Candidate("eplb", 1, "exact"), judged, question, placement)
        tokens = np.full(ran.copies.shape[:2], question.tokens)
        seconds = question.layer.seconds(ran.copies, ran.received, tokens, of_token / even)
        low, high = (1e3 * question.model.layers * seconds.mean((0, 1))).tolist()
        spans.append((low, high))
    return less(spans[0], spans[1])


def saved_ms(before: Run, after: Run, question: Question, planning: float = 1.0) -> Span:
    """Return the milliseconds of a step that one run saves over another, from and to."""
    return less(step_ms(before, question, planning), step_ms(after, question, planning))


def less(before: Span, after: Span) -> Span:
    """Return the difference; both ranges follow one all-to-all, so low ends and high ends are subtracted."""
    low, high = sorted(old - new for old, new in zip(before, after, strict=True))
    return low, high
