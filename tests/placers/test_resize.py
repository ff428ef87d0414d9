"""A group of another size: the most stays that can, every expert has a slot, and moves are counted from there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import Bounds, LinearConstraint, milp

import isoload
from isoload.placement.placement import Placement
from isoload.placers.resize import resized
from isoload.topology import Topology


def drawn_rows(draw: np.random.Generator, ranks: int, width: int, experts: int) -> Any:
    """[1, R, S] with every expert, the other slots empty or replicas."""
    rows = np.full((ranks, width), -1)
    for expert in draw.permutation(experts):
        free = [r for r in range(ranks) if (rows[r] < 0).any()]
        rank = int(draw.choice(free))
        rows[rank, np.flatnonzero(rows[rank] < 0)[0]] = expert
    for rank, place in np.argwhere(rows < 0):
        expert = int(draw.integers(experts))
        if expert not in rows[rank] and draw.random() < 0.8:
            rows[rank, place] = expert
    return rows[None].astype(np.int32)


def most_kept(rows: Any, ranks: int, width: int, experts: int) -> int:
    """Copies that can stay, by HiGHS: at most `width` on a rank, and a slot is left for each expert that none keeps."""
    pairs = [(rank, int(e)) for rank, row in enumerate(rows[0][:ranks]) for e in row if e >= 0]
    of_rank = np.array([[float(rank == r) for rank, _ in pairs] for r in range(ranks)])
    of_expert = np.array([[float(expert == e) for _, expert in pairs] for e in range(experts)])
    limits = [
        LinearConstraint(np.hstack([of_rank, np.zeros((ranks, experts))]), -np.inf, width),
        LinearConstraint(np.hstack([of_expert, np.eye(experts)]), 1, np.inf),
        LinearConstraint(np.ones(len(pairs) + experts), -np.inf, ranks * width),
    ]
    gain = np.concatenate([np.ones(len(pairs)), np.zeros(experts)])
    found = milp(-gain, integrality=np.ones_like(gain), bounds=Bounds(0, 1), constraints=limits)
    assert found.success
    return round(-found.fun)


@pytest.mark.parametrize(
    ("old", "new", "experts"), [(8, 6, 64), (6, 8, 64), (16, 15, 64), (32, 72, 72), (4, 6, 24), (6, 3, 24)]
)
def test_what_stays_is_the_most_that_can(old: int, new: int, experts: int) -> None:
    draw = np.random.default_rng(old * new)
    for more in (0, 1):
        before, after = (-(-experts // ranks) + more for ranks in (old, new))
        rows = drawn_rows(draw, old, before, experts)
        loads = draw.integers(1, 100, (1, experts)).astype(float)
        slots = resized(rows, range(new), after, loads, np.ones(new))
        assert set(slots[slots >= 0].tolist()) == set(range(experts))
        for row in slots[0]:
            present = row[row >= 0].tolist()
            assert len(present) == len(set(present))
        kept = sum(
            len(set(a.tolist()) & set(b.tolist()) - {-1}) for a, b in zip(rows[0], slots[0], strict=False)
        )
        assert kept >= most_kept(rows, new, after, experts)


def test_drawn_groups_whose_slots_are_full_of_replicas() -> None:
    draw = np.random.default_rng(0)
    for _ in range(300):
        old, new, experts = (int(draw.integers(1, most)) for most in (6, 6, 20))
        before, after = (min(-(-experts // ranks) + int(draw.integers(3)), experts) for ranks in (old, new))
        rows = drawn_rows(draw, old, before, experts)
        slots = resized(rows, range(new), after, draw.random((1, experts)), np.ones(new))
        assert set(slots[slots >= 0].tolist()) == set(range(experts))
        kept = sum(
            len(set(a.tolist()) & set(b.tolist()) - {-1}) for a, b in zip(rows[0], slots[0], strict=False)
        )
        assert kept >= most_kept(rows, new, after, experts)


def test_a_home_that_a_narrower_rank_leaves_out_is_refused_where_homes_are_pinned() -> None:
    counts = torch.from_numpy(np.random.default_rng(3).integers(1, 100, (1, 16)))
    before = isoload.place(counts, Topology(2), 9, "scenario", pinned=True)
    wider = isoload.place(counts, Topology(2), 10, "scenario", before=before, pinned=True, moves=0)
    homes = [(p.home_slot // p.slots_per_rank).tolist() for p in (before, wider)]
    assert homes[0] == homes[1]
    with pytest.raises(ValueError, match="before must have pinned homes on live ranks"):
        isoload.place(counts, Topology(4), 5, "scenario", before=before, pinned=True)


@pytest.mark.parametrize(("old", "new", "experts"), [(8, 6, 64), (6, 8, 64), (16, 15, 128), (32, 72, 384)])
def test_places_again_for_another_number_of_ranks(old: int, new: int, experts: int) -> None:
    draw = np.random.default_rng(0)
    counts = torch.from_numpy(draw.zipf(1.4, (2, experts)).clip(max=200))
    before = isoload.place(counts, Topology(old), -(-experts // old) + 1, "scenario")
    size = -(-experts // new) + 1
    start = isoload.place(counts, Topology(new), size, "scenario", before=before, moves=0)
    moved = isoload.place(counts, Topology(new), size, "scenario", before=before, moves=3)
    for placement in (start, moved):
        assert all(set(row) >= set(range(experts)) for row in placement.slot_to_expert.tolist())
        plan = isoload.plan(torch.stack([counts.int()] + [counts.int() * 0] * (new - 1), 1), placement)
        assert plan.peak is not None and plan.peak.equal(plan.bound)
    changed = [_arrivals(start, moved, layer) for layer in range(2)]
    assert max(changed) <= 3
    for layer in range(2):  # ranks that stay keep all that they have room for
        for rank in range(min(old, new)):
            was, now = (
                set(p.slot_to_expert[layer].view(-1, p.slots_per_rank)[rank].tolist())
                for p in (before, start)
            )
            assert len((was & now) - {-1}) >= min(len(was - {-1}), size) - 1


def _arrivals(before: Placement, after: Placement, layer: int) -> int:
    """Experts that ranks must load."""
    rows = [p.slot_to_expert[layer].view(-1, p.slots_per_rank).tolist() for p in (before, after)]
    return sum(len(set(new) - set(old) - {-1}) for old, new in zip(*rows, strict=True))


def test_a_lost_rank_of_a_group_that_shrinks_and_dead_ranks_of_the_new_one() -> None:
    counts = torch.from_numpy(np.random.default_rng(1).integers(1, 100, (1, 16)))
    before = isoload.place(counts, Topology(4), 5, "scenario")
    alive = Topology(6, alive=(True, False, True, True, True, True))
    after = isoload.place(counts, alive, 4, "scenario", before=before, moves=0)
    rows = after.slot_to_expert.view(6, 4)
    assert (rows[1] == -1).all() and set(rows.flatten().tolist()) >= set(range(16))


def test_more_slots_on_the_same_ranks_keep_all() -> None:
    counts = torch.from_numpy(np.random.default_rng(2).integers(1, 100, (1, 16)))
    before = isoload.place(counts, Topology(4), 4, "scenario")
    after = isoload.place(counts, Topology(4), 6, "scenario", before=before, moves=0)
    for old, new in zip(
        before.slot_to_expert.view(4, 4).tolist(), after.slot_to_expert.view(4, 6).tolist(), strict=True
    ):
        assert set(old) <= set(new) and len(set(new)) == 6
