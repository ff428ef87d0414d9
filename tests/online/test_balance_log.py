"""BalanceLog: quantiles of the plans' imbalance, rows and borrowed bytes, as plain numbers and without host waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import isoload
from isoload.online import BalanceLog
from support.stacks import Model


class Whole(nn.Module):
    """Layers after one another, on virtual ranks."""

    def __init__(self, layers: list[isoload.MoE]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        for layer in self.layers:
            rows = layer(rows)
        return rows


def whole(policy: str = "exact", **how: object) -> tuple[Whole, Model]:
    model = Model(4)
    return Whole(model.layers(policy=policy, **how)), model


def test_figures_are_those_of_the_plans() -> None:
    model, made = whole()
    log, wanted = BalanceLog(model), []
    sent = model.layers[0].balancer.group.traffic.rows.clone()
    with torch.no_grad():
        for seed in range(3):
            model(made.rows(seed))
            plans = [layer.last_plan for layer in model.layers]
            wanted.append([float(plan.peak) * 4 / float(plan.quota.sum()) for plan in plans])
    found, values = log.read(), np.array(wanted)
    assert found["balance/imbalance_p50"] == pytest.approx(np.median(values))
    assert found["balance/imbalance_p99"] == pytest.approx(np.quantile(values, 0.99))
    assert found["balance/imbalance_max"] == pytest.approx(values.max())
    assert found["balance/worst_layer"] == values.mean(0).argmax()
    rows = model.layers[0].balancer.group.traffic.rows - sent
    assert found["balance/rows_between_ranks"] == float(rows.sum() - rows.diagonal().sum()) / 3
    between = rows.sum() - rows[:2, :2].sum() - rows[2:, 2:].sum()  # two nodes of two ranks
    assert found["balance/rows_between_nodes"] == float(between) / 3 and found["balance/bytes_borrowed"] == 0
    assert "balance/imbalance_max" not in log.read()  # nothing since


def test_borrowed_bytes_and_another_prefix() -> None:
    model, made = whole("llep", min_chunk=1, threshold=0)
    log = BalanceLog(model, prefix="")
    with torch.no_grad():
        model(made.rows(0))
    found = log.read()
    assert set(found) >= {"imbalance_p90", "bytes_borrowed"} and found["imbalance_max"] >= 1
    log.close()
    with torch.no_grad():
        model(made.rows(1))
    assert "imbalance_p50" not in log.read()


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(
        ValueError, match="model must have isoload's MoE layers, got Linear without any: call isoload"
    ):
        BalanceLog(nn.Linear(2, 2))
