"""What ranks take from gathered tokens is what a dispatch would bring them, bit for bit."""

from __future__ import annotations

import pytest
import torch

from isoload import Topology
from isoload.transport import LocalTransport, Received
from isoload.transport.transport import start_gather_tokens
from support.batches import MAX_TOKENS, batches


def gathered(transport: LocalTransport, batch: object) -> list[Received]:
    """The slots travel in place of experts: every rank then sees all of them, as it does after routing all sources."""
    tokens = start_gather_tokens(transport.group, MAX_TOKENS, batch.x, batch.slots, batch.weights)()
    num_tokens = [len(x) for x in batch.x]
    return tokens.received(transport.group.ranks, num_tokens, tokens.ids, batch.slots_per_rank)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_equals_dispatch(num_ranks: int, dtype: torch.dtype) -> None:
    transport = LocalTransport(Topology(num_ranks), MAX_TOKENS)
    seen = 0
    for batch in batches(num_ranks, dtype):
        wanted = transport.dispatcher.dispatch(batch.x, batch.slots, batch.weights, batch.slots_per_rank)
        found = gathered(transport, batch)
        for got, want in zip(found, wanted, strict=True):
            for name in ("rows", "slots", "weights"):
                assert torch.equal(getattr(got, name), getattr(want, name)), (batch.name, name)
        seen += sum(int((got.slots >= 0).sum()) for got in found)
        sums = [
            transport.dispatcher.combine([r.rows for r in received], received) for received in (found, wanted)
        ]
        assert all(torch.equal(a, b) and len(a) == len(x) for a, b, x in zip(*sums, batch.x, strict=True))
    assert seen > 0


def test_each_rank_sends_its_capacity_to_all() -> None:
    transport = LocalTransport(Topology(3), MAX_TOKENS)
    batch = next(iter(batches(3, torch.float32)))
    gathered(transport, batch)
    row = batch.x[0].shape[1] * 4 + batch.slots[0].shape[1] * (4 + batch.weights[0].itemsize)
    assert transport.group.traffic.bytes["tokens"] == 3 * MAX_TOKENS * row
