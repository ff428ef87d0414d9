"""The matrix of SGLang's blog on Waterfill and LPLB, on the eight GPUs of one machine: throughput of prefill.

    python bench/serving/matrix.py --prompts mmlu.jsonl --record-prompts others.jsonl
    python bench/serving/matrix.py --dry-run                        # every command line, without a GPU or SGLang
    python bench/serving/matrix.py --only 'red32/*' --prompts ...   # these cells again; the others' rows are kept

In the environment of SGLang, with isoload installed beside it. Not run on GPUs so far.

Fairness ledger
- Equal in all cells: model, machine, flags of attention, experts and DeepEP, and the load: 1000 requests at once, 256
  of them in flight, one output token each; in every round the same prompts in the same order, and an empty prefix
  cache at its start. Two rounds of the same shape warm up: other ids, or the first of the file. Figure: the mean of the
  rounds without the fastest and the slowest, as the blog's trimmed mean.
- Placement: none (experts in order), or SGLang's own EPLB at start with 0, 16 and 32 redundant experts, from one file
  of counts that the cell `record` makes. The systems of a row have the same one, and no expert moves while they serve.
- Systems: `stock` leaves replicas to SGLang's `static` and computes shared experts apart, on their token's rank.
  `fused` has them as slots of the dispatch, on the same rank: what Waterfill gains beyond it is its choice of ranks,
  since `--enable-waterfill` and the blog's `--enable-deepep-waterfill` fuse, too. `waterfill`, `lplb` and `both` are
  SGLang's own; `both` is not in the blog. `isoload` has the flags of `both`, with which it is to be compared: policy
  `joint` in place of the two. Without EPLB there is no `lplb`, as in the blog, and isoload has the flag of Waterfill.
- Not equal: cells run one after the other in the order of the table, so what becomes of the machine meanwhile is in
  them (`--only` repeats some). Replicas and fused shared experts take memory: `cache_tokens` says what is left.
- Different from the blog: 8 GPUs of one node instead of 16 of two, unless --gpus 16 --nnodes 2; the SGLang that is
  installed, in which Waterfill's flag has another name. Its prompts (MMLU, GPQA, GSM8K) are to be given by --prompts.
  Without, a prompt is ids that follow one another from a random one: that tries the machine, and what it routes says
  nothing of text.
- A cell has failed whose log does not say that its Waterfill, LPLB or isoload is at work; what isoload cannot do it
  refuses (ISOLOAD_STRICT).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from runner import ATTACH, Cell, Load, Row, Words, options, prompt_flags, recorded, recording, run

from bench_dispatch import positive
from picture_balance import box, svg, text

NAME = "serving_matrix"
PLACEMENTS = {"none": None, "red0": 0, "red16": 16, "red32": 32}  # redundant experts of an EPLB placement


@dataclass(frozen=True)
class System:
    """Flags of the engine, what its log must say of them, variables."""

    flags: Words = ()
    says: tuple[Words, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


FUSED = System(("--enforce-shared-experts-fusion",))
STOCK, WATERFILL = System(), System(("--enable-waterfill",), (("Waterfill TopK modules",),))
LPLB = System(("--ep-dispatch-algorithm", "lp"), (("Initialized LPLB solvers",),))
BOTH = System(LPLB.flags + WATERFILL.flags, LPLB.says + WATERFILL.says)
ISOLOAD = "isoload: attached to SGLang's "
JOINT = System(BOTH.flags, ((ISOLOAD + LPLB.flags[0], "joint on"),), ATTACH)
POURED = System(WATERFILL.flags, ((ISOLOAD + WATERFILL.flags[0], "policy waterfill on"),), ATTACH)
SYSTEMS = {
    "stock": STOCK,
    "fused": FUSED,
    "waterfill": WATERFILL,
    "lplb": LPLB,
    "both": BOTH,
    "isoload": JOINT,
}
IN_ORDER = {
    "stock": STOCK,
    "fused": FUSED,
    "waterfill": WATERFILL,
    "isoload": POURED,
}  # LPLB needs a placement
STYLES = dict(zip(SYSTEMS, ("small", "small", "home", "routed", "met", "other"), strict=True))
WARM_UPS = 2


def cells(asked: argparse.Namespace) -> list[Cell]:
    """The recording, then the systems of each placement."""
    normal = ("--deepep-mode", "normal")
    made = [recording(asked, load(asked, "record", 1, asked.record_prompts))]
    for placement, redundant in PLACEMENTS.items():
        placed, needs = normal, None
        if redundant is not None:
            needs = recorded(asked)
            placed += "--init-expert-location", str(needs), "--ep-num-redundant-experts", str(redundant)
        for name, system in (IN_ORDER if needs is None else SYSTEMS).items():
            about: Row = {"placement": placement, "system": name}
            flags, served = placed + system.flags, tuple(loads(asked))
            made.append(
                Cell(f"{placement}/{name}", flags, served, about, system.variables, system.says, needs)
            )
    return made


def loads(asked: argparse.Namespace) -> Iterator[Load]:
    for turn in range(WARM_UPS):
        yield load(asked, f"warm-up {turn}", 2 + turn, asked.prompts, kept=False)
    for turn in range(asked.rounds):
        yield load(asked, f"round {turn}", 2 + WARM_UPS + turn, asked.prompts)


def load(asked: argparse.Namespace, name: str, seed: int, prompts: Path | None, kept: bool = True) -> Load:
    at_once = "--request-rate", "inf", "--max-concurrency", str(asked.concurrency)
    return Load(name, asked.batch, prompt_flags(prompts, asked.tokens, 1, seed) + at_once, kept)


def trimmed(rates: list[float]) -> float:
    """The mean without the smallest and the largest, of at least three."""
    return mean(sorted(rates)[1:-1] if len(rates) > 2 else rates)


def throughputs(rows: list[Row]) -> dict[str, dict[str, float]]:
    """{placement: {system: tokens per second, trimmed mean of rounds}} of the cells that went well."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["error"] is None and "system" in row:
            rate = trimmed([of["total_throughput"] for of in row["loads"]])
            found.setdefault(row["placement"], {})[row["system"]] = rate
    return {placement: found[placement] for placement in PLACEMENTS if placement in found}


