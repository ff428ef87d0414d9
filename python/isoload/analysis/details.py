"""Details of an answer: saving by tokens, sensitivity to each constant, a step's events, commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoload.analysis import advice
from isoload.analysis.advice import Answer, Candidate, Question, Run, Span
from isoload.analysis.judge import Floats, Judged, most_replicas
from isoload.analysis.timeline import Timeline
from isoload.balancing.planning import fill, plan, refill, share_routed
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.policies import make_policy
from isoload.policies.borrowing import IN_ENGINES
from isoload.times import LayerTime
from isoload.times.exchanges import DEFAULT_BANDWIDTHS, PEER_BANDWIDTHS, Curve
from isoload.topology import Topology, over_mean

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
    """Return the layer with one constant of EXPERTS or EXCHANGE multiplied by a factor; p stays at 1 or above."""
    if name in EXPERTS:
        field = EXPERTS[name]
        value = max(factor * getattr(layer.experts, field), 1.0 if field == "p" else 0.0)
        return replace(layer, experts=replace(layer.experts, **{field: value}))

    field = EXCHANGE[name]

    def times(curve: Curve) -> Curve:
        return curve._replace(**{field: factor * getattr(curve, field)})

    steps = (s and replace(s, low=times(s.low), high=times(s.high)) for s in (layer.dispatch, layer.combine))
    return LayerTime(next(steps), layer.experts, next(steps))


def sensitivity(before: Run, after: Run, question: Question) -> dict[str, tuple[Span, Span]]:
    """Return by constant the saving if it is halved and if it is doubled; the most important constants first."""
    half, double = (advice.saved_ms(before, after, question, factor) for factor in (0.5, 2.0))
    savings = {PLANNING: (half, double)}
    for name in (*EXPERTS, *EXCHANGE):
        asked = (replace(question, layer=scaled(question.layer, name, factor)) for factor in (0.5, 2.0))
        half, double = (advice.saved_ms(before, after, changed) for changed in asked)
        savings[name] = half, double
    width = {name: abs(sum(half) - sum(double)) for name, (half, double) in savings.items()}
    return dict(sorted(savings.items(), key=lambda item: -width[item[0]]))


class Saving(NamedTuple):
    """What a candidate saves with a number of tokens per rank."""

    tokens: int
    ms: Span  # of a step
    share: Span  # of the time of the step's MoE layers without the candidate
    extrapolated: bool  # whether the constants were measured on fewer or more tokens


def by_tokens(
    question: Question,
    layers: Mapping[str, LayerTime],
    pair: tuple[Candidate, Candidate],
    judge: Callable[[int], Judged],
    on_count: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[Saving]]:
    """Return by phase what the second of a pair saves over the first, for TOKENS and the question's own number.

    judge returns batches with a number of tokens per rank: two are used, and all for the question's own number.
    """
    counts = sorted({*TOKENS, question.tokens})
    savings: dict[str, list[Saving]] = {phase: [] for phase in layers}
    for done, tokens in enumerate(counts):
        judged = judge(tokens)
        if tokens != question.tokens:
            judged = replace(judged, loads=judged.loads[:2])
        asked = replace(question, tokens=tokens)
        before, after = (advice.run(candidate, judged, asked) for candidate in pair)
        for phase, layer in layers.items():
            timed = replace(asked, layer=layer)
            ms = advice.saved_ms(before, after, timed)
            pairs = zip(advice.step_ms(before, timed), advice.step_ms(after, timed), strict=True)
            share = sorted(1 - new / old for old, new in pairs)
            copies = [tokens * question.model.top_k]
            beyond = any(step.extrapolated(tokens) for step in (layer.dispatch, layer.combine) if step)
            savings[phase].append(
                Saving(tokens, ms, (share[0], share[1]), bool(layer.experts.extrapolated(copies)) or beyond)
            )
        on_count(done + 1, len(counts))
    return savings


def few_layers(candidate: Candidate, question: Question, judged: Judged, layers: int = 3) -> Timeline:
    """Return the first layers of the first judged batch, at the high end of every range."""
    sent = advice.sent_batches(candidate, advice.placed(candidate, judged, question.topology), judged)[0]()
    (_, plan), (_, gather) = advice.planning_us(candidate.split, question)
    dense = 1e-3 * (question.dense_ms or 0.0) / question.model.layers
    step = advice.timeline_of(sent[:layers], question)
    return step(end="high", dense_s=dense, plan_s=1e-6 * plan, gather_s=1e-6 * gather)


MAX_SLOT_RANKS = 72  # placing on more takes minutes
BUDGETS = (2, 8)  # replicas of a rank over all layers
SPARE = make_policy("llep", IN_ENGINES | {"within": "node", "refill_above": 1.1})


@dataclass(frozen=True)
class SlotsAnswer:
    """Figures of one way to use a rank's memory for slots, in SGLang; ranges are [from, to], as in Answer."""

    label: str
    ms: Span  # with the wait for weights that travel
    saved_ms: Span
    imbalance: float
    slots_bytes: float  # of the slots beyond one for each expert, on the rank with most
    kv_tokens: int  # that fit into what this leaves of one slot more in every layer
    exports: float | None = None  # experts that the busiest rank sends in a layer and batch, in the mean
    travel_ms: float | None = None  # of their weights in a step, mostly hidden by the dispatch

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def slots_answers(question: Question, judged: Judged, now: Answer, prefill: bool = True) -> list[SlotsAnswer]:
    """Return what placer scenario makes of no replicas, of replicas only where they pay, of one slot more in every
    layer, and of one spare slot that prefill fills within the node. now: the answer against which savings count.
    """
    topology, model = question.topology, question.model
    counts = judged.calibration if judged.history is None else judged.history
    base, answers = -(-model.experts // topology.num_ranks), list[SlotsAnswer]()
    per_slot = model.expert_bytes * model.layers
    if not 1 < topology.num_ranks <= MAX_SLOT_RANKS or base == model.experts:
        return answers

    def add(label: str, ran: Run, slots_bytes: float, travel: Travel | None = None) -> None:
        low, high = advice.step_ms(ran, question)
        wait = (0.0, 0.0) if travel is None else travel.wait_ms
        ms = low + wait[0], high + wait[1]
        imbalance = float(over_mean(ran.copies.sum(-1)).max(-1).mean())
        tokens = int(max(per_slot - slots_bytes, 0) // model.kv_bytes)
        more = () if travel is None else (travel.exports, travel.ms)
        answers.append(SlotsAnswer(label, ms, advice.less(now.ms, ms), imbalance, slots_bytes, tokens, *more))

    split = "exact" if question.gathers else "own"
    none = place(counts, topology, base, "scenario")
    add("scenario, no replicas", advice.run(Candidate("scenario", 0, "none"), judged, question, none), 0.0)
    num_layers = len(judged.calibration)
    factor = model.layers / num_layers  # traces may lack layers
    budgets = {max(round(budget / factor), 1) for budget in BUDGETS}
    for replicas in sorted(budget for budget in budgets if budget < num_layers):  # else it is one slot more
        placement = place(counts, topology, None, "scenario", replicas=replicas)
        memory = most_replicas(placement) * model.expert_bytes * factor
        if fits(memory, question):
            ran = advice.run(Candidate("scenario", 1, split), judged, question, placement)
            add(f"scenario, {round(replicas * factor)} replicas a rank where they pay", ran, memory)
    if fits(per_slot, question):
        more = place(counts, topology, base + 1, "scenario")
        ran = advice.run(Candidate("scenario", 1, split), judged, question, more)
        add("scenario, +1 slot", ran, per_slot)
    if fits(per_slot, question) and question.gathers and prefill:
        homes = place(counts, topology, base + 1, "scenario", spare_slots=1)
        ran, travel = travelling(homes, question, judged)
        add("scenario, +1 spare slot, within the node", ran, per_slot, travel)
    return answers


def fits(num_bytes: float, question: Question) -> bool:
    return question.memory is None or num_bytes <= question.memory


def least_memory(answers: Sequence[SlotsAnswer]) -> SlotsAnswer:
    """Return the answer with the least memory among those that take at most NO_DIFFERENCE longer than the fastest."""
    fastest = min(sum(answer.ms) for answer in answers)
    fast = [answer for answer in answers if sum(answer.ms) <= fastest * (1 + advice.NO_DIFFERENCE)]
    return min(fast, key=lambda answer: (answer.slots_bytes, sum(answer.ms)))


class Travel(NamedTuple):
    """Experts that travel."""

    exports: float  # of the busiest rank, in a layer and batch
    ms: float  # of a step's weights
    wait_ms: Span  # what the dispatch does not hide of it


def travelling(placement: Placement, question: Question, judged: Judged) -> tuple[Run, Travel]:
    """Return the run of the judged batches in which SPARE fills the spare slots, kept from batch to batch.

    The busiest exporter or importer of a layer sets the time of its weights, which travel during the dispatch.
    """
    placed_layers, topology, model = placement.layers("cpu"), placement.topology, question.model
    scale = min(1.0, 2**30 / max(float(judged.calibration.sum(-1).max()), 1.0))
    counts = torch.from_numpy((judged.calibration * scale).astype(np.int32))
    last = fill(counts, placed_layers, policy="hedge")
    batches, moves = list[advice.Batch](), list[Floats]()
    for loads in judged.loads:
        new = refill(SPARE, loads, placed_layers, last)
        moves.append(experts_moved(new.filled.slot_to_expert, last.slot_to_expert, placement))
        sent = share_routed(loads, plan(loads, placed_layers, filled=new.filled), None)
        batches.append(partial(np.asarray, sent.numpy()))
        last = new.filled
    ran = advice.run_of(Candidate("scenario", 1, "exact"), batches, question)
    moved = np.stack(moves)  # [B, L, 2]
    gigabytes = (topology.bandwidths or DEFAULT_BANDWIDTHS)[0]
    ms = moved.max(-1) * model.expert_bytes / gigabytes / 1e6
    crossing = advice.over_even(ran.crossing, question)
    tokens = np.full(ran.copies.shape[:2], question.tokens)
    _, dispatch, _ = question.layer.parts(ran.copies, ran.received, tokens, crossing)
    low, high = (model.layers * np.maximum(ms[..., None] - 1e3 * dispatch, 0).mean((0, 1))).tolist()
    return ran, Travel(float(moved[..., 0].mean()), model.layers * float(ms.mean()), (low, high))


def experts_moved(slots: Tensor, last: Tensor, placement: Placement) -> Floats:
    """Return [L, 2] experts that the busiest rank sends, and receives, for slots [L, P] after the last fill."""
    arrives = ((slots != last) & (slots >= 0)).long()
    size, ranks = placement.slots_per_rank, placement.topology.num_ranks
    homes = placement.home_slot.long().gather(1, slots.long().clamp(min=0)) // size
    sends = torch.zeros(len(slots), ranks, dtype=torch.int64).scatter_add_(1, homes, arrives)
    receives = arrives.view(len(slots), ranks, -1).sum(2)
    return torch.stack([sends.amax(1), receives.amax(1)], 1).double().numpy()


GPU_BYTES = {"h100": 80e9, "h200": 141e9, "b200": 180e9, "b300": 288e9, "gb200": 186e9, "gb300": 288e9}


def without_exchange(
    question: Question, judged: Judged, now: Answer, move_us: float | None = None
) -> tuple[list[Answer], list[str]]:
    """Return ways to run in which every rank computes its own tokens, and sentences about those that are left out.

    In "all" every rank has all experts; in "dwdp" a rank reads those that it lacks from its peers, a layer ahead, into
    two buffers. A step takes as long as the slowest rank's layers together.
    """
    model, topology, gpu = question.model, question.topology, question.layer.experts.gpu
    if (lacking := model.experts - -(-model.experts // topology.num_ranks)) == 0:
        return [], []
    known_us = 1e-3 * model.expert_bytes / PEER_BANDWIDTHS[gpu] if gpu in PEER_BANDWIDTHS else None
    one_us = move_us or known_us
    stored = {"all": lacking * model.layers * model.expert_bytes, "dwdp": 2 * lacking * model.expert_bytes}
    faults = {"all": _full(question, stored["all"]), "dwdp": ""}
    if topology.num_nodes > 1:
        faults["dwdp"] = "no bandwidth for the weights of other nodes was measured"
    elif one_us is None:
        faults["dwdp"] = f"the bandwidth between ranks of {gpu} is not known: isoload measure times it"
    elif question.memory is not None and stored["dwdp"] > question.memory:
        faults["dwdp"] = "two buffers for the experts of peers exceed --memory-per-rank"
    answers = []
    for name in (name for name, fault in faults.items() if not fault):
        transfer_s = 1e-6 * lacking * (one_us or 0.0) if name == "dwdp" else 0.0
        seconds = question.layer.without_exchange(judged.loads.numpy(), question.tokens, transfer_s)
        layer_ms = 1e3 * float(seconds.mean(1).max(-1).mean())  # of [B, L, R]
        ms = model.layers * layer_ms, model.layers * layer_ms
        candidate = Candidate(name, lacking, "none")
        answers.append(Answer(candidate, layer_ms, ms, advice.less(now.ms, ms), 1.0, stored[name], 0.0, 0.0))
    labels = {name: Candidate(name, 0, "none").label for name in faults}
    return answers, [f"{labels[name]} is left out: {fault}" for name, fault in faults.items() if fault]


def _full(question: Question, added: float) -> str:
    """Return why a rank cannot have all experts; empty: it can. added: bytes of those that it lacks."""
    model, gpu = question.model, question.layer.experts.gpu
    if question.memory is not None:
        return "" if added <= question.memory else "the other ranks' experts exceed --memory-per-rank"
    if gpu not in GPU_BYTES:
        return f"the memory of {gpu} is not known: pass --memory-per-rank"
    fits = model.experts * model.layers * model.expert_bytes < GPU_BYTES[gpu]
    return "" if fits else f"all experts together exceed the memory of one {gpu}"


FILE = "placement.json"
# The all-to-all whose measured times model a phase (models.ALL_TO_ALL), as vLLM's option names it.
VLLM_BACKENDS = {"prefill": "deepep_high_throughput", "decode": "deepep_low_latency"}
STARTS = {"sglang": "python -m sglang.launch_server --model-path MODEL", "vllm": "vllm serve MODEL"}
PLACEHOLDERS = {
    "TRACE": "the files of the trace",
    "MODEL": "the model's folder or its name on Hugging Face",
    "NODE_RANK": "0 on the first node, 1 on the second",
    "HEAD_NODE_IP": "the address of the first node",
    "PORT": "a free port of the first node",
}


def flags(
    engine: str,
    candidate: Candidate,
    topology: Topology,
    slots: int,
    trace: str | None,
    phase: str = "prefill",
) -> list[str]:
    """Return the commands that make the initial placement, where there is one, and start the engine as it was modelled.

    Words in capitals are PLACEHOLDERS. trace: files and options for isoload place, quoted for a shell.
    """
    from_file = engine == "sglang" and candidate.placer != "trivial" and trace is not None
    options = _sglang(candidate, topology, from_file)
    if engine == "vllm":
        options = _vllm(candidate, topology, VLLM_BACKENDS[phase])
    start = [STARTS[engine], *options]
    if candidate.ours:
        loads = {"exact": "gathered"}.get(candidate.split, candidate.split)
        start.insert(0, f"ISOLOAD_{engine.upper()}=1 ISOLOAD_LOADS={loads}")
    lines = [" ".join(start)]
    if from_file:
        per_node = topology.ranks_per_node
        size = f"--ranks {topology.num_ranks} --ranks-per-node {per_node} --slots-per-rank {slots}"
        lines.insert(0, f"isoload place {trace} -o {FILE} --format sglang {size} --placer {candidate.placer}")
    return lines


def placeholders(lines: list[str]) -> str:
    words = set(re.findall(r"[A-Z_]+", " ".join(lines)))
    meanings = [f"{name} is {meaning}" for name, meaning in PLACEHOLDERS.items() if name in words]
    sentence = f"Replace the words in capitals: {', '.join(meanings)}."
    if "NODE_RANK" in words:
        headless = " with --headless on every node but the first" if STARTS["vllm"] in lines[-1] else ""
        sentence += f" Run the last command on every node{',' * bool(headless)}{headless}."
    return sentence


def _sglang(candidate: Candidate, topology: Topology, from_file: bool) -> list[str]:
    ranks, nodes = topology.num_ranks, topology.num_nodes
    head = f"--nnodes {nodes} --node-rank NODE_RANK --dist-init-addr HEAD_NODE_IP:PORT"
    options = [f"--tp {ranks} --ep-size {ranks}", *([head] if nodes > 1 else []), "--moe-a2a-backend deepep"]
    if candidate.more:
        options.append(f"--ep-num-redundant-experts {ranks * candidate.more}")
        algorithm = {"exact": "lp", "node": "lp"}.get(
            candidate.split, "dynamic" if candidate.ours else candidate.split
        )
        options.append(f"--ep-dispatch-algorithm {algorithm}")
    if candidate.placer != "trivial":
        options.append("--enable-eplb" + (" --eplb-algorithm isoload" if candidate.ours else ""))
        options += [f"--init-expert-location {FILE}"] if from_file else []
    return options


def _vllm(candidate: Candidate, topology: Topology, backend: str) -> list[str]:
    ranks, nodes = topology.num_ranks, topology.num_nodes
    head = f"--nnodes {nodes} --node-rank NODE_RANK --master-addr HEAD_NODE_IP --master-port PORT"
    options = [f"--data-parallel-size {ranks} --enable-expert-parallel", *([head] if nodes > 1 else [])]
    options.append(f"--all2all-backend {backend}")
    if candidate.placer != "trivial":
        config = f"'{{\"num_redundant_experts\": {ranks * candidate.more}}}'"
        options.append(f"--enable-eplb --eplb-config {config}")
    return options
