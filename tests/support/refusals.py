"""Good calls of every op, and the bad ones of refused_plans.py and refused_routes.py.

A line there is a change of the good call, " | ", and the message, in which "..." stands for anything. The change is
Python; it knows the arguments of the good call by their names, and what this module holds.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from isoload import ops
from isoload.ops import library
from isoload.ops.tables import ReplicaTables
from support import refused_plans, refused_routes
from support.exact_splits import int32
from support.relaxed_layers import reals

MAX = 2**31 - 1
NAN, INF = float("nan"), float("inf")


def placed(*slots: int, experts: int = 4, layers: int = 0) -> ReplicaTables:
    """Tables of 4 ranks."""
    held = int32(*slots)
    return ops.replica_tables(held.expand(layers, -1) if layers else held, 4, experts)


def tables_of(data: Tensor, like: ReplicaTables) -> ReplicaTables:
    return replace(like, data=data)


def changed(values: Tensor, at: int | tuple[int, int], to: int) -> Tensor:
    values = values.clone()
    values[at] = to
    return values


def uncounted(ids: Tensor) -> ops.Counted:
    """With the numbers of other ids: `count` would refuse these."""
    return ops.count(IDS, 4)._replace(ids=ids)


def empty_tables(ranks: int, experts: int, slots: int, layers: int = 1) -> ReplicaTables:
    data = torch.zeros(layers, ReplicaTables.size(experts, slots), dtype=torch.int32)
    return ReplicaTables(data, ranks, experts, slots)


SLOTS = (0, 1, 1, 2, 2, 0, 3, 3)  # 4 experts on 4 ranks, expert 3 on one
FEW = (0, 1, 1, 2, 2, 0, -1, -1)  # expert 3 has no replica
TABLES, OF_LAYERS = placed(*SLOTS), placed(*SLOTS, layers=3)
LONE, LONE_IDS = placed(0, 1, 2, 0), torch.tensor([[0, 1], [2, -1]])  # expert 3 has no replica
FILLED = ops.replica_tables(int32(0, 1, 2, 2, 3, 0), 2, 4)
SPLIT = reals(2.5, 1, 2, 2, 0, 2.5, 1, 0)
SHARED = (0, 1, -1, 1, 2, -1, 2, 0, -1, 3, 3, -1)  # with room for a shared expert
LOADS = int32([1, 0, 3, 8], [2, 1, 0, 0], [2, 5, 0, 0], [0, 0, 4, 0])
JOINT = int32([1, 0, 3, 8, 5], [2, 1, 0, 0, 0], [2, 5, 0, 0, 9], [0, 0, 4, 0, 1])
QUOTA = int32(1, 2, 2, 1, 3, 3, 4, 0)
HUGE = int32(2**30, 2, 2, 1, 3, 2**30, 4, 0)
IDS, ONE_ID = torch.tensor([[0, 1], [0, -1]]), torch.zeros(1, 1, dtype=torch.int64)
NONE = torch.zeros(4, dtype=torch.int32)
COPIES = int32([1, 2, 3, 4], [5, 6, 7, 8], [9, 1, 2, 3], [4, 5, 6, 7])
CHOSEN = torch.tensor([[0, 3, 5, -1], [1, 4, -1, -1], [2, -1, -1, -1], [5, 4, 3, -1]])
NOBODY = torch.zeros(2, dtype=torch.bool)
HELD = [[torch.ones(2, 2)], [torch.ones(2, 2)]]  # keeps what the addresses point to

summed = {"loads": int32(5, 6, 7, 8), "tables": TABLES}
fill = {
    "loads": int32(*range(8)).view(2, 4),
    "slot_to_expert": int32(0, 1, -1, 2, 3, -1),
    "home_slot": int32(0, 1, 3, 4),
    "num_ranks": 2,
    "spare_slots": 1,
}
own = {"offset": NONE, "source": 0}
shares = {"loads": torch.ones_like(LOADS), "quota": QUOTA, "tables": TABLES, "ranks_per_node": 2}
routed = {"counted": ops.count(IDS, 4), "send_counts": int32(1, 1, 0, 0, 0, 1, 0, 0), "tables": TABLES}
lent = {
    "slot_to_expert": int32(0, 1, 2, -1, 2, -1, -1, 1),
    "home": int32([0, 1], [0, 0], [1, 0], [-1, -1]),
    "peers": ops.addresses(HELD),
    "num_ranks": 2,
    "rank": 0,
}
# How an op is called, and the arguments of a good call.
GOOD: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "count": (ops.count, {"topk_ids": IDS, "num_experts": 4}),
    "replica_tables": (ops.replica_tables, {"slot_to_expert": int32(0, 1, 1, 0), "num_ranks": 2, "num_experts": 2}),
    "plan_exact": (ops.plan_exact, summed),
    "of_a_rank": (ops.plan_exact, {"loads": LOADS, "tables": TABLES, "rank": 1}),
    "plan_active": (ops.plan_active, summed),
    "plan_lp": (ops.plan_lp, summed),
    "round_split": (ops.round_split, {"split": SPLIT, "loads": int32(5, 3, 2, 1), "tables": TABLES}),
    "plan_joint": (
        ops.plan_joint, {"loads": JOINT, "tables": placed(*SHARED), "rank": 1, "num_shared": 1, "first_shared": 2},
    ),
    "plan_fill": (ops.plan_fill, {**fill, "ranks_per_node": 2}),
    "top_up": (ops.top_up, fill),
    "plan_waterfill": (ops.plan_waterfill, {"copies": COPIES, "tokens": int32(9, 8, 7, 6)}),
    "plan_own": (
        ops.plan_own, {"counts": int32(3, 1, 2), "tables": placed(0, 1, 2, 0, experts=3), **own,
                       "recent": torch.arange(3), "sent": torch.zeros(3, 4).long()},
    ),
    "balance_own": (ops.balance_own, {"topk_ids": LONE_IDS, "tables": LONE, **own, "recent": torch.arange(4)}),
    "balance_same": (ops.balance_same, {"topk_ids": LONE_IDS, "tables": LONE}),
    "share": (ops.share, {**shares, "rank": None}),
    "share_by_rank": (ops.share_by_rank, shares),
    "route": (ops.route, routed),
    "route_sampled": (ops.route_sampled, {"topk_ids": IDS, "weights": torch.ones(8), "tables": TABLES, "seed": 1}),
    "route_shared": (
        ops.route_shared, {"slots": torch.tensor([[0, 5], [2, -1], [-1, -1], [7, 6]]),
                           "source_quota": int32(1, 2, 0, 0), "slots_per_rank": 2, "rank": 0},
    ),
    "route_shared_sampled": (
        ops.route_shared_sampled, {"slots": torch.tensor([[0, 5], [3, -1]]), "load": int32(2, 1, 0),
                                   "tokens": int32(1, 1, 0), "slots_per_rank": 2, "rank": 0, "rule": "dynamic"},
    ),
    "append_shared_expert": (
        ops.append_shared_expert, {"slots": torch.tensor([[0, 5], [3, -1]]), "weights": torch.ones(2, 2),
                                   "ranks": int32([2], [0]), "routed_per_rank": 2},
    ),
    "number_rows": (ops.number_rows, {"slots": torch.tensor([[0, 2], [3, -1]]), "slots_per_rank": 1, "num_ranks": 4}),
    "pack_rows": (
        ops.pack_rows, {"x": torch.zeros(4, 16).bfloat16(), "slots": CHOSEN, "weights": torch.ones(4, 4),
                        "rows": ops.number_rows(CHOSEN, 3, 2), "slots_per_rank": 3, "num_rows": 6, "capacity": None},
    ),
    "group_copies": (
        ops.group_copies, {"slots": torch.zeros(2, 2).int(), "first": 0, "num_slots": 1, "num_places": None},
    ),
    "borrow": (ops.borrow, {**lent, "spare": [torch.ones(2, 2)]}),
    "borrow_backward": (
        ops.borrow_backward, {**lent, "totals": [torch.ones(2, 2)], "spare_slots": 2, "dtype": torch.float32},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Refusal:
    op: str
    change: str
    message: str

    def __str__(self) -> str:
        return f"{self.op}: {self.change}"

    def arguments(self) -> dict[str, Any]:
        good = GOOD[self.op][1]
        return {**good, **eval(f"dict({self.change})", globals(), good)}

    def pattern(self) -> str:
        return "^" + ".*".join(map(re.escape, self.message.split("...")))


def read(text: str) -> Iterator[Refusal]:
    """Indented lines go on with the one before."""
    names: list[str] = []
    for line in text.replace("\n    ", " ").strip().splitlines():
        if line.startswith("["):
            names = line[1:-1].split()
            continue
        change, bar, message = line.partition(" | ")
        assert bar, f"no message: {line}"
        yield from (Refusal(name, change, message) for name in names)


def raw_call(name: str, change: str = "") -> tuple[Any, tuple[Any, ...]]:
    """The op that a good call with this change makes, and its arguments."""
    made: list[tuple[Any, tuple[Any, ...]]] = []
    call, good = GOOD[name]
    given = {**good, **eval(f"dict({change})", globals(), good)}

    def noted(op: Any, *args: Any) -> Any:
        made.append((op, args))
        return library.call(op, *args)

    with patch.object(sys.modules[call.__module__], "call", noted):
        call(**given)
    return made[-1]


REFUSALS = [*read(refused_plans.REFUSED), *read(refused_routes.REFUSED)]
