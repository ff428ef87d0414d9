"""Streams of batches for bench_libra and bench_route: recorded routing, and the made workloads W0-W7.

DeepSeek-V2-Lite: three ESFT tasks, whose second halves are shuffled token by token, or sequence by sequence where
sequences are dealt. gpt-oss-20b: decode steps without the template's, a request keeps its rank where sequences are
dealt. GLM-5.2: tokens drawn from the counts of text domains, which change from batch to batch; every fifth layer.
First halves calibrate, second halves are judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from isoload.analysis.batches import Batches, Fold, SourceBatch, make_batches
from isoload.placement.placement import Placement
from isoload.placers import place
from isoload.topology import Topology
from isoload.traces import Trace, read_trace
from isoload.traces.record import Ints
from lib.trace_files import SHIPPED, present
from workloads import W0_TO_W7, Workload, make_workload

TASKS = ("intent", "law", "summary")
FILES = (*(f"dsv2lite_esft_{task}" for task in TASKS), "gptoss20b_decode_mmlu", "glm52_domains_a")
SEED = 0
BF16 = 2


@dataclass(frozen=True, eq=False)
class MadeBatches:
    """Steps of a workload as batches of one layer; its tokens are on the sources that it names."""

    workload: Workload
    counts: Ints
    clusters = None
    drawn = True

    def source_batch(self, index: int, num_ranks: int, assign: str) -> SourceBatch:
        ids = self.workload.topk_ids(index)
        start = np.cumsum([0, *map(len, ids)]).tolist()
        return SourceBatch(torch.cat(ids).to(torch.int32).unsqueeze(0), tuple(start))


@dataclass(frozen=True, eq=False)
class Stream:
    """A trace, its batches, which of them calibrate, and what its model's rows and experts weigh.

    deal          even: tokens one by one; sequence: whole sequences to a rank; own: as the workload has them
    hidden        H, width of a row
    intermediate  I; an expert has three matrices of H x I
    """

    trace: Trace
    batches: Batches | MadeBatches
    fold: Fold
    tokens: int
    ranks: int
    deal: str
    hidden: int
    intermediate: int

    @property
    def name(self) -> str:
        return self.trace.name

    @property
    def per_token(self) -> bool:
        """Whether it has the choices of each token in all layers, so that predictors can be fitted."""
        return self.trace.topk_ids is not None

    @property
    def expert_bytes(self) -> int:
        return 3 * self.hidden * self.intermediate * BF16

    def batch(self, index: int) -> SourceBatch:
        return self.batches.source_batch(
            index, self.ranks, "round-robin" if self.deal == "even" else "contiguous"
        )


def joined(traces: list[Trace], tokens: int, by_sequence: bool = False) -> tuple[Trace, Fold]:
    """First halves one after another, then the second halves shuffled; whole batches alone."""
    first, second, sequence, seen = [], [], [], 0
    for trace in traces:
        assert trace.topk_ids is not None
        half = len(trace.topk_ids) // 2
        ids = np.arange(len(trace.topk_ids)) if trace.seq_id is None else trace.seq_id
        first.append(trace.topk_ids[:half])
        second.append(trace.topk_ids[half:])
        sequence.append(ids[half:] + seen)
        seen += int(ids.max()) + 1
    calibrate, rest, ids = map(np.concatenate, (first, second, sequence))
    stream = np.random.default_rng(SEED)
    if by_sequence:
        names, index = np.unique(ids, return_inverse=True)
        order = np.argsort(stream.permutation(len(names))[index], kind="stable")
    else:
        order = stream.permutation(len(rest))
    order = order[: len(rest) // tokens * tokens]
    calibrate = calibrate[: len(calibrate) // tokens * tokens]
    whole = np.concatenate([calibrate, rest[order]])
    dealt = np.concatenate([np.arange(len(calibrate)) + seen, ids[order]]) if by_sequence else None
    trace = Trace("DeepSeek-V2-Lite", traces[0].num_experts, topk_ids=whole, seq_id=dealt)
    count, known = len(whole) // tokens, len(calibrate) // tokens
    return trace, Fold(tuple(range(known)), tuple(range(known, count)))


def halves(trace: Trace, tokens: int) -> tuple[Trace, Fold]:
    count = len(make_batches(trace, tokens).counts)
    return trace, Fold(tuple(range(count // 2)), tuple(range(count // 2, count)))


def decode(trace: Trace, tokens: int, skip: int = 640, requests: int = 64) -> tuple[Trace, Fold]:
    """Without the steps of the template; a row's request is its place in the step."""
    assert trace.topk_ids is not None
    ids = trace.topk_ids[skip:]
    ids = ids[: len(ids) // tokens * tokens]
    found = Trace("gpt-oss-20b", trace.num_experts, topk_ids=ids, seq_id=np.arange(len(ids)) % requests)
    return halves(found, tokens)


def streams(folder: Path | None) -> Iterator[Stream]:
    """Those whose files are in the folder; the shipped cut of gpt-oss-20b without one. Even deals come first."""

    def found(*stems: str) -> list[Trace]:
        assert folder is not None
        return [read_trace(path) for path in present(folder, *stems).values()]

    def of(made: tuple[Trace, Fold], tokens: int, ranks: int, deal: str, hidden: int, inner: int) -> Stream:
        trace, fold = made
        if deal == "even":
            trace = replace(trace, seq_id=None)
        return Stream(trace, make_batches(trace, tokens, SEED), fold, tokens, ranks, deal, hidden, inner)

    if folder is None:
        trace, fold = decode(read_trace(SHIPPED), 512, skip=0)  # cut behind the template's steps
        yield of((replace(trace, name="gpt-oss-20b, shipped cut"), fold), 512, 8, "even", 2880, 2880)
        return
    if tasks := found(*FILES[:3]):
        for deal in ("even", "sequence"):
            yield of(joined(tasks, 1024, deal == "sequence"), 1024, 8, deal, 2048, 1408)
    for trace in found("gptoss20b_decode_mmlu"):
        for deal in ("even", "sequence"):
            yield of(decode(trace, 512), 512, 8, deal, 2880, 2880)
    for trace in found("glm52_domains_a"):
        picked = replace(trace.select_layers(range(0, trace.num_layers, 5)), name="GLM-5.2")
        for ranks in (8, 32):
            yield of(halves(picked, 4096), 4096, ranks, "even", 6144, 2048)


def workloads(steps: int = 16, tokens: int = 512) -> Iterator[Stream]:
    """W0-W7: 8 ranks with so many tokens each, 256 experts, top-8, in the sizes of DeepSeek-V3."""
    for number, name in enumerate(W0_TO_W7):
        made = make_workload(name, num_ranks=8, num_experts=256, top_k=8, tokens_per_rank=tokens)
        counts = np.stack([made.expert_loads(step)[None] for step in range(steps)])
        trace = Trace(f"W{number} {name}", 256, top_k=8, counts=counts)
        fold = Fold(tuple(range(steps // 2)), tuple(range(steps // 2, steps)))
        yield Stream(trace, MadeBatches(made, counts), fold, 8 * tokens, 8, "own", 7168, 2048)


def parts(stream: Stream) -> tuple[Trace, Trace]:
    """The calibration's batches and the judged ones, as traces."""
    trace, counts = stream.trace, stream.batches.counts
    if trace.topk_ids is None:
        folds = (stream.fold.calibrate, stream.fold.replay)
        seen, fresh = (Trace(trace.name, trace.num_experts, trace.top_k, counts[list(f)]) for f in folds)
        return seen, fresh
    cut = len(stream.fold.calibrate) * stream.tokens
    seen, fresh = (
        replace(
            trace, topk_ids=trace.topk_ids[rows], seq_id=None if trace.seq_id is None else trace.seq_id[rows]
        )
        for rows in (slice(cut), slice(cut, None))
    )
    return seen, fresh


def shipped_batches(tokens: int, num_ranks: int, slots_per_rank: int) -> tuple[Placement, list[SourceBatch]]:
    """The shipped trace in batches of so many tokens, dealt evenly: a placement by the first half, and the second."""
    cut = make_batches(read_trace(SHIPPED), tokens)
    half = len(cut.counts) // 2
    placement = place(cut.counts[:half].sum(0), Topology(num_ranks), slots_per_rank)
    batches = [cut.source_batch(i, num_ranks, "round-robin") for i in range(half, len(cut.counts))]
    return placement, batches
