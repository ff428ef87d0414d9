"""The pictures of docs/results-cpu.md and README.md, from the shipped trace: docs/pictures/*.svg.

They show what was routed, on 8 ranks of 2 nodes with replicas and one shared expert, placed by `eplb` on the first
half of the trace and replayed on the second: the same batches, plans and slots as `isoload replay` counts.

  rank_loads.svg      copies per rank of one layer and batch, routed and shared, under each policy
  imbalance.svg       max/mean rank load of every layer and batch, a row per policy
  shared_copies.svg   where shared copies go: home, a rank that their token visits anyway, another one

Plain SVG with two colour schemes; no font or library is embedded. The same bytes on every machine.

Usage: python bench/picture_balance.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import isoload
from isoload.analysis.batches import calibration_folds, make_batches
from isoload.analysis.simulate import default_slots_per_rank
from isoload.policies import make_policy, parse_policy

ROOT = Path(__file__).parent.parent
TRACE = ROOT / "examples" / "traces" / "gptoss20b_decode.npz"
RANKS, NODE, SHARED = 8, 4, 1
LAYER, BATCH = 16, 4  # of rank_loads.svg, where policies differ most: position in the trace, replayed batch
POLICIES = {
    "none": "none",
    "static:seed=0": "static",
    "shared_local": "shared_local",
    "exact": "exact",
    "waterfill_sampled": "waterfill_sampled",
    "waterfill_sampled:rule=dynamic": "sampled, rule=dynamic",
    "waterfill": "waterfill",
    "joint": "joint",
}
STYLE = """<style>
text { font: 12px sans-serif; fill: #1f2328 } .small { font-size: 11px; fill: #59636e } .name { font-weight: 600 }
.routed { fill: #7a9cc6 } .home { fill: #e0a35c } .met { fill: #6fae7c } .other { fill: #c8553d }
.bound { stroke: #1f2328; stroke-width: 1.5; stroke-dasharray: 4 3 } .grid { stroke: #d1d9e0 }
.dots { stroke: #4a78b5; stroke-width: 3; stroke-linecap: round; stroke-opacity: .55; fill: none }
.mean { stroke: #c8553d; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .small { fill: #9198a1 } .bound { stroke: #e6edf3 } .grid { stroke: #3d444d }
.routed { fill: #5d82b3 } .dots { stroke: #7fa8dd } }
</style>"""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Routed:
    """What one policy made of the replayed batches.

    copies  [B, L, R, 4]  copies on each rank: routed, shared at home, shared that their token visits it with, others
    bound   [B, L]        the least peak over all splits and places
    """

    copies: Ints
    bound: Ints

    @property
    def imbalance(self) -> npt.NDArray[np.float64]:
        """[B, L] max / mean"""
        loads = self.copies.sum(-1)
        return loads.max(-1) / loads.mean(-1)


def route_all(policy: str) -> Routed:
    """Replays the trace under a policy; see isoload.analysis.simulate, which does the same and counts other figures."""
    trace = isoload.read_trace(TRACE)
    batches = make_batches(trace)
    (fold,) = calibration_folds(len(batches.counts), "first-half")
    size = default_slots_per_rank(trace.num_experts, RANKS, SHARED)
    topology = isoload.Topology(RANKS, NODE)
    seen = batches.counts[list(fold.calibrate)]
    placement = isoload.place(seen, topology, size, "eplb", num_shared=SHARED)
    name, options = parse_policy(policy)
    copies = np.zeros((len(fold.replay), trace.num_layers, RANKS, 4), dtype=np.int64)
    bound = np.zeros(copies.shape[:2], dtype=np.int64)
    for b, index in enumerate(fold.replay):
        batch = batches.source_batch(index, RANKS, "contiguous").with_shared(trace.num_experts, SHARED)
        for layer in range(trace.num_layers):
            ids = [batch.on_rank(layer, rank) for rank in range(RANKS)]
            loads = torch.stack([isoload.count(row, placement.num_experts) for row in ids])
            made = isoload.plan(loads, placement, layer, make_policy(name, options))
            bound[b, layer] = isoload.plan(loads, placement, layer, "joint").bound
            for rank, row in enumerate(ids):
                slots = isoload.route(row, loads, made, rank).numpy()
                copies[b, layer] += count_kinds(slots // size, rank)
    return Routed(copies, bound)


def count_kinds(ranks: npt.NDArray[np.integer], source: int) -> Ints:
    """[R, 4] copies per rank and kind, of one source's tokens on ranks [T, K + 1], the shared copy last."""
    routed, shared = ranks[:, :-1], ranks[:, -1]
    met = (routed == shared[:, None]).any(1)
    kind = np.where(shared == source, 1, np.where(met, 2, 3))
    counts = np.zeros((RANKS, 4), dtype=np.int64)
    counts[:, 0] = np.bincount(routed.ravel(), minlength=RANKS)
    np.add.at(counts, (shared, kind), 1)
    return counts


def svg(width: int, height: int, title: str, body: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    )
    return "\n".join([head, f"<title>{title}</title>", STYLE, *body, "</svg>", ""])


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" class="{style}"/>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>'


KINDS = (
    ("routed", "routed"),
    ("home", "shared, on its own rank"),
    ("met", "shared, on a rank its token visits"),
    ("other", "shared, elsewhere"),
)


def legend(x: int, y: int, kinds: tuple[tuple[str, str], ...]) -> list[str]:
    out = []
    for style, words in kinds:
        out += [box(x, y - 9, 10, 10, style), text(x + 14, y, words, "small")]
        x += 30 + 6 * len(words)
    return out


def rank_loads(found: dict[str, Routed]) -> str:
    """A panel per policy: stacked bars per rank, and the bound as a line."""
    width, height, top = 190, 118, 40
    highest = max(int(r.copies[BATCH, LAYER].sum(-1).max()) for r in found.values())
    body = legend(10, 18, KINDS)
    body += [line(640, 14, 664, 14, "bound"), text(670, 18, "least possible peak", "small")]
    for i, (policy, routed) in enumerate(found.items()):
        x0, y0 = 10 + i % 4 * (width + 8), top + i // 4 * (height + 52)
        base = y0 + 18 + height
        ratio = routed.imbalance[BATCH, LAYER]
        body += [
            text(x0, y0 + 10, POLICIES[policy], "name"),
            text(x0 + width - 8, y0 + 10, f"{ratio:.2f}", "small", "end"),
        ]
        for rank, kinds in enumerate(routed.copies[BATCH, LAYER]):
            y = float(base)
            for (style, _), copies in zip(KINDS, kinds, strict=True):
                tall = height * int(copies) / highest
                y -= tall
                if copies:
                    body.append(box(x0 + rank * 23, y, 19, tall, style))
            body.append(text(x0 + rank * 23 + 9.5, base + 14, str(rank), "small", "middle"))
        level = base - height * int(routed.bound[BATCH, LAYER]) / highest
        body.append(line(x0 - 3, level, x0 + width - 4, level, "bound"))
    title = f"Copies per rank, layer {LAYER}; the number is max/mean"
    return svg(810, top + 2 * (height + 52), title, body)


def imbalance(found: dict[str, Routed]) -> str:
    """A row per policy: a dot for every layer and batch, the batches on lines of their own; the mean."""
    left, right, top, row = 190, 700, 26, 30
    highest = max(float(r.imbalance.max()) for r in found.values())
    most = int(np.ceil(10 * highest)) / 10

    def place(value: float) -> float:
        return left + (right - left) * (value - 1) / (most - 1)

    bottom, body = top + row * len(found), []
    for tick in np.arange(10, int(10 * most) + 1, 2) / 10:
        body.append(line(place(tick), top - 4, place(tick), bottom, "grid"))
        body.append(text(place(tick), bottom + 16, f"{tick:.1f}", "small", "middle"))
    body.append(text(right + 55, 14, "mean, worst", "small", "middle"))
    for i, (policy, routed) in enumerate(found.items()):
        y, values = top + row * i + row / 2, routed.imbalance
        dots = {
            (round(place(v), 1), round(y - 9 + 3 * batch, 1)) for batch, of in enumerate(values) for v in of
        }
        path = "".join(f"M{px:g} {py:g}h0" for px, py in sorted(dots))
        mean = place(float(values.mean()))
        body += [
            text(left - 12, y + 4, POLICIES[policy], "name", "end"),
            f'<path d="{path}" class="dots"/>',
            line(mean, y - 12, mean, y + 12, "mean"),
            text(right + 55, y + 4, f"{values.mean():.3f}, {values.max():.2f}", "small", "middle"),
        ]
    title = "max/mean rank load of every layer and batch"
    return svg(810, bottom + 26, title, body)


def shared_copies(found: dict[str, Routed]) -> str:
    """A bar per policy: where its shared copies went."""
    left, right, top, row = 190, 640, 34, 26
    body = legend(left, 16, tuple((style, words.removeprefix("shared, ")) for style, words in KINDS[1:]))
    for i, (policy, routed) in enumerate(found.items()):
        y = top + row * i
        kinds = routed.copies[..., 1:].sum((0, 1, 2)).astype(float)
        parts = kinds / kinds.sum()
        body.append(text(left - 12, y + 14, POLICIES[policy], "name", "end"))
        x = float(left)
        for (style, _), part in zip(KINDS[1:], parts, strict=True):
            body.append(box(x, y, (right - left) * part, 18, style))
            x += (right - left) * part
        body.append(
            text(right + 10, y + 14, " / ".join(f"{100 * part:.1f}" for part in parts) + " %", "small")
        )
    return svg(810, top + row * len(found) + 6, "Where shared copies are computed", body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)
    found = {policy: route_all(policy) for policy in POLICIES}
    moving = {policy: r for policy, r in found.items() if r.copies[..., 2:].any()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "rank_loads.svg").write_text(rank_loads(found))
    (out / "imbalance.svg").write_text(imbalance(found))
    (out / "shared_copies.svg").write_text(shared_copies(moving))
    print(f"written: {out}")


if __name__ == "__main__":
    main()
