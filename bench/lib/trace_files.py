"""Files of recorded routing: which are in a clone, and the one sentence that ends a bench without its file."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from isoload.traces import Trace, read_trace

BENCH = Path(__file__).parents[1]
CLONE = BENCH / "traces"
IN_CLONE = (
    *("dsv2lite_esft_intent", "dsv2lite_esft_law", "dsv2lite_esft_summary"),
    *("gptoss20b_decode_mmlu", "qwen3_30b_decode_totals", "qwen3_30b_pertoken_small"),
)
SHIPPED = BENCH.parent / "examples" / "traces" / "gptoss20b_decode.npz"


def add_traces(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--traces",
        type=Path,
        default=CLONE,
        metavar="FOLDER",
        help="folder of npz traces [default: bench/traces]",
    )


def missing(names: Iterable[str]) -> str:
    """One sentence about files that are not there."""
    listed = ", ".join(names)
    return f"no {listed} in --traces: bench/traces has those with a licence, bench/fetch_traces.py builds the others"


def need(folder: Path, *names: str) -> list[Trace]:
    """The traces; ends the bench with a sentence if one is missing."""
    if absent := [name for name in names if not (folder / f"{name}.npz").exists()]:
        raise SystemExit(missing(absent))
    return [read_trace(folder / f"{name}.npz") for name in names]


def present(folder: Path, *names: str) -> dict[str, Path]:
    """The files that are there. The others are printed."""
    paths = {name: folder / f"{name}.npz" for name in names}
    if absent := [name for name, path in paths.items() if not path.exists()]:
        print(f"left out: {missing(absent)}")
    return {name: path for name, path in paths.items() if path.exists()}


def rows_or_end(rows: Collection[Any], names: Iterable[str]) -> None:
    """Ends a bench that has measured nothing, because all of its files are missing, with a sentence."""
    if not rows:
        raise SystemExit(missing(names))
