"""Rows that others published about balancing experts, beside what isoload.times and isoload.analysis predict.

Fairness ledger
- Theirs: figures as published; those of a plot alone are left out. Ours: a range, from an all-to-all that even rows
  take to one that follows the busiest rank; over unknown settings, too, where a row names them. Error: of the range's
  middle; of several published figures, against their mean.
- Nothing is fitted to a row here. Constants are those shipped (even rows of aiconfigurator-core's tables); attention
  and dense GEMMs are read from the same wheel. Left out: router, norms, LM head, scheduling, what overlaps.
- Two-batch overlap is not modelled: the whole batch, one kernel after the other, as advise has it.
- Copies are drawn from the counts of a whole workload, so bursts are understated; LMSYS's placement is made of the
  same workload, as theirs was ("in-distribution").
- A row whose GPU, kernel or loads nobody published is printed with the reason.

Usage: python bench/bench_published.py [--traces FOLDER] [--write]      (needs pip install '.[times]')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import isoload
from isoload.analysis.advice import PLAN_US, Candidate, Question, advise
from isoload.analysis.judge import judge_by
from isoload.analysis.models import MODELS, Model, layer_time
from isoload.balancing.planning import plan
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.times import ExpertTime, LayerTime
from isoload.times.exchanges import PEER_BANDWIDTHS
from isoload.traces import Trace
from lib import published_steps as steps
from lib.cross_tables import PUBLISHED, ends
from lib.harness import begin, command, write_results
from lib.llep_setting import FULL, SHAPES, Setting, Shape
from lib.table import show
from lib.trace_files import add_traces, need

LMSYS = "[LMSYS](https://lmsys.org/blog/2025-05-05-large-scale-ep)"
BLOG = "[SGLang](https://www.lmsys.org/blog/2026-06-26-waterfill-lplb)"
LLEP = "[LLEP](https://github.com/SalesforceAIResearch/LeastLoadedEP)"
LIBRA = "Libra, under review"
CRAFT = "[CRAFT](https://arxiv.org/abs/2603.28768)"
METAL = "[tt-metal #56304](https://github.com/tenstorrent/tt-metal/issues/56304)"
OVERLAP = "bursts; how much two-batch overlap hides"
BEYOND = "the busiest rank has more copies than were measured"
PREFILL = {1024: "prefill_in1024", 2048: "prefill_in2048", 4096: "prefill_in4096"}
DECODES = ("decode_in1800out100", "decode_in2000out100")
DECODE = DECODES[-1]
NVLINK = 450e9  # bytes per second and direction of an H200, by its data sheet
UNPREDICTED = (  # what | source | theirs | why there is nothing of ours
    (
        "goodput with EPLB's replica per layer and rank over none, Kimi-K2, 48 A100, Fig. 8 and 9",
        CRAFT,
        "-46 %",
        "no kernel of this shape in bfloat16 was measured on A100, nor an all-to-all over EFA; their loads are not "
        "published; goodput depends on the KV cache that the slots leave",
    ),
    (
        "requests/s with EPLB without redundant experts, DeepSeek-V4-Pro, prefill, 8 MI355",
        "[ATOM #1210](https://github.com/ROCm/ATOM/pull/1210)",
        "+16.7 %",
        "no kernel was measured on MI355; the loads of its random prompts are not published",
    ),
    (
        "Combine after placement by loads, layer 18 of Mistral Small 4, 8 chips of a Blackhole Galaxy",
        METAL,
        "-38 %",
        "neither these chips nor their fabric were measured; what ranks hold after balancing is not published",
    ),
)


@dataclass(frozen=True)
class Recorded:
    """[L, E] counts of DeepSeek-V3's workloads by their labels, and clusters of those that are near-copies."""

    counts: dict[str, Any]
    cluster: dict[str, str]


def recorded(folder: Path) -> Recorded:
    (trace,) = need(folder, "dsv3_sglang_longin")
    labels, counts = trace.provenance["batch_labels"], trace.batch_counts()
    return Recorded(dict(zip(labels, counts, strict=True)), dict(zip(labels, trace.cluster, strict=True)))


