"""Prometheus metrics of one model on one rank (METRICS), and the meter that reads balance without a wait."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoload.balancing.planning import plan
from isoload.policies.plan import Plan

log = logging.getLogger("isoload")
LABELS = ("model", "engine", "rank")  # of every metric, before its own labels
QUANTILES = (0.5, 0.9, 1.0)  # of layers
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class Metric(NamedTuple):
    """One metric, exported as isoload_<name>."""

    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # upper bounds of a histogram, seconds
    counts: Literal["mostrecent", "min", "max"] = "mostrecent"  # combines processes of one label set


METRICS = {
    "attached": Metric(
        "gauge",
        "1: isoload chooses replicas, or counts in shadow mode; 0: the engine chooses, because isoload has detached, "
        "is switched off or did not attach",
        counts="min",
    ),
    "info": Metric(
        "gauge",
        "always 1; the labels have the versions and names in use",
        ("version", "engine_version", "policy", "placer"),
    ),
    "imbalance": Metric(
        "gauge",
        "max/mean rank load, at least 1: quantile over layers of each layer's mean since the last report. "
        "plan=isoload: isoload's plans, in shadow mode those that it would make; plan=even: copies spread evenly over "
        "replicas; plan=engine: the engine's own choice; plan=last_fill and plan=filled: prefill before and after its "
        "spare slots are filled",
        ("phase", "plan", "quantile"),
    ),
    "balancedness": Metric(
        "gauge",
        "mean/max rank load, at most 1, of the layer that isoload_imbalance has at the same quantile",
        ("phase", "plan", "quantile"),
    ),
    "wrong_slots": Metric(
        "gauge",
        "slots whose weights differ from those of their expert, in the last check of each layer",
        counts="max",
    ),
    "replica_bytes": Metric(
        "gauge",
        "bytes of weights and scales of this rank's replicas over all layers: its slots with memory beyond an even "
        "part of one slot for each expert",
    ),
    "rebalance_stalled_seconds": Metric(
        "gauge", "seconds without progress of a stalled rebalance; 0: no rebalance has stalled", counts="max"
    ),
    "rebalance_thread_dead": Metric("gauge", "1: the engine's rebalancing thread has ended", counts="max"),
    "batches_total": Metric(
        "counter",
        "layers times forward passes in which isoload chose replicas, including passes without tokens",
    ),
    "fallbacks_total": Metric("counter", "layers times forward passes in which the engine chose replicas"),
    "batches_not_certified_total": Metric(
        "counter",
        "batches whose plan is not proved optimal within the policy's tolerance, among plans from all ranks' counts",
    ),
    "errors_total": Metric("counter", "log lines of isoload at level ERROR or above"),
    "rebalances_total": Metric("counter", "finished rebalances of the engine that moved experts"),
    "rebalances_skipped_total": Metric("counter", "new maps that ISOLOAD_REBALANCE did not apply"),
    "experts_moved_total": Metric(
        "counter", "experts that arrived on this rank from other ranks, over all layers"
    ),
    "bytes_moved_total": Metric("counter", "bytes of weights and scales of these experts"),
    "fills_total": Metric(
        "counter",
        "layers times prefills in which experts travelled to spare slots; would have, in shadow mode",
    ),
    "experts_travelled_total": Metric(
        "counter", "experts that came to this rank's spare slots within prefills, over all layers"
    ),
    "bytes_travelled_total": Metric("counter", "bytes of weights and scales of these experts"),
    "plan_seconds": Metric(
        "histogram",
        "host time per layer and batch, without batches replayed from a graph",
        buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1),
    ),
    "rebalance_seconds": Metric(
        "histogram",
        "duration of a rebalance, from the engine's start of it to its end",
        buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
    ),
}
_LOCK = threading.Lock()


class Metrics:
    """Metrics of one model on one rank, for several threads; calls do nothing without ``on`` or prometheus_client.

    Make an enabled object only after the engine has set PROMETHEUS_MULTIPROC_DIR, which a loading model does: it
    imports prometheus_client.
    """

    def __init__(self, engine: str = "", model: str = "", rank: str = "", on: bool = False) -> None:
        self.on = on and _client() is not None
        self._labels = model, engine, rank
        self._children: dict[tuple[str, ...], Any] = {}

    def set(self, name: str, value: float, *labels: str) -> None:
        self._update(name, labels, lambda child: child.set(value))

    def add(self, name: str, value: float = 1, *labels: str) -> None:
        self._update(name, labels, lambda child: child.inc(value))

    def observe(self, name: str, seconds: float) -> None:
        self._update(name, (), lambda child: child.observe(seconds))

    def set_imbalance(self, phase: str, plan: str, layers: Sequence[float]) -> None:
        """Set the quantiles over layers, each with its mean imbalance."""
        if self.on and len(layers):
            for quantile in QUANTILES:
                value = float(np.quantile(layers, quantile))
                self.set("imbalance", value, phase, plan, str(quantile))
                self.set("balancedness", 1 / value, phase, plan, str(quantile))

    def begin(self, policy: str, placer: str) -> None:
        """Set the versions and names in use, and the counters to 0, so that the first event is a change."""
        self.set("info", 1, version_of("isoload"), version_of(self._labels[1].lower()), policy, placer)
        for name, metric in METRICS.items():
            if not metric.labels and metric.kind != "gauge":
                self._update(name, (), lambda child: None)
        if self.on:
            log.filters = [entry for entry in log.filters if not isinstance(entry, _CountErrors)]
            log.addFilter(_CountErrors(self))
            if MULTIPROCESS not in os.environ and self._labels[2] == "0":
                log.warning(
                    f"isoload {self._labels[1]}: metrics stay in this process: {MULTIPROCESS} is not set (SGLang sets "
                    "it with --enable-metrics, vLLM with --api-server-count; else set it to an empty folder)"
                )

    def _update(self, name: str, labels: tuple[str, ...], change: Callable[[Any], None]) -> None:
        """Change a metric; a file that cannot be written disables the metrics and does not stop the engine."""
        if not self.on:
            return
        try:
            change(self._child(name, labels))
        except OSError as error:
            self.on = False
            log.warning(
                f"isoload {self._labels[1]}: metrics are disabled because {name} cannot be written: {error}"
            )

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        key = (name, *labels)
        if key not in self._children:
            with _LOCK:  # prometheus_client rejects a second metric of one name
                metric = _create(name)
            self._children[key] = metric.labels(*self._labels, *labels)
        return self._children[key]


class _CountErrors(logging.Filter):
    """Count the error lines of isoload's own logger; every line passes."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self.metrics = metrics

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            self.metrics.add("errors_total")
        return True


