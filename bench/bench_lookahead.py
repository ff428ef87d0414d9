"""Lookahead in a real, tiny language model: how many of the tokens' choices the next gate predicts a layer ahead.

Fairness ledger
- The model: examples/train_tiny.py with six layers, no balancing, 60 steps on four CPU processes, its text this
  repository's LICENSE; it predicts batches that it was not trained on. A tiny model of short training: deeper ones
  change their hidden states less from layer to layer.
- lookahead: the next layer's own gate on its own norm of the residual before this layer's experts have run.
- popularity: the K most popular experts of earlier batches, the same for every token.
- One seed is one row: weights and batches. Shares are means over layers 1 to 5. No times.

Usage: python bench/bench_lookahead.py [--write]
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

from lib import table
from lib.harness import command, write_results
from lib.streams import SHIPPED

COMMAND = ("examples/train_tiny.py", "--layers", "6", "--policies", "none", "--text", "LICENSE")
LINE = re.compile(r"accuracy a layer ahead, .*: lookahead ([\d.]+)%, popularity ([\d.]+)%")


def judge(seed: int) -> dict[str, Any]:
    """One training; the shares that it prints."""
    command = [sys.executable, *COMMAND, "--seed", str(seed)]
    done = subprocess.run(command, cwd=SHIPPED.parents[2], capture_output=True, text=True)
    found = LINE.search(" ".join(done.stdout.split()))
    if done.returncode or found is None:
        raise SystemExit(f"{' '.join(COMMAND)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    lookahead, popularity = map(float, found.groups())
    return {"seed": seed, "lookahead": lookahead / 100, "popularity": popularity / 100}


def main() -> None:
    parser = command(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--write", action="store_true", help="write the results file")
    asked = parser.parse_args()
    rows = [judge(seed) for seed in asked.seeds]
    table.show_rows("right choices, a layer ahead", rows)
    if asked.write:
        print(write_results("bench_lookahead", rows))


if __name__ == "__main__":
    main()
