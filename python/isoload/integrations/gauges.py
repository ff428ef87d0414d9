"""Prometheus gauges of a process, where prometheus_client is installed."""

from __future__ import annotations

from functools import cache
from typing import Any

GAUGES = {
    "wrong_slots": "slots whose weights are not those of their experts, found by the last check",
    "rebalance_stalled_seconds": "seconds without progress of a rebalance that has stalled; 0: none has",
    "rebalance_thread_dead": "1 where the engine's thread of rebalances has ended",
}


def set_gauge(name: str, value: float) -> None:
    """One of GAUGES, as isoload_<name>; of several processes the largest value counts."""
    if (gauge := _gauge(name)) is not None:
        gauge.set(value)


@cache
def _gauge(name: str) -> Any:
    try:
        from prometheus_client import Gauge
    except ImportError:
        return None
    return Gauge(f"isoload_{name}", GAUGES[name], multiprocess_mode="max")
