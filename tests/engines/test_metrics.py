"""Metrics by prometheus_client itself: names, labels, several threads, models and processes; without it a line."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from isoload.engines.seams import PlugIn, Seam
from isoload.engines.settings import SGLANG
from isoload.online import metrics
from isoload.online.metrics import LABELS, METRICS, MULTIPROCESS, Metrics, set_refused

log = logging.getLogger("isoload")
SEAMS = [Seam("no_engine.function", "around", ("()",), "0", "none")]


@pytest.fixture(autouse=True)
def no_filters() -> Iterator[None]:
    yield
    log.filters = []


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """In one process."""
    monkeypatch.delenv(MULTIPROCESS, raising=False)
    return pytest.importorskip("prometheus_client", reason="an extra of the tests: pip install -e .[test]")


def value(client: Any, name: str, model: str, *labels: str, rank: str = "0") -> float | None:
    own = METRICS[name.removesuffix("_sum").removesuffix("_count")].labels
    given = dict(zip(LABELS + own, (model, "SGLang", rank, *labels), strict=True))
    found: float | None = client.REGISTRY.get_sample_value(f"isoload_{name}", given)
    return found


def test_each_kind_does_what_its_name_says(client: Any) -> None:
    made = Metrics("SGLang", "kinds", "0", on=True)
    for number in (3.0, 4.0):
        made.set("wrong_slots", number)
        made.add("bytes_moved_total", number)
        made.observe("rebalance_seconds", number)
    assert value(client, "wrong_slots", "kinds") == 4 and value(client, "bytes_moved_total", "kinds") == 7
    assert value(client, "rebalance_seconds_sum", "kinds") == 7
    assert value(client, "rebalance_seconds_count", "kinds") == 2


def test_a_model_begins_with_every_counter_at_0(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    Metrics("SGLang", "begun", "0", on=True).begin("exact", "eplb")
    for name, metric in METRICS.items():
        if metric.kind == "counter":
            assert value(client, name, "begun") == 0, name
    assert value(client, "info", "begun", "0.1.0", "unknown", "exact", "eplb") == 1
    assert f"isoload SGLang: metrics stay in this process: {MULTIPROCESS} is not set" in caplog.text


def test_a_file_that_cannot_be_written_ends_the_metrics_alone(
    client: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = Metrics("SGLang", "unwritten", "0", on=True)

    def refuse(*_: Any) -> Any:
        raise FileNotFoundError("no such folder")

    monkeypatch.setattr(metrics, "_child", refuse)
    metrics.begin("exact", "eplb")
    metrics.set("attached", 1)
    assert not metrics.on and caplog.text.count("metrics are disabled because") == 1


def test_error_lines_are_counted_of_the_model_that_came_last(client: Any) -> None:
    """vLLM's drafts come first."""
    for model in ("draft", "served"):
        Metrics("SGLang", model, "0", on=True).begin("exact", "eplb")
    log.error("one")
    log.warning("none")
    try:
        raise ValueError("two")
    except ValueError:
        log.exception("two")
    assert value(client, "errors_total", "served") == 2 and value(client, "errors_total", "draft") == 0


def test_imbalance_is_a_quantile_over_layers(client: Any) -> None:
    made = Metrics("SGLang", "layers", "0", on=True)
    made.set_imbalance("decode", "isoload", [1.0, 1.25, 2.0])
    made.set_imbalance("decode", "engine", [])
    for quantile, want in (("0.5", 1.25), ("1.0", 2.0)):
        assert value(client, "imbalance", "layers", "decode", "isoload", quantile) == want
        assert value(client, "balancedness", "layers", "decode", "isoload", quantile) == 1 / want
    assert value(client, "imbalance", "layers", "decode", "isoload", "0.9") == pytest.approx(1.85)
    assert value(client, "imbalance", "layers", "decode", "engine", "1.0") is None


