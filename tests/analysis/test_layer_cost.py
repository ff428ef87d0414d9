"""Predicted layer times: every figure recounted token by token from the routed slots and the plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.batches import make_batches
from isoload.analysis.layer_cost import CostTally
from isoload.analysis.metrics import count_routed
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.times.cost import CostModel
from isoload.traces import Trace

RANKS, PER_NODE, EXPERTS, LAYERS, TOP_K, SPARE, SIZE = 4, 2, 8, 2, 2, 2, 4
MODEL = CostModel(64, 32, 3, 2.0, 4.0, 3.0, ((1, 2.0), (32, 0.25)), (2.0, 0.5), "made")
POLICIES = ("none", "llep:min_chunk=1:threshold=0.0", "spill_cost:min_chunk=1", "exact")


def skewed_trace(seed: int = 5) -> Trace:
    """Four batches of 40, 24, 0 and 16 tokens, hot experts 0 and 1."""
    rng = np.random.default_rng(seed)
    sizes = np.array([40, 24, 0, 16])
    keys = rng.gumbel(size=(sizes.sum(), LAYERS, EXPERTS)) + 2 * (np.arange(EXPERTS) < 2)
    ids = np.argsort(-keys, axis=-1)[..., :TOP_K].astype(np.int32)
    return Trace("skewed", EXPERTS, topk_ids=ids, tokens_per_batch=sizes)


def predicted(**settings: object) -> dict[str, dict[str, Any]]:
    given = {"num_ranks": RANKS, "ranks_per_node": PER_NODE, "slots_per_rank": SIZE, "spare_slots": SPARE}
    given |= {"placer": "trivial", "calibrate": "all", "policies": POLICIES, "cost": MODEL}
    found = replay(skewed_trace(), ReplaySettings(**{**given, **settings}))  # type: ignore[arg-type]
    return {row.policy: cost for row, cost in zip(found.policies, found.costs, strict=False)}


def seconds_of(copies: int) -> float:
    """Of one slot; linear in log(copies) from 1 to 32."""
    part = min(1.0, np.log(max(copies, 1)) / np.log(32))
    return (3.0 + copies * (2.0 + (0.25 - 2.0) * part)) * 1e-6 if copies else 0.0


def link(a: int, b: int) -> float:
    """Seconds per byte."""
    return 0.0 if a == b else 1 / (2.0e9 if a // PER_NODE == b // PER_NODE else 0.5e9)


def recount(
    slots: np.ndarray, sources: np.ndarray, held: np.ndarray, speeds: Sequence[float] = (1.0,) * RANKS
) -> dict[str, float]:
    """One layer: routed slots [T, K], source ranks [T], filled slots [P]. Home of expert e: rank e // 2."""
    copies = np.bincount(slots.ravel(), minlength=RANKS * SIZE).reshape(RANKS, SIZE)
    rows = np.zeros((RANKS, RANKS))
    for source, mine in zip(sources, slots, strict=True):
        for rank in {slot // SIZE for slot in mine}:
            rows[source, rank] += 1
    lending, borrowed, moved = np.zeros((RANKS, RANKS)), 0, 0
    for rank, s in product(range(RANKS), range(SIZE - SPARE, SIZE)):
        if (expert := held[rank * SIZE + s]) >= 0:
            lending[expert // 2, rank] += 1
            borrowed, moved = borrowed + 1, moved + copies[rank, s]

    def busiest(amount: np.ndarray, size: float) -> float:
        times = [
            max(
                sum(amount[r, q] * link(r, q) for q in range(RANKS)),
                sum(amount[q, r] * link(q, r) for q in range(RANKS)),
            )
            for r in range(RANKS)
        ]
        return size * max(times)

    weights = 3 * 64 * 32 * 2
    memory = [
        sum(copies[r]) * (64 + 32) * 4 + sum(held[r * SIZE : (r + 1) * SIZE] >= 0) * weights
        for r in range(RANKS)
    ]
    return {
        "compute": max(
            sum(seconds_of(int(n)) for n in row) / s for row, s in zip(copies, speeds, strict=True)
        ),
        "exchange": 2 * busiest(rows, 64 * 4),
        "import": busiest(lending, weights),
        "memory": max(memory),
        "borrowed": borrowed,
        "moved": moved,
        "copies": copies.sum() / RANKS,
    }


@pytest.mark.parametrize(
    ("policy", "speeds"), [("none", None), ("llep", None), ("exact", None), ("exact", (1.0, 0.5, 2.0, 1.0))]
)
def test_figures_are_those_of_the_routed_slots(policy: str, speeds: tuple[float, ...] | None) -> None:
    trace = skewed_trace()
    batches = make_batches(trace, None, 0)
    topology = isoload.Topology(RANKS, PER_NODE, speeds, bandwidths=MODEL.bandwidths)
    placement = isoload.place(batches.counts, topology, SIZE, "trivial", SPARE)
    options = {"min_chunk": 1, "threshold": 0.0} if policy == "llep" else {}
    tally, expected = CostTally(MODEL), []
    for index in range(4):
        batch = batches.source_batch(index, RANKS, "contiguous")
        plans, slots = [], []
        for layer in range(LAYERS):
            loads = torch.stack([isoload.count(batch.on_rank(layer, r), EXPERTS) for r in range(RANKS)])
            plans.append(isoload.plan(loads, placement, layer, policy, **options))
            routed = [isoload.route(batch.on_rank(layer, r), loads, plans[-1], r) for r in range(RANKS)]
            slots.append(torch.cat(routed).numpy())
            if batch.num_tokens:
                held = plans[-1].slot_to_expert.numpy()
                expected.append(recount(slots[-1], batch.sources(), held, speeds or (1.0,) * RANKS))
        tally.add(plans, count_routed(np.stack(slots), batch.sources(), topology, SIZE), placement)
    found = tally.figures()

    def mean(name: str) -> float:
        return float(np.mean([row[name] for row in expected]))

    layer = [1e6 * (row["compute"] + row["exchange"] + row["import"]) for row in expected]
    assert len(expected) == 6 and (mean("borrowed") > 0) == (policy == "llep")
    assert found["compute_us"] == pytest.approx(1e6 * mean("compute"))
    assert found["exchange_us"] == pytest.approx(1e6 * mean("exchange"))
    assert found["import_us"] == pytest.approx(1e6 * mean("import"))
    assert (found["layer_us_mean"], found["layer_us_max"]) == pytest.approx((np.mean(layer), max(layer)))
    assert (found["bytes_mean"], found["bytes_max"]) == (
        mean("memory"),
        max(row["memory"] for row in expected),
    )
    assert (found["borrowed"], found["mean_copies"]) == (mean("borrowed"), mean("copies"))
    each = mean("moved") / mean("borrowed") if policy == "llep" else None
    assert found["copies_per_borrowed"] == (each and pytest.approx(each))


def test_a_replay_predicts_a_row_per_policy_and_prices_imports_by_its_constants() -> None:
    dear = predicted(cost=replace(MODEL, bandwidths=(0.2, 0.05)))
    assert list(dear) == list(POLICIES)
    assert dear["none"]["borrowed"] == 0 < dear["llep:min_chunk=1:threshold=0.0"]["borrowed"]
    assert dear["spill_cost:min_chunk=1"]["borrowed"] == 0, "an import takes longer than all tokens"
    cheap = predicted(cost=replace(MODEL, bandwidths=(2000.0, 500.0)))
    assert cheap["spill_cost:min_chunk=1"]["borrowed"] > 0
    assert cheap["none"]["compute_us"] == dear["none"]["compute_us"]
    assert cheap["none"]["exchange_us"] == pytest.approx(dear["none"]["exchange_us"] / 10_000)


def test_an_option_of_a_policy_outranks_the_constants() -> None:
    free = "spill_cost:min_chunk=1:expert_bytes=1"
    assert predicted(policies=(free,))[free]["borrowed"] > 0


def test_no_cost_model_no_rows() -> None:
    assert predicted(cost=None) == {}