def row(
    what: str, source: str, theirs: Sequence[float], ours: Any, unit: str, unknown: str
) -> dict[str, Any]:
    low, high = sorted(float(value) for value in ours)
    error = (low + high) / 2 / float(np.mean(theirs)) - 1
    inside = low <= min(theirs) and max(theirs) <= high
    found = {"theirs": list(theirs), "ours": [low, high], "error": error, "inside": inside, "unit": unit}
    return {"what": what, "source": source} | found | {"not_known": unknown}


def lmsys(given: Recorded) -> list[dict[str, Any]]:
    """96 H100: prefill on 32 with 16,384 tokens a rank, decode on 72 with 256 requests of 2,000 tokens in the cache."""
    even = replace(given, counts=dict.fromkeys(given.counts, np.ones_like(given.counts[DECODE])))
    prefill = {length: _lmsys_step(given, "prefill", length, "dynamic") for length in PREFILL}
    perfect, decode = (
        _lmsys_step(even, "prefill", 4096, "dynamic"),
        _lmsys_step(given, "decode", 2048, "static"),
    )
    rows = [
        _rate(f"prefill, EP32, prompts of {length}, with EPLB", theirs, 16_384, prefill[length])
        for length, theirs in ((4096, 50_302), (2048, 54_543), (1024, 57_674))
    ]
    rows.append(_rate("the same, prompts of 4096, perfectly balanced (simulated)", 59_337, 16_384, perfect))
    rows.append(_rate("decode, EP72, cache of 2000, with EPLB", 22_282, 256, decode))
    rows[-1]["not_known"] += "; the exchange is that of 64 ranks"
    for phase, length, after, theirs in (
        ("prefill", 4096, prefill[4096], 1.49),
        ("decode", 2048, decode, 2.54),
    ):
        before = _lmsys_step(given, phase, length, None)
        hidden = ends(before.hidden_ms / after.hidden_ms)
        more = f"workload, and placement without EPLB; {OVERLAP} (all: {hidden})"
        more += f"; {BEYOND}" * before.beyond
        rows.append(row(f"EPLB's speed-up in {phase}", LMSYS, [theirs], before.ms / after.ms, "x", more))
    return rows


def _lmsys_step(given: Recorded, phase: str, length: int, split: str | None) -> steps.Step:
    """A step with 32 redundant experts that EPLB placed; split None: without EPLB, experts in order."""
    ranks, tokens = {"prefill": (32, 16_384), "decode": (72, 256)}[phase]
    requests = tokens // length if phase == "prefill" else tokens
    counts = given.counts[PREFILL[length] if phase == "prefill" else DECODE]
    slots = 288 // ranks if split or ranks == 72 else 256 // ranks  # 72 divides 288 only
    placement = place(counts, isoload.Topology(ranks, 8), slots, "eplb" if split else "trivial")
    layers = steps.moe_layers(phase, placement, counts, tokens, split or "static")
    return steps.step(phase, layers, requests, length, tokens)


def _rate(what: str, theirs: float, tokens: int, step: steps.Step) -> dict[str, Any]:
    ours, hidden = (8e3 * tokens / ms for ms in (step.ms, step.hidden_ms))
    unknown = f"{OVERLAP} (all: {ends(hidden)})" + f"; {BEYOND}" * step.beyond
    return row(f"{what}, tokens/s a node", LMSYS, [theirs], ours, "", unknown)


