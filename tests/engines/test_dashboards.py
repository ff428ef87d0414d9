"""dashboards/: every expression parses and names metrics, and labels of them, that isoload exports; docs/metrics.md has
the same table as the code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from isoload.online.metrics import LABELS, METRICS, Metric

promql = pytest.importorskip("promql_parser", reason="an extra of the tests: pip install -e .[test]")
ROOT = Path(__file__).parents[2]
BOARD = json.loads((ROOT / "dashboards" / "grafana.json").read_text())
ALERTS = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
TARGETS = [(panel["title"], target) for panel in BOARD["panels"] for target in panel["targets"]]


def expressions() -> Iterator[tuple[str, str, set[str]]]:
    """(where, PromQL, labels that texts take from its result)"""
    for title, target in TARGETS:
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        yield title, target["expr"].replace("$__rate_interval", "5m"), shown
    for rule in RULES:
        yield rule["alert"], rule["expr"], set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))


EXPRESSIONS = list(expressions())


def exported(name: str) -> tuple[str, Metric, set[str]]:
    """The metric behind a series, and all of its labels."""
    assert name.startswith("isoload_"), name
    base = name.removeprefix("isoload_")
    part = next((end for end in ("_bucket", "_sum", "_count") if base.endswith(end)), "")
    of = base.removesuffix(part)
    metric = METRICS[of]
    assert (metric.kind == "histogram") == bool(part), name
    return of, metric, {*LABELS, *metric.labels, *(["le"] if part == "_bucket" else [])}


def found(expression: str, kind: str) -> list[Any]:
    nodes: list[Any] = []
    promql.walk(promql.parse(expression), lambda node: nodes.append(node) or True)
    return [node for node in nodes if type(node).__name__ == kind]


@pytest.mark.parametrize(("where", "expression", "shown"), EXPRESSIONS, ids=[of[0] for of in EXPRESSIONS])
def test_expressions_name_what_is_exported(where: str, expression: str, shown: set[str]) -> None:
    selectors = found(expression, "VectorSelector")
    assert selectors
    for selector in selectors:
        _, _, labels = exported(selector.name)
        assert {of.name for of in selector.matchers.matchers} <= labels, selector.name
        for matcher in selector.matchers.matchers:
            if matcher.name in ("quantile", "plan"):
                assert matcher.value in {"0.5", "0.9", "1.0", "isoload", "even", "engine"}
    common = set.intersection(*(exported(of.name)[2] for of in selectors))
    kept = [set(of.modifier.labels) for of in found(expression, "AggregateExpr")]
    assert kept and all(labels <= common for labels in kept)
    assert shown <= set.intersection(*kept), "a label that the result does not have"


@pytest.mark.parametrize(("where", "expression", "shown"), EXPRESSIONS, ids=[of[0] for of in EXPRESSIONS])
def test_counters_are_rates_and_gauges_are_not(where: str, expression: str, shown: set[str]) -> None:
    over_time = {
        call.args[0].vector_selector.name
        for call in found(expression, "Call")
        if call.func.name in ("rate", "increase")
    }
    for selector in found(expression, "VectorSelector"):
        assert (selector.name in over_time) == (exported(selector.name)[1].kind != "gauge"), selector.name


def test_every_metric_is_drawn_and_what_harms_has_an_alert() -> None:
    drawn, alerting = (
        {exported(selector.name)[0] for expression in of for selector in found(expression, "VectorSelector")}
        for of in (
            [target["expr"].replace("$__rate_interval", "5m") for _, target in TARGETS],
            [rule["expr"] for rule in RULES],
        )
    )
    assert drawn == set(METRICS)
    assert alerting == {
        "attached", "info", "batches_not_certified_total", "imbalance", "rebalance_stalled_seconds", "wrong_slots",
        "rebalance_thread_dead", "errors_total",
    }  # fmt: skip


def test_the_boards_variables_are_labels() -> None:
    named = {of["name"]: of["query"] for of in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(target["expr"] for _, target in TARGETS)))
    assert used - {"__rate_interval"} == set(named) - {"datasource"}
    for name in used - {"__rate_interval"}:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", named[name]["query"]).groups()  # type: ignore[union-attr]
        assert label == name and label in exported(metric)[2]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_the_documents_table_is_the_codes() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `isoload_(\w+)` \| (\w+) \| (.+?) \| (.+?) \|$", text, re.M)
    assert rows == [
        (name, of.kind, ", ".join(f"`{label}`" for label in of.labels) or "-", of.text)
        for name, of in METRICS.items()
    ]
