"""Meter: what balancing gained in the batches since the last report, layer by layer, without waiting for a device."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from isoload.balancing.planning import plan
from isoload.online.metrics import Metrics
from isoload.policies.plan import Plan

log = logging.getLogger("isoload")
COLUMNS = 5  # batches, sum of imbalance before, after, batches with peak == bound, batches that have a peak


@dataclass(frozen=True)
class LayerReport:
    """One layer since the last report. Imbalance is max/mean rank load.

    batches    batches with at least one copy that were planned; where loads are not gathered the last of each layer
               before an exchange: between two nobody has all ranks' counts
    before     mean imbalance if every expert's copies were spread evenly over its replicas; None: not gathered
    after      mean imbalance of the plans; None: the policy samples, so that its plans have no peak
    certified  batches whose plan has peak == bound: no split over these replicas is better
    peaks      batches whose plan has a peak
    """

    layer: int
    batches: int
    before: float | None
    after: float | None
    certified: int
    peaks: int = 0


class Meter:
    """Sums per layer, on the plans' device: written in place, so that captured graphs go on counting. The engine's name
    begins every line, and so many seconds lie between two."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.metrics = Metrics()
        self._sums: dict[int, Tensor] = {}
        self._sent: Tensor | None = None  # [2, L]: exchanges behind copies of a layer, sum of imbalance
        self._calls, self._host_seconds = 0, 0.0
        self._since = time.monotonic()

    def add(self, layer: int, loads: Tensor, made: Plan, host_seconds: float) -> None:
        """One batch: [R, E] loads, their plan, and how long the host took for the call."""
        if layer not in self._sums:
            with torch.inference_mode(False):  # else only inference could add to it
                self._sums[layer] = torch.zeros(COLUMNS, dtype=torch.float64, device=loads.device)
        mean = loads.sum(dtype=torch.float64) / made.topology.copies_per_cost
        even = plan(loads, made.placed, None, "even").peak
        assert even is not None
        some, least = mean > 0, mean.clamp(min=1e-9)
        row = [some, some * even / least]
        if made.peak is not None:
            row += [some * made.peak / least, some & (made.peak == made.bound), some]
        self._sums[layer][: len(row)] += torch.stack([value.to(torch.float64) for value in row])
        self._calls += 1
        self._host_seconds += host_seconds

    def add_exchange(self, imbalance: Tensor) -> None:
        """What an exchange found out of L layers: [L] float64; nan: no rank sent a copy."""
        some = ~imbalance.isnan()
        row = torch.stack([some.to(imbalance.dtype), torch.where(some, imbalance, 0.0)])
        self._sent = row if self._sent is None else self._sent + row

    def read_sent(self) -> list[LayerReport]:
        """As :meth:`read`, of layers whose loads are not gathered, numbered as they were exchanged."""
        sums = [] if self._sent is None else self._sent.T.tolist()
        self._sent = None
        return [LayerReport(i, int(n), None, total / n, 0) for i, (n, total) in enumerate(sums) if n]

    def read(self) -> list[LayerReport]:
        """All layers since the last reading, which begins anew; the host waits for the device."""
        reports = []
        for layer in sorted(self._sums):
            batches, before, after, certified, peaks = self._sums[layer].tolist()
            self._sums[layer].zero_()
            if batches:
                mean_after = after / peaks if peaks else None
                reports.append(
                    LayerReport(layer, int(batches), before / batches, mean_after, int(certified), int(peaks))
                )
        return reports

    def report_if_due(self) -> bool:
        """A log line and the metrics, if anything was planned; whether the interval was over."""
        if time.monotonic() - self._since < self.seconds:
            return False
        self._since = time.monotonic()
        for layers in filter(None, (self.read(), self.read_sent())):
            log.info(line(self.name, layers, self._host_seconds / self._calls if self._calls else None))
            before, after = before_and_after(layers)
            self.metrics.set_imbalance("mixed", "even", before)
            self.metrics.set_imbalance("mixed", "isoload", after)
            if before and after:
                self.metrics.add(
                    "batches_not_certified_total", sum(layer.peaks - layer.certified for layer in layers)
                )
        self._calls, self._host_seconds = 0, 0.0
        return True


def before_and_after(layers: list[LayerReport]) -> tuple[list[float], list[float]]:
    """Those of the layers that have them."""
    before = [layer.before for layer in layers if layer.before is not None]
    return before, [layer.after for layer in layers if layer.after is not None]


def line(name: str, layers: list[LayerReport], plan_seconds: float | None) -> str:
    """What a report says in the log; plan_seconds: of the host per layer and batch."""
    before, after = before_and_after(layers)
    planned, worst = (sum(after) / len(after), max(after)) if after else (float("nan"), float("nan"))
    if not before:
        return (
            f"isoload {name}: {max(layer.batches for layer in layers)} exchanges of {len(layers)} layers; imbalance "
            f"{planned:.3f} of all copies of the batch before each, {worst:.3f} in the worst layer"
        )
    level = sum(layer.certified == layer.batches for layer in layers)
    time_taken = "all replayed from graphs"
    if plan_seconds is not None:
        time_taken = f"{1e6 * plan_seconds:.0f} us per plan on the host"
    return (
        f"isoload {name}: {sum(layer.batches for layer in layers)} plans of {len(layers)} layers; "
        f"imbalance {sum(before) / len(before):.3f} evenly spread, {planned:.3f} planned, "
        f"{worst:.3f} in the worst layer; peak == bound in all batches of {level} of "
        f"{len(layers)} layers; {time_taken}"
    )