def test_threads_make_one_of_a_name(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    stock = client.Gauge

    def gauge(*given: Any, **named: Any) -> Any:
        made.append(given[0])
        return stock(*given, **named, registry=None)

    metrics._create.cache_clear()
    monkeypatch.setattr(client, "Gauge", gauge)
    try:
        with ThreadPoolExecutor(8) as pool:
            models = [Metrics("SGLang", f"model {i}", str(i), on=True) for i in range(16)]
            list(pool.map(lambda of: [of.set("attached", 1) for _ in range(50)], models))
    finally:
        metrics._create.cache_clear()
        for collector in {*client.REGISTRY._names_to_collectors.values()}:
            if getattr(collector, "_name", "").startswith("isoload_"):
                client.REGISTRY.unregister(collector)
    assert made == ["isoload_attached"]


WRITE = """
import sys
from isoload.online.metrics import Metrics
of = Metrics("vLLM", "m", sys.argv[1], on=True)
of.begin("exact", "eplb")
of.set("attached", float(sys.argv[2]))
of.add("rebalances_total", 2)
of.observe("plan_seconds", 3e-5)
"""


@pytest.mark.slow
def test_workers_meet_in_the_engines_folder(client: Any, tmp_path: Path) -> None:
    """A rank that was started again: its gauges are the last process's, its counters those of both."""
    environ = {MULTIPROCESS: str(tmp_path), "PYTHONPATH": str(Path(metrics.__file__).parents[2])}
    path = environ["PYTHONPATH"] + ":" + str(Path(client.__file__).parents[1])
    for rank, attached in (("0", "1"), ("1", "1"), ("1", "0")):
        command = [sys.executable, "-c", WRITE, rank, attached]
        subprocess.run(command, env=environ | {"PYTHONPATH": path}, check=True)
    from prometheus_client import multiprocess

    registry = client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))

    def found(name: str, rank: str, **more: str) -> float | None:
        labels = {"model": "m", "engine": "vLLM", "rank": rank, **more}
        sample: float | None = registry.get_sample_value(f"isoload_{name}", labels)
        return sample

    assert [found("attached", rank) for rank in "01"] == [1, 0]
    assert [found("rebalances_total", rank) for rank in "01"] == [2, 4]
    assert [found("plan_seconds_bucket", rank, le="5e-05") for rank in "01"] == [1, 2]


def test_without_prometheus_client_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)  # an import of it fails
    metrics._client.cache_clear()
    try:
        for model in "ab":
            made = Metrics("SGLang", model, "0", on=True)
            made.begin("exact", "eplb")
            made.observe("plan_seconds", 1.0)
            assert not made.on
    finally:
        metrics._client.cache_clear()
    (line,) = caplog.messages
    assert line.startswith("isoload: prometheus_client is not installed") and not log.filters


@pytest.mark.slow
def test_what_is_off_imports_nothing() -> None:
    code = (
        "import sys, isoload.engines.layers as of\n"
        "from isoload.online.metrics import Metrics, set_refused\n"
        "made = Metrics('SGLang', 'm', '0')\n"
        "made.begin('exact', 'eplb'); made.set('attached', 1); made.observe('plan_seconds', 1)\n"
        "set_refused('SGLang')\n"
        "assert 'prometheus_client' not in sys.modules\n"
    )
    environ = {"PYTHONPATH": ":".join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environ, check=True)


@pytest.mark.parametrize(
    ("variables", "want"),
    [
        ({"ISOLOAD_REPORT_SECONDS": "60"}, ["SGLang"]),
        ({"ISOLOAD_MODE": "off", "ISOLOAD_REPORT_SECONDS": "60"}, ["SGLang"]),
        ({}, []),
    ],
)
def test_who_refuses_to_attach_says_so(
    variables: dict[str, str], want: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("isoload.engines.seams.set_refused", told.append)
    for name, text in (variables | {"ISOLOAD_SGLANG": "1"}).items():
        monkeypatch.setenv(name, text)
    # Of the engine nothing can be found.
    PlugIn("SGLang", SGLANG, lambda settings: None, {}, lambda seams, settings: None, SEAMS).attach_or_leave()
    assert told == want


def test_refusals_are_metrics_where_there_is_a_place_for_them(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_refused("SGLang")
    assert value(client, "attached", "", rank="") == 0
