"""Details of an answer: saving by tokens, sensitivity to each constant, a step's events, commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from isoload.analysis.advice import (
    Candidate,
    Question,
    Run,
    Span,
    placed,
    planning_us,
    run,
    saved_ms,
    sent_batches,
    step_ms,
    timeline_of,
)
from isoload.analysis.judge import Judged
from isoload.analysis.timeline import Timeline
from isoload.times import AllToAllTime, LayerTime
from isoload.topology import Topology

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
    """Return the layer with one constant of EXPERTS or EXCHANGE multiplied by a factor.

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
    """Return by constant the saving if it is halved and if it is doubled; the most important constants first."""
    savings = {PLANNING: (saved_ms(before, after, question, 0.5), saved_ms(before, after, question, 2.0))}
    for name in (*EXPERTS, *EXCHANGE):
        half, double = (
            saved_ms(before, after, replace(question, layer=scaled(question.layer, name, factor)))
            for factor in (0.5, 2.0)
        )
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

    Args:
        layers: constants by phase.
        judge: returns batches with a number of tokens per rank, as :func:`judge_by` makes them. Two of them are used;
            for the question's own number all, so that the figures are those of the answer.
    """
    counts = sorted({*TOKENS, question.tokens})
    savings: dict[str, list[Saving]] = {phase: [] for phase in layers}
    for done, tokens in enumerate(counts):
        judged = judge(tokens)
        if tokens != question.tokens:
            judged = replace(judged, loads=judged.loads[:2])
        asked = replace(question, tokens=tokens)
        before, after = (run(candidate, judged, asked) for candidate in pair)
        for phase, layer in layers.items():
            timed = replace(asked, layer=layer)
            ms = saved_ms(before, after, timed)
            pairs = zip(step_ms(before, timed), step_ms(after, timed), strict=True)
            share = sorted(1 - new / old for old, new in pairs)
            copies = [tokens * question.model.top_k]
            beyond = any(step.extrapolated(tokens) for step in (layer.dispatch, layer.combine) if step)
            savings[phase].append(
                Saving(tokens, ms, (share[0], share[1]), bool(layer.experts.extrapolated(copies)) or beyond)
            )
        on_count(done + 1, len(counts))
    return savings


def few_layers(candidate: Candidate, question: Question, judged: Judged, layers: int = 3) -> Timeline:
    """Return the first layers of the first judged batch, at the high end of every range; without dense_ms no dense
    part.
    """
    sent = sent_batches(candidate, placed(candidate, judged, question.topology), judged)[0]()
    (_, plan), (_, gather) = planning_us(candidate.split, question)
    dense = 1e-3 * (question.dense_ms or 0.0) / question.model.layers
    step = timeline_of(sent[:layers], question)
    return step(end="high", dense_s=dense, plan_s=1e-6 * plan, gather_s=1e-6 * gather)


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
    """Return the commands that make the initial placement, where there is one, and start the engine.

    The start includes the ranks and the all-to-all that the candidate was modelled with. Words in capitals are
    PLACEHOLDERS.

    Args:
        engine: "sglang" or "vllm".
        candidate: what runs, other than the experts in order that engines start with.
        topology: R ranks and their nodes.
        slots: slots of a rank.
        trace: files that the placement is made of and options that read them, quoted for a shell; None: no files.
        phase: "prefill" or "decode", whose all-to-all was modelled.
    """
    from_file = engine == "sglang" and candidate.placer != "trivial" and trace is not None
    options = (
        _vllm(candidate, topology, VLLM_BACKENDS[phase])
        if engine == "vllm"
        else _sglang(candidate, topology, from_file)
    )
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
    """Return a sentence on the words in capitals that the reader replaces in these commands."""
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
