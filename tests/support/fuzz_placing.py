"""Fuzzed placements of ranks that differ in speed, judged by plain loops and flows; and layers in another order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

import isoload
from isoload import ops
from isoload.analysis.judge import even_imbalance, exact_imbalance
from support.fuzz_cases import FuzzCase
from support.oracles import flow_optimum


def check_speeds(case: FuzzCase) -> None:
    """Both imbalances in one unit, a copy's ticks; the fewest slots to read, whatever the ticks."""
    rng = np.random.default_rng([case.seed, 2])
    ranks, live, routed = case.num_ranks, case.topology.live_ranks, case.placement.num_routed
    speeds = tuple(rng.choice([0.25, 0.5, 0.9, 1.0, 1.7, 3.0], ranks).tolist())
    placement = replace(case.placement, topology=replace(case.topology, speeds=speeds))
    ticks = np.array([round(1024 / speed) for speed in speeds])
    counts = rng.integers(0, rng.choice([2, 100, 2**18]), (2, placement.num_layers, routed))
    even, exact = even_imbalance(placement, counts), exact_imbalance(placement, counts)
    slots = np.where(placement.slot_to_expert < routed, placement.slot_to_expert, -1)
    for batch in range(len(counts)):
        for layer, held in enumerate(slots):
            loads = counts[batch, layer]
            mean = loads.sum() / sum(1 / ticks[rank] for rank in live)
            part = loads / np.maximum(np.bincount(held[held >= 0], minlength=routed), 1)
            cost = ticks * np.where(held >= 0, part[held], 0).reshape(ranks, -1).sum(1)
            least = flow_optimum(loads, held, ranks, None, ticks)
            wanted = (cost.max() / mean, least / mean) if mean else (1, 1)
            np.testing.assert_allclose((even[batch, layer], exact[batch, layer]), wanted, rtol=1e-9)
            units = (loads > 0).astype(np.int32)
            tables = ops.replica_tables(torch.from_numpy(held), ranks, routed)
            active = ops.plan_active(torch.from_numpy(loads.astype(np.int32)), tables)
            fewest = flow_optimum(units, held, ranks)
            assert int(active.active_peak) == int(active.active_bound) == fewest, (
                int(active.active_peak),
                fewest,
            )


def check_orders(case: FuzzCase) -> None:
    """Where nothing may move, nothing moves, in whatever order the layers before come and whatever stands beside."""
    rng = np.random.default_rng([case.seed, 3])
    experts, live, layers = case.placement.num_routed, len(case.topology.live_ranks), 4
    ids = tuple(rng.choice(100, layers, replace=False).tolist())
    least = -(-experts // live)
    size = int(rng.integers(least, min(least + 2, experts) + 1))
    topology = replace(
        case.topology, speeds=None if rng.random() < 0.5 else (0.5, *[1.0] * (case.num_ranks - 1))
    )
    counts = rng.integers(1, 1000, (3, layers, experts))
    trace = isoload.traces.Trace("fuzz", experts, counts=counts, layer_ids=ids)
    before = isoload.place(trace, topology, size, "scenario")
    mixed = before.with_layers([ids[i] for i in rng.permutation(layers)])
    part = trace.select_layers(rng.permutation(layers)[: rng.integers(1, layers + 1)].tolist())
    after = isoload.place(part, topology, size, "scenario", before=mixed, moves=0)
    assert after.layer_ids == part.layer_ids, "another order than the trace's"
    wanted = before.with_layers(part.layer_ids)
    assert torch.equal(after.slot_to_expert, wanted.slot_to_expert), "an expert moved"
    assert torch.equal(after.home_slot, wanted.home_slot), "a home moved"
