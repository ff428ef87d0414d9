"""Imbalance of a placement's ranks on counts, with copies spread evenly over replicas or split exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoload.analysis.batches import Fold, calibration_folds, make_batches
from isoload.analysis.models import Model
from isoload.balancing.planning import plan_layers
from isoload.placement.placement import Placement
from isoload.placers.base import rank_loads
from isoload.times.exchanges import DEFAULT_BANDWIDTHS
from isoload.times.experts import ExpertTime
from isoload.topology import over_mean
from isoload.traces import Trace

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]

MAX_BATCH = 2**31  # largest number of copies of a layer in one batch that a plan may have
JUDGED = 8  # batches: more change a mean little
MANY_RANKS = 128  # with more ranks half as many: a batch has more copies, and takes longer to judge
HISTORY = 8  # earlier batches: a placer takes longer for more
MAX_COPIES = 2**30  # of a pass and layer, as plans accept them
# Of packed dtypes; others have their item size.
BYTES_PER_WEIGHT = {torch.uint8: 0.5, torch.int8: 1.0, torch.int32: 0.5}


def even_imbalance(placement: Placement, counts: Ints) -> Floats:
    """Return [batches, L] max/mean load of the live ranks for counts [batches, L, E], spread evenly over replicas.

    Shared experts have no load; a batch without copies in a layer has imbalance 1. With speeds a load is a cost.
    """
    return over_mean(even_loads(placement, counts).max(-1), mean_load(counts, placement))


def even_loads(placement: Placement, counts: Ints) -> Floats:
    slots, ticks = placement.arrays[0], placement.topology.ticks
    routed = np.where(slots < counts.shape[2], slots, -1)  # shared experts come after the routed ones
    load = rank_loads(counts, routed.reshape(len(slots), placement.topology.num_ranks, -1))
    return load if ticks is None else np.asarray(load * ticks.numpy())


def exact_imbalance(placement: Placement, counts: Ints) -> Floats:
    """Return :func:`even_imbalance` with the best split of whole copies, that of policy ``exact``."""
    ranks, peaks = placement.topology.num_ranks, []
    for batch in counts:
        # A split of halves is one of the whole: counts that are too large for a batch are scaled down.
        scale = -(-int(batch.sum(-1).max()) // (MAX_BATCH - 1)) or 1
        loads = torch.zeros(batch.shape[0], ranks, placement.num_experts, dtype=torch.int32)
        scaled = torch.from_numpy((batch // scale).astype(np.int32))
        loads[:, placement.topology.live_ranks[0], : batch.shape[1]] = scaled
        peaks.append(plan_layers(loads, placement, "exact").bound.numpy() * scale)
    return over_mean(np.array(peaks, dtype=np.float64), mean_load(counts, placement))


def routed_imbalance(placement: Placement, slot_copies: Ints) -> Floats:
    """Return the same for an engine's own routing: slot_copies [batches, L, P] that each slot received."""
    per_rank = slot_copies.reshape(*slot_copies.shape[:2], placement.topology.num_ranks, -1).sum(-1)
    return over_mean(per_rank.max(-1), mean_load(slot_copies, placement))


def mean_load(copies: Ints, placement: Placement) -> Floats:
    """Return [batches, L] mean cost of a rank for copies [batches, L, E] of experts, or of slots."""
    return np.asarray(copies.sum(-1) / placement.topology.copies_per_cost)


def judge_unseen(
    trace: Trace, calibrate: str, make: Callable[[Any], Placement], needs_tokens: bool = False
) -> tuple[float, float]:
    even, exact = unseen_imbalances(trace, calibrate, make, needs_tokens)
    return float(even.mean()), float(exact.mean())


def unseen_imbalances(
    trace: Trace,
    calibrate: str,
    make: Callable[[Any], Placement],
    needs_tokens: bool = False,
    uses_tokens: bool = False,
) -> tuple[Floats, Floats]:
    """Return the imbalance [batches, L], even and exact, of batches that the placement was not made from.

    make: gets counts [batches, L, E], or with `needs_tokens` the trace of these batches. uses_tokens: it gets tokens if
    they are those of the batches.
    """
    counts, even, exact = trace.batch_counts(), [], []
    for fold in calibration_folds(len(counts), calibrate, trace.cluster):
        calibration: Any = counts[list(fold.calibrate)]
        if needs_tokens or (uses_tokens and trace.has_tokens):
            calibration = _with_tokens(trace, calibrate, fold, None if needs_tokens else calibration)
        placement, judged = make(calibration), counts[list(fold.replay)]
        even.append(even_imbalance(placement, judged))
        exact.append(exact_imbalance(placement, judged))
    return np.concatenate(even), np.concatenate(exact)


