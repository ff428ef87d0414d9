"""Random placements, policies and layers, and processes that end, for as long as you like.

    python tests/fuzz.py --seconds 3600        # from a seed that is printed
    python tests/fuzz.py --seed 17             # one case, the same each time

Runs isoload against a dense layer and maximum flows that share no code with it (tests/support/fuzz*.py). A case that
fails prints its seed; the exit code is 1 if any did.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from support.fuzz import KINDS, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long; the last case ends by itself")
    parser.add_argument("--seed", type=int, help="one case")
    parser.add_argument("--first", type=int, help="the first of many seeds; default: by the clock")
    parser.add_argument("--kind", choices=sorted(KINDS), help="default: what the seed draws")
    asked = parser.parse_args()
    if asked.seed is not None:
        seeds, seconds = iter([asked.seed]), float("inf")
    else:
        first = int(time.time()) * 1000 if asked.first is None else asked.first
        print(f"seeds {first}, {first + 1}, ...", flush=True)
        seeds, seconds = itertools.count(first), asked.seconds
    failed = run_seeds(seeds, seconds, lambda text: print(text, flush=True), asked.kind)
    if failed:
        print(f"{len(failed)} failed: {' '.join(map(str, failed[:50]))}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
