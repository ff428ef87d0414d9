"""Borrowing by DeepEP's double beside all_to_all: every rank lends and borrows, homes in any order and number."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from isoload import Topology
from isoload.transport import CollectiveGroup
from isoload.transport.deep_ep import DeepEPTransport
from isoload.weights.backends import BorrowPlan, make_backend, redundancy_mapping
from isoload.weights.layout import Address
from support.deep_ep_double import EPBuffer
from support.processes import run_ranks

SHAPES = [((4, 8), torch.bfloat16), ((16,), torch.float32), ((3,), torch.bfloat16), ((5, 7), torch.float32)]
SPARE = 4
CPU = torch.device("cpu")


def draw_plan(seed: int, ranks: int) -> BorrowPlan:
    """Rank r is home to 2 + r % 2 experts; a spare slot borrows one of any other rank, or none."""
    rng = np.random.default_rng(seed)
    home = [Address(r, int(row)) for r in range(ranks) for row in rng.permutation(2 + r % 2)]
    slots = np.full((ranks, 3 + SPARE), -1, np.int32)
    for rank in range(ranks):
        others = [e for e, address in enumerate(home) if address.rank != rank]
        chosen = rng.permutation(others)[:SPARE]
        slots[rank, 3 : 3 + len(chosen)] = np.where(rng.random(len(chosen)) < 0.8, chosen, -1)
    table = torch.tensor(home, dtype=torch.int32)
    return BorrowPlan(torch.from_numpy(slots).flatten(), table, dict(enumerate(home)), ranks, SPARE)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_mapping_says_what_the_moves_say(ranks: int) -> None:
    for seed in range(20):
        plan = draw_plan(seed, ranks)
        mapping = redundancy_mapping(plan)
        assert mapping.dtype == torch.int32 and mapping.shape == (ranks, SPARE) and mapping.is_contiguous()
        found = [
            ((id_ // plan.rows, id_ % plan.rows), (rank, slot))
            for rank, ids in enumerate(mapping.tolist())
            for slot, id_ in enumerate(ids)
            if id_ >= 0
        ]
        assert found == [(tuple(source), tuple(target)) for source, target in plan.moves]


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int, rows: int) -> Tensor:
    """Whole numbers, whose sums do not depend on their order."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, (rows, *shape), generator=draw).to(dtype)


def both(rank: int, ranks: int) -> None:
    group = CollectiveGroup(Topology(ranks)).process_group
    buffer = EPBuffer(group, num_max_tokens_per_rank=4, lb_allocation_plan_or_num_bytes=2**21)
    made = DeepEPTransport(
        Topology(ranks), hidden=256, top_k=2, slots_per_rank=7, max_tokens_per_rank=4, buffer=buffer
    )
    backends = [make_backend(made.group, name, CPU) for name in ("all_to_all", "deep_ep")]
    empty = [torch.empty(0, *shape, dtype=dtype) for shape, dtype in SHAPES]
    pools = [[b.new_spare(like, SPARE) for like in empty] for b in backends]
    for seed in range(4):
        plan, homes = draw_plan(seed, ranks), 2 + rank % 2
        held = [whole(*kind, 100 * seed + rank, homes) for kind in SHAPES]
        for backend, pool in zip(backends, pools, strict=True):
            for stack in pool:
                stack.fill_(7)
            backend.start("borrow", plan, [held], [pool])()
        assert all(torch.equal(a, b) for a, b in zip(*pools, strict=True))
        grads = [whole(*kind, 100 * seed + rank + 50, SPARE) for kind in SHAPES]
        sums = [[whole(*kind, rank, homes) for kind in SHAPES] for _ in backends]
        for backend, totals in zip(backends, sums, strict=True):
            backend.add_back("borrowed gradients", plan, [grads], [totals])
        assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_and_gradients_are_those_of_all_to_all(ranks: int) -> None:
    run_ranks(both, ranks, ranks)
