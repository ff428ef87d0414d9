"""A placement for one step whose routes are known: made by its own loads, and taken only if moving experts pays."""

from __future__ import annotations

import pytest
import torch

import isoload
from isoload import KnownRoutes
from isoload.analysis.judge import ExpertSize
from isoload.layer import MoE
from isoload.online.rebalancer import place_step
from isoload.times import ExpertTime
from support.borrowed_layer import close
from support.known_step import LAYERS, Step, make_step

LINEAR = ExpertTime("h100", "made", "", 0, 0, 0.0, 0.0, 2.0, 0.0, 1.0)  # 2 us a copy, nothing else
FREE, DEAR = ExpertSize(1, 1), ExpertSize(10**12, 1)


def misplaced() -> tuple[Step, KnownRoutes]:
    """One replica on every rank, of the experts that the step needs least."""
    step = make_step(spare=0)
    counts = torch.arange(16.0).expand(LAYERS, -1)
    step.placement = isoload.place(counts, step.placement.topology, 5, "eplb")
    return step, KnownRoutes(step.ids, step.placement)


def ms(known: KnownRoutes, placement: isoload.Placement) -> float:
    loads = known.loads.flatten(0, 1)
    peaks = [isoload.plan(row, placement, i % LAYERS, "exact").peak for i, row in enumerate(loads)]
    return sum(2e-3 * int(peak) for peak in peaks if peak is not None)


def test_a_placement_that_pays_is_taken() -> None:
    _, known = misplaced()
    step = place_step(known, FREE, moves=4, experts=LINEAR)
    saved = ms(known, known.placement) - ms(known, step.placement)
    assert step.worth.gain_ms == pytest.approx(3 * saved) and saved > 0
    moved = (step.placement.slot_to_expert != known.placement.slot_to_expert).sum(1)
    assert 0 < int(moved.max()) <= 4
    assert step.placement.layer_ids == known.placement.layer_ids
    once = place_step(known, FREE, moves=4, experts=LINEAR, passes=1.0)
    assert once.worth.gain_ms == pytest.approx(saved)


def test_a_placement_that_does_not_pay_is_not_taken() -> None:
    _, known = misplaced()
    step = place_step(known, DEAR, moves=4, experts=LINEAR)
    assert step.placement is known.placement and step.worth.move_ms > step.worth.gain_ms > 0


def test_layers_load_it_and_stay_dense() -> None:
    step, known = misplaced()
    group = isoload.LocalTransport(step.placement.topology)
    layers = [MoE(lambda _: None, step.dense[i], group, step.placement, i) for i in range(LAYERS)]  # type: ignore
    size = ExpertSize.of(layers[0]._ranks()[0].stored_rows())
    assert size == (3 * 8 * 8 * 8, 3 * 8 * 8)  # gate, up and down of float64
    placement = place_step(known, size, experts=LINEAR).placement
    assert placement is not step.placement
    for layer in layers:
        layer.load_placement(placement)
    plans = KnownRoutes(step.ids, placement).plans()
    for index, layer in enumerate(layers):
        with torch.no_grad():
            ys = layer.compute(step.rows(0), step.layer_ids(0, index), step.gates(0), plan=plans[0, index])
        assert all(close(y, wanted, 1e-12) for y, wanted in zip(ys, step.dense_run(0, index)[0], strict=True))


def test_refused() -> None:
    with pytest.raises(ValueError, match="passes must be above 0, got 0"):
        place_step(misplaced()[1], FREE, passes=0)
