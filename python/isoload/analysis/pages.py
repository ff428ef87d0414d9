"""Pages of ``--html``: one file with its style, tables, and charts as SVG (Vega-Lite, drawn without a browser)."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import cycle, pairwise
from typing import Any

import numpy as np

from isoload.files import printable, to_json_text

# Width of the plot: two charts fit next to each other on a desk, one on a phone; 8, 16, 32, 64 divide it.
WIDTH = 384
LABELS = 130  # width of the names on the left
HEIGHT = 230
SCALE = 1.15  # largest scale at which a chart is shown
# Limits of a heat map's classes; the class with 1 has the page's own colour.
EDGES = (0.5, 0.8, 0.95, 1.05, 1.2, 1.5, 2.0)
CLASSES = ("below 0.5", *(f"{low:g} to {high:g}" for low, high in pairwise(EDGES)), "2 and more")
OWN = "var(--c2)"  # colour of isoload's values
LINES = tuple(f"var(--c{i})" for i in (0, 1, 3, 4, 5, 6, 7))
HEAT = tuple(f"var(--h{i})" for i in range(8))
PARTS = ("var(--h3)", "var(--h5)", "var(--h6)")  # of a whole, the last for the most expensive part
LINE: dict[str, Any] = {"type": "line", "strokeWidth": 1.8}
TEXT = {"labelColor": "var(--soft)", "titleColor": "var(--soft)", "labelFontSize": 12, "titleFontSize": 12}
CONFIG = {
    "aria": False,  # the picture has one label; a table with all its values follows it
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
    if find_spec("vl_convert") is None:
        raise ValueError("html needs vl-convert-python, which is missing: pip install 'isoload[report]'")


def draw(spec: Spec, title: str, said: str) -> str:
    """Return the SVG of a Vega-Lite specification, with a title and a description for screen readers."""
    check_drawing()
    from vl_convert import vegalite_to_svg

    drawn = str(vegalite_to_svg({"width": WIDTH, **spec, "config": CONFIG}))
    title, said = html.escape(title, quote=True), html.escape(said, quote=True)
    label = f'<svg role="img" aria-label="{title}. {said}" '
    opening, body = drawn.split(">", 1)
    opening = re.sub(
        r' width="(\d+)" height="\d+"', lambda size: f' width="{SCALE * int(size[1]):.0f}"', opening
    )
    return f"{opening.replace('<svg ', label, 1)}><title>{title}</title><desc>{said}</desc>{body}"


def _colours(names: Sequence[str], colours: Sequence[str] = ()) -> Spec:
    chosen = list(colours)[: len(names)] or [LINES[i % len(LINES)] for i in range(len(names))]
    return {"field": "of", "type": "nominal", "scale": {"domain": list(names), "range": chosen}}


def _rows(*columns: Any) -> Spec:
    names = ("x", "y", "of", "from", "to")
    return {"values": [dict(zip(names, row, strict=False)) for row in zip(*columns, strict=True)]}


def _number(field: str, title: str | None, **more: Spec) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, **more}


def by_number(
    series: Mapping[str, Sequence[float]], numbers: Sequence[int], x: str, unit: str, best: str = ""
) -> Spec:
    """Return a line for each name, over layers in steps; best: the name with isoload's colour."""
    points = [(n, y, name) for name, line in series.items() for n, y in zip(numbers, line, strict=True)]
    others = cycle(LINES)
    colours = _colours(list(series), [OWN if name == best else next(others) for name in series])
    across = {"grid": False, "tickMinStep": 1}
    return {
        "height": HEIGHT,
        "data": _rows(*zip(*points, strict=True)),
        "mark": {**LINE, "interpolate": "step" if x == "layer" else "linear"},
        "encoding": {
            "x": _number("x", x, scale={"zero": False, "nice": False}, axis=across),
            "y": _number("y", unit, scale={"zero": False}, axis={"tickCount": 5}),
            "color": colours | {"legend": {"symbolType": "stroke", "columns": 5}},
        },
    }


