"""Scenarios: the batches that a placement is made for, each with its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from isoload.traces import Trace, same_layers

Loads = np.ndarray[Any, np.dtype[np.float64]]
Tokens = np.ndarray[Any, np.dtype[np.integer[Any]]]

MAX_SCENARIOS = 64  # planning time goes with them; consecutive batches are merged down to so many
WHOLE = 2**24  # a scenario's copies of a layer, when scaled: sums over slots stay exact in float64


@dataclass(frozen=True, eq=False)
class Scenarios:
    """Loads that a placement must suit, one by one."""

    loads: Loads  # [n, L, E] copies; traces are scaled to the same number of copies
    weight: Loads  # [n] sums to 1: every batch of a trace weighs alike, and every trace
    topk_ids: tuple[Tokens, ...] = ()  # [tokens, L, K] of every trace with per-token choices

    @property
    def num_layers(self) -> int:
        return len(self.loads[0])

    @property
    def num_experts(self) -> int:
        return len(self.loads[0, 0])

    def total(self) -> Loads:
        """[L, E] copies of all scenarios together."""
        total: Loads = self.loads.sum(0)
        return total

    def shares(self, shrink: float | None = 0.0) -> Loads:
        """[n, L, E] share of each expert in its scenario's copies of the layer; 0 in a scenario without any.

        Args:
            shrink: so much of every scenario is replaced by the mean of all; None = :meth:`counting_noise` times ten
                (tokens of a text move together, so real noise is a multiple of it), at most 0.2, 0 below 0.05.
        """
        shares: Loads = self.loads / np.maximum(self.loads.sum(-1, keepdims=True), np.finfo(float).tiny)
        if shrink is None:
            noise = 10 * self.counting_noise(shares)
            shrink = 0.0 if noise < 0.05 else min(noise, 0.2)
        mixed: Loads = shares if not shrink else (1 - shrink) * shares + shrink * self.mean(shares)
        return mixed

    def counting_noise(self, shares: Loads) -> float:
        """The part of the shares' variance over scenarios that independent draws of as many copies would have."""
        copies = np.maximum(self.loads.sum(-1, keepdims=True), 1)
        drawn = (self.mean(shares) / copies).mean(0).sum()
        spread = ((shares - self.mean(shares)) ** 2).sum()
        if len(shares) < 2 or not spread:
            return 0.0
        return float(drawn / (spread / (len(shares) - 1)))

    def mean(self, shares: Loads) -> Loads:
        """[L, E] weighted mean of values [n, L, E]."""
        mean: Loads = (self.weight[:, None, None] * shares).sum(0)
        return mean


def make_scenarios(counts: Any) -> tuple[Scenarios, list[Trace]]:
    """Scenarios of an array of counts [L, E] or [batches, L, E], of a trace, or of several; and these traces."""
    traces = _traces(counts)
    batches: list[Loads] = [_batches(trace.batch_counts()) for trace in traces] or [_batches(counts)]
    sums = [part.sum() for part in batches]
    if traces and not all(sums):
        raise ValueError(f"counts must not be empty, trace {traces[sums.index(0)].name} has no copies")
    most = MAX_SCENARIOS // len(batches)
    loads, weight = [], []
    for part, copies in zip(batches, sums, strict=True):
        scale = 1.0 if len(batches) == 1 else max(sums) / copies
        groups = np.array_split(part, min(len(part), most))
        loads += [scale * group.sum(0) for group in groups]
        weight += [len(group) / len(part) / len(batches) for group in groups]
    tokens = tuple(trace.topk_ids for trace in traces if trace.topk_ids is not None)
    return Scenarios(np.stack(loads), np.array(weight), tokens), traces


def _traces(counts: Any) -> list[Trace]:
    """The traces, if it is one or some; they must agree in layers and experts."""
    given = [counts] if isinstance(counts, Trace) else counts
    if not isinstance(given, Sequence) or not any(isinstance(trace, Trace) for trace in given):
        return []
    traces = list(given)
    if not all(isinstance(trace, Trace) for trace in traces):
        raise ValueError("counts must be an array, a trace, or traces alone, got a list of traces and others")
    if len(traces) > MAX_SCENARIOS:
        raise ValueError(f"counts must be at most {MAX_SCENARIOS} traces, got {len(traces)}")
    first = traces[0]
    return [first, *(same_layers(first, trace) for trace in traces[1:])]


def _batches(counts: Any) -> Loads:
    """[batches, L, E] float64 copies."""
    if isinstance(counts, torch.Tensor):
        counts = counts.detach().cpu().double().numpy()
    try:
        loads = np.asarray(counts, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"counts must be numeric, got {type(counts).__name__} ({error})") from None
    if loads.ndim not in (2, 3) or 0 in loads.shape:
        raise ValueError(f"counts must be [L, E] or [batches, L, E] and not empty, got {list(loads.shape)}")
    if (bad := ~((loads >= 0) & (loads < 2**63))).any():
        raise ValueError(f"counts must be at least 0 and below 2^63, got {loads[bad][0]:g}")
    return loads if loads.ndim == 3 else loads[None]
