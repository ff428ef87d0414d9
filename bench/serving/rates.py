"""CRAFT's curve of request rate against time to first token (its Figures 8 and 11), on the eight GPUs of one machine.

    python bench/serving/rates.py --prompts german.jsonl --record-prompts others.jsonl
    python bench/serving/rates.py --dry-run                 # every command line, without a GPU or SGLang
    python bench/serving/rates.py --only craft8 --rates 4 8 --prompts ...

In the environment of SGLang, with isoload installed beside it. Not run on GPUs so far.

Fairness ledger
- Equal in all cells: model, machine, flags of attention, experts and DeepEP, prefill in chunks of at most 4096 tokens a
  rank, mixed with decoding of at most 128 requests a rank, and the loads: at each rate Poisson arrivals for --seconds,
  256 new tokens a request, the same prompts at the same moments, and an empty prefix cache at its start. Rates ascend
  within one start of the engine; at the lowest rate others warm up, with --prompts the first of the file.
- Placements, all from one file of counts that the cell `record` makes, of other prompts, and fixed while they serve:
  `base` is SGLang's EPLB without redundant experts, `eplb` the same with one for each rank and layer, the fewest that
  it can have. SGLang's `static` splits replicas.
- `craft8`: CRAFT's choice of 8 replicas of a rank over all layers (--replicas: another number, a cell of its own). What
  runs is a rectangle, since engines load no ragged placement: a slot that CRAFT leaves out holds a second copy of an
  expert, beside its only one (rectangle.py). Ranks have CRAFT's loads, and EPLB's memory. So this measures what its
  replicas do to balance, not what fewer of them leave to the KV cache, the larger part of CRAFT's gain in goodput; of
  that only `base` has more. `cache_tokens` says how much.
- `isoload` is the placement and memory of `eplb` under isoload's `dynamic`: own counts, nothing exchanged in a pass.
- Different from the paper: 8 GPUs of one node instead of 48 to 96, DeepEP instead of NCCL, the checkpoint's precision
  instead of bfloat16, the SGLang that is installed instead of 0.4.8. Its prompts (FinePDFs, Lambada, arXiv, cut to 4096
  tokens) are to be given by --prompts. Without, a prompt is ids that follow one another from a random one: that tries
  the machine, and what it routes says nothing of text.
- Not equal: cells run one after the other in the order of the table.
- A cell `isoload` whose log does not say that it is at work has failed; what it cannot do it refuses (ISOLOAD_STRICT).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner import ATTACH, Cell, Load, Row, options, prompt_flags, recorded, recording, run

from bench_dispatch import positive
from picture_balance import line, svg, text

NAME, CHUNK, DECODED = "serving_rates", 4096, 128  # tokens prefilled and requests decoded by a rank at a time
COLOURS = {"base": "#8a8f98", "eplb": "#e0a35c", "craft": "#6fae7c", "isoload": "#4a78b5"}
OWN = "isoload: attached to SGLang's --ep-dispatch-algorithm dynamic (loads own", "policy exact on"
LEFT, TOP, WIDTH, HEIGHT = 60, 40, 500, 260  # of the picture's axes


def cells(asked: argparse.Namespace) -> list[Cell]:
    """The recording, then a cell for each placement."""
    if min(asked.rates) <= 0:
        raise ValueError(f"--rates must be above 0, got {min(asked.rates):g}")
    name, ranks, counts = f"craft{asked.replicas}", str(asked.gpus), str(recorded(asked))
    craft = str(asked.work / f"{name}.json")
    # SGLang divides chunk and requests by the ranks of attention; more than DECODED overrun DeepEP's buffers.
    shared = (
        "--enable-mixed-chunk", "--chunked-prefill-size", str(CHUNK * asked.gpus),
        "--max-running-requests", str(DECODED * asked.gpus), "--cuda-graph-max-bs-decode", str(DECODED),
    )  # fmt: skip
    make = (
        sys.executable, str(Path(__file__).with_name("rectangle.py")), counts, "--ranks", ranks,
        "--replicas", str(asked.replicas), "--output", craft,
    )  # fmt: skip

    def cell(name: str, file: str, redundant: str, *flags: str, **more: Any) -> Cell:
        placed = "--init-expert-location", file, "--ep-num-redundant-experts", redundant
        given: Row = {"variables": {}, "needs": recorded(asked)} | more
        return Cell(name, (*shared, *placed, *flags), tuple(loads(asked)), {"placement": name}, **given)

    return [
        recording(asked, load(asked, "record", min(asked.rates), 1, asked.record_prompts)),
        cell("base", counts, "0"),
        cell("eplb", counts, ranks),
        cell(name, craft, ranks, before=(make,)),
        cell("isoload", counts, ranks, "--ep-dispatch-algorithm", "dynamic", variables=ATTACH, says=(OWN,)),
    ]


def loads(asked: argparse.Namespace) -> Iterator[Load]:
    yield load(asked, "warm-up", min(asked.rates), 2, asked.prompts, kept=False)
    for rate in sorted(asked.rates):
        yield load(asked, f"rate {rate:g}", rate, 3, asked.prompts)


def load(
    asked: argparse.Namespace, name: str, rate: float, seed: int, prompts: Path | None, kept: bool = True
) -> Load:
    number = max(1, round(rate * asked.seconds))
    flags = prompt_flags(prompts, asked.tokens, asked.new, seed)
    return Load(name, number, (*flags, "--request-rate", f"{rate:g}"), kept)


def draw(rows: list[Row]) -> str:
    """A line for each placement: mean time to first token over the rate of requests that was served."""
    lines = {
        row["placement"]: [(of["request_throughput"], of["mean_ttft_ms"] / 1e3) for of in row["loads"]]
        for row in rows
        if "placement" in row and row["loads"] and row.get("error") is None
    }
    points = [point for of in lines.values() for point in of]
    most = [max(axis) for axis in zip(*points, strict=True)] if points else [1.0, 1.0]

    def place(served: float, ttft: float) -> tuple[float, float]:
        return LEFT + WIDTH * served / most[0], TOP + HEIGHT * (1 - ttft / most[1])

    body = [text(LEFT, 18, "time to first token, seconds, mean"), *axes(most)]
    for i, (name, of) in enumerate(lines.items()):
        colour = COLOURS[name.rstrip("0123456789")]  # craft's is followed by its number of replicas
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in of))
        body.append(f'<path d="M{path}" style="fill:none;stroke:{colour};stroke-width:2"/>')
        for point in of:
            x, y = place(*point)
            body.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>')
        body.append(f'<circle cx="{LEFT + WIDTH + 30}" cy="{TOP + 20 * i}" r="5" style="fill:{colour}"/>')
        body.append(text(LEFT + WIDTH + 42, TOP + 20 * i + 4, name))
    return svg(LEFT + WIDTH + 130, TOP + HEIGHT + 44, "Time to first token by requests served", body)


def axes(most: list[float]) -> list[str]:
    """Five lines of either axis, and what they stand for."""
    body = [text(LEFT + WIDTH, TOP + HEIGHT + 36, "requests served per second", "small", "end")]
    for fifth in range(6):
        x, y = LEFT + WIDTH * fifth / 5, TOP + HEIGHT * (1 - fifth / 5)
        body.append(line(LEFT, y, LEFT + WIDTH, y, "grid"))
        body.append(text(LEFT - 6, y + 4, f"{most[1] * fifth / 5:.3g}", "small", "end"))
        body.append(text(x, TOP + HEIGHT + 16, f"{most[0] * fifth / 5:.3g}", "small", "middle"))
    return body


def main() -> int:
    parser = options(__doc__, "deepseek-ai/DeepSeek-R1", NAME)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.5, 1, 2, 4, 6, 8, 12, 16], help="requests/s"
    )
    parser.add_argument("--seconds", type=positive, default=120, help="of arrivals at each rate")
    parser.add_argument(
        "--tokens", type=positive, default=4096, help="of a random prompt; --prompts have theirs"
    )
    parser.add_argument("--new", type=positive, default=256, help="tokens generated for each request")
    parser.add_argument("--replicas", type=positive, default=8, help="of a rank over all layers: CRAFT's R")
    asked = parser.parse_args()
    return run(NAME, cells(asked), asked, draw)


if __name__ == "__main__":
    sys.exit(main())
