"""A stack is the dense model, whatever is predicted, and fetches a layer's experts while the one before computes."""

from __future__ import annotations

import pytest
import torch

from isoload.layer.stack import LibraStack
from isoload.transport import LocalTransport
from support.stacks import TOKENS, Model, close, run

LOCALS = pytest.mark.parametrize("local", ["planned", "held"])


def transport_for(model: Model, local: str) -> LocalTransport:
    return LocalTransport(model.topology, max(TOKENS) + 2 if local == "held" else None)


@LOCALS
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_equals_the_dense_model(ranks: int, local: str) -> None:
    model = Model(ranks)
    layers = model.layers(transport_for(model, local))
    LibraStack(layers, "last", local=local)
    with torch.no_grad():
        for batch in range(3):
            rows = model.rows(batch)
            for got, want in zip(run(layers, rows), model.wanted(rows), strict=True):
                assert close(got, want, 1e-12)
            for layer in layers:
                plan = layer.last_plan
                assert local == "held" or plan.peak == plan.bound
                filled = bool((plan.slot_to_expert.view(ranks, -1)[:, -2:] >= 0).any())
                assert filled == (ranks > 1 and batch > 0)