def _with_tokens(trace: Trace, calibrate: str, fold: Fold, otherwise: Any) -> Any:
    """Return the trace of a fold's first part, or `otherwise` if its tokens are not those of its batches."""
    if calibrate == "all" or not trace.has_tokens:
        return trace
    if not tokens_are_batches(trace):
        if otherwise is not None:
            return otherwise
        raise ValueError(
            f"calibrate must be all for trace {trace.name}, whose per-token choices are not those of its batches, "
            f"got {calibrate}"
        )
    return make_batches(trace).part(fold.calibrate)


def tokens_are_batches(trace: Trace) -> bool:
    """Return whether a trace's batches were counted from its per-token choices."""
    return trace.has_tokens and np.array_equal(make_batches(trace).counts, trace.batch_counts())


def changed_slots(before: Placement, after: Placement) -> float:
    """Return the fraction of slots whose expert changes: what must be loaded."""
    old, new = before.arrays[0], after.arrays[0]
    return float(((old != new) & (new >= 0)).mean())


def arrivals(before: Placement, after: Placement) -> Ints:
    """Return [L, R] experts that each rank of `after` must load; ranks beyond those of `before` are new."""
    old, new = (p.arrays[0].reshape(p.num_layers, p.topology.num_ranks, -1) for p in (before, after))
    count = np.zeros(new.shape[:2], dtype=np.int64)
    for layer, rank in np.ndindex(*count.shape):
        present = old[layer, rank] if rank < old.shape[1] else ()
        count[layer, rank] = len(np.setdiff1d(new[layer, rank][new[layer, rank] >= 0], present))
    return count


def count_replicas(placement: Placement) -> int:
    """Return the slots of all layers beyond one for each routed expert."""
    return int(_routed(placement).sum()) - placement.num_layers * placement.num_routed


def most_replicas(placement: Placement) -> float:
    """Return the slots of all layers on the rank with most, beyond its even part of one for each routed expert."""
    filled = _routed(placement).sum((0, 2)).max()
    return float(filled - placement.num_layers * placement.num_routed / len(placement.topology.live_ranks))


