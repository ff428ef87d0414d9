"""Choose which sequences of a training step share a micro-batch, by routes that are known before the step.

The time of a micro-batch follows its busiest rank, layer by layer. Sequences whose busy ranks differ lower the peak
when they run together, before any weight has moved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from isoload.balancing.known_routes import placement_ids
from isoload.placement.placement import Placement
from isoload.traces import Trace

Floats = npt.NDArray[np.float64]
Longs = npt.NDArray[np.int64]
SCALE = 2**16  # units of a copy: replicas share copies equally, and sums of integers are exact in any order
KICKS, KICKED = 3, 3  # random changes of a search that came to an end, each of so many exchanges
WORK = 5 * 10**9  # numbers that a search reads at most, about 20 s: the end of a search without a time limit


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Assignment of sequences to micro-batches, with sums over micro-batches and layers of the largest rank load. Peaks
    are in copies, or in ticks if ranks have speeds. Sequences go to the rank with the fewest tokens of their
    micro-batch, the longest first."""

    micro_batches: Longs  # [sequences] micro-batch of every sequence, by ascending seq_id
    ranks: Longs  # [sequences] source rank
    peak: float  # of this assignment
    peak_given: float | None  # of the order given; None if it exceeds the token limit
    peak_shuffled: float  # of the shuffle from which the search started
    floor: float  # of all sequences in one micro-batch, below which no assignment can go
    finished: bool  # whether the search ended before its time limit: then always with this result

    def __repr__(self) -> str:
        before = "" if self.peak_given is None else f", {self.peak_given:.0f} in the order given"
        peaks = f"peak {self.peak:.0f}{before}, {self.peak_shuffled:.0f} shuffled, floor {self.floor:.0f}"
        return f"MicroBatches({len(self.micro_batches)} sequences, {peaks})"


