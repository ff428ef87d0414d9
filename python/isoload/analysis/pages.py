"""Charts as SVG: Vega-Lite, drawn without a browser. Colours are variables of the page's style, for dark and light."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle, pairwise
from typing import Any

import numpy as np

# Of what is plotted: two charts beside each other on a desk, one on a phone; 8, 16, 32, 64 divide it.
WIDTH = 384
LABELS = 130  # of it, for names at the left
HEIGHT = 230
SCALE = 1.15  # at which a chart is shown where there is room
# Of a heat map's classes; the one with 1 has the page's own colour.
EDGES = (0.5, 0.8, 0.95, 1.05, 1.2, 1.5, 2.0)
CLASSES = ("below 0.5", *(f"{low:g} to {high:g}" for low, high in pairwise(EDGES)), "2 and more")
OWN = "var(--c2)"  # of what isoload does
LINES = tuple(f"var(--c{i})" for i in (0, 1, 3, 4, 5, 6, 7))
HEAT = tuple(f"var(--h{i})" for i in range(8))
PARTS = ("var(--h3)", "var(--h5)", "var(--h6)")  # of a whole, the last the dearest
LINE: dict[str, Any] = {"type": "line", "strokeWidth": 1.8}
TEXT = {"labelColor": "var(--soft)", "titleColor": "var(--soft)", "labelFontSize": 12, "titleFontSize": 12}
CONFIG = {
    "aria": False,  # the picture has one label; a table with all its values stands behind it
    "background": "transparent",
    "view": {"stroke": None},
    "axis": {
        **TEXT,
        "titleFontWeight": "normal",
        "titlePadding": 8,
        "gridColor": "var(--line)",
        "domain": False,
        "ticks": False,
        "labelPadding": 6,
    },
    "legend": {**TEXT, "orient": "top", "title": None, "labelLimit": 300, "columnPadding": 14, "offset": 10},
    "text": {"color": "var(--ink)", "fontSize": 11},
}

Spec = dict[str, Any]
Stacked = Mapping[str, Mapping[str, float]]  # by label, a value for each part


def check_drawing() -> None:
    """ValueError: vl-convert-python is missing."""
    if find_spec("vl_convert") is None:
        raise ValueError("html needs vl-convert-python, which is missing: pip install 'isoload[report]'")


def draw(spec: Spec, title: str, said: str) -> str:
    """The SVG of a Vega-Lite specification, with a title and a description for who does not see it.

    Raises:
        ValueError: see :func:`check_drawing`.
    """
    check_drawing()
    from vl_convert import vegalite_to_svg

    drawn = str(vegalite_to_svg({"width": WIDTH, **spec, "config": CONFIG}))
    title, said = html.escape(title, quote=True), html.escape(said, quote=True)
    label = f'<svg role="img" aria-label="{title}. {said}" '
    opening, rest = drawn.split(">", 1)
    opening = re.sub(
        r' width="(\d+)" height="\d+"', lambda size: f' width="{SCALE * int(size[1]):.0f}"', opening
    )
    return f"{opening.replace('<svg ', label, 1)}><title>{title}</title><desc>{said}</desc>{rest}"


def _colours(names: Sequence[str], colours: Sequence[str] = ()) -> Spec:
    given = list(colours)[: len(names)] or [LINES[i % len(LINES)] for i in range(len(names))]
    return {"field": "of", "type": "nominal", "scale": {"domain": list(names), "range": given}}


def _rows(*columns: Any) -> Spec:
    names = ("x", "y", "of", "from", "to")
    return {"values": [dict(zip(names, row, strict=False)) for row in zip(*columns, strict=True)]}


def _number(field: str, title: str | None, **more: Spec) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def by_number(
    series: Mapping[str, Sequence[float]], numbers: Sequence[int], x: str, y: str, best: str = ""
) -> Spec:
    """A line for each name, over layers in steps; best: the name that has isoload's colour."""
    found = [(at, value, name) for name, of in series.items() for at, value in zip(numbers, of, strict=True)]
    others = cycle(LINES)
    colours = _colours(list(series), [OWN if name == best else next(others) for name in series])
    across = {"grid": False, "tickMinStep": 1}
    return {
        "height": HEIGHT,
        "data": _rows(*zip(*found, strict=True)),
        "mark": {**LINE, "interpolate": "step" if x == "layer" else "linear"},
        "encoding": {
            "x": _number("x", x, scale={"zero": False, "nice": False}, axis=across),
            "y": _number("y", y, scale={"zero": False}, axis={"tickCount": 5}),
            "color": colours | {"legend": {"symbolType": "stroke", "columns": 5}},
        },
    }


