"""Prometheus gauges of a process, where prometheus_client is installed."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

# By name: of several processes which value counts, and what it is.
GAUGES = {
    "imbalance_before": (
        "mostrecent",
        "mean over layers of max/mean rank load, copies spread evenly over replicas, or in shadow mode as the engine "
        "routed; nan: not gathered",
    ),
    "imbalance_after": (
        "mostrecent",
        "mean over layers of max/mean rank load, as planned, or as sent before exchanges",
    ),
    "imbalance_worst": (
        "mostrecent",
        "max/mean rank load of the worst layer, as planned, or as sent before exchanges",
    ),
    "certified_share": ("mostrecent", "part of the plans that are proved optimal"),
    "plan_seconds": (
        "mostrecent",
        "time of the host per layer and batch that was not replayed from a graph",
    ),
    "wrong_slots": ("max", "slots whose weights are not those of their experts, found by the last check"),
    "rebalance_stalled_seconds": (
        "max",
        "seconds without progress of a rebalance that has stalled; 0: none has",
    ),
    "rebalance_thread_dead": ("max", "1 where the engine's thread of rebalances has ended"),
}
_LOCK = threading.Lock()


def set_gauges(figures: Mapping[str, float]) -> None:
    """Those of GAUGES, as isoload_<name>; called from several threads."""
    with _LOCK:  # prometheus_client refuses a second one of a name
        for name, value in figures.items():
            if (gauge := _gauge(name)) is not None:
                gauge.set(value)


@cache
def _gauge(name: str) -> Any:
    try:
        from prometheus_client import Gauge
    except ImportError:
        return None
    mode, text = GAUGES[name]
    return Gauge(f"isoload_{name}", text, multiprocess_mode=mode)