def heat(values: Any, rows: Sequence[Any], across: str, down: str) -> Spec:
    """Return cells [n, m] of values that are 1 for even loads, in eight classes; rows: their names."""
    cells = np.asarray(values, dtype=np.float64)
    height, width = cells.shape
    kinds = np.digitize(cells, EDGES)
    every_row, every_column = (-(-count // limit) for count, limit in ((height, 16), (width, 16)))
    y, x = (index.ravel().tolist() for index in np.indices(cells.shape))
    ticks = [i for i in range(0, height, every_row)]
    names = {i: str(rows[i]) for i in ticks}
    label = " : ".join(f"datum.value == {i} ? '{name}'" for i, name in names.items()) + " : ''"
    axis = {"labelAngle": 0, "grid": False}
    columns = {**axis, "values": list(range(0, width, every_column))}
    lines = {**axis, "values": ticks, "labelExpr": label}
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
    """Return a bar for each label, divided into parts of one whole."""
    names = _parts(parts)
    spec = _by_label(parts, None, {"format": ".0%"})
    spec["encoding"]["x"]["stack"] = "zero"
    spec["encoding"] |= {"color": _colours(names, PARTS), "order": {"field": "order"}}
    order = {"calculate": f"indexof({names!r}, datum.of)", "as": "order"}
    return {**spec, "mark": {"type": "bar", "height": 16}, "transform": [order]}


def points(values: Stacked, x: str, colours: Sequence[str] = (), middle: float | None = None) -> Spec:
    """Return a point for each value of a label, and a line between them; middle: a rule through all labels."""
    spec = _by_label(values, x)
    encoding = spec.pop("encoding")
    encoding["x"]["scale"] = {"zero": False, "padding": 12}
    ends = {name: {"aggregate": aggregate, "field": "x"} for name, aggregate in (("x", "min"), ("x2", "max"))}
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
    bars = [(value, label, part) for label, parts in values.items() for part, value in parts.items()]
    names = {"labelLimit": LABELS + 30, "minExtent": LABELS, "grid": False}
    return {
        "width": WIDTH - LABELS,
        "height": {"step": 28},
        "data": _rows(*zip(*bars, strict=True)),
        "encoding": {
            "x": _number("x", x, axis={"tickCount": 4, **(axis or {})}),
            "y": {"field": "y", "type": "nominal", "sort": list(values), "title": None, "axis": names},
        },
    }


def _parts(values: Stacked) -> list[str]:
    return list(dict.fromkeys(part for parts in values.values() for part in parts))


def by_tokens(
    rows: Sequence[tuple[int, float, float, str, bool]], extent: tuple[float, float], colour: str
) -> Spec:
    """Return saved fractions, from and to, by tokens per rank; rows: (tokens, low, high, label, whether measured)."""
    values, above, last = list[Spec](), True, 0
    for n, low, high, said, measured in rows:
        above = not above or n >= 4 * last  # a label is as wide as a factor of 4 on this axis at most
        text = {"said": said, "measured": measured, "above": above}
        values.append({"x": n, "from": low, "to": high, "y": (low + high) / 2, **text})
        last = n
    counts = {"grid": False, "values": [row[0] for row in rows], "labelOverlap": True}
    x = _number("x", "tokens per rank", axis=counts, scale={"type": "log", "base": 2, "padding": 26})
    share = {"format": ".0%", "tickCount": 5}
    y = _number("y", "fraction saved of the MoE layers' time", axis=share, scale={"domain": list(extent)})
    constant = {"value": colour}
    fill = {"condition": {"test": "datum.measured", **constant}, "value": "var(--paper)"}
    return {
        "height": HEIGHT,
        "data": {"values": values},
        "encoding": {"x": x},
        "layer": [
            {
                "mark": {"type": "area", "opacity": 0.18},
                "encoding": {"y": {**y, "field": "from"}, "y2": {"field": "to"}, "color": constant},
            },
            {"mark": {"type": "rule", "color": "var(--soft)"}, "encoding": {"x": {}, "y": {"datum": 0}}},
            {"mark": LINE, "encoding": {"y": y, "color": constant}},
            {
                "mark": {"type": "point", "size": 60, "opacity": 1, "strokeWidth": 1.8},
                "encoding": {"y": y, "stroke": constant, "fill": fill},
            },
            *(
                {
                    "transform": [{"filter": f"datum.above == {side}"}],
                    "mark": {"type": "text", "dx": dx, "dy": dy},
                    "encoding": {"y": y, "text": {"field": "said"}},
                }
                for side, dx, dy in (("true", -14, -12), ("false", 14, 16))
            ),
        ],
    }


def gantt(events: Sequence[tuple[int, str, float, float]], stages: Sequence[str], until_ms: float) -> Spec:
    """Return a row for each rank and a bar for each stage; events: (rank, stage, start and end in ms)."""
    ranks = [str(rank) for rank in dict.fromkeys(rank for rank, *_ in events)]
    bars = [(start, str(rank), stage, start, end) for rank, stage, start, end in events]
    x = _number("from", "ms", axis={"tickCount": 6}, scale={"domain": [0, until_ms], "nice": False})
    return {
        "height": {"step": 22},
        "data": _rows(*zip(*bars, strict=True)),
        "mark": {"type": "bar", "height": 14},
        "encoding": {
            "x": x,
            "x2": {"field": "to"},
            "y": {"field": "y", "type": "nominal", "sort": ranks, "title": "rank", "axis": {"grid": False}},
            "color": _colours(stages) | {"legend": {"columns": 4}},
        },
    }


_LIGHT = """--paper:#fff;--ink:#1c2024;--soft:#60676f;--line:#e3e6ea;--tint:#f5f7f9;--accent:#0b6e5f;
--c0:#8a8f98;--c1:#3f7cc4;--c2:#0b8a76;--c3:#d98a29;--c4:#b3558f;--c5:#7a63c4;--c6:#5d8f2f;--c7:#c8553d;
--h0:#2f6db5;--h1:#74a3d6;--h2:#bcd3ec;--h3:#eef0f2;--h4:#fbdcbc;--h5:#f3ab68;--h6:#dc6f35;--h7:#a8321f;"""
_DARK = """--paper:#14171a;--ink:#e7eaed;--soft:#9aa3ac;--line:#2e343a;--tint:#1c2125;--accent:#4cc9b0;
--c0:#8d949d;--c1:#6aa5e8;--c2:#35c2a6;--c3:#e9a955;--c4:#d985ba;--c5:#a792ec;--c6:#93c763;--c7:#e87d66;
--h0:#6ba6ea;--h1:#3f75b3;--h2:#2b4a6d;--h3:#262b30;--h4:#5d4126;--h5:#9c6527;--h6:#dc8333;--h7:#ffb066;"""

STYLE = (
    f":root{{{_LIGHT}color-scheme:light dark}}@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 -apple-system,"Segoe UI","Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:48px 24px 64px}
header{border-bottom:1px solid var(--line);padding-bottom:28px}
.kicker{margin:0;color:var(--soft);font-size:14px}
h1{margin:10px 0 12px;font-size:40px;line-height:1.15;letter-spacing:-.02em;color:var(--accent)}
.lead{margin:0 0 6px;max-width:68ch;font-size:18px}
section{margin-top:44px}
h2{margin:0 0 4px;font-size:22px;letter-spacing:-.01em}
h3{margin:0;font-size:16px}
.said,figcaption{margin:0 0 12px;color:var(--soft);font-size:14px;max-width:75ch}
figcaption{min-height:3.1em}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:32px 40px;margin-top:16px}
.grid>:not(figure){grid-column:1/-1}
figure{margin:0;min-width:0;break-inside:avoid}
svg{display:block;max-width:100%;height:auto}
svg .mark-rect path{shape-rendering:crispEdges}
svg text{font-family:inherit;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:6px 14px 6px 0;text-align:right;border-bottom:1px solid var(--line)}
th:first-child{text-align:left}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--soft);font-weight:400;vertical-align:bottom;white-space:normal;max-width:7em}
thead th:first-child{max-width:none}
tbody th{font-weight:400}
.mark th,.mark td{font-weight:650}
details{margin-top:10px;font-size:14px}
summary{color:var(--soft);cursor:pointer;width:fit-content}
details .wide{max-height:360px;overflow:auto;margin-top:8px}
details table{font-size:12px}
pre{margin:8px 0 0;padding:14px 16px;background:var(--tint);border-radius:8px;overflow:auto;
font-size:13px;line-height:1.6;white-space:pre-wrap;overflow-wrap:anywhere}
details pre{max-height:480px}
:focus-visible{outline:2px solid var(--accent);outline-offset:3px}
@media (max-width:760px){main{padding:28px 16px 48px}h1{font-size:32px}.lead{font-size:17px}
.grid{grid-template-columns:minmax(0,1fr)}figcaption{min-height:0}section{margin-top:36px}
.cards thead{display:none}.cards table,.cards tbody{display:block}
.cards tr{display:grid;grid-template-columns:1fr 1fr;gap:2px 20px;padding:12px 0;border-bottom:1px solid var(--line)}
.cards th,.cards td{display:flex;justify-content:space-between;gap:8px;padding:0;border:0;font-size:13px}
.cards th{grid-column:1/-1;font-size:15px}.cards td::before{content:attr(data-of);color:var(--soft);font-weight:400}}
@media print{main{max-width:none;padding:0}.grid{gap:20px 28px}details{display:none}}
"""
)


MARK = '<meta name="generator" content="isoload">'  # by which a page is known again
CARDS = 20  # rows and columns of a table that a phone shows as cards


def is_page(text: str) -> bool:
    return MARK in text[:1000]


def text(value: Any) -> str:
    return html.escape(str(value), quote=False)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], marked: Sequence[int] = ()) -> str:
    """Return a table of these cells; the first column names its row. On a narrow screen a short table becomes cards."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in header)
    cards = len(rows) <= CARDS and len(header) <= CARDS
    labels = [f' data-of="{html.escape(name)}"' if cards else "" for name in header[1:]]
    lines = []
    for i, (first, *cells) in enumerate(rows):
        row = "".join(f"<td{name}>{text(cell)}</td>" for name, cell in zip(labels, cells, strict=True))
        mark = " class=mark" if i in marked else ""
        lines.append(f"<tr{mark}><th scope=row>{text(first)}</th>{row}</tr>\n")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>\n{''.join(lines)}</tbody></table>"
    return f'<div class="wide{" cards" * cards}" role="region" aria-label="table" tabindex="0">{body}</div>'