def version_of(module: str) -> str:
    """Return the version of a module that this process has imported."""
    return str(getattr(sys.modules.get(module), "__version__", "unknown"))


def set_refused(engine: str) -> None:
    """Set isoload_attached to 0 in a process to which isoload has not attached, if metrics can be written already."""
    if MULTIPROCESS in os.environ or "prometheus_client" in sys.modules:
        Metrics(engine, on=True).set("attached", 0)


@cache
def _create(name: str) -> Any:
    client, metric = _client(), METRICS[name]
    full_name, labels = f"isoload_{name}", LABELS + metric.labels
    if metric.kind == "gauge":
        return client.Gauge(full_name, metric.text, labels, multiprocess_mode=metric.counts)
    if metric.kind == "counter":
        return client.Counter(full_name, metric.text, labels)
    return client.Histogram(full_name, metric.text, labels, buckets=metric.buckets)


@cache
def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        log.warning("isoload: prometheus_client is not installed, so reports are log lines without metrics")
        return None
    return prometheus_client


COLUMNS = 5  # batches, sum of imbalance before, after, certified batches, batches that have a peak


@dataclass(frozen=True)
class LayerReport:
    """One layer since the last report. Imbalance is max/mean rank load."""

    layer: int
    batches: int  # planned batches with at least one copy
    before: float | None  # mean imbalance of copies spread evenly over replicas; None: not gathered
    after: float | None  # mean imbalance of the plans; None: the policy samples, so there is no peak
    certified: int  # batches with peak <= bound * (1 + the policy's tolerance): no split is better
    peaks: int = 0  # batches whose plan has a peak


