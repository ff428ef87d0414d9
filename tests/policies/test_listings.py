"""Policies llep_published and libra_published against the listings of their papers (tests/reference/listings.py)."""

from __future__ import annotations

from math import ceil
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload.balancing import planning
from isoload.policies import published_borrowing as published
from isoload.policies.published_borrowing import llep_published
from reference.listings import Segments, expert_replication, lla, token_sharding


def in_order(ranks: int, experts: int, spare: int) -> isoload.Placement:
    counts = torch.ones(1, experts)
    size = experts // ranks + spare
    return isoload.place(counts, isoload.Topology(ranks), size, "trivial", spare_slots=spare)


def drawn(seed: int, sources: bool) -> tuple[np.ndarray[Any, Any], np.random.Generator]:
    """[R, E] copies, skewed in many ways."""
    rng = np.random.default_rng(seed)
    ranks, per_rank = int(rng.integers(2, 9)), int(rng.integers(1, 5))
    experts = ranks * per_rank
    popular = rng.dirichlet(np.full(experts, rng.choice([0.05, 0.3, 1.0, 5.0])))
    rows = popular * (rng.gamma(2, size=(ranks, experts)) if sources else np.ones((ranks, 1)))
    copies = rng.choice([3, 40, 1000], size=ranks if rng.random() < 0.3 else 1)
    rows /= rows.sum(1, keepdims=True)
    return np.stack(
        [rng.multinomial(n, row) for n, row in zip(np.resize(copies, ranks), rows, strict=True)]
    ), rng


