"""DeepEP's buffers as dispatchers: the conformance suite of every transport, over doubles of them on gloo."""

from __future__ import annotations

import traceback

import pytest

from isoload import Topology
from support.conformance import CASES
from support.deep_ep_transports import BUFFERS, any_shape
from support.processes import run_ranks

ELSEWHERE = {
    "bytes": "DeepEP moves the bytes, not the group",
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
    scope="module", params=[*RUNS, *(pytest.param(run, marks=pytest.mark.slow) for run in MORE)], ids=str
)
def failures(request: pytest.FixtureRequest) -> list[dict[str, str]]:
    num_ranks, kind, waits = request.param
    return run_ranks(all_cases, num_ranks, num_ranks, kind, waits)


@pytest.mark.parametrize("case", sorted(CASES.keys() - ELSEWHERE.keys()))
def test_conformance(case: str, failures: list[dict[str, str]]) -> None:
    for rank, failed in enumerate(failures):
        assert case not in failed, f"rank {rank}: {failed[case]}"
