"""How often a stack makes the host wait for a GPU: as often as its layers do without it."""

from __future__ import annotations

import pytest

from isoload.transport import LocalTransport, Transport
from support.fake_ranks import CAPACITY, VIRTUAL, one_rank, short, wanted
from support.fake_stack import LAYERS, fake_stack
from support.sweeps import slow


def waits_of(transport: Transport, *how: str) -> tuple[list[str], int]:
    """What the third batch waits for, and what it counts itself."""
    with fake_stack(transport, *how, batches=2) as fake:
        waited, before = len(fake.host.waits), transport.group.traffic.host_syncs
        fake.batch()
        assert fake.stack._fetched is not None
        return fake.host.waits[waited:], transport.group.traffic.host_syncs - before


@pytest.mark.parametrize(
    ("borrow", "rank", "predict", "policy"),
    [
        ("copy", 0, "last", "hedge"),
        ("pull", 0, "lookahead", "hedge"),
        pytest.param("all_to_all", 1, "last", "libra", marks=pytest.mark.slow),
        *slow(("pull", 0, "last", "libra"), ("all_to_all", 0, "lookahead", "hedge")),
    ],
)
@pytest.mark.parametrize("local", ["planned", "held"])
def test_one_wait_per_layer(borrow: str, rank: int, predict: str, policy: str, local: str) -> None:
    """With a capacity none, but for back ends that read the plan on the host."""
    for capacity in (CAPACITY,) if local == "held" else (None, CAPACITY):
        waits, syncs = wanted(capacity)
        if capacity is not None and borrow != "pull":
            waits, syncs = ["event in weights/backends.py"], 1
        alone = borrow == "all_to_all"
        transport = one_rank(rank, capacity) if alone else LocalTransport(VIRTUAL, capacity)
        found = short(waits_of(transport, predict, local, policy, borrow))
        assert found == (waits * LAYERS, syncs * LAYERS), capacity
