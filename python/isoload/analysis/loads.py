"""Batches of a trace to make placements from and to judge them by, as each rank would hold its own tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from isoload.analysis.batches import make_batches
from isoload.analysis.models import Model
from isoload.traces import Ints, Trace

JUDGED = 8  # batches: more change a mean little


@dataclass(frozen=True, eq=False)
class Judged:
    """Loads of batches from which no placement was made, and the counts for making placements.

    calibration [L, E] int64  copies of the earlier batches
    loads   [B, L, R, E]      int32 copies that each rank sends in each judged batch
    drawn   whether tokens were drawn from counts, so that bursts are understated
    """

    calibration: Ints
    loads: Tensor
    drawn: bool


def judge_by(trace: Trace, model: Model, ranks: int, tokens: int, seed: int = 0) -> Judged:
    """Return the first half of a trace to place by, and batches of its other half with `tokens` tokens on every rank.

    Tokens are those of the trace, in their order, if the second half has enough for one batch. Otherwise each rank
    draws its copies in the shares of one recorded batch.

    Raises:
        ValueError: a trace of another model, or of one batch, which leaves none to judge by.
    """
    if trace.num_experts != model.experts or trace.top_k not in (0, model.top_k):
        top_k = f" and top-{trace.top_k}" if trace.top_k else ""
        raise ValueError(
            f"model must have the trace's {trace.num_experts} experts{top_k}, {model.name} has {model.experts} and "
            f"top-{model.top_k}"
        )
    if trace.num_layers > model.layers:
        raise ValueError(
            f"model must have the trace's {trace.num_layers} layers, {model.name} has {model.layers}"
        )
    batch = ranks * tokens
    if trace.topk_ids is not None:
        cut = make_batches(trace, batch)
        whole = [i for i, size in enumerate(cut.num_tokens) if size == batch]
        first = len(whole) // 2
        if first:
            parts = [
                cut.source_batch(i, ranks, "contiguous").loads(trace.num_experts)
                for i in whole[first : first + JUDGED]
            ]
            return Judged(cut.counts[whole[:first]].sum(0), torch.stack(parts), drawn=False)
    counts = trace.batch_counts()
    if len(counts) < 2:
        raise ValueError(
            f"trace must have at least 2 batches, one to place by, {trace.name} has {len(counts)}"
        )
    first = len(counts) // 2
    # If there are few, each is drawn from equally often.
    chosen = first + np.arange(JUDGED) * (len(counts) - first) // JUDGED
    total = counts[chosen].sum(-1, keepdims=True)
    shares = np.where(total > 0, counts[chosen] / np.maximum(total, 1), 1 / trace.num_experts)
    draw = np.random.default_rng(seed)
    loads = draw.multinomial(tokens * model.top_k, shares[:, :, None, :], size=(*shares.shape[:2], ranks))
    return Judged(counts[:first].sum(0), torch.from_numpy(loads.astype(np.int32)), drawn=True)


def guessed_trace(skew: str, drift: float, model: Model, seed: int = 0) -> Trace:
    """Return a trace for users without a recording: 16 batches whose experts' shares fall by Zipf's law.

    Args:
        skew: "zipf:1.2": the n-th most frequent expert of a layer has a share of n^-1.2, but at most that of an expert
            which every token chooses.
        drift: 0..1, the fraction of each batch's tokens that have another order of experts, drawn for the batch.

    Raises:
        ValueError: names the argument, the rule and the value.
    """
    kind, _, text = skew.partition(":")
    try:
        power = float(text or "nan")
    except ValueError:
        power = -1.0
    if kind != "zipf" or not 0 <= power <= 10:
        raise ValueError(f"skew must be zipf:POWER, a power of 0..10, got {skew!r:.40}")
    if not 0 <= drift <= 1:
        raise ValueError(f"drift must be in 0..1, got {drift:g}")
    draw, experts = np.random.default_rng(seed), model.experts
    falling = np.arange(1, experts + 1) ** -power
    share = _below(falling / falling.sum(), 1 / model.top_k)
    order = draw.permuted(np.tile(share, (model.layers, 1)), axis=1)
    other = draw.permuted(np.tile(share, (16, model.layers, 1)), axis=2)
    counts = np.rint(((1 - drift) * order + drift * other) * 1e6).astype(np.int64)
    name = f"a guess, {skew}, drift {drift:g}"
    return Trace(name, experts, model.top_k, counts, provenance={"model": model.name})


def _below(share: np.ndarray, limit: float) -> np.ndarray:
    """Return falling shares with none above `limit`: the excess goes to the other experts in proportion."""
    for n in range(len(share)):
        scaled = share[n:] * (1 - n * limit) / share[n:].sum()
        if scaled[0] <= limit:
            return np.concatenate([np.full(n, limit), scaled])
    return np.full(len(share), 1 / len(share))