def figure(title: str, said: str, spec: Spec, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a chart under its title, what one reads off it, and its values."""
    return (
        f"<figure><h3>{text(title)}</h3><figcaption>{text(said)}</figcaption>{draw(spec, title, said)}"
        f"<details><summary>Values</summary>{table(header, rows)}</details></figure>\n"
    )


def section(title: str, *parts: str, said: str = "") -> str:
    """Return charts and tables under a heading, charts in two columns on a wide page."""
    note = f"<p class=said>{text(said)}</p>" if said else ""
    return f"<section><h2>{text(title)}</h2>{note}<div class=grid>{''.join(parts)}</div></section>\n"


def code(lines: Sequence[str]) -> str:
    return f'<pre tabindex="0">{text(chr(10).join(lines))}</pre>'


def prose(notes: Sequence[str]) -> str:
    return "<div>{}</div>".format("".join(f"<p class=said>{text(note)}</p>" for note in notes))


def page(
    title: str, what: Sequence[str], heading: str, lead: Sequence[str], body: Sequence[str], figures: Any
) -> str:
    """Return the file's text; what: lines about the subject; heading, lead: conclusion; figures: as --json has them."""
    kicker = " · ".join(map(text, what))
    sentences = "".join(f"<p class=lead>{text(line)}</p>" for line in lead)
    values = text(to_json_text(figures, indent=1))
    document = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">{MARK}
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<title>{text(title)}</title><style>{STYLE}</style></head>
<body><main><header><p class=kicker>{kicker}</p><h1>{text(heading)}</h1>{sentences}</header>
{"".join(body)}<section><h2>All figures</h2><details><summary>As --json writes them</summary>
<pre tabindex="0">{values}</pre></details></section></main></body></html>
"""
    return "\n".join(map(printable, document.split("\n")))
