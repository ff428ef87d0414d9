"""max_copies_per_rank: experts' buffers hold so many copies; more are refused on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import isoload
from isoload.layer import moe
from isoload.transport import CollectiveTransport, LocalTransport, Transport
from isoload.weights import compute
from isoload.weights.experts import ExpertWeights
from support.processes import run_ranks

RANKS, EXPERTS, TOP_K, TOKENS = 2, 6, 3, 7
COPIES = RANKS * TOKENS * TOP_K


def layer_on(transport: Transport) -> isoload.MoE:
    dense = ExpertWeights.random(EXPERTS, 8, 4, generator=torch.Generator().manual_seed(1))
    placement = isoload.place(torch.ones(1, EXPERTS), isoload.Topology(RANKS), slots_per_rank=4)
    return isoload.MoE(gate, dense, transport, placement)


def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = rows[:, :EXPERTS].softmax(-1).topk(TOP_K)
    return ids, weights


def draw() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(TOKENS, 8, generator=generator) for _ in range(RANKS)]


def test_the_same_bits_with_fewer_places() -> None:
    rows = draw()
    outputs = [
        layer_on(LocalTransport(isoload.Topology(RANKS), *capacities))(rows)
        for capacities in ((None, None), (TOKENS, None), (TOKENS, COPIES))
    ]
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


@pytest.mark.parametrize("capacities", [(None, None), (TOKENS, COPIES)])
def test_experts_are_told_how_many_come(
    capacities: tuple[int | None, int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, where the host reads row counts, else the most there may be; where values cannot be read."""
    told: list[object] = []

    def noted(*args: object) -> Tensor:
        told.append(args[-1])
        return compute.run_experts(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(moe, "run_experts", noted)
    monkeypatch.setattr(moe, "values_readable", lambda _: False)
    layer = layer_on(LocalTransport(isoload.Topology(RANKS), *capacities))
    layer(draw())
    assert layer.last_plan is not None
    arrived = layer.last_plan.quota.view(RANKS, -1).sum(1).tolist()
    assert told == ([[n] for n in arrived] if capacities[0] is None else [[COPIES]] * RANKS)


def fails(rank: int) -> str:
    layer = layer_on(CollectiveTransport(isoload.Topology(RANKS), None, TOKENS, 5))
    with torch.no_grad(), pytest.raises(ValueError) as raised:
        layer(draw()[rank])
    return str(raised.value)


def test_more_copies_are_refused_on_all_ranks() -> None:
    found = run_ranks(fails, RANKS)
    assert len(set(found)) == 1
    assert found[0].startswith("max_copies_per_rank must be at least the copies that rank ") and found[
        0
    ].endswith(" gets (21), got 5")


@pytest.mark.parametrize(
    ("capacities", "message"),
    [
        ((TOKENS, 0), "max_copies_per_rank must be at least 1, got 0"),
        ((None, 4), "max_copies_per_rank needs max_tokens_per_rank, got 4 and None"),
    ],
)
def test_refused(capacities: tuple[int | None, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalTransport(isoload.Topology(RANKS), *capacities)
