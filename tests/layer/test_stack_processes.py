"""A stack over gloo processes: the bits of virtual ranks, one wait of the host per layer, one error on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.balancing import prediction
from isoload.layer.stack import LibraStack
from isoload.transport import CollectiveTransport, LocalTransport
from support.processes import rank_outcomes, run_ranks
from support.stacks import Model, close, run

CAPACITY, BATCHES = 15, 3
LOCALS = pytest.mark.parametrize("local", ["planned", "held"])


def batches(model: Model, layers: list[isoload.MoE], ranks: tuple[int, ...]) -> list[list[Tensor]]:
    """[batch][owned rank] what the model makes of its rows."""
    with torch.no_grad():
        return [run(layers, [model.rows(batch)[rank] for rank in ranks]) for batch in range(BATCHES)]


def on_rank(rank: int, ranks: int, local: str, borrow: str) -> dict[str, Any]:
    model = Model(ranks, slots=0 if ranks < 4 else 4)
    transport = CollectiveTransport(model.topology, None, CAPACITY if local == "held" else None)
    layers = model.layers(transport, borrow=borrow)
    stack = LibraStack(layers, "lookahead", local=local)
    found = batches(model, layers, (rank,))
    syncs, sent = transport.group.traffic.host_syncs, dict(transport.group.traffic.bytes)
    early = [
        s["local"].begin < s["dispatch"].end and s["fetch"].end <= s["local"].begin for s in stack.events
    ]
    plans = [layer.last_plan.slot_to_expert for layer in layers]
    return {"rows": found, "syncs": syncs, "bytes": sent, "early": early, "plans": plans}


@LOCALS
@pytest.mark.parametrize(("ranks", "borrow"), [(2, "all_to_all"), (3, "all_to_all"), (4, "all_to_all")])
def test_processes_compute_what_virtual_ranks_do(ranks: int, borrow: str, local: str) -> None:
    model = Model(ranks, slots=0 if ranks < 4 else 4)
    layers = model.layers(
        LocalTransport(model.topology, CAPACITY if local == "held" else None), borrow="all_to_all"
    )
    LibraStack(layers, "lookahead", local=local)
    virtual = batches(model, layers, tuple(range(ranks)))
    results = run_ranks(on_rank, ranks, ranks, local, borrow)
    for rank, result in enumerate(results):
        for batch, rows in enumerate(result["rows"]):
            assert torch.equal(rows[0], virtual[batch][rank])
            assert close(rows[0], model.wanted(model.rows(batch))[rank], 1e-12)
        assert result["syncs"] == (0 if local == "held" else BATCHES * len(layers)), "one wait per layer"
        assert result["early"] == [True] * len(layers)
        for mine, layer in zip(result["plans"], layers, strict=True):
            assert torch.equal(mine, layer.last_plan.slot_to_expert)
    assert sum(r["bytes"]["borrow"] for r in results) > 0
    assert all(("tokens" in r["bytes"]) == (local == "held") for r in results)


class Own(prediction.LoadsPredictor):
    """On rank 1 other loads than on the others, or an error."""

    num_layers = 3

    def __init__(self, rank: int, what: str) -> None:
        self.rank, self.what = rank, what

    def predict(self, layer: int, earlier: Sequence[Tensor]) -> Tensor:
        if self.rank and self.what == "forecast fails":
            raise KeyError("no such model")
        return earlier[0].roll(self.rank * 5, 1)


def differs(rank: int, ranks: int, what: str) -> None:
    model = Model(ranks)
    layers = model.layers(CollectiveTransport(model.topology, None, CAPACITY))
    if what == "predictor":
        LibraStack(layers, "last" if rank else "lookahead")
    elif what == "slots":
        LibraStack(layers, "last", slots=1 + rank)
    elif what == "local":
        LibraStack(layers, "last", local="held" if rank else "planned")
    elif what == "construction":
        LibraStack(layers, "last", local="both" if rank else "planned")
    stack = LibraStack(layers, Own(rank, what) if what.startswith("forecast") else "lookahead")
    rows = [model.rows(0)[rank]]
    with torch.set_grad_enabled(what == "gradients" and rank == 1):
        if what == "order" and rank == 1:
            layers[1](rows)
        run(layers, rows)
    with torch.no_grad():
        if what == "forgotten" and rank == 1:
            stack.forget()
        if what == "weights" and rank == 1:
            layers[0].weights[0].down.mul_(2)
        run(layers, rows)


ON_RANK_0 = {
    "predictor": "predict must be the same on all ranks, got Lookahead on rank 0 and Last on rank 1",
    "slots": "slots must be the same on all ranks, got 1 on rank 0 and 2 on rank 1",
    "local": "local must be the same on all ranks, got planned on rank 0 and held on rank 1",
    "construction": "rank 1 failed in stage construction",
    "gradients": "rank 1 failed in stage count",
    "order": "layer must be the same on all ranks, got 0 on rank 0 and 1 on rank 1",
    "weights": "rank 1 failed in stage count",
    "forecast": "slots filled ahead must be the same on all ranks, got",
    "forecast fails": "rank 1 failed in stage plan, so all ranks stop",
    "forgotten": "slots filled ahead must be the same on all ranks, got",
}
ON_RANK_1 = {
    **ON_RANK_0,
    "construction": "local must be one of planned, held, got 'both'",
    "forecast fails": "KeyError: 'no such model'",
    "gradients": "a LibraStack must run under torch.no_grad(), got gradients recorded",
    "weights": "expert Parameters must stay as they are while their weights travel ahead",
}


@pytest.mark.parametrize("what", ON_RANK_0)
def test_a_rank_that_differs_fails_all(what: str) -> None:
    for outcome, message in zip(
        rank_outcomes(differs, 2, 2, what, group_timeout=10.0),
        (ON_RANK_0[what], ON_RANK_1[what]),
        strict=True,
    ):
        assert outcome.error is not None and message in outcome.error, outcome