def draw(rows: list[Row]) -> str:
    """A bar for each system, by placement, and its gain over stock of the same placement."""
    left, right, y, body = 130, 560, 14, []
    found = throughputs(rows)
    highest = max((rate for of in found.values() for rate in of.values()), default=1.0)
    for placement, of in found.items():
        body.append(text(8, y + 12, placement, "name"))
        for system in (system for system in SYSTEMS if system in of):
            rate = of[system]
            gain = f", {100 * (rate / of['stock'] - 1):+.1f} %" if "stock" in of else ""
            body.append(text(left - 8, y + 12, system, "small", "end"))
            body.append(box(left, y, (right - left) * rate / highest, 16, STYLES[system]))
            body.append(text(right + 8, y + 12, f"{rate:,.0f} tokens/s{gain}", "small"))
            y += 20
        y += 10
    return svg(760, y + 6, "Tokens per second, trimmed mean of rounds, and gain over stock", body)


def main() -> int:
    parser = options(__doc__, "deepseek-ai/DeepSeek-V3", NAME)
    parser.add_argument("--batch", type=positive, default=1000, help="requests of a round")
    parser.add_argument("--concurrency", type=positive, default=256)
    parser.add_argument(
        "--tokens", type=positive, default=512, help="of a random prompt; --prompts have theirs"
    )
    parser.add_argument("--rounds", type=positive, default=4)
    asked = parser.parse_args()
    return run(NAME, cells(asked), asked, draw)


if __name__ == "__main__":
    sys.exit(main())