def dispatch_time(given: Recorded) -> list[dict[str, Any]]:
    """Two Hopper nodes, three data sets that are not ours: microseconds saved per token, placed by other workloads."""
    unknown = "its loads (DeepSeek-V3's recorded workloads here), tokens a rank (512 to 4096 here), which Hopper GPU"
    found: dict[str, list[float]] = {"red0": [], "lp0": [], "lp": [], "in_order": [], "waterfill": []}
    for label in PREFILL.values():
        others = [name for name in given.counts if given.cluster[name] != given.cluster[label]]
        before = sum(given.counts[name] / given.counts[name].sum() for name in others if "prefill" in name)
        for tokens in (512, 4096):
            for name, ms in _saved(before, given.counts[label], tokens).items():
                found[name] += list(1e3 * ms * steps.MODEL.layers / (16 * tokens))
    named = {
        "red0": ("EPLB without redundant experts over none", [1.62, 5.11, 3.48]),
        "lp0": ("LPLB over static, no redundant experts", [-0.50, -0.62, -0.29]),
        "lp": ("LPLB over static, 32 redundant experts", [0.86, 0.32, 2.01]),
        "in_order": ("Waterfill over shared experts on their own rank, no EPLB", [0.85, 1.92, 1.36]),
        "waterfill": (
            "Waterfill over shared experts on their own rank, EPLB, no redundant experts",
            [1.08, 0.91, 1.29],
        ),
    }
    return [
        row(
            f"{what}, µs saved per token, EP16",
            BLOG,
            theirs,
            (min(found[name]), max(found[name])),
            "µs",
            unknown,
        )
        for name, (what, theirs) in named.items()
    ]


def _saved(before: Any, counts: Any, tokens: int) -> dict[str, steps.Floats]:
    """[2] milliseconds of a layer that each of the three saves."""
    topology = isoload.Topology(16, 8)

    def ms(placement: Placement, split: str) -> steps.Floats:
        return steps.moe_layers("prefill", placement, counts, tokens, split).ms

    red0, red32 = (place(before, topology, slots, "eplb") for slots in (16, 18))
    shared, in_order = (place(before, topology, 17, placer, num_shared=1) for placer in ("eplb", "trivial"))
    planning = np.array(PLAN_US["exact"]) / 1e3
    return {
        "red0": ms(place(before, topology, 16, "trivial"), "none") - ms(red0, "none"),
        "lp0": -planning,  # nothing to choose
        "lp": ms(red32, "static") - ms(red32, "exact") - planning,
        "in_order": ms(in_order, "shared_local") - ms(in_order, "waterfill"),
        "waterfill": ms(shared, "shared_local") - ms(shared, "waterfill"),
    }


def borrowing() -> list[dict[str, Any]]:
    """LLEP on 8 H200, 95 % of the tokens into one expert: the layer's speed-up over expert parallelism."""
    figure_1 = Shape("a layer of 128 experts of width 2048, top-4", 2048, 768, 128, 4, 32_768)
    rows = []
    for shape, dtype, figure, theirs, unknown in (
        (figure_1, "bfloat16", "Fig. 1", 4.6, "tokens, intermediate width (32,768 and 768 here)"),
        (SHAPES["gpt-oss-120b"], "w4a16_mxfp4", "Fig. 4", 6.11, "its bfloat16 kernel (mxfp4's here)"),
    ):
        model = Model(shape.name, shape.hidden, shape.intermediate, shape.experts, shape.top_k, 1, dtype, 0)
        layer, _ = layer_time("h200", "sglang", "prefill", model, isoload.Topology(8, 8))
        plain, spilled = (_borrowed_ms(layer, shape, name) for name in ("EP", "LLEP"))
        more = f"{unknown}; its all-to-all (NCCL; DeepEP's here); its planner, in Python; {BEYOND}"
        what = f"LLEP over EP, {shape.name}, 8 H200, 95 % into one expert, {figure}"
        rows.append(row(what, LLEP, [theirs], plain / spilled, "x", more))
    return rows


def _borrowed_ms(layer: LayerTime, shape: Shape, name: str) -> steps.Floats:
    """[2] of a layer, the weights of borrowed experts ahead of it."""
    setting = Setting(shape=shape, scale=FULL, share=0.95, num_hot=1, repeat=True)
    ids = setting.topk_ids(torch.device("cpu"))
    loads = torch.stack([torch.bincount(each.ravel(), minlength=shape.experts) for each in ids]).int()
    made = plan(loads, setting.placement, 0, setting.policy(name))
    assert made.quota is not None
    copies = made.quota.reshape(setting.ranks, -1).numpy()
    slots, held = made.slot_to_expert.numpy(), setting.placement.arrays[0][0]
    borrowed = slots[(slots >= 0) & (held < 0)]
    sent = np.bincount(borrowed, minlength=1).max()  # by one home
    moving = 3 * shape.hidden * shape.intermediate * 2 * sent / NVLINK  # bfloat16, as theirs
    tokens = np.float64(setting.tokens)
    return 1e3 * (layer.seconds(copies, copies.sum(-1), tokens) + moving)


