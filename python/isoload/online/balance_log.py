"""Imbalance and traffic of a model's steps as plain numbers, for the loggers of training loops."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isoload.layer.checks import infers_shapes
from isoload.layer.moe import MoE
from isoload.policies.plan import Plan

MOST = 2**16  # limit of kept values (layers x passes) between two readings; older ones are dropped


class BalanceLog:
    """Record the imbalance of every MoE layer in every forward pass of a model.

    A forward hook keeps tensors on their device, so that no step waits for the host. :meth:`read` waits once, and
    returns what wandb.log and the like take. Only layers whose plans are made from the loads of all ranks have an
    imbalance: with loads="own", and with policies that sample, no rank has all loads.

    Args:
        model: contains isoload's layers; its own forward must be called, because the hook is on it.
        prefix: begins every key.
    """

    def __init__(self, model: nn.Module, prefix: str = "balance/") -> None:
        self.prefix = prefix
        self.layers = [module for module in model.modules() if isinstance(module, MoE)]
        if not self.layers:
            raise ValueError(
                f"model must have isoload's MoE layers, got {type(model).__name__} without any: call isoload.balance "
                "first"
            )
        self._counted_plans: list[Plan | None] = [layer.last_plan for layer in self.layers]
        self._values: deque[tuple[int, Tensor]] = deque(maxlen=MOST)
        self._passes = 0
        self._sent = self._traffic()
        self._hook = model.register_forward_hook(self._record)

    def read(self) -> dict[str, float]:
        """Return the figures since the last reading and reset them; the host waits for the device.

        Keys, after the prefix: ``imbalance_p50``, ``_p90``, ``_p99`` and ``_max`` of max/mean rank load over layers and
        passes; ``worst_layer``, the position of the layer with the highest mean; ``rows_between_ranks`` and
        ``rows_between_nodes``, tokens that this process sent in a pass to another rank, and to one of another node;
        ``bytes_borrowed`` of expert weights and their gradients in a pass. Unknown figures are omitted.
        """
        figures = self._imbalance()
        sent, passes = self._traffic(), max(self._passes, 1)
        for name, value in sent.items():
            figures[name] = (value - self._sent[name]) / passes
        self._sent, self._passes = sent, 0
        self._values.clear()
        return {f"{self.prefix}{name}": value for name, value in figures.items()}

    def close(self) -> None:
        """Remove the hook."""
        self._hook.remove()

    def _record(self, *_: Any) -> None:
        if infers_shapes():
            return
        self._passes += 1
        for index, layer in enumerate(self.layers):
            plan = layer.last_plan
            if plan is None or plan is self._counted_plans[index] or plan.peak is None or plan.quota is None:
                continue
            self._counted_plans[index] = plan
            copies = plan.quota.sum(-1, dtype=torch.float64)
            mean = copies / plan.topology.copies_per_cost
            self._values.append((index, (plan.peak / mean).detach()))  # nan without copies

    def _imbalance(self) -> dict[str, float]:
        if not self._values:
            return {}
        layers, tensors = zip(*self._values, strict=True)
        values = torch.stack([tensor.reshape(()) for tensor in tensors]).cpu().numpy()
        layer, some = np.array(layers), np.isfinite(values)
        if not some.any():
            return {}
        known = values[some]
        means = {int(n): float(values[some & (layer == n)].mean()) for n in np.unique(layer[some])}
        quantiles = np.quantile(known, [0.5, 0.9, 0.99]).tolist()
        names = "imbalance_p50", "imbalance_p90", "imbalance_p99"
        return dict(zip(names, quantiles, strict=True)) | {
            "imbalance_max": float(known.max()),
            "worst_layer": float(max(means, key=lambda n: means[n])),
        }

    def _traffic(self) -> dict[str, float]:
        """Return the traffic of this process since its groups were made."""
        groups = {id(layer.balancer.group): layer.balancer.group for layer in self.layers}
        total = {"rows_between_ranks": 0.0, "rows_between_nodes": 0.0, "bytes_borrowed": 0.0}
        for group in groups.values():
            rows, topology = group.traffic.rows.cpu(), group.topology
            rank = torch.arange(topology.num_ranks)
            node = rank // topology.ranks_per_node
            total["rows_between_ranks"] += float(rows[rank[:, None] != rank].sum())
            total["rows_between_nodes"] += float(rows[node[:, None] != node].sum())
            stages = group.traffic.bytes.items()
            total["bytes_borrowed"] += float(sum(number for stage, number in stages if "borrow" in stage))
        return total
