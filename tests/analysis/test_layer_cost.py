"""Layer times of a replay: every figure recounted token by token from the routed slots and the plans."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.analysis.batches import make_batches
from isoload.analysis.metrics import TimesTally, count_routed
from isoload.analysis.simulate import ReplaySettings, replay
from isoload.times import LayerTime
from isoload.traces import Trace
from support.measured_times import times

RANKS, EXPERTS, LAYERS, TOP_K, SPARE, SIZE = 4, 8, 2, 2, 2, 4
POLICIES = ("none", "llep:min_chunk=1:threshold=0.0", "spill_cost:min_chunk=1", "exact")


def skewed_trace(seed: int = 5) -> Trace:
    """Four batches of 40, 24, 0 and 16 tokens, hot experts 0 and 1."""
    rng = np.random.default_rng(seed)
    sizes = np.array([40, 24, 0, 16])
    keys = rng.gumbel(size=(sizes.sum(), LAYERS, EXPERTS)) + 2 * (np.arange(EXPERTS) < 2)
    ids = np.argsort(-keys, axis=-1)[..., :TOP_K].astype(np.int32)
    return Trace("skewed", EXPERTS, topk_ids=ids, tokens_per_batch=sizes)


def predicted(**changes: object) -> dict[str, dict[str, Any]]:
    settings: dict[str, Any] = {"num_ranks": RANKS, "slots_per_rank": SIZE, "spare_slots": SPARE}
    settings |= {"placer": "trivial", "calibrate": "all", "policies": POLICIES, "times": times(), **changes}
    replayed = replay(skewed_trace(), ReplaySettings(**settings))
    return {
        row.policy: row_times for row, row_times in zip(replayed.policies, replayed.layer_times, strict=False)
    }


def recount(
    slots: np.ndarray, sources: np.ndarray, filled: np.ndarray, layer: LayerTime, speeds: tuple[float, ...]
) -> dict[str, float]:
    """One layer: routed slots [T, K], source ranks [T], filled slots [P]. Expert e has its home slot on rank e // 2."""
    copies = np.bincount(slots.ravel(), minlength=RANKS * SIZE).reshape(RANKS, SIZE)
    rows = [len({token for token, row in enumerate(slots) if rank in row // SIZE}) for rank in range(RANKS)]
    sent, received, borrowed, moved = np.zeros(RANKS), np.zeros(RANKS), 0, 0
    for rank, s in product(range(RANKS), range(SIZE - SPARE, SIZE)):
        if (expert := filled[rank * SIZE + s]) >= 0:
            sent[expert // 2] += 1
            received[rank] += 1
            borrowed, moved = borrowed + 1, moved + copies[rank, s]
    busiest = max(rows) / np.mean(rows)
    steps = [step.seconds(len(slots) / RANKS, busiest) for step in (layer.dispatch, layer.combine) if step]
    ranks = zip(copies, rows, speeds, strict=True)
    return {
        "experts": max(
            float(layer.experts.seconds(mine, sum_rows)) / speed for mine, sum_rows, speed in ranks
        ),
        "low": sum(float(step[0]) for step in steps),
        "high": sum(float(step[1]) for step in steps),
        "import": max(max(sent), max(received)) * 12e-6,
        "borrowed": borrowed,
        "moved": moved,
        "copies": copies.sum() / RANKS,
    }


@pytest.mark.parametrize(
    ("policy", "speeds"), [("none", None), ("llep", None), ("exact", None), ("exact", (1.0, 0.5, 2.0, 1.0))]
)
def test_figures_are_those_of_the_routed_slots(policy: str, speeds: tuple[float, ...] | None) -> None:
    batches = make_batches(skewed_trace(), None, 0)
    topology = isoload.Topology(RANKS, RANKS, speeds)
    placement = isoload.place(batches.counts, topology, SIZE, "trivial", SPARE)
    options = {"min_chunk": 1, "threshold": 0.0} if policy == "llep" else {}
    layer, _ = times().layer(RANKS, 1, TOP_K)
    tally, expected = TimesTally(layer, 12.0), []
    for index in range(4):
        batch = batches.source_batch(index, RANKS, "contiguous")
        plans, slots = [], []
        for i in range(LAYERS):
            loads = torch.stack([isoload.count(batch.on_rank(i, r), EXPERTS) for r in range(RANKS)])
            plans.append(isoload.plan(loads, placement, i, policy, **options))
            routed = [isoload.route(batch.on_rank(i, r), loads, plans[-1], r) for r in range(RANKS)]
            slots.append(torch.cat(routed).numpy())
            if batch.num_tokens:
                filled = plans[-1].slot_to_expert.numpy()
                expected.append(recount(slots[-1], batch.sources(), filled, layer, speeds or (1.0,) * RANKS))
        figures = count_routed(np.stack(slots), batch.sources(), topology, SIZE)
        tally.add(plans, figures, placement, batch.num_tokens)
    row = tally.figures()

    def mean(name: str) -> float:
        return float(np.mean([layer_row[name] for layer_row in expected]))

    assert len(expected) == 6 and (mean("borrowed") > 0) == (policy == "llep")
    assert row["experts_us"] == pytest.approx(1e6 * mean("experts"))
    assert row["exchange_us_low"] == pytest.approx(1e6 * mean("low"))
    assert row["exchange_us_high"] == pytest.approx(1e6 * mean("high"))
    assert row["import_us"] == pytest.approx(1e6 * mean("import"))
    for end in ("low", "high"):
        assert row[f"layer_us_{end}"] == pytest.approx(1e6 * (mean("experts") + mean(end) + mean("import")))
    assert (row["borrowed"], row["mean_copies"]) == (mean("borrowed"), mean("copies"))
    copies = mean("moved") / mean("borrowed") if policy == "llep" else None
    assert row["copies_per_borrowed"] == (copies and pytest.approx(copies))


def test_a_replay_has_a_row_per_policy_and_prices_imports_by_its_times() -> None:
    dear = predicted()
    assert list(dear) == list(POLICIES)
    assert dear["none"]["borrowed"] == 0 < dear["llep:min_chunk=1:threshold=0.0"]["borrowed"]
    assert dear["spill_cost:min_chunk=1"]["borrowed"] == 0, "an import takes longer than all tokens"
    cheap = predicted(times=times(move_us=0.01))
    assert cheap["spill_cost:min_chunk=1"]["borrowed"] > 0
    assert cheap["none"] == dear["none"] and dear["none"]["import_us"] == 0


def test_an_option_of_a_policy_outranks_the_times() -> None:
    free = "spill_cost:min_chunk=1:expert_bytes=1"
    assert predicted(policies=(free,))[free]["borrowed"] > 0


def test_no_times_no_rows() -> None:
    assert predicted(times=None) == {}
