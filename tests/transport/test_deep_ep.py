"""DeepEP's buffers as dispatchers: the conformance suite of every transport, over doubles of them on gloo."""

from __future__ import annotations

import traceback

import numpy as np
import pytest
import torch

from isoload import Topology
from isoload.transport import CollectiveGroup
from support.batches import MAX_TOKENS
from support.conformance import CASES
from support.deep_ep_transports import BUFFERS, CANCELLING, any_shape, make_dispatcher
from support.processes import run_ranks
from support.sweeps import slow

ELSEWHERE = {
    "bytes": "DeepEP moves the bytes, not the group",
    "traffic": "DeepEP numbers the rows",
    "equals_local": "EPBuffer and ElasticBuffer add in another order; sums and gradients are held to plain loops",
}


def all_cases(rank: int, num_ranks: int, kind: str, waits: bool) -> dict[str, str]:
    failed = {}
    for name in sorted(CASES.keys() - ELSEWHERE.keys()):
        try:
            CASES[name](lambda: any_shape(Topology(num_ranks), BUFFERS[kind], waits))
        except AssertionError:
            failed[name] = traceback.format_exc()
    return failed


RUNS = [(2, "EPBuffer", True), (2, "EPBuffer", False), (2, "ElasticBuffer", False), (2, "Buffer", True)]
MORE = [(4, "EPBuffer", True), (2, "ElasticBuffer", True), (4, "Buffer", True), (2, "Buffer", False)]


@pytest.fixture(
    scope="module",
    params=[RUNS[0], *slow(*((run,) for run in [*RUNS[1:], *MORE]))],
    ids=str,
)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    num_ranks, kind, waits = request.param
    return run_ranks(all_cases, num_ranks, num_ranks, kind, waits)


@pytest.mark.parametrize("case", sorted(CASES.keys() - ELSEWHERE.keys()))
def test_conformance(case: str, failures: list[dict[str, str]]) -> None:
    for rank, failed in enumerate(failures):
        assert case not in failed, f"rank {rank}: {failed[case]}"


def cancelling_sums(rank: int, kind: str) -> int:
    """A token's rows of four ranks, of which two cancel: the sum says in which order they were added."""
    made = make_dispatcher(CollectiveGroup(Topology(4)), BUFFERS[kind], 256, 4, 2)
    rng = np.random.default_rng(rank)
    slots = torch.from_numpy(np.array([rng.permutation(8)[:4] for _ in range(MAX_TOKENS)]))
    x = torch.from_numpy(rng.standard_normal((MAX_TOKENS, 256))).bfloat16()
    (got,) = made.dispatch([x], [slots], [torch.ones(slots.shape)], 2)
    (out,) = made.combine([got.rows * CANCELLING[rank]], [got])
    assert made.adds_by_rank == (kind == "Buffer")
    by_rank = 0
    for token, chosen in enumerate((slots // 2).tolist()):
        ranks = sorted(set(chosen))
        if not made.adds_by_rank:
            ranks.sort(key=lambda r: max(place for place, other in enumerate(chosen) if other == r))
        sums = [np.zeros(256, np.float32) for _ in range(2)]
        for total, order in zip(sums, (ranks, sorted(ranks)), strict=True):
            for r in order:
                total += (x[token] * CANCELLING[r]).float().numpy()
        assert torch.equal(out[token], torch.from_numpy(sums[0]).bfloat16())
        by_rank += not np.array_equal(*sums)
    return by_rank


@pytest.mark.parametrize("kind", BUFFERS)
def test_sums_in_their_order(kind: str) -> None:
    differ = run_ranks(cancelling_sums, 4, kind)
    assert (sum(differ) > 0) == (kind != "Buffer")


def in_any_order(rank: int) -> None:
    """Without ``deterministic`` rows come in any order: a layer's result is the same."""
    group = CollectiveGroup(Topology(2))
    rng = np.random.default_rng(rank)
    slots = torch.from_numpy(np.array([rng.permutation(4)[:2] for _ in range(MAX_TOKENS)]))
    x = torch.from_numpy(rng.standard_normal((MAX_TOKENS, 256))).bfloat16()
    weights, found = torch.from_numpy(rng.random((MAX_TOKENS, 2))).float(), []
    for deterministic in (True, False):
        made = make_dispatcher(group, BUFFERS["EPBuffer"], 256, 2, 2, deterministic=deterministic)
        leaf, gates = x.clone().requires_grad_(), weights.clone().requires_grad_()
        (got,) = made.dispatch([leaf], [slots], [gates], 2)
        y = (torch.tanh(got.rows) * (got.weights * (got.slots + 1)).sum(1, keepdim=True)).bfloat16()
        (out,) = made.combine([y], [got])
        out.float().square().sum().backward()
        found.append((out, leaf.grad, gates.grad, got.rows))
    assert not torch.equal(found[0][3], found[1][3])
    assert all(torch.equal(a, b) for a, b in zip(found[0][:3], found[1][:3], strict=True))


def test_rows_in_any_order() -> None:
    run_ranks(in_any_order, 2)
