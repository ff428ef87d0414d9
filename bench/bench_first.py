"""How long does the first batch of a process take, and the second?

Fairness ledger
- one layer of 256 experts on 8 ranks, 8 spare slots each where a policy borrows, else 2 replicas; a shared expert where
  a policy is made for them. 512 tokens per rank, top-8.
- each policy in a process of its own, forked from one that has imported isoload and called nothing; the placement, the
  Balancer and the ids are made before the clock starts. One call each: no median.
- modules: what the first call imports. None of torch's compiler: tests/test_layout.py.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

import isoload
from lib.harness import begin, write_results

RANKS, EXPERTS, TOKENS, TOP_K = 8, 256, 512, 8
OF_SHARED = ("shared_local", "waterfill", "waterfill_sampled", "joint")


def first_calls(policy: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    draw, topology = torch.Generator().manual_seed(0), isoload.Topology(RANKS, 4)
    spare, shared = 8 * isoload.POLICIES[policy]().borrows, int(policy in OF_SHARED)
    placement = isoload.place(
        torch.arange(1, EXPERTS + 1)[None] ** 2,
        topology,
        slots_per_rank=EXPERTS // RANKS + (spare or 2) + shared,
        spare_slots=spare,
        num_shared=shared,
        placer="trivial" if spare else "eplb",
    )
    balancer = isoload.Balancer(
        placement, policy=policy, group=isoload.LocalGroup(topology), shared_columns=False
    )
    popularity = torch.linspace(1, 4, EXPERTS).expand(TOKENS, -1)
    ids = [torch.multinomial(popularity, TOP_K, generator=draw) for _ in range(RANKS)]
    before, ms = len(sys.modules), []
    for _ in range(2):
        start = time.perf_counter_ns()
        balancer(ids)
        ms.append((time.perf_counter_ns() - start) / 1e6)
    return {"policy": policy, "first_ms": ms[0], "second_ms": ms[1], "modules": len(sys.modules) - before}


def main() -> None:
    begin(__doc__)
    rows = []
    for policy in isoload.POLICIES:
        with ProcessPoolExecutor(1, get_context("fork")) as fresh:
            rows.append(fresh.submit(first_calls, policy).result())
        print(
            "{policy:17} first {first_ms:7.2f} ms, second {second_ms:6.2f} ms, {modules} modules".format(
                **rows[-1]
            )
        )
    print("written:", write_results("bench_first", rows))


if __name__ == "__main__":
    main()
