"""A step of DeepSeek-V3 as the sum of its measured kernels, for rows that others published.

MoE layers by isoload.times and isoload.analysis, on copies drawn from recorded counts; attention and dense GEMMs read
from the wheel aiconfigurator-core (extra `[times]`): SGLang's MLA module with its projections and DeepGEMM's fp8
matrices on an H100. Kernels run one after the other on the whole batch: nothing is overlapped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np
import torch

import isoload
from isoload.analysis.advice import Candidate, sent
from isoload.analysis.models import MODELS, layer_time
from isoload.analysis.timeline import Floats, rows_between
from isoload.balancing.planning import plan_layers, share
from isoload.placement.placement import Placement
from isoload.times import LayerTime
from lib import times_tables as tables

GPU, NODE = "h100", 8
MODEL = MODELS["deepseek-v3"]
ALL_LAYERS, DENSE = 61, 9  # a dense layer is 18432 wide, as nine shared experts
WIDEST = 64  # ranks that exchanges were measured among
MLA = {"prefill": "wideep_context_mla_perf", "decode": "wideep_generation_mla_perf"}


@cache
def _rows(pattern: str) -> list[tables.Row]:
    found = [row for path in tables.folder().glob(f"{GPU}_sxm/{pattern}") for row in tables.read(path)]
    if not found:
        raise SystemExit(f"{tables.WHEEL} has no {pattern} of {GPU}")
    return found


def attention_ms(phase: str, requests: int, length: int) -> float:
    """Of a layer: the median over SGLang's versions and backends. length: of prompts, or of the KV cache in decode."""
    found = [
        row["latency"]
        for row in _rows(f"mla/sglang/*/{MLA[phase]}.parquet")
        if (row["num_heads"], row["batch_size"], row["isl"]) == (128, requests, length)
    ]
    return float(median(found))


def shared_ms(tokens: int) -> float:
    """The shared expert's two GEMMs."""
    shapes = ((2 * MODEL.intermediate, MODEL.hidden), (MODEL.hidden, MODEL.intermediate))
    times = {
        (row["n"], row["k"]): row["latency"]
        for row in _rows("gemm/sglang/0.5.14/gemm_perf.parquet")
        if row["gemm_dtype"] == "fp8_block" and row["m"] == tokens
    }
    return float(sum(times[shape] for shape in shapes))


def _b200(pattern: str, **wanted: object) -> float:
    """The latency of the one row with these values, on a B200."""
    paths = sorted(tables.folder().glob(f"b200_sxm/{pattern}"))
    rows = [row for row in tables.read(paths[-1]) if all(row[key] == value for key, value in wanted.items())]
    return float(median(row["latency"] for row in rows))


def gpt_oss_dense_ms(length: int, tokens: int = 16_384) -> float:
    """Attention and projections of a layer of gpt-oss-120b in SGLang on a B200, all heads; every second layer has a
    window of 128. Projections of 2,880 columns take their part of the time of the nearest measured shape.
    """
    asked = {
        "batch_size": tokens // length,
        "isl": length,
        "num_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    attention = "attention/sglang/0.5.14/context_attention_perf.parquet"
    windows = (_b200(attention, attn_dtype="bfloat16", window_size=window, **asked) for window in (0, 128))
    gemm = {"gemm_dtype": "bfloat16", "m": tokens, "k": 4096}
    shapes = {5120: 2880 / 4096, 3072: 2880 / 3072}  # to 64 + 2 x 8 heads of 64; from 64 heads
    projections = (
        _b200("gemm/sglang/0.5.14/gemm_perf.parquet", n=n, **gemm) * part for n, part in shapes.items()
    )
    return sum(windows) / 2 + sum(projections)


def gathered_ms(values: int) -> float:
    """NCCL's all-gather and reduce-scatter of so many bfloat16 values, in the rows' proportion, on 4 B200."""
    measured, found = 2**27, {"num_gpus": 4, "nccl_dtype": "half", "message_size": 2**27}
    steps = (
        _b200("comm/nccl/*/nccl_perf.parquet", op_name=name, **found)
        for name in ("all_gather", "reduce_scatter")
    )
    return sum(steps) * values / measured


@dataclass(frozen=True)
class Layers:
    """Means over the MoE layers. ms: [2], with an all-to-all that even rows take and with one of the busiest rank.

    experts_ms: of it, the slowest rank's experts.
    beyond: whether a rank has more copies than the constants were measured on.
    """

    ms: Floats
    experts_ms: float
    beyond: bool


def constants(phase: str, ranks: int) -> LayerTime:
    """Of more ranks than were measured: those of the most."""
    return layer_time(GPU, "sglang", phase, MODEL, isoload.Topology(min(ranks, WIDEST), NODE))[0]


def drawn(counts: Floats, ranks: int, tokens: int) -> torch.Tensor:
    """[L, R, E] int32 copies that each rank draws in the shares of counts [L, E]."""
    shares = counts / counts.sum(-1, keepdims=True)
    draw = np.random.default_rng(0)
    loads = draw.multinomial(tokens * MODEL.top_k, shares[:, None, :], size=(len(shares), ranks))
    return torch.from_numpy(loads.astype(np.int32))


def moe_layers(phase: str, placement: Placement, counts: Floats, tokens: int, split: str) -> Layers:
    """What MoE layers take. counts: [L, E] that a batch is drawn from. tokens: of a rank. split: as in a Candidate.

    With a shared expert in the placement, split is its policy, and rows are those of the routed experts.
    """
    ranks = placement.topology.num_ranks
    layer, loads = constants(phase, ranks), drawn(counts, ranks, tokens)
    if placement.num_shared:
        given = torch.cat([loads, torch.full_like(loads[..., :1], tokens)], -1)
        moved = share(given, plan_layers(given, placement, split)).numpy()
        routed = moved.reshape(*moved.shape[:2], ranks, -1)[..., :-1].reshape(*moved.shape[:2], -1)
    else:
        moved = routed = sent(Candidate("eplb", 0, split), loads, placement, [], 0).numpy()
    copies = moved.sum(1).reshape(len(moved), ranks, -1)
    rows = rows_between(routed, tokens, ranks).sum(1)
    ms = 1e3 * layer.seconds(copies, rows, np.full(len(moved), tokens)).mean(0)
    experts = 1e3 * layer.experts.seconds(copies, rows).max(-1).mean()
    return Layers(ms, float(experts), bool((copies.sum(-1) > layer.experts.copies_to).any()))


@dataclass(frozen=True)
class Step:
    """[2] ms of a step: one kernel after the other; hidden_ms: what is shorter, all-to-all or the rest, costs nothing.

    beyond: as of Layers.
    """

    ms: Floats
    hidden_ms: Floats
    beyond: bool


def step(phase: str, layers: Layers, requests: int, length: int, tokens: int) -> Step:
    """58 MoE layers and three dense ones. tokens: of a rank, in so many requests of this length."""
    attention, shared = attention_ms(phase, requests, length), shared_ms(tokens)
    computed = attention + shared + layers.experts_ms
    dense = (ALL_LAYERS - MODEL.layers) * (attention + DENSE * shared)
    exchanged = layers.ms - layers.experts_ms
    return Step(
        MODEL.layers * (computed + exchanged) + dense,
        MODEL.layers * np.maximum(computed, exchanged) + dense,
        layers.beyond,
    )