def test_llep_as_printed() -> None:
    """Segment for segment on 3,000 drawn loads, with forced chunks among them."""
    forced = 0
    for seed in range(3000):
        loads, rng = drawn(seed, sources=False)
        ranks, counts = len(loads), loads.sum(0).tolist()
        alpha, m = float(rng.choice([1.0, 1.1, 1.5])), int(rng.choice([1, 8, 64]))
        m_alpha = int(round(alpha * 10) * sum(counts) // (10 * ranks))
        found = llep_published(counts, ranks, alpha, m, "paper")
        mine: dict[int, Segments] = {}
        for segment in found:
            mine.setdefault(segment.expert, []).append((segment.rank, segment.first, segment.last))
        listed = {i: A for i, A in lla(counts, len(counts) // ranks, m_alpha, m).items() if counts[i]}
        assert mine == listed and list(mine) == list(listed), seed
        load = np.bincount([s.rank for s in found], [s.last - s.first for s in found], ranks)
        forced += any(load[s.rank] > m_alpha for s in found if s.rank != s.expert // (len(counts) // ranks))
    assert forced > 100, forced


def test_the_code_differs_where_its_home_rank_takes_nothing() -> None:
    """The code goes on among helpers sorted before the first chunk, the listing sorts them again."""
    differ = 0
    for seed in range(3000):
        loads, rng = drawn(seed, sources=False)
        ranks, counts, m = len(loads), loads.sum(0).tolist(), int(rng.choice([1, 8, 64]))
        counts[0] += -sum(counts) % ranks  # else the code rounds the capacity down twice
        code, paper = (llep_published(counts, ranks, 1.0, m, rule) for rule in ("code", "paper"))
        if code != paper:
            expert = next(a.expert for a, b in zip(code, paper, strict=False) if a != b)
            takers = [segment.rank for segment in code if segment.expert == expert]
            assert expert // (len(counts) // ranks) not in takers and len(takers) > 1
            differ += 1
    assert 0 < differ < 300, differ


def test_libra_as_printed() -> None:
    """The fill and the quota on 1,500 drawn loads and forecasts; every branch is met."""
    full = stalled = beyond = 0
    for seed in range(1500):
        loads, rng = drawn(seed, sources=True)
        forecast = loads if rng.random() < 0.3 else rng.permutation(loads, axis=1)
        ranks, experts = loads.shape
        per_rank = experts // ranks
        spare = int(rng.integers(1, min(5, experts - per_rank + 1)))
        alpha, epsilon = float(rng.choice([0.0, 0.5, 1.0])), float(rng.choice([0.0, 0.0, 0.1]))
        placement = in_order(ranks, experts, spare)
        options = {"alpha": alpha, "tolerance": epsilon}
        ahead, batch = (torch.from_numpy(x.astype(np.int32)) for x in (forecast, loads))
        filled = planning.fill(ahead, placement, 0, "libra_published", **options)
        plan = isoload.plan(batch, placement, 0, "libra_published", filled=filled, **options)
        assert isoload.policies.plan.plan_errors(plan, batch) == [], seed

        home = [e // per_rank for e in range(experts)]
        held = expert_replication(forecast.tolist(), home, spare, int(alpha * spare))
        rows = filled.slot_to_expert.view(ranks, -1).tolist()
        assert [set(row) - {-1} for row in rows] == held, seed

        B = ceil(loads.sum() / ranks)
        local = [[int(n) if e in held[g] else 0 for e, n in enumerate(loads[g])] for g in range(ranks)]
        remote = [[0] * experts for _ in range(ranks)]
        for g in range(ranks):
            for e in range(experts):
                remote[home[e]][e] += int(loads[g, e]) - local[g][e]
        moved, total = token_sharding(held, [sum(row) for row in local], remote, B, epsilon)
        assert quota_of(plan, ranks, experts) == [
            [a + b for a, b in zip(*both, strict=True)] for both in zip(local, moved, strict=True)
        ], seed
        assert int(plan.peak) == max(total)
        full += all(len(row) == per_rank + spare for row in held)
        stalled += max(total) > (1 + epsilon) * B
        beyond += any(sum(local[g]) + sum(remote[g]) > B > total[g] for g in range(ranks))
    assert min(full, stalled, beyond) > 10, (full, stalled, beyond)


def test_llep_by_hand() -> None:
    """Three GPUs of two experts, loads 9 + 0, 2 + 1, 0 + 0: capacity 4; the code keeps the order of the helpers."""
    loads = [9, 0, 2, 1, 0, 0]
    printed = {0: [(0, 0, 4), (2, 4, 8), (1, 8, 9)], 2: [(1, 0, 2)], 3: [(1, 0, 1)]}
    assert {e: A for e, A in lla(loads, 2, 4, 1).items() if A and loads[e]} == printed
    found = llep_published(loads, 3, 1.0, 1, "paper")
    assert [(s.expert, s.rank, s.first, s.last) for s in found] == [
        (e, *segment) for e, A in printed.items() for segment in A
    ]
    # The rest of 5 tokens is below m = 100 and above every helper's free capacity: the least loaded helper takes it.
    assert lla(loads, 2, 4, 100)[0] == [(0, 0, 4), (2, 4, 9)]
    assert [s[1:] for s in llep_published(loads, 3, 1.0, 100, "paper") if s.expert == 0] == [
        (0, 0, 4),
        (2, 4, 9),
    ]


def test_a_ratio_of_exactly_lambda_is_balanced_in_the_code_and_not_in_the_listing() -> None:
    """papers/003, Algorithm 4: plain expert parallelism if max / mean < lambda."""
    loads = torch.tensor(
        [[6, 2, 0, 4], [0, 0, 0, 0]], dtype=torch.int32
    )  # ranks 8 and 4: ratio 4 / 3; experts 2
    for measure, ratio in (("rank", 8 / 6), ("expert", 2.0)):
        options = {"threshold": ratio, "measure": measure, "capacity": 1.0, "min_chunk": 1}
        code, paper = (
            isoload.plan(loads, in_order(2, 4, 2), 0, "llep_published", rule=rule, **options)
            for rule in ("code", "paper")
        )
        assert (int(code.peak), int(paper.peak)) == (8, 6), measure


@pytest.mark.parametrize("case", [0, 1])
def test_libra_by_hand(case: int) -> None:
    """Two GPUs of two experts. N = L = 1: each copies what it asks for. L = 0: 6 + 8 copies on GPU 0 exceed B = 8."""
    load, home = [[0, 0, 8, 2], [6, 0, 0, 0]], [0, 0, 1, 1]
    held = expert_replication(load, home, 1, 1 - case)
    assert held == ([{0, 1, 2}, {0, 2, 3}] if case == 0 else [{0, 1}, {2, 3}])
    filled = planning.fill(
        torch.tensor(load, dtype=torch.int32), in_order(2, 4, 1), 0, "libra_published", alpha=1.0 - case
    )
    assert [set(row) - {-1} for row in filled.slot_to_expert.view(2, -1).tolist()] == held


def test_presets_are_the_papers_settings() -> None:
    llep = isoload.policies.make_policy("llep_section_5_1")
    assert llep == isoload.policies.make_policy(
        "llep_published",
        {"rule": "paper", "capacity": 1.0, "min_chunk": 1024, "threshold": 1.3, "measure": "expert"},
    )
    libra = isoload.policies.make_policy("libra_section_5_2")
    assert (libra.name, libra.slots, libra.alpha) == ("libra_published", 8, 0.5)
    changed = isoload.policies.make_policy("libra_section_5_2", {"slots": 2})
    assert (changed.slots, changed.alpha) == (2, 0.5)
    assert isoload.policies.parse_policy("libra_section_5_2") == (
        "libra_published",
        {"slots": 8, "alpha": 0.5},
    )


@pytest.mark.parametrize("policy", ["llep_published", "libra_published"])
def test_a_cuda_graph_is_refused(policy: str) -> None:
    message = (
        f"policy {policy} must not run while a CUDA graph is captured, because it plans on the CPU: use libra"
    )
    with patch.object(published, "capturing", lambda _device: True), pytest.raises(ValueError, match=message):
        isoload.plan(torch.ones(2, 4, dtype=torch.int32), in_order(2, 4, 1), 0, policy)


def quota_of(plan: isoload.policies.plan.Plan, ranks: int, experts: int) -> list[list[int]]:
    """[R, E] copies of every expert on every rank."""
    copies = torch.zeros(ranks, experts + 1, dtype=torch.int64)
    slots = plan.slot_to_expert.view(ranks, -1).long()
    quota: Tensor = plan.quota
    copies.scatter_add_(1, torch.where(slots < 0, experts, slots), quota.view(ranks, -1).long())
    return copies[:, :experts].tolist()