class Meter:
    """Sums per layer on the plans' device, written in place so that captured graphs count too; reported in the log."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.metrics = Metrics()
        self._sums: dict[int, Tensor] = {}
        self._sent: Tensor | None = None  # [2, L]: exchanges after copies of a layer, sum of imbalance
        self._calls, self._host_seconds = 0, 0.0
        self.tolerance = 0.0  # of the plans' policies: the largest
        self._since = time.monotonic()

    def add(self, layer: int, loads: Tensor, planned: Plan, host_seconds: float) -> None:
        """Add one batch: [R, E] loads, their plan, and the host's time for the call."""
        if layer not in self._sums:
            with torch.inference_mode(False):  # otherwise only inference mode could add to it
                self._sums[layer] = torch.zeros(COLUMNS, dtype=torch.float64, device=loads.device)
        mean = loads.sum(dtype=torch.float64) / planned.topology.copies_per_cost
        even = plan(loads, planned.placed, None, "even").peak
        assert even is not None
        some, least = mean > 0, mean.clamp(min=1e-9)
        row = [some, some * even / least]
        if planned.peak is not None:
            tolerance = getattr(planned.policy, "tolerance", None) or 0.0
            self.tolerance = max(self.tolerance, tolerance)
            # In millionths and integers, as plan_exact counts them.
            certified = planned.peak - planned.bound <= planned.bound * round(1e6 * tolerance) // 1_000_000
            row += [some * planned.peak / least, some & certified, some]
        self._sums[layer][: len(row)] += torch.stack([value.to(torch.float64) for value in row])
        self._calls += 1
        self._host_seconds += host_seconds

    def add_exchange(self, imbalance: Tensor) -> None:
        """Add the imbalance [L] float64 of an exchange; nan: no rank sent a copy."""
        some = ~imbalance.isnan()
        row = torch.stack([some.to(imbalance.dtype), torch.where(some, imbalance, 0.0)])
        self._sent = row if self._sent is None else self._sent + row

    def read_sent(self) -> list[LayerReport]:
        """Return :meth:`read` for layers whose loads are not gathered, in the order of the exchange."""
        sums = [] if self._sent is None else self._sent.T.tolist()
        self._sent = None
        return [LayerReport(i, int(n), None, total / n, 0) for i, (n, total) in enumerate(sums) if n]

    def read(self) -> list[LayerReport]:
        """Return all layers since the last reading and reset them; the host waits for the device."""
        reports = []
        for layer, sums in sorted(self._sums.items()):
            batches, before, after, certified, peaks = sums.tolist()
            sums.zero_()
            if batches:
                means = before / batches, after / peaks if peaks else None
                reports.append(LayerReport(layer, int(batches), *means, int(certified), int(peaks)))
        return reports

    def report_if_due(self) -> bool:
        """Log a line and set the metrics, if anything was planned; return whether the interval is over."""
        if time.monotonic() - self._since < self.seconds:
            return False
        self._since = time.monotonic()
        for layers in filter(None, (self.read(), self.read_sent())):
            plan_seconds = self._host_seconds / self._calls if self._calls else None
            log.info(line(self.name, layers, plan_seconds, self.tolerance))
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
    before = [layer.before for layer in layers if layer.before is not None]
    return before, [layer.after for layer in layers if layer.after is not None]


def line(name: str, layers: list[LayerReport], plan_seconds: float | None, tolerance: float = 0.0) -> str:
    """Return a report's line for the log; plan_seconds: of the host per layer and batch."""
    before, after = before_and_after(layers)
    planned, worst = (sum(after) / len(after), max(after)) if after else (float("nan"), float("nan"))
    if not before:
        return (
            f"isoload {name}: {max(layer.batches for layer in layers)} exchanges of {len(layers)} layers; imbalance "
            f"{planned:.3f} of all copies of the batch before each, {worst:.3f} in the worst layer"
        )
    level = sum(layer.certified == layer.batches for layer in layers)
    proof = f"peak <= {1 + tolerance:g} bound" if tolerance else "peak == bound"
    time_taken = "all replayed from graphs"
    if plan_seconds is not None:
        time_taken = f"{1e6 * plan_seconds:.0f} us per plan on the host"
    return (
        f"isoload {name}: {sum(layer.batches for layer in layers)} plans of {len(layers)} layers; imbalance "
        f"{sum(before) / len(before):.3f} evenly spread, {planned:.3f} planned, {worst:.3f} in the worst layer; "
        f"{proof} in all batches of {level} of {len(layers)} layers; {time_taken}"
    )
