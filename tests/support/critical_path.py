"""The critical path of kernels' launches, by source line, in a model of their latencies. No figure: compare versions.

    make critical-path [KERNELS="plan_exact share"] [RANKS=64]

tests/native/simt/latency.h says what the model counts and what it leaves out; it is good to about a factor of two.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch

LABEL = (
    "MODEL of the critical path, good to a factor of two: compare two versions of a kernel, quote no number"
)
INSIDE = "ISOLOAD_CRITICAL_PATH"  # set where isoload has the kernels on the run-time


def show(ranks: int, tokens: int, wanted: list[str], lines: int) -> None:
    import isoload
    from support import simt_scenarios
    from support.simt import TEAM, Runtime

    torch.set_num_threads(1)
    runtime = Runtime(next(Path(isoload.__file__).parent.glob("_C*.so")))
    at = (ranks, 2 * ranks, tokens)
    runtime.watch(races=False)
    x = simt_scenarios.layer(*at)
    calls = {name: call for name, (call, _) in simt_scenarios.OF_LAYERS.items()}
    unknown = [name for name in wanted if name not in calls]
    if unknown:
        raise SystemExit(f"no kernel {', '.join(unknown)}; there are: {', '.join(calls)}")
    print(f"{LABEL}\n{at[0]} ranks, {simt_scenarios.EXPERTS} experts + {at[1]} replicas, {at[2]} tokens\n")
    for name in wanted or calls:
        runtime.watch(races=False, latency=True)
        calls[name](x)
        runtime.watch(races=False)
        for path in runtime.take_paths():
            print(f"{name}: {path.kernel}, {path.blocks} blocks of {path.lanes}")
            print(f"  model: {path.cycles} cycles, {path.high} if no loads overlapped; ", end="")
            print(f"{path.block_barriers} block barriers")
            by_line: Counter[str] = Counter()
            for frames, cycles in path.places:
                by_line[str(next((f for f in frames if f.file != TEAM), frames[0])) if frames else "?"] += (
                    cycles
                )
            for line, cycles in by_line.most_common(lines):
                print(f"  {100 * cycles / max(path.cycles, 1):5.1f} %  {line}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", help="names of scenarios; none: all")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of a rank")
    parser.add_argument("--lines", type=int, default=8, help="of each launch")
    options = parser.parse_args()
    if INSIDE in os.environ:
        return show(options.ranks, options.tokens, options.kernels, options.lines)
    from support import simt_build

    with tempfile.TemporaryDirectory() as folder:
        package = simt_build.build(Path(folder))
        path = os.pathsep.join([str(package), str(simt_build.TESTS)])
        done = subprocess.run(
            [sys.executable, "-m", "support.critical_path", *sys.argv[1:]],
            env={**os.environ, "PYTHONPATH": path, INSIDE: "1"},
        )
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
