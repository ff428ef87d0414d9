"""SGLang's own dispatch and isoload's on the same choices: imbalance, and the time of the call on a CPU.

Runs in the environment of `make test-sglang`: .venv-sglang/bin/python bench/bench_sglang.py

Fairness ledger
- Placement: EPLB on the first half of the shipped gpt-oss trace, 32 experts in 8 ranks of 5 slots, the same for all.
  Batches: the other half, cut into batches of as many tokens as a row says, all layers.
- own: tokens lie on 8 ranks in turn, as before an all-to-all. `static` is SGLang's table of each rank, `dynamic` its
  random replica (seed 0), isoload policy `exact` (SGLang's option lp).
- same: all ranks hold all tokens. SGLang's `dynamic` takes replicas by row there and refuses `static`; isoload the
  same option.
- SGLang's functions are called as they are: _topk_ids_logical_to_physical_static and _dynamic, on CPU tensors.
- time: one layer's call for one rank's tokens, one thread. isoload's is count, plan and route; the gather of `own`, an
  exchange of 8 x 32 integers, is not in it. SGLang's lp kernels need a GPU and are not here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "real_engines" / "harness"))
import torchvision_names  # noqa: E402, F401

import isoload  # noqa: E402
from isoload.engines.tables import replica_lists  # noqa: E402
from lib.harness import command, measure, write_results  # noqa: E402
from lib.streams import shipped_batches  # noqa: E402

RANKS, SLOTS = 8, 5
Dispatch = Callable[[int, int, Tensor], Tensor]  # layer, rank, topk_ids -> slots


def sglang_dispatch(placement: isoload.Placement, algorithm: str, same: bool) -> Dispatch:
    """SGLang's function, on the tables of every layer and rank."""
    from sglang.srt.eplb import expert_location, expert_location_dispatch
    from sglang.srt.runtime_context import get_context

    get_context().override_server_args(tp_size=RANKS, ep_size=RANKS, device="cpu").install()
    lists = replica_lists(placement)
    slots = lists.logical_to_physical
    static = [
        expert_location.compute_logical_to_rank_dispatch_physical_map(slots, RANKS, RANKS * SLOTS, rank)
        for rank in range(RANKS)
    ]
    function = getattr(expert_location_dispatch, f"_topk_ids_logical_to_physical_{algorithm}")

    def dispatch(layer: int, rank: int, ids: Tensor) -> Tensor:
        info = expert_location_dispatch.ExpertLocationDispatchInfo(
            algorithm, static[rank][layer], slots[layer], lists.num_replicas[layer], RANKS * SLOTS, same
        )
        return function(ids, info)

    return dispatch


def isoload_dispatch(placement: isoload.Placement, loads: dict[int, Tensor]) -> Dispatch:
    """One rank's part, given what the gather brings: loads [R, E] by layer."""
    layers = [placement.layer(i, "cpu") for i in range(placement.num_layers)]

    def dispatch(layer: int, rank: int, ids: Tensor) -> Tensor:
        gathered = loads[layer].index_copy(
            0, torch.tensor([rank]), isoload.count(ids, placement.num_experts)[None]
        )
        made = isoload.plan(gathered, layers[layer], None, "exact")
        return isoload.route(ids, gathered, made, rank)

    return dispatch


def rows_of(batch: Any, layer: int, same: bool) -> list[Tensor]:
    """[T, K] of every rank that dispatches: with the same tokens one stands for all."""
    if same:
        return [batch.topk_ids[layer].contiguous()]
    return [batch.on_rank(layer, rank).contiguous() for rank in range(RANKS)]


def judge(name: str, placement: isoload.Placement, batches: list[Any], same: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    worst, total, number = 0.0, 0.0, 0
    theirs = None if name == "isoload" else sglang_dispatch(placement, name, same)
    for batch in batches:
        for layer in range(placement.num_layers):
            rows = rows_of(batch, layer, same)
            dispatch = theirs
            if dispatch is None:
                loads = torch.zeros(RANKS, placement.num_experts, dtype=torch.int32)
                for rank, ids in enumerate(rows):
                    loads[rank] = isoload.count(ids, placement.num_experts)
                dispatch = isoload_dispatch(placement, {layer: loads})
            slots = torch.cat([dispatch(layer, rank, ids) for rank, ids in enumerate(rows)])
            copies = torch.bincount(slots.flatten().long() // SLOTS, minlength=RANKS)
            imbalance = float(copies.max() * RANKS / copies.sum())
            worst, total, number = max(worst, imbalance), total + imbalance, number + 1
    # Afterwards, since a timed call draws as many random numbers as it has repeats.
    us = measure(lambda: dispatch(placement.num_layers - 1, 0, rows[0])).median
    return {"imbalance_mean": total / number, "imbalance_max": worst, "us": us}


def main() -> None:
    torch.set_num_threads(1)
    parser = command(__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[64, 1024], help="tokens per batch, all ranks"
    )
    found = []
    for tokens in parser.parse_args().tokens:
        placement, batches = shipped_batches(tokens, RANKS, SLOTS)
        for same, names in ((False, ("static", "dynamic", "isoload")), (True, ("dynamic", "isoload"))):
            for name in names:
                row = {"tokens": tokens, "held": "same" if same else "own", "policy": name}
                found.append(row | judge(name, placement, batches, same))
                print(found[-1])
    print(write_results("bench_sglang", found))


if __name__ == "__main__":
    main()
