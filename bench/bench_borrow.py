"""Borrowed experts' rows between ranks: bytes per second of borrow and borrow_backward.

Fairness ledger
- Four virtual ranks of one process with two spare slots each, all filled with experts of the rank before; one rank's
  call, best of the blocks tried. On a GPU all ranks lie on one device, so this is no NVLink number.
- GB/s: bytes of rows that a call fills or adds, over its median time, waiting for the device included.
- torch: the same rows, known on the host: a copy_ per row; total += row.to(float32), what a host that had waited for
  the plan would do.
- Rows are bf16 experts without biases, gate_up [2 I, H] and down [H, I].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isoload import ops
from lib import table
from lib.harness import command, measure, write_results

RANKS, SPARE, HOMES = 4, 2, 4
SHAPES = {"H 2048, I 768": (2048, 768), "H 7168, I 2048": (7168, 2048)}


def timed(call: Callable[[], Any], cuda: bool) -> float:
    """Microseconds."""

    def waited() -> None:
        call()
        if cuda:
            torch.cuda.synchronize()

    return measure(waited, seconds=1.0, least=5).median


def bench(hidden: int, inner: int, device: str, blocks: list[int]) -> dict[str, Any]:
    shapes, cuda = ((2 * inner, hidden), (hidden, inner)), device == "cuda"

    def stacks(rows: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        return [torch.ones(rows, *shape, dtype=dtype, device=device) for shape in shapes]

    weights, pools = [stacks(HOMES) for _ in range(RANKS)], [stacks(SPARE) for _ in range(RANKS)]
    totals = stacks(HOMES, torch.float32)
    home = torch.tensor([(e // HOMES, e % HOMES) for e in range(RANKS * HOMES)], dtype=torch.int32)
    slots = torch.arange(RANKS * HOMES, dtype=torch.int32).view(RANKS, HOMES)
    filled = torch.cat([slots, slots.roll(1, 0)[:, :SPARE]], 1).flatten()  # two experts of the rank before
    filled, home = filled.to(device), home.to(device)
    peers, gradients = ops.addresses(weights), ops.addresses(pools)

    def borrow_by_torch() -> None:
        for pool, stack in zip(pools[1], weights[0], strict=True):
            for j in range(SPARE):
                pool[j].copy_(stack[j])

    def return_by_torch() -> None:
        for total, pool in zip(totals, pools[1], strict=True):
            for j in range(SPARE):
                total[j] += pool[j].to(torch.float32)

    def borrow(count: int) -> float:
        return timed(lambda: ops.borrow(filled, home, peers, pools[1], RANKS, 1, blocks=count), cuda)

    def give_back(count: int) -> float:
        args = (filled, home, gradients, totals, RANKS, 0, SPARE, torch.bfloat16)
        return timed(lambda: ops.borrow_backward(*args, blocks=count), cuda)

    size = SPARE * sum(stack[0].numel() * 2 for stack in pools[0])
    times = {
        "borrow": {count: borrow(count) for count in blocks},
        "borrow_torch": timed(borrow_by_torch, cuda),
        "backward": {count: give_back(count) for count in blocks},
        "backward_torch": timed(return_by_torch, cuda),
    }
    best = {name: min(us.values()) if isinstance(us, dict) else us for name, us in times.items()}
    return {"bytes": size, "us": times, "gb_per_s": {name: size / us / 1e3 for name, us in best.items()}}


def main() -> None:
    command(__doc__).parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = [8, 16, 32, 64, 128] if device == "cuda" else [32]
    where = torch.cuda.get_device_name() if device == "cuda" else device
    rows = [
        {"expert": name, "on": where, **bench(hidden, inner, device, blocks)}
        for name, (hidden, inner) in SHAPES.items()
    ]
    rates = table.same(rows[0]["gb_per_s"], "{gb_per_s[NAME]:.2f}")
    table.show(f"GB/s on {where}", {"expert": "{expert}", "MB": "{bytes:.0f/1e6}", **rates}, rows)
    print(write_results("bench_borrow", rows))


if __name__ == "__main__":
    main()