def choose_micro_batches(
    routes: Trace | npt.NDArray[Any],
    placement: Placement,
    num_micro_batches: int,
    *,
    tokens_limit: int | None = None,
    tokens: Sequence[int] | None = None,
    before: Sequence[int] | None = None,
    equal_counts: bool = False,
    seed: int = 0,
    seconds: float | None = None,
) -> MicroBatches:
    """Choose which sequences share a micro-batch, so that the sum over layers of the peak rank load is low.

    The search exchanges sequences between micro-batches while that lowers the peaks. Its result is never worse than the
    order given. The replicas of an expert count as equally loaded, and shared experts are not counted.

    Args:
        routes: a Trace with topk_ids and seq_id, or loads [sequences, L, E] of the placement's layers and routed
            experts.
        placement: slots of the experts.
        num_micro_batches: M; every micro-batch gets a sequence.
        tokens_limit: largest number of tokens of a micro-batch. None: no limit, and equal numbers of sequences.
        tokens: with loads: [sequences] tokens of every sequence. None: the most copies of a layer.
        before: [sequences] micro-batch of every sequence in the order given. None: consecutive sequences.
        equal_counts: whether micro-batches have equal numbers of sequences, up to one.
        seed: of the shuffle and of the order in which exchanges are tried.
        seconds: time limit of the search, which returns the best assignment so far. None: a fixed amount of work.
    """
    loads, sizes = rank_loads(routes, placement, tokens)
    num = len(loads)
    if not 1 <= num_micro_batches <= num:
        raise ValueError(
            f"num_micro_batches must be in 1..{num}, the number of sequences, got {num_micro_batches}"
        )
    limit = int(sizes.sum()) if tokens_limit is None else tokens_limit
    if sizes.max() > limit:
        longest = int(sizes.argmax())
        raise ValueError(
            f"tokens_limit must be at least {sizes[longest]}, the tokens of sequence {longest}, got {tokens_limit}"
        )
    if seconds is not None and not seconds >= 0:
        raise ValueError(f"seconds must be at least 0, got {seconds}")
    rule = _Rule(num_micro_batches, sizes, limit, equal_counts or tokens_limit is None)
    first_order = _first_order(before, rule)
    rng = np.random.default_rng(seed)
    start = rule.spread(rng.permutation(num))
    if start is None:
        start = first_order
    if start is None:
        least = -(-int(sizes.sum()) // limit)
        raise ValueError(
            f"tokens_limit must let {num_micro_batches} micro-batches hold all {sizes.sum()} tokens, found no "
            f"assignment for {tokens_limit} (at least {least} micro-batches are needed)"
        )
    search = _Search(loads, rule, start)
    shuffled = search.peaks.sum()
    finished = search.run(rng, seconds)
    peak_given = None if first_order is None else float(_Search(loads, rule, first_order).peaks.sum())
    chosen = search.batch
    if first_order is not None and peak_given is not None and peak_given <= search.peaks.sum():
        chosen = first_order
    peak = float(_Search(loads, rule, chosen).peaks.sum())
    return MicroBatches(
        chosen,
        source_ranks(loads, sizes, chosen, num_micro_batches, placement.topology.live_ranks),
        peak / SCALE,
        None if peak_given is None else peak_given / SCALE,
        float(shuffled) / SCALE,
        float(loads.sum(0).max(0).sum()) / SCALE,
        finished,
    )


@dataclass(frozen=True, eq=False)
class _Rule:
    """Which assignments are legal: at most limit tokens per micro-batch, and equal counts if equal_counts."""

    num_batches: int
    sizes: Longs
    limit: int
    equal_counts: bool

    @property
    def capacity(self) -> int:
        num = len(self.sizes)
        return -(-num // self.num_batches) if self.equal_counts else num

    def error(self, batch: Longs) -> str:
        used = np.bincount(batch, self.sizes, self.num_batches)
        counts = np.bincount(batch, minlength=self.num_batches)
        if used.max() > self.limit:
            return f"micro-batch {used.argmax()} has {used.max():.0f} tokens, above the limit of {self.limit}"
        if counts.min() < 1:
            return f"micro-batch {counts.argmin()} has no sequence"
        if self.equal_counts and counts.max() - counts.min() > 1:
            return f"micro-batch {counts.argmax()} has {counts.max()} sequences, {counts.argmin()} has {counts.min()}"
        return ""

    def spread(self, order: Longs) -> Longs | None:
        """Return every sequence's micro-batch: the longest first, each where tokens are fewest; None: not legal."""
        num, (used, counts) = len(order), np.zeros((2, self.num_batches), dtype=np.int64)
        batch = np.empty(num, dtype=np.int64)
        more = num % self.num_batches or self.num_batches  # micro-batches that have the larger of two counts
        for sequence in order[np.argsort(-self.sizes[order], kind="stable")]:
            full = counts >= self.capacity
            if self.equal_counts and (counts == self.capacity).sum() >= more:
                full |= counts >= self.capacity - (more < self.num_batches)
            chosen = int(np.where(full, np.iinfo(np.int64).max, used * num + counts).argmin())
            batch[sequence] = chosen
            used[chosen] += self.sizes[sequence]
            counts[chosen] += 1
        return None if self.error(batch) else batch


def _first_order(before: Sequence[int] | None, rule: _Rule) -> Longs | None:
    """Return the order given; None if none was given and consecutive sequences exceed the token limit."""
    num = len(rule.sizes)
    if before is None:
        consecutive = np.arange(num, dtype=np.int64) * rule.num_batches // num
        return None if rule.error(consecutive) else consecutive
    batch = np.asarray(before)
    if batch.shape != (num,) or batch.dtype.kind not in "iu":
        raise ValueError(
            f"before must be one integer per sequence ({num}), got {list(batch.shape)} {batch.dtype}"
        )
    batch = batch.astype(np.int64)
    if batch.min() < 0 or batch.max() >= rule.num_batches:
        raise ValueError(f"before must be in 0..{rule.num_batches - 1}, got {batch.min()}..{batch.max()}")
    if error := rule.error(batch):
        raise ValueError(f"before must be a legal assignment, but {error}")
    return batch


class _Search:
    """Exchanges of sequences between micro-batches that lower the sum of peaks. `loads` [sequences, R, L] of the ranks;
    sums [M, R, L]; peaks [M], the sum over layers of a micro-batch's peaks."""

    def __init__(self, loads: Floats, rule: _Rule, batch: Longs) -> None:
        self.loads, self.rule, self.work = loads, rule, 0
        self._set(batch)

    def _set(self, batch: Longs) -> None:
        self.batch, rule = batch.copy(), self.rule
        self.members = [np.flatnonzero(batch == b) for b in range(rule.num_batches)]
        self.sums = np.stack([self.loads[members].sum(0) for members in self.members])
        self.peaks = self.sums.max(1).sum(1)
        self.used = np.bincount(batch, rule.sizes, rule.num_batches).astype(np.int64)

    def run(self, rng: np.random.Generator, seconds: float | None) -> bool:
        """Descend, and again after random exchanges until KICKS times bring nothing better; False: out of time."""
        end = None if seconds is None else time.monotonic() + seconds
        best, peak, kicks, finished = self.batch, np.inf, 0, True
        while finished and kicks < KICKS and self.work < WORK and self.rule.num_batches > 1:
            finished = self._descend(rng, end)
            kicks += 1
            if self.peaks.sum() < peak:
                best, peak, kicks = self.batch.copy(), self.peaks.sum(), 0
            else:
                self._set(best)
            self._kick(rng)
        self._set(best)
        return finished

    def _kick(self, rng: np.random.Generator) -> None:
        for _ in range(KICKED):
            first, second = rng.permutation(len(self.batch))[:2]
            batch = self.batch.copy()
            batch[[first, second]] = batch[[second, first]]
            if not self.rule.error(batch):
                self._set(batch)

    def _descend(self, rng: np.random.Generator, end: float | None) -> bool:
        """Exchange until no exchange of two sequences lowers the peaks, or the work is done; False: out of time."""
        num_batches, quiet = self.rule.num_batches, 0
        while quiet < num_batches - 1 and self.work < WORK:
            # A round tries every sequence against one other micro-batch; M - 1 rounds try all.
            if quiet == 0:
                shifts = list(rng.permutation(num_batches - 1) + 1)
            shift, improved = shifts[quiet], False
            for sequence in rng.permutation(len(self.batch)):
                if end is not None and time.monotonic() >= end:
                    return False
                other = int((self.batch[sequence] + shift) % num_batches)
                improved |= self._exchange(int(sequence), other)
                self.work += 2 * (len(self.members[other]) + 1) * self.loads[0].size
            quiet = 0 if improved else quiet + 1
        return True

    def _exchange(self, sequence: int, other: int) -> bool:
        """Exchange a sequence with the best one of another micro-batch, or move it there, if that lowers the peaks."""
        source, rule, members = int(self.batch[sequence]), self.rule, self.members[other]
        sizes, size = rule.sizes[members], int(rule.sizes[sequence])
        allowed = (self.used[source] - size + sizes <= rule.limit) & (
            self.used[other] + size - sizes <= rule.limit
        )
        difference = self.loads[members] - self.loads[sequence]
        peaks = np.full(len(members) + 1, np.inf)
        peaks[:-1] = (self.sums[source] + difference).max(1).sum(1)
        np.subtract(self.sums[other], difference, out=difference)
        peaks[:-1] += difference.max(1).sum(1)
        peaks[:-1][~allowed] = np.inf
        surplus = len(self.members[source]) - len(members) if rule.equal_counts else 1
        if surplus > 0 and len(self.members[source]) > 1 and self.used[other] + size <= rule.limit:
            moved = self.sums[source] - self.loads[sequence], self.sums[other] + self.loads[sequence]
            peaks[-1] = sum(part.max(0).sum() for part in moved)
        best = int(peaks.argmin())
        if peaks[best] >= self.peaks[source] + self.peaks[other]:
            return False
        self._move(sequence, other)
        if best < len(members):
            self._move(int(members[best]), source)
        self.peaks[[source, other]] = self.sums[[source, other]].max(1).sum(1)
        return True

    def _move(self, sequence: int, other: int) -> None:
        source = int(self.batch[sequence])
        for batch, sign in ((source, -1), (other, 1)):
            self.sums[batch] += sign * self.loads[sequence]
            self.used[batch] += sign * self.rule.sizes[sequence]
        self.members[source] = self.members[source][self.members[source] != sequence]
        self.members[other] = np.append(self.members[other], sequence)
        self.batch[sequence] = other


def rank_loads(
    routes: Trace | npt.NDArray[Any], placement: Placement, tokens: Sequence[int] | None
) -> tuple[Floats, Longs]:
    """Return [sequences, R, L] loads of sequences on ranks, in units of a copy's cost, and [sequences] tokens."""
    layers, experts, topology = placement.num_layers, placement.num_routed, placement.topology
    if isinstance(routes, Trace):
        if tokens is not None:
            raise ValueError("tokens belong to loads, got them with a Trace")
        ids, number, num, sizes = _sequences(routes, placement)
    else:
        counts = np.asarray(routes)
        if counts.ndim != 3 or counts.shape[1:] != (layers, experts) or counts.dtype.kind not in "iu":
            raise ValueError(
                f"routes must be loads [sequences, {layers}, {experts}] of integers or a Trace, "
                f"got {list(counts.shape)} {counts.dtype}"
            )
        if not len(counts) or counts.min() < 0:
            raise ValueError(
                f"routes must be loads of at least one sequence and not negative, got {len(counts)}"
            )
        num = len(counts)
        stated = counts.sum(2, dtype=np.int64).max(1) if tokens is None else np.asarray(tokens)
        if stated.shape != (num,) or stated.dtype.kind not in "iu" or stated.min() < 0:
            raise ValueError(
                f"tokens must be one number per sequence ({num}), got {list(stated.shape)} {stated.dtype}"
            )
        sizes = stated.astype(np.int64)
    loads = np.empty((num, topology.num_ranks, layers))
    for layer in range(layers):
        if isinstance(routes, Trace):
            chosen = ids[:, layer]
            keys = (number[:, None] * experts + chosen)[chosen >= 0]
            of_layer = np.bincount(keys, minlength=num * experts).reshape(num, experts)
        else:
            of_layer = counts[:, layer]
        loads[:, :, layer] = of_layer.astype(np.float64) @ _shares(placement, layer)
    return loads, sizes


def _sequences(trace: Trace, placement: Placement) -> tuple[npt.NDArray[Any], Longs, int, Longs]:
    """Return ids [tokens, L, K] of the placement's layers, every token's sequence, their number, and their tokens."""
    ids = placement_ids(trace, placement)
    if trace.seq_id is None:
        raise ValueError("routes must have seq_id, got a trace without (sequence_lengths of read_routes)")
    if ids.max() >= placement.num_routed:
        raise ValueError(f"routes must be in -1..{placement.num_routed - 1}, got {ids.max()}")
    sequences, number = np.unique(trace.seq_id, return_inverse=True)
    return ids, number, len(sequences), np.bincount(number).astype(np.int64)


def _shares(placement: Placement, layer: int) -> Floats:
    slots = placement.arrays[0][layer].reshape(placement.topology.num_ranks, -1)
    shares = np.zeros((placement.num_routed, len(slots)))
    for rank, row in enumerate(slots):
        shares[row[(row >= 0) & (row < placement.num_routed)], rank] = 1
    shares = np.rint(SCALE / shares.sum(1, keepdims=True)) * shares
    ticks = placement.topology.ticks
    costs: Floats = shares if ticks is None else shares * ticks.numpy()
    return costs


def source_ranks(loads: Floats, sizes: Longs, batch: Longs, num_batches: int, live: list[int]) -> Longs:
    """Return the source rank of every sequence: the longest first, on the micro-batch's rank with the fewest tokens. Of
    several such ranks the one that computes most of the sequence's copies."""
    ranks, local = np.empty(len(sizes), dtype=np.int64), loads.sum(2)[:, live]
    used = np.zeros((num_batches, len(live)), dtype=np.int64)
    for sequence in np.argsort(-sizes, kind="stable"):
        row = used[batch[sequence]]
        chosen = int(np.where(row == row.min(), local[sequence], -1).argmax())
        ranks[sequence] = live[chosen]
        row[chosen] += sizes[sequence]
    return ranks
