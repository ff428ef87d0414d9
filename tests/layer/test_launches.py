"""How many kernels a forward launches on a GPU outside of its GEMMs, and how much memory it takes on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.weights.experts import ExpertWeights
from support.fake_ranks import Everything, OneRank, kept_memos, one_rank
from support.host_waits import HostWaits
from support.launches import Launches, stand_ins

RANKS, TOKENS, TOP_K, EXPERTS, HIDDEN = 16, 4096, 8, 256, 7168
ROWS, COPIES = (
    1651,
    TOKENS * TOP_K // RANKS,
)  # from a rank to another: 1 - (15/16)^8 of the tokens; all copies
TOPOLOGY = isoload.Topology(RANKS, 8)
GB = 1e9


def answer(tensor: Tensor) -> list[Any]:
    """Row counts as of even routing, no errors, no facts that differ."""
    if tensor.dim() == 3:
        return [[[ROWS, ROWS, COPIES] + [0] * (tensor.shape[2] - 3)] * RANKS]
    return [[0] * tensor.shape[1]] * len(tensor) if tensor.dim() == 2 else [0] * len(tensor)


def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    ids = torch.empty(len(rows), TOP_K, dtype=torch.int64, device=rows.device)
    return ids, torch.empty(len(rows), TOP_K, device=rows.device)


def second_forward(capacity: int | None, max_copies: int | None = None, policy: str = "exact") -> Launches:
    """What the second forward of one of 16 ranks launches: 4096 tokens of DeepSeek-V3's width, narrow experts."""
    transport = one_rank(0, capacity, TOPOLOGY, max_copies)
    borrows = isoload.POLICIES[policy]().borrows
    placement = isoload.place(
        torch.ones(1, EXPERTS),
        TOPOLOGY,
        slots_per_rank=18,
        spare_slots=2 if borrows else 0,
        placer="trivial" if borrows else "eplb",
    )
    assert placement.has_freedom == (True,)  # of real tensors, before they are fake
    transport.group._agreed = Everything()
    launches = Launches()
    with HostWaits(answer), torch.no_grad(), kept_memos(), launches, stand_ins(launches):
        shapes = (EXPERTS, 16, HIDDEN), (EXPERTS, HIDDEN, 8)
        dense = ExpertWeights(*(torch.zeros(s, dtype=torch.bfloat16, device="cuda") for s in shapes))
        layer = isoload.MoE(gate, dense, transport, placement, policy=policy)
        layer.balancer._own[dense.down.device] = layer.balancer.placed_on(dense.down.device)
        rows = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        layer(rows)
        launches.clear()
        layer(rows)
    assert layer.last_plan is not None
    return launches


@pytest.mark.parametrize("capacity", [None, TOKENS])
def test_twenty_launches(capacity: int | None) -> None:
    launches = second_forward(capacity)
    assert len(launches.kernels) <= 20, "\n".join(launches.kernels)
    counted = launches.counted()
    for op in (
        "count",
        "plan_exact",
        "route",
        "number_rows",
        "pack_rows",
        "group_copies",
        "spread_rows",
    ):
        assert counted[op] > 0, op


def test_three_launches_from_ids_to_slots() -> None:
    """But for those of the gather."""
    kernels = second_forward(None).kernels
    ours = [line.split(" ")[0] for line in kernels if "in transport/" not in line]
    assert ours[: ours.index("number_rows")] == ["count", "plan_exact", "route"]


def launched(policy: str, num_shared: int, tokens: int = TOKENS, **how: Any) -> list[str]:
    """The kernels of a Balancer's second batch on one of 16 ranks, but for those of the gather."""
    placement = isoload.place(
        torch.ones(1, EXPERTS), TOPOLOGY, slots_per_rank=18 + num_shared, num_shared=num_shared, placer="eplb"
    )
    assert placement.has_freedom == (True,)  # of real tensors, before they are fake
    group, launches = OneRank(3, TOPOLOGY), Launches()
    how["tokens"] = how.pop("tokens_are", "own")
    group._agreed = Everything()
    with HostWaits(answer), torch.no_grad(), kept_memos(), launches:
        balancer = isoload.Balancer(placement, 0, policy, group, **how)
        width = TOP_K + (num_shared if how.get("shared_columns", True) else 0)
        ids = torch.empty(tokens, width, dtype=torch.int64, device="cuda")
        balancer._own[ids.device] = balancer.placed_on(ids.device)
        balancer(ids)
        launches.clear()
        balancer(ids)
    return [line.split(" ")[0] for line in launches.kernels if "in transport/" not in line]


def test_one_launch_from_own_counts_and_three_of_many_copies() -> None:
    """And no exchange, though the group has 16 ranks."""
    assert launched("exact", 0, loads="own") == ["balance_own"] * 3
    assert launched("exact", 0, 8192 // TOP_K, loads="own") == ["balance_own"]
    assert launched("exact", 0, 8192 // TOP_K + 1, loads="own") == ["balance_own"] * 3


def test_six_launches_from_a_nodes_counts() -> None:
    """But for those of the gather in the node: its sum, its split, and what of it is this rank's."""
    made = ["count", "sum", "plan_own", "constant_pad_nd", "share", "route"]
    assert launched("exact", 0, loads="node") == made


def test_launches_from_the_same_rows() -> None:
    """Count, plan and route, and the loads of ranks that have none."""
    assert launched("exact", 0, tokens_are="same") == ["balance_same"] * 4


@pytest.mark.parametrize("policy", ["joint", "waterfill"])
def test_three_launches_from_ids_to_slots_with_a_shared_expert(policy: str) -> None:
    """The last block to look up routed copies deals the shared ones to ranks."""
    assert launched(policy, 1) == ["count", "plan_joint", "route"]


def test_three_launches_where_the_caller_gives_no_shared_columns() -> None:
    """They are added while the copies are counted."""
    assert launched("joint", 1, shared_columns=False) == ["count", "plan_joint", "route"]


def test_launches_where_shared_experts_stay_home() -> None:
    assert launched("exact", 1) == [
        "count",
        "plan_exact",
        "floor_divide",
        "add_",
        "route",
    ]


def test_memory_of_exact_splits() -> None:
    """Buffers hold what arrives; all of transport and permutation, and the activations of narrow experts."""
    assert second_forward(None).peak <= 1.5 * GB


def test_memory_of_a_fixed_capacity() -> None:
    """Rows for every pair, copies up to the most that a rank gets: a quarter above the mean."""
    assert second_forward(TOKENS, TOKENS * TOP_K * 5 // 4).peak <= 4 * GB
    assert second_forward(TOKENS).peak > 8 * GB