def replica_memory(placement: Placement, expert_bytes: int, kv_bytes: int | None) -> dict[str, Any]:
    """Return the memory of the replicas on the rank with most, and of one more slot in every layer."""
    slots = -(-placement.num_routed // len(placement.topology.live_ranks)) + 1
    even = placement.num_routed / len(placement.topology.live_ranks)
    numbers = most_replicas(placement), placement.num_layers * (slots - even)
    replicas, more = (round(number * expert_bytes) for number in numbers)
    tokens = None if kv_bytes is None else max(more - replicas, 0) // kv_bytes
    return {"replica_bytes": replicas, "one_slot_more_bytes": more, "kv_tokens": tokens}


def without_replicas(placement: Placement) -> Placement:
    """Return the placement with every routed expert in its home slot only; the other replicas' slots are absent."""
    slots, home = (array.copy() for array in placement.arrays)
    home_of = np.take_along_axis(home, np.clip(slots, 0, None), 1)
    slots[(slots < placement.num_routed) & (home_of != np.arange(slots.shape[1]))] = -1
    return replace(placement, slot_to_expert=torch.from_numpy(slots), replica_weight=None)


def _routed(placement: Placement) -> Any:
    """Return [L, R, S] whether a slot holds a routed expert."""
    slots = placement.arrays[0].reshape(placement.num_layers, placement.topology.num_ranks, -1)
    return (slots >= 0) & (slots < placement.num_routed)


@dataclass(frozen=True, eq=False)
class Judged:
    """Loads of batches from which no placement was made, and the counts for making placements."""

    calibration: Ints  # [L, E] int64 copies of the earlier batches
    loads: Tensor  # [B, L, R, E] int32 copies that each rank sends in each judged batch
    drawn: bool  # whether tokens were drawn from counts, so that bursts are understated
    history: Ints | None = None  # [N, L, E] earlier batches; None: their sum alone is known


def judge_by(trace: Trace, model: Model, ranks: int, tokens: int, seed: int = 0) -> Judged:
    """Return the first half of a trace to place by, and batches of its other half with `tokens` tokens on every rank.

    Tokens are those of the trace, in their order, if the second half has enough for one batch. Otherwise each rank
    draws its copies in the shares of one recorded batch.
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
    batch, judged = ranks * tokens, JUDGED if ranks <= MANY_RANKS else JUDGED // 2
    if trace.topk_ids is not None:
        cut = make_batches(trace, batch)
        whole = [i for i, size in enumerate(cut.num_tokens) if size == batch]
        first = len(whole) // 2
        if first:
            parts = [cut.source_batch(i, ranks, "contiguous") for i in whole[first : first + judged]]
            sent = torch.stack([part.loads(trace.num_experts) for part in parts])
            earlier = cut.counts[whole[:first]]
            return Judged(earlier.sum(0), sent, False, spread(earlier, HISTORY))
    counts = trace.batch_counts()
    if len(counts) < 2:
        raise ValueError(
            f"trace must have at least 2 batches, one to place by, {trace.name} has {len(counts)}"
        )
    first = len(counts) // 2
    # If there are few, each is drawn from equally often.
    chosen = first + np.arange(judged) * (len(counts) - first) // judged
    total = counts[chosen].sum(-1, keepdims=True)
    shares = np.where(total > 0, counts[chosen] / np.maximum(total, 1), 1 / trace.num_experts)
    draw = np.random.default_rng(seed)
    loads = draw.multinomial(tokens * model.top_k, shares[:, :, None, :], size=(*shares.shape[:2], ranks))
    earlier = spread(counts[:first], HISTORY)
    return Judged(counts[:first].sum(0), torch.from_numpy(loads.astype(np.int32)), True, earlier)


def spread(batches: Ints, number: int) -> Ints:
    """Return at most this number of batches [B, ...], evenly spread over all of them."""
    count = min(number, len(batches))
    return np.asarray(batches[np.arange(count) * len(batches) // count])


def guessed_trace(skew: str, drift: float, model: Model, seed: int = 0) -> Trace:
    """Return a trace for users without a recording: 16 batches whose experts' shares fall by Zipf's law.

    skew: "zipf:1.2": the n-th most frequent expert of a layer has a share of n^-1.2, limited by that of an expert which
    every token chooses. drift: 0..1, fraction of each batch's tokens that have another order of experts, drawn for the
    batch.
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


class ExpertSize(NamedTuple):
    """Weights of one expert in one layer: bytes as stored, scales included, and the number of weights."""

    num_bytes: int
    num_weights: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> ExpertSize:
        """Return the size of an expert from a layer's stacks [slots, ...]; its matrices are the two largest."""
        sizes = sorted((t.nbytes // len(t), BYTES_PER_WEIGHT.get(t.dtype, t.element_size())) for t in tensors)
        weights = sum(size / per_weight for size, per_weight in sizes[-2:])
        return cls(sum(size for size, _ in sizes), int(weights))


class Worth(NamedTuple):
    """What a new placement saves, and what moving its experts takes, in milliseconds."""

    gain_ms: float
    move_ms: float


def pass_ms(loads: Tensor, placement: Placement, policy: str, experts: ExpertTime) -> float:
    """Return the milliseconds of the slowest rank's experts in one pass of loads [L, E] or [L, R, E], all layers."""
    loads = loads // (int(loads.flatten(1).sum(-1).max()) // MAX_COPIES + 1)
    quota = plan_layers(loads.int().cpu(), placement, policy).quota
    assert quota is not None
    topology = placement.topology
    seconds = experts.seconds(quota.view(len(quota), topology.num_ranks, -1).numpy())  # [L, R]
    if topology.speeds is not None:
        seconds = seconds / np.asarray(topology.speeds)
    return float(1e3 * seconds.max(-1).sum())


def move_ms(before: Placement, after: Placement, num_bytes: int) -> float:
    """Return the milliseconds in which the busiest rank receives its new experts of all layers, of num_bytes each."""
    topology = before.topology
    near, far = topology.bandwidths or DEFAULT_BANDWIDTHS
    bandwidth = near if topology.ranks_per_node == topology.num_ranks else far
    return float(int(arrivals(before, after).sum(0).max()) * num_bytes / bandwidth / 1e6)
