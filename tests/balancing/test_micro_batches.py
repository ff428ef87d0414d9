"""Choosing what runs together: legal, never worse than the order given, and the best of all on small cases."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload import KnownRoutes, Placement, Topology, choose_micro_batches
from isoload.balancing import micro_batches
from isoload.traces import Identity, Trace, read_routes

LAYERS, EXPERTS, RANKS = 3, 12, 4
Array = np.ndarray[Any, Any]


def place(replicas: int = 0, topology: Topology | int = RANKS) -> Placement:
    counts = torch.arange(1.0, EXPERTS + 1).expand(LAYERS, -1)
    ranks = isoload.Topology(topology).num_ranks if isinstance(topology, int) else topology.num_ranks
    return isoload.place(counts, topology, EXPERTS // ranks + replicas, placer="eplb")


def domains(sequences: int, seed: int = 0) -> Array:
    """Loads of sequences of three domains, one after the other, that prefer other experts."""
    rng = np.random.default_rng(seed)
    popular = rng.dirichlet(np.full(EXPERTS, 0.5), size=(3, LAYERS))
    sizes = rng.integers(20, 60, sequences)
    return np.stack([rng.multinomial(2 * sizes[s], popular[3 * s // sequences]) for s in range(sequences)])


def peak_of(loads: Array, placement: Placement, batch: Array | list[int]) -> float:
    """Sum over micro-batches and layers of the largest rank load; replicas share alike."""
    total, batch = 0.0, np.asarray(batch)
    for number in np.unique(batch):
        counts = loads[batch == number].sum(0)
        for layer in range(LAYERS):
            slots = placement.slot_to_expert[layer].view(RANKS, -1).tolist()
            held = [{e for e in row if e >= 0} for row in slots]
            times = [sum(e in row for row in held) for e in range(EXPERTS)]
            total += max(sum(counts[layer][e] / times[e] for e in row) for row in held)
    return total


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize(("sequences", "batches"), [(6, 2), (6, 3), (7, 2)])
def test_the_best_of_all_assignments(sequences: int, batches: int, replicas: int) -> None:
    placement, loads = place(replicas), domains(sequences, seed=batches)
    chosen = choose_micro_batches(loads, placement, batches)
    peaks = []
    for batch in itertools.product(range(batches), repeat=sequences):
        counts = np.bincount(batch, minlength=batches)
        if counts.max() - counts.min() <= 1:
            peaks.append(peak_of(loads, placement, list(batch)))
    assert chosen.peak == pytest.approx(min(peaks), rel=1e-4)
    assert chosen.peak == pytest.approx(peak_of(loads, placement, chosen.micro_batches), rel=1e-4)
    given = np.arange(sequences) * batches // sequences
    assert chosen.peak_given == pytest.approx(peak_of(loads, placement, given), rel=1e-4)
    assert chosen.floor == pytest.approx(peak_of(loads, placement, [0] * sequences), rel=1e-4)
    assert chosen.floor <= chosen.peak <= chosen.peak_given and chosen.finished


def test_sequences_of_one_domain_are_spread() -> None:
    """Most of the way from the order given to the floor."""
    placement, loads = place(), domains(48)
    chosen = choose_micro_batches(loads, placement, 6)
    assert chosen.peak_given is not None
    assert chosen.peak - chosen.floor < 0.1 * (chosen.peak_given - chosen.floor)
    assert chosen.peak < chosen.peak_shuffled
    assert np.bincount(chosen.micro_batches).tolist() == [8] * 6
    text = f"MicroBatches(48 sequences, peak {chosen.peak:.0f}, {chosen.peak_given:.0f} in the order given, "
    assert repr(chosen).startswith(text)


@pytest.mark.parametrize("equal_counts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_token_limits(seed: int, equal_counts: bool) -> None:
    loads = domains(21, seed)
    tokens = loads[:, 0].sum(1) // 2
    limit = int(tokens.sum() / 5 * 1.15)
    how: dict[str, Any] = {
        "tokens_limit": limit,
        "tokens": tokens,
        "equal_counts": equal_counts,
        "seed": seed,
    }
    chosen = choose_micro_batches(loads, place(), 5, **how)
    assert np.bincount(chosen.micro_batches, tokens).max() <= limit
    counts = np.bincount(chosen.micro_batches, minlength=5)
    assert counts.min() >= 1 and (not equal_counts or counts.max() - counts.min() <= 1)
    again = choose_micro_batches(loads, place(), 5, **how)
    assert (again.micro_batches == chosen.micro_batches).all() and again.peak == chosen.peak


def test_never_worse_than_the_order_given() -> None:
    """Without time, and where the order given is the best one."""
    placement, loads = place(), domains(24)
    best = choose_micro_batches(loads, placement, 4).micro_batches
    kept = choose_micro_batches(loads, placement, 4, before=best, seconds=0)
    assert (kept.micro_batches == best).all() and not kept.finished and kept.peak == kept.peak_given
    assert choose_micro_batches(loads, placement, 4, seconds=0).peak <= kept.peak_shuffled


def test_the_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "WORK", 1)
    chosen = choose_micro_batches(domains(24), place(), 4)
    assert chosen.finished and chosen.peak < chosen.peak_shuffled


def test_an_order_above_the_limit_has_no_peak() -> None:
    loads = np.ones((4, LAYERS, EXPERTS), dtype=int)
    chosen = choose_micro_batches(loads, place(), 2, tokens=[9, 9, 1, 1], tokens_limit=10)
    assert chosen.peak_given is None and "order given" not in repr(chosen)
    assert sorted(np.bincount(chosen.micro_batches, [9, 9, 1, 1])) == [10, 10]


@pytest.mark.parametrize("sequences", [1, 3])
def test_one_micro_batch(sequences: int) -> None:
    chosen = choose_micro_batches(domains(sequences), place(), 1)
    assert (
        chosen.micro_batches.tolist() == [0] * sequences and chosen.peak == chosen.floor == chosen.peak_given
    )
    every = choose_micro_batches(domains(sequences), place(), sequences)
    assert sorted(every.micro_batches) == list(range(sequences))


def test_speeds_of_ranks_count() -> None:
    """Ranks of half the speed are the busy ones."""
    loads = domains(12)
    slow = choose_micro_batches(loads, place(topology=Topology(RANKS, speeds=(1.0, 1.0, 1.0, 0.5))), 3)
    even = choose_micro_batches(loads, place(), 3)
    assert slow.floor > even.floor


def trace_of(seed: int = 0) -> Trace:
    rng, popular = (
        np.random.default_rng(seed),
        np.random.default_rng(1).dirichlet(np.full(EXPERTS, 0.5), size=3),
    )
    requests = []
    for sequence in range(18):
        noise = rng.gumbel(size=(int(rng.integers(5, 30)), LAYERS, EXPERTS)) + np.log(popular[sequence // 6])
        requests.append(np.argsort(-noise, axis=-1)[..., :2])
    requests[3][2] = -1
    return read_routes(requests, num_experts=EXPERTS)


def test_routes_of_a_trace_to_known_routes() -> None:
    """The same as by loads; KnownRoutes takes the assignment, whose peaks are those that were promised."""
    trace, placement = trace_of(), place()
    assert trace.seq_id is not None
    chosen = choose_micro_batches(trace, placement, 3, tokens_limit=150)
    loads = np.stack(counts_of(trace))
    tokens = np.bincount(trace.seq_id)
    same = choose_micro_batches(loads, placement, 3, tokens_limit=150, tokens=tokens)
    assert (chosen.micro_batches == same.micro_batches).all() and (chosen.ranks == same.ranks).all()
    known = KnownRoutes(trace, placement, micro_batches=chosen.micro_batches, ranks=chosen.ranks)
    peak = known.plans("none").peak
    assert peak is not None and int(peak.sum()) == chosen.peak
    for batch in range(3):
        held = [len(known.tokens(batch, rank)) for rank in range(RANKS)]
        assert max(held) - min(held) <= tokens.max()


def counts_of(trace: Trace) -> list[Array]:
    assert trace.topk_ids is not None and trace.seq_id is not None
    rows = []
    for sequence in np.unique(trace.seq_id):
        ids = trace.topk_ids[trace.seq_id == sequence]
        rows.append(np.stack([np.bincount(of[of >= 0], minlength=EXPERTS) for of in ids.transpose(1, 0, 2)]))
    return rows


def test_refused() -> None:
    placement, loads, trace = place(), domains(6), trace_of()

    def refused(message: str, routes: Any, number: Any = 2, **how: Any) -> None:
        with pytest.raises(ValueError, match=message):
            choose_micro_batches(routes, placement, number, **how)

    refused("num_micro_batches must be in 1..6, the number of sequences, got 7", loads, 7)
    refused("in 1..6, the number of sequences, got 0", loads, 0)
    refused(
        "tokens_limit must be at least 9, the tokens of sequence 1, got 8",
        loads,
        tokens=[1, 9, 1, 1, 1, 1],
        tokens_limit=8,
    )
    refused(
        r"let 2 micro-batches hold all 30 tokens, found no assignment for 14 \(at least 3",
        loads,
        tokens=[5] * 6,
        tokens_limit=14,
    )
    refused("seconds must be at least 0, got -1", loads, seconds=-1)
    refused("seconds must be at least 0, got nan", loads, seconds=float("nan"))
    refused(r"before must be one integer per sequence \(6\), got \[2\]", loads, before=[0, 1])
    refused("before must be in 0..1, got 0..2", loads, before=[0, 1, 2, 0, 1, 0])
    refused("before must be a legal assignment, but micro-batch 1 has no sequence", loads, before=[0] * 6)
    refused("micro-batch 0 has 4 sequences, 1 has 2", loads, before=[0, 0, 0, 0, 1, 1])
    refused(
        "micro-batch 0 has 20 tokens, above the limit of 16",
        loads, before=[0, 0, 0, 0, 1, 1], tokens=[5] * 6, tokens_limit=16,
    )  # fmt: skip
    refused(r"loads \[sequences, 3, 12\] of integers or a Trace, got \[6, 2, 12\]", loads[:, 1:])
    refused("got .* float64", loads * 1.0)
    refused("at least one sequence and not negative", loads - 100)
    refused("at least one sequence and not negative", loads[:0])
    refused(r"tokens must be one number per sequence \(6\), got \[2\]", loads, tokens=[1, 2])
    refused("tokens belong to loads", trace, tokens=[1] * 18)
    refused("routes must have seq_id", read_routes(trace.topk_ids))
    refused(
        "routes must be in -1..11, got 12",
        read_routes(np.full((4, 3, 1), 12), sequence_lengths=[1] * 4),
    )
    refused("placement's 12 routed experts, trace t has 13", Trace("t", 13, topk_ids=trace.topk_ids))
    named = placement.with_rows([0, 1, 2], [0, 1, 2], Identity("model"))
    with pytest.raises(ValueError, match="does not state which layers"):
        choose_micro_batches(trace, named, 2)
