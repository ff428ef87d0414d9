"""Where nothing is planned: every copy reaches a slot that holds its expert's weights, from the placement alone."""

from __future__ import annotations

import random

import pytest
import torch

import isoload
from isoload.balancing.routing import route_fixed
from isoload.policies import StaticPolicy
from isoload.weights.layout import layouts

EXPERTS, RANKS, K = 12, 4, 3


def doubled(seed: int, num_shared: int = 0) -> isoload.Placement:
    """Every expert somewhere, the other slots at random: second slots of one expert on one rank, empty slots."""
    draw = random.Random(seed)
    rows: list[list[int]] = [[] for _ in range(RANKS)]
    for expert in range(EXPERTS):
        rows[draw.randrange(RANKS)].append(expert)
    size = max(map(len, rows)) + 2
    for row in rows:
        row += [draw.choice([*row, -1]) for _ in range(size - len(row))]
        draw.shuffle(row)
        row += range(EXPERTS, EXPERTS + num_shared)
    topology = isoload.Topology(RANKS, ranks_per_node=2)
    return isoload.Placement(
        torch.tensor(rows).view(1, -1), topology, EXPERTS + num_shared, num_shared=num_shared
    )


@pytest.mark.parametrize("num_shared", [0, 1])
@pytest.mark.parametrize("seed", range(20))
def test_second_slots_of_an_expert_get_no_copies(seed: int, num_shared: int) -> None:
    """Regression: they hold no weights, and fixed routes chose them."""
    placement = doubled(seed, num_shared)
    placed = placement.layer(0, "cpu")
    held = layouts(placed)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=draw)[:K] for _ in range(50)])
    ids = torch.cat([ids, torch.arange(EXPERTS, EXPERTS + num_shared).expand(50, -1)], dim=1)
    for rank in range(RANKS):
        slots = route_fixed(ids, placed, rank)
        assert torch.equal(placed.slot_to_expert[slots], ids.int())
        for slot in slots.flatten().tolist():
            owner, place = divmod(slot, placement.slots_per_rank)
            assert held[owner].row_of_slot[place] >= 0, "a slot without weights"
    assert placed.tables.is_replica()[StaticPolicy().slots(placed)].all()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 1, -1]], r"got \[0, 1\] and \[-1\] in row 0"),
        ([[0, 1, 12], [-1, -1, 12]], r"got \[-1, -1\] and \[12\] in row 1"),
        ([[0, 1, 11]], r"got \[0, 1\] and \[11\] in row 0"),
    ],
)
def test_refuses_shared_columns_that_do_not_fit(ids: list[list[int]], message: str) -> None:
    """Regression: more or fewer shared copies than the quota, without a word."""
    placement, topk_ids = doubled(0, 1), torch.tensor(ids)
    counts = isoload.count(topk_ids, EXPERTS + 1)
    loads = torch.stack([counts, *[torch.zeros_like(counts)] * (RANKS - 1)])
    for policy in ("exact", "static", "joint"):
        plan = isoload.plan(loads, placement, 0, policy)
        with pytest.raises(ValueError, match=r"topk_ids must end in the shared experts \[12\].*" + message):
            isoload.route(topk_ids, loads, plan, 0)
