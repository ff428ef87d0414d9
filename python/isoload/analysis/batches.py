"""Cut or draw a trace's batches of tokens on source ranks; choose which calibrate and which are replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload.balancing.counting import count
from isoload.traces import Trace
from isoload.traces.record import Ints, count_batches
from isoload.wording import not_one_of

ASSIGNMENTS = ("contiguous", "round-robin")
CUT_TOKENS = 1024  # tokens per batch if a per-token trace does not state them
MAX_ASKED_TOKENS = 2**20  # limit, because memory grows with the number of drawn tokens
MAX_DRAWN_TOKENS = 4096  # a drawn batch needs enough tokens to show the shares, not the millions of a sum


@dataclass(frozen=True, eq=False)
class SourceBatch:
    """One batch with its tokens grouped by source rank, in trace order inside a rank."""

    topk_ids: Tensor  # [L, T, K] int32 logical experts, -1 = absent
    start: tuple[int, ...]  # [R+1] source rank r's tokens are ``topk_ids[:, start[r]:start[r+1]]``

    @property
    def num_ranks(self) -> int:
        return len(self.start) - 1

    @property
    def num_tokens(self) -> int:
        return self.start[-1]

    def on_rank(self, layer: int, rank: int) -> Tensor:
        return self.topk_ids[layer, self.start[rank] : self.start[rank + 1]]

    def loads(self, num_experts: int) -> Tensor:
        """Return the [L, R, E] int32 copies that each source rank sends to each expert."""
        ranks, layers = range(self.num_ranks), range(len(self.topk_ids))
        counts = [[count(self.on_rank(layer, rank), num_experts) for rank in ranks] for layer in layers]
        return torch.stack([torch.stack(layer) for layer in counts])

    def with_shared(self, num_routed: int, num_shared: int) -> SourceBatch:
        """Return the batch with a column per shared expert (ids from num_routed on); -1 for a token without experts."""
        if not num_shared:
            return self
        ids = torch.arange(num_routed, num_routed + num_shared, dtype=torch.int32)
        used = (self.topk_ids >= 0).any(-1, keepdim=True)
        return SourceBatch(torch.cat([self.topk_ids, torch.where(used, ids, -1)], dim=-1), self.start)

    def sources(self) -> Ints:
        """Return the [T] int64 source rank of every token."""
        return np.repeat(np.arange(self.num_ranks), np.diff(self.start))


@dataclass(frozen=True, eq=False)
class Batches:
    """A trace's batches of tokens: consecutive cuts of its topk_ids, or drawn from its counts by :func:`draw_topk_ids`.

    If K is unknown, copies are drawn one by one, each as a token, so that rows have no meaning. Each batch and layer
    has a stream of its own: a layer's tokens do not depend on which others are drawn.
    """

    trace: Trace
    num_tokens: tuple[int, ...]  # [batches]
    counts: Ints  # [batches, L, E] int64 copies per expert: the trace's own, not the drawn ones
    clusters: tuple[str, ...] | None  # [batches] labels, or None if the trace has none for its tokens
    seed: int = 0

    @property
    def drawn(self) -> bool:
        return self.trace.topk_ids is None

    def tokens(self, index: int) -> slice:
        first = sum(self.num_tokens[:index])
        return slice(first, first + self.num_tokens[index])

    def part(self, chosen: Sequence[int]) -> Trace:
        """Return the trace of some batches, with their tokens if the batches are cut from tokens."""
        picked = list(chosen)
        fields: dict[str, Any] = {"counts": self.counts[picked], "cluster": None}
        if self.drawn:
            tokens = self.trace.tokens_per_batch
            return replace(self.trace, **fields, tokens_per_batch=None if tokens is None else tokens[picked])
        rows = np.concatenate([np.arange(len(self.trace.topk_ids))[self.tokens(index)] for index in picked])  # type: ignore[arg-type]
        for name in ("topk_ids", "seq_id"):
            array = getattr(self.trace, name)
            fields[name] = None if array is None else array[rows]
        return replace(self.trace, **fields, tokens_per_batch=np.array(self.num_tokens)[picked])

    def source_batch(self, index: int, num_ranks: int, assign: str) -> SourceBatch:
        """Return batch `index` with its tokens on source ranks, as by :func:`source_ranks`."""
        trace, seq_id = self.trace, None
        if trace.topk_ids is not None:
            topk_ids = trace.topk_ids[self.tokens(index)]
            seq_id = None if trace.seq_id is None else trace.seq_id[self.tokens(index)]
        else:
            layers = []
            for layer_id, counts in zip(trace.layer_ids, self.counts[index], strict=True):
                stream = np.random.default_rng((self.seed, index, layer_id))
                layers.append(draw_topk_ids(counts, self.num_tokens[index], trace.top_k or 1, stream))
            topk_ids = np.stack(layers, axis=1)
        # Tokens grouped by source rank.
        ranks = source_ranks(len(topk_ids), num_ranks, assign, seq_id)
        order = np.argsort(ranks, kind="stable")
        start = np.concatenate([[0], np.cumsum(np.bincount(ranks, minlength=num_ranks))])
        grouped = np.ascontiguousarray(topk_ids[order].transpose(1, 0, 2), dtype=np.int32)
        return SourceBatch(torch.from_numpy(grouped), tuple(start.tolist()))


def make_batches(trace: Trace, batch_tokens: int | None = None, seed: int = 0) -> Batches:
    """Return a trace's batches: cut from its tokens if it has them, else drawn from its counts.

    Args:
        batch_tokens: N. Tokens are cut every N and where the cluster changes. Default: the trace's own batches if they
            cover its tokens, else 1024. Drawn batches have N tokens (copies, if K is unknown). Default: as many as the
            trace's batch, at most 4096.
        seed: of the draw.
    """
    if batch_tokens is not None and batch_tokens < 1:
        raise ValueError(f"batch_tokens must be at least 1, got {batch_tokens}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    if trace.topk_ids is not None:
        return _cut(trace, batch_tokens)
    assert trace.counts is not None
    if batch_tokens is not None and batch_tokens > MAX_ASKED_TOKENS:
        raise ValueError(
            f"batch_tokens must be at most {MAX_ASKED_TOKENS} for drawn tokens, got {batch_tokens}"
        )
    tokens = trace.tokens_per_batch
    if tokens is None or not trace.top_k:
        tokens = -(-trace.counts.sum(-1).max(-1) // (trace.top_k or 1))  # of the fullest layer
    num_tokens = [min(int(n), MAX_DRAWN_TOKENS) if batch_tokens is None else batch_tokens for n in tokens]
    return Batches(trace, tuple(num_tokens), trace.counts, trace.cluster, seed)


def _cut(trace: Trace, batch_tokens: int | None) -> Batches:
    assert trace.topk_ids is not None
    total, sizes, labels = len(trace.topk_ids), [len(trace.topk_ids)], None
    recorded = trace.tokens_per_batch
    if recorded is not None and int(recorded.sum()) == total:
        sizes, labels = recorded.tolist(), trace.cluster
    else:  # the batches are of more tokens than these
        batch_tokens = batch_tokens or CUT_TOKENS
    if batch_tokens is not None:
        sizes, labels = _recut(sizes, labels, batch_tokens)
    return Batches(trace, tuple(sizes), count_batches(trace.topk_ids, sizes, trace.num_experts), labels)


def _recut(
    sizes: list[int], labels: tuple[str, ...] | None, batch_tokens: int
) -> tuple[list[int], tuple[str, ...] | None]:
    """Return sizes and labels of batches that are cut every `batch_tokens`, and at every change of the label."""
    pieces: list[tuple[int, str]] = []
    runs = zip(labels or [""] * len(sizes), sizes, strict=True)
    for label, run in groupby(runs, key=lambda pair: pair[0]):
        left = sum(size for _, size in run)
        pieces += [(min(batch_tokens, left - low), label) for low in range(0, left, batch_tokens)]
    return [size for size, _ in pieces], tuple(label for _, label in pieces) if labels else None


def draw_topk_ids(counts: Ints, num_tokens: int, top_k: int, stream: np.random.Generator) -> Ints:
    """Draw tokens [num_tokens, top_k] int32 of distinct experts by systematic sampling; -1 if all counts are 0.

    Expert e is in a token with probability ``top_k * counts[e] / counts.sum()``, exactly. Every token joins the experts
    end to end in a random order, expert e with length ``top_k * counts[e]``, draws an integer u in 0..total-1 and takes
    the experts at u, u + total, .... (Drawing one expert after the other without replacement would flatten the shares.)
    """
    total = int(counts.sum())
    topk_ids = np.full((num_tokens, top_k), -1, dtype=np.int32)
    if total == 0:
        return topk_ids
    if (hottest := int(counts.max())) * top_k > total:
        raise ValueError(
            f"counts must be of {top_k} distinct experts per token, so none above {total}/{top_k}, got {hottest}"
        )
    for low in range(0, num_tokens, MAX_DRAWN_TOKENS):  # bounds the [T, E] memory
        rows = min(MAX_DRAWN_TOKENS, num_tokens - low)
        order = stream.permuted(np.tile(np.arange(len(counts), dtype=np.int32), (rows, 1)), axis=1)
        # One number line for all tokens, so that one search finds all their experts.
        line = np.arange(rows)[:, None] * (top_k * total)
        ends = line + np.cumsum(top_k * counts[order], axis=1)
        points = line + stream.integers(total, size=(rows, 1)) + np.arange(top_k) * total
        topk_ids[low : low + rows] = order.ravel()[np.searchsorted(ends.ravel(), points, side="right")]
    return topk_ids


def source_ranks(num_tokens: int, num_ranks: int, assign: str, seq_id: Ints | None = None) -> Ints:
    """Return the [T] int64 source rank of every token of a batch; the tokens of a sequence (seq_id) share one.

    "contiguous" joins the sequences in order of first appearance and cuts the line into R equal parts; the middle of a
    sequence counts. "round-robin" gives the j-th sequence to appear to rank ``j % R``.
    """
    if assign not in ASSIGNMENTS:
        raise ValueError(not_one_of("assign", ASSIGNMENTS, assign))
    if num_tokens == 0:
        return np.zeros(0, dtype=np.int64)
    ids = np.arange(num_tokens) if seq_id is None else seq_id
    _, first, inverse, sizes = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
    appearance = np.argsort(first)
    rank = np.empty(len(first), dtype=np.int64)
    if assign == "round-robin":
        rank[appearance] = np.arange(len(first)) % num_ranks
    else:
        size = sizes[appearance]
        rank[appearance] = num_ranks * (2 * np.cumsum(size) - size) // (2 * num_tokens)
    return rank[inverse]


PHASES = {"prefill", "decode"}  # labels of batches that shadow mode records
CALIBRATIONS = ("first-half", "interleaved", "all", "leave-one-out", "leave-cluster-out")


@dataclass(frozen=True)
class Fold:
    """Batches from which a placement is made, and batches that are replayed on it."""

    calibrate: tuple[int, ...]
    replay: tuple[int, ...]


def strictest(num_batches: int, clusters: tuple[str, ...] | None) -> str:
    """Return the strictest calibration that the batches allow; phases of an engine are not clusters."""
    if clusters is not None and len(set(clusters)) > 1 and not set(clusters) <= PHASES:
        return "leave-cluster-out"
    return "first-half" if num_batches > 1 else "all"


def calibration_folds(
    num_batches: int, calibrate: str, clusters: tuple[str, ...] | None = None
) -> list[Fold]:
    """Return the folds of a replay of batches 0..num_batches-1.

    calibrate: first-half: the first ``num_batches // 2`` calibrate, the rest is replayed. interleaved: every second
    batch calibrates, from the first on. all: all calibrate and are replayed. leave-one-out: each batch on the placement
    of all others. leave-cluster-out: each cluster's batches (by label) on the placement of all other clusters.
    """
    every = tuple(range(num_batches))
    if calibrate not in CALIBRATIONS:
        raise ValueError(not_one_of("calibrate", CALIBRATIONS, calibrate))
    if calibrate == "all":
        return [Fold(every, every)]
    if calibrate == "leave-cluster-out":
        if clusters is None or len(set(clusters)) < 2:
            got = "no labels" if clusters is None else f"only {clusters[0]!r}"
            raise ValueError(f"calibrate=leave-cluster-out needs batches of at least 2 clusters, got {got}")
        by_cluster = [tuple(b for b in every if clusters[b] == label) for label in dict.fromkeys(clusters)]
        return [Fold(tuple(b for b in every if b not in fold), fold) for fold in by_cluster]
    if num_batches < 2:
        raise ValueError(
            f"calibrate={calibrate} needs at least 2 batches, got {num_batches}: use calibrate=all"
        )
    if calibrate == "first-half":
        return [Fold(every[: num_batches // 2], every[num_batches // 2 :])]
    if calibrate == "interleaved":
        return [Fold(every[::2], every[1::2])]
    return [Fold(every[:b] + every[b + 1 :], (b,)) for b in every]
