"""DeepEP's expert-major layout: a row per copy, by slot, over doubles of EPBuffer and ElasticBuffer on gloo."""

from __future__ import annotations

import traceback
from itertools import accumulate

import numpy as np
import pytest
import torch

from isoload import Topology
from isoload.transport import CollectiveGroup
from support.batches import MAX_TOKENS
from support.conformance import CASES
from support.deep_ep_transports import BUFFERS, any_shape, make_dispatcher
from support.processes import run_ranks

# bytes and equals_local as in test_deep_ep.py; the others count a row once per rank: below, once per copy
ELSEWHERE = {"bytes", "traffic", "equals_local", "rows", "sums", "own_contributions", "backward_everywhere"}
HIDDEN, TOP_K, SIZE = 256, 3, 2


def all_cases(rank: int, kind: str) -> dict[str, str]:
    failed = {}
    for name in sorted(CASES.keys() - ELSEWHERE):
        try:
            CASES[name](lambda: any_shape(Topology(2), BUFFERS[kind], True, expert_major=True))
        except AssertionError:
            failed[name] = traceback.format_exc()
    return failed


@pytest.mark.parametrize("kind", ["EPBuffer", pytest.param("ElasticBuffer", marks=pytest.mark.slow)])
def test_conformance(kind: str) -> None:
    for rank, failed in enumerate(run_ranks(all_cases, 2, kind)):
        assert not failed, f"rank {rank}: " + "\n".join(failed.values())


def draw(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, slots (some absent, some tokens with several on one rank), gate weights; rank 1 has no tokens."""
    rng = np.random.default_rng(rank)
    tokens = 0 if rank == 1 else MAX_TOKENS - rank
    slots = np.array([rng.permutation(ranks * SIZE)[:TOP_K] for _ in range(tokens)]).reshape(-1, TOP_K)
    slots[rng.random(slots.shape) < 0.2] = -1
    x = torch.from_numpy(rng.standard_normal((tokens, HIDDEN))).bfloat16()
    return x, torch.from_numpy(slots).long(), torch.from_numpy(rng.random((tokens, TOP_K))).float()


def a_row_per_copy(rank: int, ranks: int, kind: str, deterministic: bool) -> int:
    """Rows, ends and weights by plain loops over all ranks' tokens; sums and gradients, whatever the order of rows."""
    group = CollectiveGroup(Topology(ranks))
    how = {"deterministic": deterministic, "expert_major": True}
    made = make_dispatcher(group, BUFFERS[kind], HIDDEN, TOP_K, SIZE, **how)
    everyone = [draw(other, ranks) for other in range(ranks)]
    x, slots, weights = everyone[rank]
    leaf, gates = x.clone().requires_grad_(rank != 0), weights.clone().requires_grad_()
    (got,) = made.dispatch([leaf], [slots], [gates], SIZE)
    copies = [
        (int(slot) - rank * SIZE, row, weight)
        for rows, chosen, given in everyone
        for row, own, ws in zip(rows, chosen, given, strict=True)
        for slot, weight in zip(own, ws, strict=True)
        if int(slot) // SIZE == rank
    ]
    counts = [sum(slot == s for slot, *_ in copies) for s in range(SIZE)]
    assert got.ends == list(accumulate(counts))
    assert got.slots.flatten().tolist() == [s for s, n in enumerate(counts) for _ in range(n)]

    def key(slot: int, row: torch.Tensor, weight: torch.Tensor) -> tuple[float, ...]:
        return slot, round(float(weight), 6), *row[:4].float().tolist()

    arrived = zip(
        got.slots.flatten().tolist(), got.rows.detach(), got.weights.detach().flatten(), strict=True
    )
    assert sorted(key(*copy) for copy in arrived) == sorted(key(*copy) for copy in copies)
    scale = torch.tensor([0.5, 2.0])[got.slots] * (1 + rank)  # by slot: exact in bfloat16
    own = x * 0.25
    (out,) = made.combine([(got.rows * scale).bfloat16()], [got], [own])
    for token, chosen in enumerate(slots.tolist()):
        per_rank: dict[int, tuple[torch.Tensor, int]] = {}
        for place, slot in enumerate(chosen):
            if slot < 0:
                continue
            part = (x[token] * (0.5, 2.0)[slot % SIZE] * (1 + slot // SIZE)).float()
            owner = slot // SIZE
            before = per_rank.pop(owner)[0] if owner in per_rank else torch.zeros(HIDDEN)
            per_rank[owner] = (before + part, place)  # the place of its last copy decides the order
        total = own[token].float()
        for part, _ in sorted(per_rank.values(), key=lambda pair: pair[1]):
            total = total + part.bfloat16().float()
        assert torch.equal(out[token], total.bfloat16()), token
    (out.float().sum() + (got.weights * scale).sum()).backward()
    factor = torch.where(slots >= 0, torch.tensor([0.5, 2.0])[slots % SIZE] * (1 + slots // SIZE), 0)
    if rank:
        wanted = factor.sum(1, keepdim=True).expand(-1, HIDDEN)
        torch.testing.assert_close(leaf.grad.float(), wanted, rtol=0.02, atol=0)
    torch.testing.assert_close(gates.grad, factor)
    return len(copies)


@pytest.mark.parametrize("kind", ["EPBuffer", "ElasticBuffer"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_row_per_copy_by_slot(kind: str, deterministic: bool) -> None:
    assert sum(run_ranks(a_row_per_copy, 3, 3, kind, deterministic)) > 50


def refusals(rank: int) -> None:
    group = CollectiveGroup(Topology(2))
    with pytest.raises(ValueError, match="expert_major must be False for DeepEP's Buffer, got True"):
        make_dispatcher(group, BUFFERS["Buffer"], HIDDEN, TOP_K, SIZE, expert_major=True)
    with pytest.raises(ValueError, match="waits must be True for expert_major, .* got False"):
        make_dispatcher(group, BUFFERS["EPBuffer"], HIDDEN, TOP_K, SIZE, waits=False, expert_major=True)
    with pytest.raises(ValueError, match="expert_major must be the same on all ranks"):
        make_dispatcher(group, BUFFERS["EPBuffer"], HIDDEN, TOP_K, SIZE, expert_major=rank == 0)


def test_what_is_refused() -> None:
    run_ranks(refusals, 2)
