"""Replicas and borrowed weights: the two starts of a plan, beside the rule that lends as if replicas took nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload.trace import read_trace
from reference.plan_spill import capacity_of, lend
from reference.spill_tries import Layer, SpillRules
from support.sweeps import every

SHIPPED = Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz"
COUNT, EXPERTS, UNLIMITED = 400 // every(), 32, 2**31 - 1
LLEP = {"min_chunk": 1, "threshold": 1.0, "tolerance": 0.0}
EXPERT_BYTES = 4_000_000


class Outcome(NamedTuple):
    """Of a plan: largest copies plus what imports cost, imports, largest copies."""

    cost: int
    imports: int
    peak: int


def placed_by_eplb(rng: np.random.Generator, history: np.ndarray) -> isoload.Placement:
    ranks, spare, replicas = int(rng.choice([4, 8])), int(rng.integers(1, 3)), int(rng.choice([1, 2, 4]))
    return isoload.place(
        torch.from_numpy(history)[None].float(),
        isoload.Topology(ranks),
        EXPERTS // ranks + replicas + spare,
        placer="eplb",
        spare_slots=spare,
    )


def drawn(seed: int) -> tuple[isoload.Placement, Tensor]:
    """Shares that have drifted since the experts were placed."""
    rng = np.random.default_rng([17, seed])
    shares = rng.dirichlet(np.full(EXPERTS, 0.5 + rng.random()))
    placement = placed_by_eplb(rng, rng.multinomial(100_000, shares))
    drift = shares * rng.lognormal(0, 0.3, EXPERTS)
    return placement, torch.from_numpy(rng.multinomial(100_000, drift / drift.sum())).int()


def recorded(seed: int) -> tuple[isoload.Placement, Tensor]:
    """A layer and batch of the shipped trace, placed by the batches before."""
    counts = read_trace(SHIPPED).counts
    assert counts is not None
    rng = np.random.default_rng([23, seed])
    batch, layer = rng.integers(1, len(counts)), rng.integers(counts.shape[1])
    placement = placed_by_eplb(rng, counts[:batch, layer].sum(0))
    shares = counts[batch, layer] / counts[batch, layer].sum()
    return placement, torch.from_numpy(rng.multinomial(100_000, shares)).int()


def instances(count: int) -> Iterator[tuple[str, isoload.Placement, Tensor]]:
    for seed in range(count):
        make = recorded if seed % 5 == 4 else drawn
        yield f"{make.__name__} {seed}", *make(seed)


def as_if_alone(placement: isoload.Placement, loads: Tensor, capacity: float | None, price: int) -> Outcome:
    """The rule without replicas' copies, in the reference's words: from all home slots, the greedy alone."""
    ranks = placement.topology.num_ranks
    ppm = None if capacity is None else round(capacity * 1e6)
    rules = SpillRules(
        ranks,
        ranks,
        placement.spare_slots,
        [True] * ranks,
        ppm,
        0,
        False,
        0,
        1,
        (price, price),
        UNLIMITED,
        False,
    )
    slots, home = placement.slot_to_expert[0], placement.home_slot[0]
    start = torch.zeros_like(slots).scatter(0, home.long(), loads)
    layer = Layer(rules, loads.tolist(), slots.tolist(), home.tolist(), [0] * ranks, start.tolist())
    attempt = lend(layer, capacity_of(layer))
    return Outcome(max(attempt.cost), len(attempt.lender), attempt.peak())


def outcome(plan: isoload.records.plan.Plan, price: int) -> Outcome:
    ranks, spare = plan.topology.num_ranks, plan.placed.spare_slots
    assert plan.quota is not None
    load = plan.quota.view(ranks, -1).sum(1)
    imports = (plan.slot_to_expert.view(ranks, -1)[:, -spare:] >= 0).sum(1)
    return Outcome(int((load + price * imports).max()), int(imports.sum()), int(load.max()))


@pytest.mark.parametrize("policy", ["llep", "spill_cost"])
def test_never_worse_than_as_if_replicas_took_nothing(policy: str) -> None:
    """No higher cost; more imports or a higher peak only for a lower cost. For llep cost is the peak."""
    near, _ = isoload.cost.DEFAULT_BANDWIDTHS
    price = 0 if policy == "llep" else isoload.cost.break_even(EXPERT_BYTES, near, 0.147)
    options = LLEP if policy == "llep" else {"expert_bytes": EXPERT_BYTES, "min_chunk": 1}
    fewer = lower = 0
    for name, placement, loads in instances(COUNT):
        found = outcome(isoload.plan(loads, placement, 0, policy, **options), price)
        other = as_if_alone(placement, loads, 1.0 if policy == "llep" else None, price)
        assert found.cost <= other.cost, (name, found, other)
        no_worse = found.imports <= other.imports and found.peak <= other.peak
        assert no_worse or found.cost < other.cost, (name, found, other)
        fewer, lower = fewer + (found.imports < other.imports), lower + (found.cost < other.cost)
    assert fewer > COUNT // 2 and lower > COUNT // 5, (fewer, lower)
