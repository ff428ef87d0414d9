"""Metrics that only remember, without prometheus_client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from isoload.online.metrics import METRICS, Metrics


class Told(Metrics):
    """values: by name, or name and labels, what was set, the sum of what was added, or all that was observed."""

    def __init__(self) -> None:
        super().__init__()
        self.on, self.values = True, dict[Any, Any]()

    def _child(self, name: str, labels: tuple[str, ...]) -> Any:
        assert len(labels) == len(METRICS[name].labels), name
        key, values = (name, *labels) if labels else name, self.values
        return SimpleNamespace(
            set=lambda value: values.update({key: value}),
            inc=lambda value: values.update({key: values.get(key, 0) + value}),
            observe=lambda value: values.setdefault(key, []).append(value),
        )