def heat(values: Any, rows: Sequence[Any], across: str, down: str) -> Spec:
    """Cells [n, m] of what is 1 where all are alike, in eight classes; rows: their names."""
    cells = np.asarray(values, dtype=np.float64)
    height, width = cells.shape
    kinds = np.digitize(cells, EDGES)
    every_row, every_column = (-(-count // most) for count, most in ((height, 16), (width, 16)))
    y, x = (each.ravel().tolist() for each in np.indices(cells.shape))
    kept = [i for i in range(0, height, every_row)]
    names = {i: str(rows[i]) for i in kept}
    label = " : ".join(f"datum.value == {i} ? '{name}'" for i, name in names.items()) + " : ''"
    axis = {"labelAngle": 0, "grid": False}
    columns = {**axis, "values": list(range(0, width, every_column))}
    lines = {**axis, "values": kept, "labelExpr": label}
    return {
        "width": {"step": max(1, WIDTH // width)},
        "height": {"step": max(3, min(18, 300 // height))},
        "data": _rows(x, y, [CLASSES[kind] for kind in kinds.ravel()]),
        "mark": "rect",
        "encoding": {
            "x": {"field": "x", "type": "ordinal", "title": across, "axis": columns},
            "y": {"field": "y", "type": "ordinal", "title": down, "axis": lines},
            "color": _colours(CLASSES, HEAT) | {"legend": {"columns": 4, "symbolType": "square"}},
        },
    }


def shares(parts: Stacked) -> Spec:
    """A bar for each label, cut into parts of one whole."""
    names = _parts(parts)
    spec = _by_label(parts, None, {"format": ".0%"})
    spec["encoding"]["x"]["stack"] = "zero"
    spec["encoding"] |= {"color": _colours(names, PARTS), "order": {"field": "order"}}
    order = {"calculate": f"indexof({names!r}, datum.of)", "as": "order"}
    return {**spec, "mark": {"type": "bar", "height": 16}, "transform": [order]}


def points(values: Stacked, x: str, colours: Sequence[str] = (), middle: float | None = None) -> Spec:
    """A point for each value of a label, and a line between them; middle: a rule through all labels."""
    spec = _by_label(values, x)
    encoding = spec.pop("encoding")
    encoding["x"]["scale"] = {"zero": False, "padding": 12}
    ends = {name: {"aggregate": of, "field": "x"} for name, of in (("x", "min"), ("x2", "max"))}
    between = {
        "mark": {"type": "rule", "strokeWidth": 3, "color": "var(--line)"},
        "encoding": {"y": encoding["y"], "x": encoding["x"] | ends["x"], "x2": ends["x2"]},
    }
    through = {"mark": {"type": "rule", "color": "var(--soft)"}, "encoding": {"x": {"datum": middle}}}
    dots = {
        "mark": {"type": "point", "filled": True, "size": 80, "opacity": 1},
        "encoding": encoding | {"color": _colours(_parts(values), colours)},
    }
    return {**spec, "layer": [between, *([] if middle is None else [through]), dots]}


def _by_label(values: Stacked, x: str | None, axis: Spec | None = None) -> Spec:
    """What charts with a row for each label have alike."""
    found = [(value, label, part) for label, of in values.items() for part, value in of.items()]
    names = {"labelLimit": LABELS + 30, "minExtent": LABELS, "grid": False}
    return {
        "width": WIDTH - LABELS,
        "height": {"step": 28},
        "data": _rows(*zip(*found, strict=True)),
        "encoding": {
            "x": _number("x", x, axis={"tickCount": 4, **(axis or {})}),
            "y": {"field": "y", "type": "nominal", "sort": list(values), "title": None, "axis": names},
        },
    }


def _parts(values: Stacked) -> list[str]:
    return list(dict.fromkeys(part for of in values.values() for part in of))


def by_tokens(
    rows: Sequence[tuple[int, float, float, str, bool]], extent: tuple[float, float], colour: str
) -> Spec:
    """Parts that are saved, from and to, by tokens of a rank; rows: (tokens, low, high, label, whether measured)."""
    values = [
        {"x": n, "from": low, "to": high, "y": (low + high) / 2, "said": said, "measured": measured}
        for n, low, high, said, measured in rows
    ]
    counts = {"grid": False, "values": [row[0] for row in rows], "labelOverlap": True}
    x = _number("x", "tokens of a rank", axis=counts, scale={"type": "log", "base": 2, "padding": 26})
    share = {"format": ".0%", "tickCount": 5}
    y = _number("y", "saved of the MoE layers' time", axis=share, scale={"domain": list(extent)})
    one = {"value": colour}
    fill = {"condition": {"test": "datum.measured", **one}, "value": "var(--paper)"}
    return {
        "height": HEIGHT,
        "data": {"values": values},
        "encoding": {"x": x},
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.18},
                "encoding": {"y": {**y, "field": "from"}, "y2": {"field": "to"}, "color": one},
            },
            {"mark": {"type": "rule", "color": "var(--soft)"}, "encoding": {"x": {}, "y": {"datum": 0}}},
            {"mark": LINE, "encoding": {"y": y, "color": one}},
            {
                "mark": {"type": "point", "size": 60, "opacity": 1, "strokeWidth": 1.8},
                "encoding": {"y": y, "stroke": one, "fill": fill},
            },
            {"mark": {"type": "text", "dx": -14, "dy": -12}, "encoding": {"y": y, "text": {"field": "said"}}},
        ],
    }


def gantt(events: Sequence[tuple[int, str, float, float]], stages: Sequence[str], until_ms: float) -> Spec:
    """A step, or a few layers of it: a row for each rank, a bar for each stage.

    events: (rank, stage, start and end in ms). stages: with a colour each, in order, whether they have a bar or not.
    until_ms: where the axis ends.
    """
    ranks = [str(rank) for rank in dict.fromkeys(rank for rank, *_ in events)]
    found = [(start, str(rank), stage, start, end) for rank, stage, start, end in events]
    x = _number("from", "ms", axis={"tickCount": 6}, scale={"domain": [0, until_ms], "nice": False})
    return {
        "height": {"step": 22},
        "data": _rows(*zip(*found, strict=True)),
        "mark": {"type": "bar", "height": 14},
        "encoding": {
            "x": x,
            "x2": {"field": "to"},
            "y": {"field": "y", "type": "nominal", "sort": ranks, "title": "rank", "axis": {"grid": False}},
            "color": _colours(stages) | {"legend": {"columns": 4}},
        },
    }
