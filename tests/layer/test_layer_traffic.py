"""What a layer's processes send each other, seen from below: at the collectives themselves."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # which a dispatch mode imports: once, not in every forked rank
from torch.utils._python_dispatch import TorchDispatchMode

import isoload
from isoload.analysis.simulate import DEFAULT_POLICIES
from isoload.transport import CollectiveTransport
from support.processes import run_ranks
from support.small_layer import EXPERTS, make_setup

RANKS = 3


class Collectives(TorchDispatchMode):
    """Bytes that torch.distributed's backend is handed, by its own name for the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            output, given = args[:2]
            assert isinstance(given, torch.Tensor), f"{func} hands over lists"
            is_header = given.dtype == torch.uint8 and given.dim() == 1  # of CPU alone: not counted
            self.bytes["headers" if is_header else func.overloadpacket.__name__] += given.nbytes
        return func(*args, **(kwargs or {}))


def train_once(rank: int, policy: str, capacity: int | None) -> SimpleNamespace:
    """A forward, a backward and a refresh of one process: what it counted, what passed below, and its plan."""
    setup = make_setup(RANKS)
    transport = CollectiveTransport(setup.topology, max_tokens_per_rank=capacity)
    layer = isoload.MoE(setup.gate, setup.dense, transport, setup.placement, policy=policy)
    with Collectives() as below:
        layer(setup.rows[rank]).sum().backward()
        layer.refresh_replicas()
    made = layer.last_plan
    decided = made.weights if made.quota is None else made.quota
    return SimpleNamespace(
        counted=transport.group.traffic.bytes,
        below=below.bytes,
        rows=transport.group.traffic.rows,
        decided=decided,
    )


@pytest.mark.parametrize("capacity", [None, 13])
def test_bytes_are_those_handed_to_the_collectives(capacity: int | None) -> None:
    results = run_ranks(train_once, RANKS, "exact", capacity)
    for of_rank in results:
        gathers = sum(n for stage, n in of_rank.counted.items() if "gather" in stage or "agreement" in stage)
        assert of_rank.below.pop("headers") > gathers  # on CPU rows as small as these travel with the header
        assert of_rank.below == {"alltoall_base_": sum(of_rank.counted.values()) - gathers}
    rows = ("dispatch", "combine", "combine backward", "dispatch backward", "replica gradients", "refresh")
    assert all(sum(of_rank.counted[stage] for of_rank in results) > 0 for stage in rows)


@pytest.mark.parametrize("policy", ["none", *DEFAULT_POLICIES[1:]])
def test_all_ranks_make_one_plan_and_send_each_token_once_per_rank(policy: str) -> None:
    results, setup = run_ranks(train_once, RANKS, policy, None), make_setup(RANKS)
    loads = torch.stack([isoload.count(setup.gate(rows)[0], EXPERTS) for rows in setup.rows])
    made = isoload.plan(loads, setup.placement, 0, policy, step=1)  # of the first batch
    for rank, (of_rank, rows) in enumerate(zip(results, setup.rows, strict=True)):
        assert torch.equal(of_rank.decided, results[0].decided)
        slots = isoload.route(setup.gate(rows)[0], loads, made, rank).numpy()  # [T, K]
        token = np.broadcast_to(np.arange(len(slots))[:, None], slots.shape)
        pairs = np.unique(np.stack([token.ravel(), slots.ravel() // setup.placement.slots_per_rank]), axis=1)
        wanted = np.zeros((RANKS, RANKS), dtype=np.int64)
        wanted[rank] = np.bincount(pairs[1], minlength=RANKS)
        assert np.array_equal(of_rank.rows.numpy(), wanted)
