"""Prometheus metrics of one model on one rank, where reports are asked for. METRICS names them all."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

log = logging.getLogger("isoload")
LABELS = ("model", "engine", "rank")  # of every metric, ahead of its own
QUANTILES = (0.5, 0.9, 1.0)  # of layers
MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"


class Metric(NamedTuple):
    """One, exported as isoload_<name>.

    buckets: upper bounds of a histogram, seconds. counts: of several processes with the same labels, as pipeline stages
    have, the value of which gauge is scraped.
    """

    kind: Literal["gauge", "counter", "histogram"]
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    counts: Literal["mostrecent", "min", "max"] = "mostrecent"


METRICS = {
    "attached": Metric(
        "gauge",
        "1: isoload chooses replicas, or counts in shadow mode; 0: the engine chooses, as isoload has detached, is "
        "switched off or refused to attach",
        counts="min",
    ),
    "info": Metric("gauge", "1", ("version", "engine_version", "policy", "placer")),
    "imbalance": Metric(
        "gauge",
        "max/mean rank load, at least 1: quantile over layers of each one's mean since the last report. plan: isoload "
        "as planned, or what it would plan; even: copies spread evenly over replicas; engine: as the engine chose",
        ("phase", "plan", "quantile"),
    ),
    "balancedness": Metric(
        "gauge",
        "mean/max rank load, at most 1, of the layer that isoload_imbalance has at the same quantile",
        ("phase", "plan", "quantile"),
    ),
    "wrong_slots": Metric(
        "gauge",
        "slots whose weights are not those of their experts, found by the last check of each layer",
        counts="max",
    ),
    "rebalance_stalled_seconds": Metric(
        "gauge", "seconds without progress of a rebalance that has stalled; 0: none has", counts="max"
    ),
    "rebalance_thread_dead": Metric(
        "gauge", "1 where the engine's thread of rebalances has ended", counts="max"
    ),
    "batches_total": Metric(
        "counter",
        "layers times forward passes in which isoload chose replicas, those without tokens included",
    ),
    "fallbacks_total": Metric(
        "counter", "layers times forward passes in which the choice was left to the engine"
    ),
    "batches_not_certified_total": Metric(
        "counter", "batches whose plan is not proved optimal, of plans with the counts of all ranks"
    ),
    "errors_total": Metric("counter", "lines of level ERROR or above that isoload logged"),
    "rebalances_total": Metric("counter", "rebalances of the engine that have moved experts and ended"),
    "experts_moved_total": Metric("counter", "experts that came to this rank from others, over all layers"),
    "bytes_moved_total": Metric("counter", "bytes of weights and scales of these experts"),
    "plan_seconds": Metric(
        "histogram",
        "time of the host per layer and batch that was not replayed from a graph",
        buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1),
    ),
    "rebalance_seconds": Metric(
        "histogram",
        "from where the engine began a rebalance to its end",
        buckets=(0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300),
    ),
}
_LOCK = threading.Lock()


class Metrics:
    """Those of one model on one rank; without ``on``, and without prometheus_client, calls do nothing.

    Called from several threads. prometheus_client is imported when an object that is on is made: it must not be before
    the engine has said in PROMETHEUS_MULTIPROC_DIR where its processes write, which is so when a model is loaded.
    """

    def __init__(self, engine: str = "", model: str = "", rank: str = "", on: bool = False) -> None:
        self.on = on and _client() is not None
        self._own = model, engine, rank
        self._children: dict[tuple[str, ...], Any] = {}

    def set(self, name: str, value: float, *labels: str) -> None:
        self._tell(name, labels, lambda child: child.set(value))

    def add(self, name: str, value: float = 1, *labels: str) -> None:
        self._tell(name, labels, lambda child: child.inc(value))

    def observe(self, name: str, seconds: float) -> None:
        self._tell(name, (), lambda child: child.observe(seconds))

    def set_imbalance(self, phase: str, plan: str, layers: Sequence[float]) -> None:
        """Of every layer that has one its mean imbalance."""
        if self.on and len(layers):
            for quantile in QUANTILES:
                value = float(np.quantile(layers, quantile))
                self.set("imbalance", value, phase, plan, str(quantile))
                self.set("balancedness", 1 / value, phase, plan, str(quantile))

    def begin(self, policy: str, placer: str) -> None:
        """When the model is loaded: versions, and counters from 0, without which the first event is no change.

        Args:
            policy, placer: "engine" where the engine's own stand.
        """
        self.set("info", 1, version_of("isoload"), version_of(self._own[1].lower()), policy, placer)
        for name, metric in METRICS.items():
            if not metric.labels and metric.kind != "gauge":
                self._tell(name, (), lambda child: None)
        if self.on:
            log.filters = [of for of in log.filters if not isinstance(of, _CountErrors)]
            log.addFilter(_CountErrors(self))
            if MULTIPROCESS not in os.environ and self._own[2] == "0":
                log.warning(
                    f"isoload {self._own[1]}: metrics stay in this process: {MULTIPROCESS} is not set (SGLang sets it "
                    "with --enable-metrics, vLLM with --api-server-count; else set it to an empty folder)"
                )

    def _tell(self, name: str, labels: tuple[str, ...], tell: Callable[[Any], None]) -> None:
        """A file that cannot be written ends the metrics, not the engine."""
        if not self.on:
            return
        try:
            tell(self._child(name, labels))
        except OSError as error:
            self.on = False
            log.warning(
                f"isoload {self._own[1]}: no metrics from here on, as {name} cannot be written: {error}"
            )

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        key = (name, *labels)
        if key not in self._children:
            self._children[key] = _metric(name).labels(*self._own, *labels)
        return self._children[key]


class _CountErrors(logging.Filter):
    """Of isoload's own logger; every line passes."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self.metrics = metrics

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            self.metrics.add("errors_total")
        return True


def version_of(module: str) -> str:
    """Of what this process has imported."""
    return str(getattr(sys.modules.get(module), "__version__", "unknown"))


def tell_refused(engine: str) -> None:
    """isoload_attached 0 of a process to which isoload has not attached, if it has a place for metrics already."""
    if MULTIPROCESS in os.environ or "prometheus_client" in sys.modules:
        Metrics(engine, on=True).set("attached", 0)


def _metric(name: str) -> Any:
    with _LOCK:  # prometheus_client refuses a second one of a name
        return _made(name)


@cache
def _made(name: str) -> Any:
    client, metric = _client(), METRICS[name]
    made, labels = f"isoload_{name}", LABELS + metric.labels
    if metric.kind == "gauge":
        return client.Gauge(made, metric.text, labels, multiprocess_mode=metric.counts)
    if metric.kind == "counter":
        return client.Counter(made, metric.text, labels)
    return client.Histogram(made, metric.text, labels, buckets=metric.buckets)


@cache
def _client() -> Any:
    try:
        import prometheus_client
    except ImportError:
        log.warning(
            "isoload: prometheus_client is not installed, so that reports are lines of the log and no metrics"
        )
        return None
    return prometheus_client