def libra() -> list[dict[str, Any]]:
    """Table 2: the experts of a layer of Qwen3MoE, 32 prompts of 1,024 tokens on 8 H200."""
    sizes = {"hidden": 4096, "intermediate": 1536, "dtype": "bfloat16"}
    experts = ExpertTime.load("h200", "sglang_fused_moe_triton", **sizes)
    even = np.full((1, 128 // 8), 32 * 1024 * 8 / 128)
    level, skewed = (1e3 * experts.seconds(even * imbalance)[0] for imbalance in (1.0, 1.5))
    unknown = "the imbalance ({} here); its kernel (SGLang's fused Triton kernel here)"
    return [
        row(
            f"experts of a layer of Qwen3MoE, 8 H200, {whose}, Table 2",
            LIBRA,
            [theirs],
            ours,
            "ms",
            unknown.format(how),
        )
        for whose, theirs, ours, how in (
            ("SGLang", 10.99, (skewed, skewed), "1.5"),
            ("Lina", 8.11, (level, skewed), "1.0 to 1.5"),
            ("Libra", 7.32, (level, level), "1.0"),
        )
    ]


def whole_models(folder: Path) -> list[dict[str, Any]]:
    """LLEP, Figure 1c: from no gain to that of the MoE layers, since the other work of a step is not published."""
    (trace,) = need(folder, "gptoss20b_decode_mmlu")
    shares = trace.batch_counts()[10:].sum(0)
    shares = shares / shares.sum(-1, keepdims=True)
    rows, unknown = (
        [],
        "attention and other work of a step; its loads (MMLU here); its bfloat16 kernel (mxfp4's here)",
    )
    layer, _ = layer_time("h200", "sglang", "prefill", MODELS["gpt-oss-20b"], isoload.Topology(8, 8))
    tokens = 32_768
    in_order = (shares * 8 * tokens * 4).reshape(len(shares), 8, -1)
    level = np.full_like(in_order, tokens * 4 / in_order.shape[-1])
    plain, even = (
        layer.seconds(copies, copies.sum(-1), np.full(len(copies), tokens)) for copies in (in_order, level)
    )
    ends = (1.0, float((plain.mean(-1) / even.mean(-1)).max()))
    rows.append(row("LLEP over EP, gpt-oss-20b as a whole, 8 H200, Fig. 1c", LLEP, [2.2], ends, "x", unknown))
    return rows


def cache() -> list[dict[str, Any]]:
    """CRAFT, section 5.3: KV cache that EPLB's replica per layer and rank takes, from 80 GB without the weights."""
    unknown = (
        "the part of 80 GB for weights and cache (80 to 90 % here, as engines choose it); ranks of the other weights "
        "(eight here)"
    )
    rows, expert = [], 3 * 7168 * 2048 * 2 / 1e9
    for what, layers, experts, ranks, other, theirs in (
        ("DeepSeek-R1, 64 A100", 58, 256, 64, 17, -19),
        ("Kimi-K2, 48 A100", 60, 384, 48, 11, -75),
        ("Kimi-K2, 96 A100", 60, 384, 96, 11, -24),
    ):
        weights = (
            layers * experts * expert / ranks + 2 * other / 8
        )  # attention over the eight ranks of a node
        ours = [-100 * layers * expert / (80 * part - weights) for part in (0.8, 0.9)]
        rows.append(
            row(f"KV cache with a replica per layer and rank, {what}", CRAFT, [theirs], ours, "%", unknown)
        )
    return rows


def rearranging(given: Recorded) -> dict[str, Any]:
    """vLLM's run whose engine stood still 24 times in what takes 463 s without: `--rebalance-seconds` and `--every`."""
    counts = np.stack([given.counts[name] for name in DECODES])
    trace = Trace("decode", steps.MODEL.experts, steps.MODEL.top_k, counts)
    topology, tokens = isoload.Topology(16, 8), 64
    asked = Question(steps.MODEL, steps.constants("decode", 16), topology, tokens)
    judged = judge_by(trace, steps.MODEL, 16, tokens)
    step_s = sum(advise(asked, judged).now.ms) / 2e3
    advice = advise(replace(asked, rebalance_s=42.0, every=round(463.11 / 24 / step_s)), judged)
    packed = next(answer for answer in advice.answers if answer.candidate == Candidate("eplb", 0, "none"))
    unknown = "its loads (DeepSeek-V3's here), tokens a rank (64 here), other work of a step (none here)"
    unknown += "; the 42 s are from its own two totals, so this shows only that they are counted"
    source = "[vLLM #50647](https://github.com/vllm-project/vllm/pull/50647)"
    what = "Kimi-K3, EP16, EPLB with 24 rearrangements of 42 s in 463 s: slower by"
    found = row(what, source, [3.17], np.array(packed.ms) / np.array(advice.now.ms), "x", unknown)
    return found | {"verdict": advice.verdict}


def prefetching() -> list[dict[str, Any]]:
    """gpt-oss-120b, 4 B200, 16,384 tokens a rank: weights of peers are prefetched, against an all-gather of tokens."""
    ranks, tokens, rows = 4, 16_384, []
    unknown = "its loads (even here), its kernel (mxfp4 with bfloat16 or mxfp8 rows), other work of a step (none here)"
    for length, theirs in ((4096, 1.16), (8192, 1.37), (16_384, 1.18)):
        rest, speedups = 1e-3 * steps.gpt_oss_dense_ms(length), []
        exchange = 1e-3 * steps.gathered_ms(ranks * tokens * MODELS["gpt-oss-120b"].hidden)
        for dtype in ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8"):
            model = replace(MODELS["gpt-oss-120b"], dtype=dtype)
            layer, _ = layer_time("b200", "sglang", "prefill", model, isoload.Topology(ranks, ranks))
            even = tokens * model.top_k / model.experts
            own = np.full(model.experts // ranks, ranks * even)
            remote_s = 1e-9 * (model.experts - len(own)) * model.expert_bytes / PEER_BANDWIDTHS["b200"]
            dwdp = layer.without_exchange(np.full(model.experts, even), tokens, remote_s)
            exchanged = exchange + layer.experts.seconds(own, ranks * tokens)
            speedups.append((rest + exchanged) / (rest + dwdp))
        what = f"DWDP over EP4 with an all-gather, gpt-oss-120b, 4 B200, prefill, prompts of {length}"
        source = "[SGLang #29778](https://github.com/sgl-project/sglang/pull/29778)"
        rows.append(row(what, source, [theirs], speedups, "x", unknown))
    return rows


def form() -> dict[str, Any]:
    """Of an all-to-all on chips that nobody measured only the range's ends are known: flat, and as the busiest."""
    unknown = "chips and fabric; the range is that of the form alone: flat, or in proportion to the busiest"
    what = "Combine where the busiest of 8 chips has 1.66 times the copies (layers 18 and 23)"
    return row(what, METAL, [1.78], (1.0, 1.66), "x", unknown)


def main() -> None:
    parser = command(__doc__)
    add_traces(parser)
    parser.add_argument("--write", action="store_true", help="write the results file")
    asked = parser.parse_args()
    begin(__doc__)
    given = recorded(asked.traces)
    rows = [*lmsys(given), *dispatch_time(given), *borrowing(), *libra(), *whole_models(asked.traces)]
    rows += [*cache(), rearranging(given), *prefetching(), form()]
    keys = ("what", "source", "theirs", "not_known")
    rows += [dict(zip(keys, each, strict=True)) | {"ours": None} for each in UNPREDICTED]
    show("what others published, and what is predicted", PUBLISHED, rows)
    if asked.write:
        print(write_results("bench_published", rows))


if __name__ == "__main__":
    main()
