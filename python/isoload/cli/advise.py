"""``isoload advise``: whether isoload pays, with which slots and flags, and how many milliseconds it saves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from isoload.cli import options
from isoload.cli.tables import columns_of, page_table, write_out

if TYPE_CHECKING:
    from isoload.analysis.advice import Advice, Question
    from isoload.analysis.judge import Judged
    from isoload.analysis.models import Model
    from isoload.times import LayerTime, Times
    from isoload.topology import Topology
    from isoload.traces import Trace

GIB = 2.0**30
OWN_EXCHANGE = (
    "The commands start DeepEP, but the times of dispatch and combine are those of isoload's own exchange over "
    "torch.distributed. isoload measure times DeepEP on GPUs where deep_ep is installed and starts."
)
NORMAL_MODE = (
    "The commands start DeepEP's low-latency mode for decode, but the times of dispatch and combine are those of its "
    "normal mode, which isoload measure times."
)


class PhaseQuestion(NamedTuple):
    """The question about the steps of one phase; notes: constants that were measured for another setting."""

    question: Question
    trace: Trace
    judged: Judged
    notes: list[str]


class Answered(NamedTuple):
    """Advice in the form of --json, of a terminal and of a page."""

    figures: dict[str, Any]
    show: Callable[..., None]  # arguments: console, whether wide
    page: Callable[..., str]  # argument: sections that come first


def phase_times(
    gpu: str | Times,
    engine: str,
    phases: Collection[str],
    model: Model,
    topology: Topology,
    kernel: str | None = None,
) -> dict[str, tuple[LayerTime, list[str]]]:
    """Return by phase a layer's constants and notes. vLLM has one all-to-all backend: for both phases, prefill's."""
    from isoload.analysis.models import layer_time, measured_layer

    if not isinstance(gpu, str):
        return dict.fromkeys(phases, measured_layer(gpu, model, topology))
    exchange = "prefill" if engine == "vllm" and len(phases) > 1 else None
    return {name: layer_time(gpu, engine, name, model, topology, kernel, exchange) for name in phases}


def one_placement(
    asked: Mapping[str, PhaseQuestion], unseen_by_both: bool = False
) -> dict[str, PhaseQuestion]:
    """Return the questions with the same counts to place by, so that all phases have the same placements.

    unseen_by_both: the phases are cut from one trace, so that its shorter first part counts; otherwise all counts are
    added.
    """
    counts_by_phase = [part.judged.calibration for part in asked.values()]
    counts = min(counts_by_phase, key=lambda part: int(part.sum()))
    if not unseen_by_both:
        counts = sum(counts_by_phase, start=0 * counts)
    return {
        name: part._replace(judged=replace(part.judged, calibration=counts)) for name, part in asked.items()
    }


def answer(
    asked: Mapping[str, PhaseQuestion],
    engine: str,
    gpu: str | Times,
    kernel: str | None,
    source: str | None,
    guessed: bool = False,
    weights: Mapping[str, float] | None = None,
) -> Answered:
    """Return the advice on one phase, or on both phases of a server with the same counts to place by.

    source: the trace's files for the command that makes a placement. weights: by phase its part of all steps, for both.
    """
    from isoload.analysis.advice import advise as search
    from isoload.analysis.details import MAX_SLOT_RANKS, flags, slots_answers
    from isoload.analysis.server import ServerAdvice, advise_server, with_alone
    from isoload.cli.advise_output import print_advice, warnings
    from isoload.cli.arguments import progress

    questions = {name: (part.question, part.judged) for name, part in asked.items()}
    with progress("candidates") as on_candidate:
        if len(asked) > 1 and weights is not None:
            server = advise_server(questions, weights, on_candidate)
        else:
            ((only, first),) = asked.items()
            advice = search(first.question, first.judged, on_candidate)
            server = ServerAdvice(advice, {only: advice}, {only: 1.0})
    server, left_out = with_alone(server, questions, None if isinstance(gpu, str) else gpu.move_us)
    advice, phases, weights = server.whole, server.phases, server.weights
    first, question = next(iter(asked.values())), advice.question
    best, model, topology = advice.answers[0], question.model, question.topology
    slots = -(-model.experts // topology.num_ranks) + best.candidate.more
    phase = next(iter(phases))  # prefill, if the question is about both
    launch = [] if best is advice.now else flags(engine, best.candidate, topology, slots, source, phase)
    notes = list(dict.fromkeys(note for part in asked.values() for note in part.notes))
    exchange = None if isinstance(gpu, str) or gpu.dispatch is None else gpu.dispatch.kernel
    warned = warnings(advice, notes, guessed=guessed)
    if launch and exchange == "isoload":
        warned.append(OWN_EXCHANGE)
    if launch and exchange == "deep_ep" and "decode" in (phases if engine == "sglang" else [phase]):
        warned.append(NORMAL_MODE)
    if engine == "sglang" and topology.num_ranks > MAX_SLOT_RANKS:
        warned.append(f"Placements of SGLang's slots are compared on at most {MAX_SLOT_RANKS} ranks.")
    warned += left_out
    now, is_prefill = phases[phase].now, phase == "prefill"
    slot_ways = slots_answers(first.question, first.judged, now, is_prefill) if engine == "sglang" else []
    kernels = {name: part.question.layer.experts.kernel for name, part in phases.items()}
    figures = {
        "model": model.name,
        "gpu": question.layer.experts.gpu,
        "kernel": kernels[phase],
        "verdict": advice.verdict,
        "gain_ms": advice.gain_ms,
        "gain_share": advice.share(advice.gain_ms),
        "gain_ms_by_slots": {
            "chosen": advice.gain_over(advice.rival(False)),
            "equal": advice.gain_over(advice.rival(True)),
        },
        "answers": [answer.to_json() for answer in advice.answers],
        "without_exchange": [answer.to_json() for answer in advice.alone],
        "steps": dict(zip(("now", "best"), map(vars, advice.steps or ()), strict=False)),
        "flags": launch,
        "slots": [way.to_json() for way in slot_ways],
        "warnings": warned,
    }
    if len(phases) > 1:
        figures["by_phase"] = {
            name: {
                "tokens_per_rank": part.question.tokens,
                "share_of_steps": weights[name],
                "kernel": kernels[name],
                "gain_ms": part.gain_ms,
                "answers": [answer.to_json() for answer in part.answers],
            }
            for name, part in phases.items()
        }
    batches = len(first.judged.loads)
    show = partial(print_advice, advice, phases, weights, batches, launch, warned, slot_ways)
    page = partial(_page, advice, phases, weights, asked, (engine, gpu, kernel), launch, warned, figures)
    return Answered(figures, show, page)


def _page(
    advice: Advice,
    phases: Mapping[str, Advice],
    weights: Mapping[str, float],
    asked: Mapping[str, PhaseQuestion],
    chosen: tuple[str, str | Times, str | None],
    launch: list[str],
    warned: list[str],
    answered: dict[str, Any],
    *first: str,
    figures: dict[str, Any] | None = None,
) -> str:
    """Return the page's text. chosen: engine, GPU and kernel. first: sections ahead; figures: those of all sections."""
    from isoload.analysis.judge import judge_by
    from isoload.analysis.models import layer_times
    from isoload.cli import advise_output as output

    engine, gpu, kernel = chosen
    has_both_phases, parts, gaps = len(phases) > 1, {}, dict[str, None]()
    for name, part in phases.items():
        model, topology = part.question.model, part.question.topology
        if has_both_phases or not isinstance(gpu, str):
            times = {name: part.question.layer}
        else:
            times, missing = layer_times(gpu, engine, name, model, topology, kernel)
            gaps |= dict.fromkeys(missing)
        trace, judged = asked[name].trace, asked[name].judged

        def judge(tokens: int, trace: Trace = trace, part: Advice = part, judged: Judged = judged) -> Judged:
            if tokens == part.question.tokens:
                return judged
            others = judge_by(trace, part.question.model, part.question.topology.num_ranks, tokens)
            return replace(others, calibration=judged.calibration)

        parts[name] = output.PagePhase(part, judged, trace.layer_ids, times, judge)
    rows = output.rows_of(advice, phases)
    candidates = page_table(columns_of(output.FIGURES, rows, wide=True), [0])
    batches = len(next(iter(asked.values())).judged.loads)
    notes = [*output.unit_notes(advice, batches, has_both_phases), *warned, *gaps]
    said = output.question_lines(advice, phases, weights), output.verdict_lines(advice, phases)
    text = output.PageText(*said, candidates, launch, notes)
    return output.advise_page(advice, parts, text, figures or answered, first)


