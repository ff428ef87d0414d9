"""Gauges: by prometheus_client where it is, made once; elsewhere nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from isoload.integrations import gauges


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    gauges._gauge.cache_clear()
    yield
    gauges._gauge.cache_clear()


def test_each_is_made_once_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, str, str]] = []
    values: dict[str, float] = {}

    def gauge(name: str, text: str, multiprocess_mode: str) -> Any:
        made.append((name, text, multiprocess_mode))
        return SimpleNamespace(set=lambda value: values.update({name: value}))

    monkeypatch.setitem(sys.modules, "prometheus_client", SimpleNamespace(Gauge=gauge))
    for value in (3.0, 4.0):
        gauges.set_gauges(dict.fromkeys(gauges.GAUGES, value))
    assert made == [(f"isoload_{name}", text, mode) for name, (mode, text) in gauges.GAUGES.items()]
    assert values == {f"isoload_{name}": 4.0 for name in gauges.GAUGES}


def test_without_prometheus_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # an import of it fails
    gauges.set_gauges({"wrong_slots": 1})
    assert gauges._gauge("wrong_slots") is None
