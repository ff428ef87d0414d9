"""vLLM's rebalances by isoload's placers, as tables of slots. No engine."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter

import pytest
import torch
from torch import Tensor

import isoload
from isoload.analysis.judge import ExpertSize
from isoload.engines.tables import check_placer, keep_slots
from isoload.engines.vllm.dispatch import plan_rebalance
from isoload.engines.vllm.layers import MODELS
from isoload.engines.worth import NewMaps, RebalanceRule
from isoload.online.metrics import Metrics

EXPERTS, RANKS, SIZE, LAYERS = 16, 4, 6, 3
TOPOLOGY = isoload.Topology(RANKS)


def draw(seed: int) -> Tensor:
    return torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed)).pow(3) * 1000


def by_rank(slots: Tensor) -> list[Counter[int]]:
    return [Counter(row.tolist()) for row in slots.reshape(-1, SIZE)]


def first() -> Tensor:
    """vLLM's initial layout: redundant experts behind the others."""
    return (torch.arange(RANKS * SIZE) % EXPERTS).expand(LAYERS, -1)


@pytest.mark.parametrize("seed", range(20))
def test_experts_that_stay_on_their_rank_keep_their_slot(seed: int) -> None:
    """As many as their ranks have in common, several slots of one expert included."""
    generator = torch.Generator().manual_seed(seed)
    new, old = (torch.randint(0, 5 + seed, (LAYERS, RANKS * SIZE), generator=generator) for _ in range(2))
    kept = keep_slots(new, old, RANKS)
    assert by_rank(kept) == by_rank(new)
    common = sum((a & b).total() for a, b in zip(by_rank(new), by_rank(old), strict=True))
    assert int((kept == old).sum()) == common


def test_the_placers_experts_are_on_every_rank() -> None:
    made = plan_rebalance(draw(0), TOPOLOGY, SIZE, "eplb", first())
    want = isoload.place(draw(0), TOPOLOGY, SIZE, "eplb").slot_to_expert.long()
    assert made.dtype == torch.int64 and by_rank(made) == by_rank(want)
    assert torch.equal(plan_rebalance(draw(0), TOPOLOGY, SIZE, "eplb", made), made), (
        "nothing moves for the same loads"
    )


@pytest.mark.parametrize("moves", [0, 1, 4])
def test_a_bounded_rebalance_moves_no_more(moves: int) -> None:
    before = plan_rebalance(draw(0), TOPOLOGY, SIZE, "eplb", None)
    made = plan_rebalance(draw(1), TOPOLOGY, SIZE, f"scenario:moves={moves}", before)
    changed = (made != before).sum(dim=1)
    assert int(changed.max()) <= moves and (moves == 0 or changed.any())


def test_where_vllms_experts_lie_first_a_placer_can_start() -> None:
    """An expert twice on a rank, as where redundant experts are more than experts."""
    layout = (torch.arange(20) % 4).expand(LAYERS, -1)
    made = plan_rebalance(torch.rand(LAYERS, 4), isoload.Topology(10), 2, "scenario:moves=6", layout)
    assert {int(expert) for expert in made[0]} == set(range(4))


def test_profiling_without_loads() -> None:
    made = plan_rebalance(torch.zeros(LAYERS, EXPERTS, dtype=torch.int32), TOPOLOGY, SIZE, "eplb", first())
    assert set(made[0].tolist()) == set(range(EXPERTS))


@pytest.mark.parametrize("before", ["empty slots", "other ranks"])
def test_other_or_empty_slots_are_laid_out_anew(before: str) -> None:
    layout = first().clone()
    layout[:, -1] = -1
    given = layout if before == "empty slots" else layout[:, :18]
    made = plan_rebalance(draw(0), TOPOLOGY, SIZE, "scenario", given)
    assert torch.equal(made, plan_rebalance(draw(0), TOPOLOGY, SIZE, "scenario", None))


def test_a_placer_that_leaves_slots_empty_is_refused() -> None:
    layout = (torch.arange(RANKS * 20) % EXPERTS).expand(LAYERS, -1)
    with pytest.raises(ValueError, match="--enable-eplb with ISOLOAD_PLACER=eplb: "):
        check_placer("--enable-eplb", "eplb", layout, EXPERTS, TOPOLOGY)
    check_placer("--enable-eplb", "eplb", first(), EXPERTS, TOPOLOGY)


def test_a_new_map_that_does_not_pay_keeps_the_present_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decision is that of the model whose experts are in these slots; other models have none."""
    before, loads = plan_rebalance(draw(0), TOPOLOGY, SIZE, "eplb", None), draw(1)
    models = [Namespace(tables=first(), new_maps=None), Namespace(tables=before.int(), window=10)]
    monkeypatch.setattr(MODELS, "by_state", dict(enumerate(models)))
    for rule, pays in (("gain_ms=1000", False), ("move_ms=0", True)):
        made = NewMaps(
            "vLLM", RebalanceRule.parse(rule), ExpertSize(10**9, 10**9), 100, False, None, Metrics()
        )
        models[1].new_maps = made
        assert torch.equal(plan_rebalance(loads, TOPOLOGY, SIZE, "eplb", before), before) != pays
    other = plan_rebalance(draw(2), TOPOLOGY, SIZE, "eplb", None)
    assert not torch.equal(plan_rebalance(loads, TOPOLOGY, SIZE, "eplb", other), other)