def tokens_by_phase(
    phase: str | None, tokens_per_rank: int | None, prefill_tokens: int | None, decode_tokens: int | None
) -> dict[str, int]:
    """Return by phase the tokens of a rank in a step, from the options that give them."""
    by_phase = {"prefill": prefill_tokens, "decode": decode_tokens}
    tokens_of = {name: tokens for name, tokens in by_phase.items() if tokens is not None}
    if not tokens_of and tokens_per_rank is not None:
        return {phase or "prefill": tokens_per_rank}
    if not tokens_of:
        raise ValueError(
            "tokens_per_rank must be given, or prefill_tokens and decode_tokens for a server that runs both phases; "
            "isoload report takes them from a recording of shadow mode"
        )
    if tokens_per_rank is not None or phase is not None:
        raise ValueError(
            "tokens_per_rank and phase must be given without prefill_tokens and decode_tokens, which name their phases"
        )
    return tokens_of


def advise(
    model: Annotated[str, Option(metavar="NAME|FILE", help="A model's name, or its config.json.")],
    ranks: options.Ranks,
    traces: Annotated[
        list[Path] | None,
        Argument(
            metavar="[TRACE...]", help="Recorded trace, in a format that replay reads. Omit it to use --skew."
        ),
    ] = None,
    gpu: Annotated[str | None, Option(help="Kind of GPU, as isoload.times.available() names it.")] = None,
    times: Annotated[
        Path | None,
        Option(metavar="FILE", help="File of isoload measure with times of your GPUs; replaces --gpu."),
    ] = None,
    tokens_per_rank: Annotated[
        int | None,
        options.Range(1),
        Option(
            help="Tokens per rank in a step of one phase: of prompts in prefill, one per request in decode."
        ),
    ] = None,
    prefill_tokens: Annotated[
        int | None, options.Range(1), Option(help="Tokens per rank in a step of prefill.")
    ] = None,
    decode_tokens: Annotated[
        int | None,
        options.Range(1),
        Option(help="Tokens per rank in a step of decode; with --prefill-tokens one advice for both phases."),
    ] = None,
    prefill_share: Annotated[
        float | None,
        options.Range(0, 1),
        Option(help="With both phases: fraction of all steps that are prefill."),
    ] = None,
    ranks_per_node: options.RanksPerNode = 0,
    engine: Annotated[str, Option(help="sglang or vllm.")] = "sglang",
    phase: Annotated[
        str | None,
        Option(help="With --tokens-per-rank: phase whose kernels run, prefill or decode. Default: prefill."),
    ] = None,
    dtype: Annotated[
        str | None, Option(help="Dtype of the experts' weights. Default: that of the published model.")
    ] = None,
    experts: options.Experts = None,
    top_k: options.ExpertsPerToken = None,
    moe_layers: options.MoeLayers = None,
    kernel: Annotated[
        str | None, Option(help="Kernel of the experts, as isoload.times.available() names it.")
    ] = None,
    step_ms: Annotated[
        float | None,
        options.Range(0.001, 10**7),
        Option(help="Milliseconds of a whole step that you measured; percentages refer to it."),
    ] = None,
    dense_ms: Annotated[
        float | None,
        options.Range(0.001, 10**7),
        Option(
            help="Milliseconds of attention and the dense part of a step, all layers: a whole step is modelled."
        ),
    ] = None,
    memory_per_rank: Annotated[
        float | None,
        options.Range(0, 10**6),
        Option(help="Upper limit of the added slots' memory on a rank, all layers, in GiB."),
    ] = None,
    rebalance_seconds: Annotated[
        float, options.Range(0, 10**6), Option(help="Seconds that a rebalance takes.")
    ] = 0.0,
    every: Annotated[int, options.Range(0), Option(help="Steps between two rebalances.")] = 0,
    context: Annotated[
        int, options.Range(1), Option(help="Tokens per request, for the memory of its KV cache.")
    ] = 4096,
    skew: Annotated[
        str | None,
        Option(
            metavar="zipf:POWER", help="A guess that replaces a trace: the power law of the experts' shares."
        ),
    ] = None,
    drift: Annotated[
        float,
        options.Range(0, 1),
        Option(help="With --skew: fraction of each batch whose tokens follow another order of experts."),
    ] = 0.3,
    like_for_like: Annotated[
        bool,
        Option(
            "--like-for-like",
            help="Compare isoload with the engine at equal numbers of slots. Default: each side chooses its number.",
        ),
    ] = False,
    stages: options.Stages = False,
    same_layers: options.SameLayers = False,
    allow_missing_ranks: options.AllowMissingRanks = False,
    wide: options.Wide = False,
    json: options.JsonTarget = None,
    html: options.HtmlTarget = None,
    force: options.Force = False,
) -> None:
    """Estimate the milliseconds per step that balancing saves on your GPUs, and print the commands of the best way
    to run.
    """
    from isoload.analysis.advice import Question
    from isoload.analysis.judge import guessed_trace, judge_by
    from isoload.analysis.models import find_model
    from isoload.analysis.server import step_weights
    from isoload.cli.arguments import Reading, check_targets, load_trace
    from isoload.times import load
    from isoload.topology import Topology

    check_targets([*(traces or []), times], force, json, html=html)
    if (gpu is None) == (times is None):
        raise ValueError(
            "gpu or times must be given, and not both: --gpu h100 for the shipped times of a GPU, or --times FILE for "
            "times of your GPUs from isoload measure"
        )
    if times is not None and kernel is not None:
        raise ValueError(f"kernel must be left out with times, whose file has one kernel, got {kernel}")
    device = load(times) if times is not None else str(gpu)
    tokens = tokens_by_phase(phase, tokens_per_rank, prefill_tokens, decode_tokens)
    if (prefill_share is None) == (len(tokens) > 1):
        raise ValueError(
            "prefill_share must be given with prefill_tokens and decode_tokens, and only with both: the fraction of "
            f"all steps that are prefill, such as 0.1, got {prefill_share}"
        )
    chosen = find_model(model, dtype, experts, top_k, moe_layers)
    topology = Topology(ranks, ranks_per_node)
    if bool(traces) == (skew is not None):
        raise ValueError(f"skew must be given without a trace, and only then, got {skew!r} and {traces}")
    reading = Reading(stages, same_layers, allow_missing_ranks)
    layers = phase_times(device, engine, tokens, chosen, topology, kernel)
    loaded = load_trace(traces, reading=reading) if traces else guessed_trace(str(skew), drift, chosen)
    memory = None if memory_per_rank is None else memory_per_rank * GIB
    gathers = engine == "vllm" or chosen.is_deepseek
    plan_us = None if isinstance(device, str) else device.plan_us
    asked = {}
    for name, (layer, notes) in layers.items():
        setting = step_ms, memory, rebalance_seconds, every, context, gathers, dense_ms
        question = Question(chosen, layer, topology, tokens[name], *setting, plan_us, like_for_like)
        asked[name] = PhaseQuestion(question, loaded, judge_by(loaded, chosen, ranks, tokens[name]), notes)
    source = reading.shell_words(traces, loaded, model) if traces else None
    weights = None if prefill_share is None else step_weights(prefill_share)
    unseen = one_placement(asked, unseen_by_both=True)
    advice = answer(unseen, engine, device, kernel, source, guessed=not traces, weights=weights)
    write_out(json, advice.figures, partial(advice.show, wide=wide), html=html, page=advice.page)
