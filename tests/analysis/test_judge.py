"""A placement's worth on counts: against plain counting, with dead ranks, shared experts and empty batches."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.judge import (
    changed_slots,
    count_replicas,
    even_imbalance,
    exact_imbalance,
    most_replicas,
)
from support.placing import busiest, level_of


@pytest.fixture
def case():
    rng = np.random.default_rng(0)
    counts = np.floor(100 * 3 ** rng.normal(size=(4, 2, 9))).astype(np.int64)
    return isoload.place(counts[:2], isoload.Topology(4), 3, "scenario"), counts


def test_both_imbalances_are_what_plain_counting_finds(case):
    placement, counts = case
    slots, mean = placement.slot_to_expert.numpy(), counts.sum(-1) / 4
    np.testing.assert_allclose(even_imbalance(placement, counts), busiest(slots, counts, 4) / mean)
    np.testing.assert_allclose(exact_imbalance(placement, counts), np.ceil(level_of(slots, counts, 4)) / mean)


SPEEDS = (1.0, 0.5, 2.0, 0.9)


def test_with_speeds_both_are_of_costs(case):
    """Over what ranks have that all end together: 1.1, where ticks over copies gave a thousand."""
    placement, counts = case
    unequal = replace(placement, topology=isoload.Topology(4, speeds=SPEEDS))
    slots, tick = placement.slot_to_expert.numpy(), unequal.topology.ticks.numpy()
    mean = counts.sum(-1) / (1 / tick).sum()
    even, exact = even_imbalance(unequal, counts), exact_imbalance(unequal, counts)
    np.testing.assert_allclose(even, busiest(slots, counts, 4, tick) / mean)
    level = level_of(
        slots, counts, 4, tick
    )  # of real numbers: whole copies take at most one more on each rank
    assert (exact >= level / mean - 1e-9).all() and (exact <= (level + tick.max()) / mean).all()
    assert (exact >= 1).all() and (exact <= even + tick.max() / mean).all() and even.max() < 4


def test_equal_speeds_change_no_figure(case):
    placement, counts = case
    double = replace(placement, topology=isoload.Topology(4, speeds=(2.0,) * 4))
    for judge in (even_imbalance, exact_imbalance):
        np.testing.assert_allclose(judge(double, counts), judge(placement, counts), rtol=1e-12)


@pytest.mark.parametrize("split", ["even", "exact"])
def test_what_a_placer_saw_is_what_is_judged(split):
    counts = np.random.default_rng(2).integers(100, 999, (1, 2, 9)) * 10**4  # few copies would be rounded
    placement = isoload.place(counts, isoload.Topology(4, speeds=SPEEDS), 3, "scenario", split=split)
    judge = even_imbalance if split == "even" else exact_imbalance
    seen = placement.provenance["seen_imbalance"]
    assert seen == pytest.approx(judge(placement, counts).mean(), abs=1e-2)


def test_dead_ranks_and_shared_experts_are_left_aside(case):
    placement, counts = case
    topology = isoload.Topology(5, alive=(True, False, True, True, True))
    slots = torch.full((2, 5, 5), -1, dtype=torch.int32)
    slots[:, [0, 2, 3, 4], :3] = placement.slot_to_expert.view(2, 4, 3)
    slots[:, [0, 2, 3, 4], 3] = 9
    wide = isoload.Placement(slots.view(2, -1), topology, 10, spare_slots=1, num_shared=1)
    np.testing.assert_allclose(even_imbalance(wide, counts), even_imbalance(placement, counts))
    np.testing.assert_allclose(exact_imbalance(wide, counts), exact_imbalance(placement, counts))
    assert count_replicas(wide) == count_replicas(placement) == 2 * 3
    assert most_replicas(wide) == most_replicas(placement) == 2 * (3 - 9 / 4)


def test_an_empty_batch_is_balanced_and_large_counts_keep_their_shares(case):
    placement, counts = case
    assert even_imbalance(placement, 0 * counts).tolist() == exact_imbalance(placement, 0 * counts).tolist()
    assert (even_imbalance(placement, 0 * counts) == 1).all()
    large = exact_imbalance(placement, counts * 10**7)
    np.testing.assert_allclose(
        large, level_of(placement.slot_to_expert.numpy(), counts, 4) * 4 / counts.sum(-1), rtol=1e-5
    )


def test_changed_slots_are_those_to_be_loaded():
    before, after = (
        isoload.Placement(torch.tensor([row]), isoload.Topology(2), 2)
        for row in ([0, 1, 0, 1], [0, 1, 1, -1])
    )
    assert changed_slots(before, after) == 1 / 4
