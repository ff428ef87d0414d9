"""Does a kernel that starts early wait for a memset ahead of it, in a captured graph too? Prints the graphs' nodes.

`count` of many ids clears its counts by a memset and adds to them in the kernel behind; here torch clears the ids too.
Between replays both hold something else.
"""

from __future__ import annotations

import sys

import torch

import isoload
from lib.gpu_clock import Graph

TOKENS, TOP_K, EXPERTS = 2**20, 8, 256  # 32 MB: a memset of microseconds


def main() -> None:
    ids = torch.full((TOKENS, TOP_K), 7, dtype=torch.int32, device="cuda")
    wanted = torch.zeros(EXPERTS, dtype=torch.int32)
    wanted[0] = ids.numel()

    def call() -> torch.Tensor:
        ids.zero_()
        return isoload.count(ids, EXPERTS)

    graph = Graph([call])
    counts = graph.results[0]
    wrong = {"graph": 0, "stream": 0}
    for _ in range(100):
        ids.fill_(7)
        counts.fill_(77)
        graph.replay()
        wrong["graph"] += not torch.equal(counts.cpu(), wanted)
        ids.fill_(7)
        wrong["stream"] += not torch.equal(call().cpu(), wanted)
    isoload.ops.check_device("cuda")
    print(f"{graph.num_nodes()} nodes; of 100 runs wrong: {wrong}")
    sys.exit(any(wrong.values()))


if __name__ == "__main__":
    main()
