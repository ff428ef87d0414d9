"""The picture of docs/own-counts.md, from the results of bench_loads: docs/pictures/loads.svg.

The busiest rank over the bound of all loads by tokens of a rank, a line for each protocol, mean over traces, dealings
(hom and het) and ranks, without idle ranks. `static` is left out: it lies above the others by more than they reach.

Usage: python bench/picture_loads.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLOURS = {
    "last step, sampled": "#c8553d",
    "hash": "#8a8f98",
    "own": "#8ab4dc",
    "own + targets": "#4a78b5",
    "node": "#6fae7c",
}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 720, 330, 46, 34, 150, 40
MOST = 1.3  # of the scale
STYLE = """<style>
text { font: 12px sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e } .grid { stroke: #d1d9e0 }
path { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .grid { stroke: #3d444d } }
</style>"""


def means() -> dict[str, dict[int, float]]:
    """{protocol: {tokens of a rank: mean}}"""
    found: dict[str, dict[int, list[float]]] = {}
    for line in (ROOT / "bench" / "results" / "bench_loads.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["dealing"] != "turned" and row["busy"] == "all":
            found.setdefault(row["protocol"], {}).setdefault(row["tokens"], []).append(row["mean"])
    return {p: {n: sum(x) / len(x) for n, x in sorted(of.items())} for p, of in found.items()}


def draw() -> str:
    found = means()
    tokens = list(found["hash"])
    bottom = HEIGHT - BOTTOM

    def x(i: int) -> float:
        return LEFT + i * (WIDTH - LEFT - RIGHT) / (len(tokens) - 1)

    def y(value: float) -> float:
        return bottom - (value - 1) / (MOST - 1) * (bottom - TOP)

    parts = [f'<text x="{LEFT}" y="16">busiest rank over the proved bound of all loads</text>']
    for tenth in range(7):
        value = 1 + tenth / 20
        parts.append(
            f'<path class="grid" style="stroke-width:1" d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}"/>'
        )
        parts.append(
            f'<text class="small" x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
        )
    for i, n in enumerate(tokens):
        parts.append(
            f'<text class="small" x="{x(i):.1f}" y="{bottom + 16}" text-anchor="middle">{n:,}</text>'
        )
    parts.append(
        f'<text class="small" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">tokens of a rank</text>'
    )
    for i, (name, colour) in enumerate(COLOURS.items()):
        line = "L".join(f"{x(j):.1f} {y(found[name][n]):.1f}" for j, n in enumerate(tokens))
        parts.append(f'<path stroke="{colour}" d="M{line}"/>')
        at = TOP + 10 + 20 * i
        parts.append(f'<path stroke="{colour}" d="M{WIDTH - RIGHT + 14} {at}h18"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 38}" y="{at + 4}">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">'
    return "\n".join([head, STYLE, *parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    (parser.parse_args().out / "loads.svg").write_text(draw())


if __name__ == "__main__":
    main()
