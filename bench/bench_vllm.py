"""vLLM's choice of replicas and isoload's on the same choices of experts: imbalance.

Needs no vLLM: python bench/bench_vllm.py

Fairness ledger
- Placement: EPLB on the first half of the shipped gpt-oss trace, 32 experts in 8 ranks of 5 slots, the same for all.
  Batches: the other half, cut into batches of as many tokens as a row says, all layers.
- own: tokens lie on 8 ranks in turn, as before an all-to-all; each rank chooses replicas for its own rows.
- same: all ranks hold all tokens, as with tensor parallelism alone.
- vLLM's rule (a hash of the row) is tests/real_engines/harness/vllm_cpu.py's, which `make test-vllm` compares with
  vLLM's own kernel, row by row. It is Triton for GPUs: no times here.
- isoload, all counts: policy exact by the counts of all ranks, as with ISOLOAD_LOADS=gathered. isoload, own counts:
  each rank by its own, targets exchanged every 16 batches; of 1,024 tokens there are four, which have none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "real_engines" / "harness"))
from vllm_cpu import map_and_record  # noqa: E402

import isoload  # noqa: E402
from isoload.engines.layers import EXCHANGE_EVERY  # noqa: E402
from isoload.engines.tables import ReplicaLists, replica_lists  # noqa: E402
from lib.harness import command, write_results  # noqa: E402
from lib.streams import shipped_batches  # noqa: E402

RANKS, SLOTS = 8, 5


def vllms(lists: ReplicaLists, layer: int, rows: list[Tensor]) -> Tensor:
    """[R * S] copies per slot."""
    loads = torch.zeros(RANKS * SLOTS, dtype=torch.int32)
    maps = lists.logical_to_physical[layer], lists.num_replicas[layer]
    for ids in rows:
        map_and_record(ids, loads, *maps, torch.tensor(True))
    return loads


def isoloads(placement: isoload.Placement, layer: int, rows: list[Tensor]) -> Tensor:
    loads = torch.zeros(RANKS, placement.num_experts, dtype=torch.int32)
    for rank, ids in enumerate(rows):
        loads[rank] = isoload.count(ids, placement.num_experts)
    made = isoload.plan(loads, placement, layer, "exact")
    slots = [isoload.route(ids, loads, made, rank) for rank, ids in enumerate(rows)]
    return isoload.count(torch.cat(slots), RANKS * SLOTS)


def by_own_counts(placement: isoload.Placement) -> Callable[[int, list[Tensor]], Tensor]:
    """Of one batch after the other: (layer, rows of every rank) to copies per slot."""
    group = isoload.LocalGroup(placement.topology)
    layers = [isoload.Balancer(placement, i, group=group, loads="own") for i in range(placement.num_layers)]

    def next_batch(layer: int, rows: list[Tensor]) -> Tensor:
        balancer = layers[layer]
        if layer == 0 and balancer.batch and balancer.batch % EXCHANGE_EVERY == 0:
            balancer.exchange(*layers[1:])
        return isoload.count(torch.cat(balancer(rows)), RANKS * SLOTS)

    return next_batch


def judge(placement: isoload.Placement, batches: list[Any], same: bool) -> list[dict[str, Any]]:
    lists = replica_lists(placement)
    choices = {"vllm": partial(vllms, lists), "isoload": partial(isoloads, placement)}
    if not same:
        choices["isoload_own"] = by_own_counts(placement)
    found: dict[str, list[float]] = {name: [] for name in choices}
    for batch in batches:
        for layer in range(placement.num_layers):
            rows = [batch.topk_ids[layer]] if same else [batch.on_rank(layer, rank) for rank in range(RANKS)]
            rows = [ids.contiguous() for ids in rows]
            for name, choose in choices.items():
                per_rank = choose(layer, rows).view(RANKS, -1).sum(1)
                found[name].append(float(per_rank.max() * RANKS / per_rank.sum()))
    return [
        {"policy": name, "imbalance_mean": sum(values) / len(values), "imbalance_max": max(values)}
        for name, values in found.items()
    ]


def main() -> None:
    torch.set_num_threads(1)
    parser = command(__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[64, 1024], help="tokens per batch, all ranks"
    )
    found = []
    for tokens in parser.parse_args().tokens:
        placement, batches = shipped_batches(tokens, RANKS, SLOTS)
        for same in (False, True):
            held = {"tokens": tokens, "held": "same" if same else "own"}
            found += [held | row for row in judge(placement, batches, same)]
    print(write_results("bench_vllm", found))


if __name__ == "__main__":
    main()
