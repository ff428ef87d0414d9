"""One HTML file: its style, tables, charts with the table behind each, and the figures as --json writes them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from isoload.analysis.pages import Spec, draw
from isoload.files.writing import printable, to_json_text
from isoload.report.style import STYLE

MARK = '<meta name="generator" content="isoload">'  # by which a page is known again
CARDS = 20  # rows and columns of a table that a phone shows as cards


def is_page(text: str) -> bool:
    """Whether a text is a page of isoload's."""
    return MARK in text[:1000]


def text(value: Any) -> str:
    return html.escape(str(value), quote=False)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], marked: Sequence[int] = ()) -> str:
    """A table of cells as they are said; the first column names its row. marked: rows that stand out.

    Where the screen is narrow a short table becomes a card for each row.
    """
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in header)
    cards = len(rows) <= CARDS and len(header) <= CARDS
    of = [f' data-of="{html.escape(name)}"' if cards else "" for name in header[1:]]
    lines = []
    for i, (first, *cells) in enumerate(rows):
        row = "".join(f"<td{name}>{text(cell)}</td>" for name, cell in zip(of, cells, strict=True))
        mark = " class=mark" if i in marked else ""
        lines.append(f"<tr{mark}><th scope=row>{text(first)}</th>{row}</tr>\n")
    body = f"<table><thead><tr>{head}</tr></thead><tbody>\n{''.join(lines)}</tbody></table>"
    return f'<div class="wide{" cards" * cards}" role="region" aria-label="table" tabindex="0">{body}</div>'


def figure(title: str, said: str, spec: Spec, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A chart under its title, what one reads off it, and its values."""
    return (
        f"<figure><h3>{text(title)}</h3><figcaption>{text(said)}</figcaption>{draw(spec, title, said)}"
        f"<details><summary>Values</summary>{table(header, rows)}</details></figure>\n"
    )


def section(title: str, *parts: str, said: str = "") -> str:
    """Charts and tables under a heading; charts stand beside each other where there is room."""
    note = f"<p class=said>{text(said)}</p>" if said else ""
    return f"<section><h2>{text(title)}</h2>{note}<div class=grid>{''.join(parts)}</div></section>\n"


def code(lines: Sequence[str]) -> str:
    """What is to be typed."""
    return f'<pre tabindex="0">{text(chr(10).join(lines))}</pre>'


def prose(notes: Sequence[str]) -> str:
    return "<div>{}</div>".format("".join(f"<p class=said>{text(note)}</p>" for note in notes))


def page(
    title: str, what: Sequence[str], heading: str, lead: Sequence[str], body: Sequence[str], figures: Any
) -> str:
    """The file's text.

    Args:
        title: of the window.
        what: lines that say what the page is of.
        heading, lead: what follows from it all, in a word and in two sentences.
        body: sections, as they were made.
        figures: plain values, as --json writes them.
    """
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
