"""Targets of sources that were idle, or nearly so: none moves more than the share of the source warrants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, LocalGroup
from isoload.balancing.targets import offsets, strength
from support.small_batches import EXPERTS, RANKS, make_placement, make_topology

ONE = 2**20
K, SPARE = 4, 2
Busy = Callable[[int], list[bool]]  # ranks with tokens in a batch


def draw_batch(ranks: int, batch: int, busy: list[bool], differ: bool, tokens: int = 64) -> list[Tensor]:
    """[R][T, K] ids of popular experts, of the same ones on all ranks or of a domain for each three ranks."""
    draw = torch.Generator().manual_seed(1000 + batch)
    ids = []
    for rank in range(ranks):
        domain = torch.Generator().manual_seed(rank % 3 if differ else 0)
        likes = torch.rand(64, generator=domain) ** 4 + 1e-3
        drawn = torch.multinomial(likes.expand(tokens, -1), K, generator=draw)
        ids.append(drawn if busy[rank] else drawn[:0])
    return ids


def imbalance(slots: list[Tensor], per_rank: int, ranks: int) -> float:
    """max/mean rank load of the copies that were routed."""
    routed = torch.cat([s.flatten() for s in slots])
    carried = torch.bincount(routed[routed >= 0] // per_rank, minlength=ranks)
    return float(carried.max() / carried.double().mean())


def means(ranks: int, busy: Busy, judged: range, differ: bool = False, **how: Any) -> tuple[float, float]:
    """Mean imbalance of the judged batches with targets, renewed after every 16 batches, and without targets."""
    topology = isoload.Topology(ranks, ranks_per_node=ranks // 4)
    seen = torch.stack([isoload.count(x, 64) for x in draw_batch(ranks, 0, [True] * ranks, differ, 512)])
    placement = isoload.place(seen.sum(0)[None], topology, slots_per_rank=64 // ranks + SPARE)
    layers = [
        Balancer(placement, group=LocalGroup(topology), **{"loads": "own", **how})
        for _ in ("targets", "none")
    ]
    found: tuple[list[float], list[float]] = [], []
    for batch in range(judged.stop):
        ids = draw_batch(ranks, batch, busy(batch), differ)
        for layer, of in zip(layers, found, strict=True):
            slots = layer(ids)
            if batch in judged:
                of.append(imbalance(slots, placement.slots_per_rank, ranks))
        if batch % 16 == 15:
            layers[0].exchange()
    return float(np.mean(found[0])), float(np.mean(found[1]))


@pytest.mark.parametrize("loads", ["own", "node"])
@pytest.mark.parametrize("ranks", [16, 32, 64])
def test_ranks_that_were_idle_do_not_send_all_copies_to_one_rank(ranks: int, loads: str) -> None:
    """Half of the ranks have no tokens before the exchange, and all have tokens in the eight batches after it."""

    def busy(batch: int) -> list[bool]:
        return [batch >= 16 or rank < ranks // 2 for rank in range(ranks)]

    targets, none = means(ranks, busy, range(16, 24), loads=loads)
    assert targets < none + 0.01, (targets, none)


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize(
    ("name", "busy"),
    [
        ("turns", lambda batch: [(rank + batch // 8) % 2 == 0 for rank in range(16)]),
        ("each batch", lambda batch: [(rank + batch) % 2 == 0 for rank in range(16)]),
        ("one", lambda batch: [rank == batch % 16 for rank in range(16)]),
        ("one for long", lambda batch: [rank == batch // 8 % 16 for rank in range(16)]),
    ],
)
def test_ranks_that_are_busy_by_turns_lose_nothing_by_targets(name: str, busy: Busy, differ: bool) -> None:
    targets, none = means(16, busy, range(16, 48), differ)
    assert targets < none + 0.01, (name, targets, none)


def test_targets_of_ranks_that_stay_busy_still_help_where_others_stay_idle() -> None:
    targets, none = means(16, lambda _: [rank < 8 for rank in range(16)], range(16, 48), differ=True)
    assert targets < none - 0.01, (targets, none)


def drawn_counts(seed: int = 0) -> Tensor:
    """[1, R, E] decayed counts."""
    return torch.from_numpy(np.random.default_rng(seed).integers(2**30, 2**34, (1, RANKS, EXPERTS)))


def offset_of(recent: Tensor, last: Tensor, source: int) -> Tensor:
    """[R]"""
    placed = make_placement().layers("cpu")
    tables = replace(placed.tables, data=placed.tables.data[:1])
    return offsets(recent, last, source, tables, placed.slot_to_expert[:1], make_topology())[0]


def last_of(recent: Tensor) -> Tensor:
    """[1, R] last batch in which every source sent what it sent in a mean one."""
    return recent.sum(2) // (2**32 // 5439)


def test_an_idle_source_has_no_targets() -> None:
    recent = drawn_counts()
    recent[0, 3] = 0
    assert not offset_of(recent, last_of(recent), 3).any()
    assert not offset_of(torch.zeros_like(recent), torch.zeros(1, RANKS, dtype=torch.int64), 3).any()


def test_targets_fade_with_the_share_of_a_source_without_a_step() -> None:
    """Down to one unit of 2^-16 copy: half the share, half the offset."""
    before = int(offset_of(drawn_counts(), last_of(drawn_counts()), 3).max())
    assert before > ONE // 50
    for halvings in range(1, 35):
        recent = drawn_counts()
        recent[0, 3] >>= halvings
        last = last_of(recent)
        found = int(offset_of(recent, last, 3).max())
        share = int(recent[0, 3].sum()) / int(recent.sum())
        assert found <= 2 * RANKS * share * ONE + 1
        assert before // 4 - 8 <= found <= before, "continuous"
        before = found
    assert before == 0


def test_targets_of_a_source_that_was_idle_in_the_last_batch_are_none() -> None:
    recent = drawn_counts()
    last = last_of(recent)
    last[0, 3] = 0
    assert not offset_of(recent, last, 3).any() and offset_of(recent, last, 2).any()


@pytest.mark.parametrize(
    ("usual", "last", "followed"),
    [
        ([4, 4, 4, 4], [4, 4, 4, 4], 1.0),
        ([4, 4, 0, 0], [4, 4, 0, 0], 1.0),  # idle ranks that stay idle
        ([4, 4, 4, 4], [5, 4, 4, 3], (1 - 2 / 16) ** 2),
        ([4, 4, 4, 4], [2, 2, 2, 2], 0.5**2 * 0.5),  # half of a mean batch
        ([4, 4, 4, 4], [8, 8, 8, 8], 1.0),
        ([1, 5, 5, 5], [1, 5, 5, 5], 4 / 16),
        ([4, 4, 4, 4], [16, 0, 0, 0], 0.0),
        ([4, 4, 4, 4], [0, 0, 0, 0], 0.0),
        ([0, 0, 0, 0], [4, 4, 4, 4], 0.0),
    ],
)
def test_how_far_the_first_source_follows_its_targets(
    usual: list[int], last: list[int], followed: float
) -> None:
    per_batch = torch.tensor([last]) * 1000
    recent = torch.tensor([usual]) * 1000 * (2**32 // 5439)
    assert strength(recent, per_batch, 0).item() / ONE == pytest.approx(followed, abs=1e-5)


def test_the_strength_of_many_copies_stays_in_range() -> None:
    recent = torch.full((2, 4), 2**53)
    last = torch.full((2, 4), 2**29)
    assert strength(recent, last, 1).tolist() == pytest.approx([0, 0], abs=ONE // 100)
    assert strength(recent // 2**10, last, 1).tolist() == pytest.approx([ONE, ONE], rel=1e-4)
