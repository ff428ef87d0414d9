"""Dispatch by nodes: a row crosses to a node once; what comes back is what dispatch by ranks gives."""

from __future__ import annotations

import traceback
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import Topology
from isoload.transport import CollectiveTransport, LocalTransport, NodeDispatcher, RowDispatcher, Transport
from support.batches import MAX_TOKENS, Batch, batches, draw
from support.conformance import CASES, layer, own, send
from support.processes import die, rank_outcomes, run_ranks
from support.sweeps import slow

CAPACITIES = [None, MAX_TOKENS]
SHAPES = [(4, 2), (6, 3), (6, 2), (8, 4)]  # ranks, ranks of a node
SHAPED = pytest.mark.parametrize("shape", SHAPES)
EITHER = pytest.mark.parametrize("capacity", CAPACITIES)
# on forked ranks; the others, which take longer, where time is
FEW = ("rows", "sums", "traffic", "bytes", "started_dispatch", "gradients", "backward_everywhere")


def local(ranks: int, per_node: int, capacity: int | None, dispatch: Any = "node") -> Transport:
    return LocalTransport(Topology(ranks, per_node), capacity, dispatch=dispatch)


@EITHER
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("case", CASES)
def test_local(case: str, shape: tuple[int, int], capacity: int | None) -> None:
    CASES[case](lambda: local(*shape, capacity))


def whole_numbers(batch: Batch) -> Batch:
    """Rows and weights whose sums are exact in any order and dtype."""
    draw = torch.Generator().manual_seed(3)
    x = [torch.randint(-3, 4, v.shape, generator=draw).to(v.dtype) for v in batch.x]
    weights = [torch.randint(0, 3, w.shape, generator=draw).to(w.dtype) for w in batch.weights]
    return Batch(batch.name, x, batch.slots, weights, batch.slots_per_rank)


def linear(transport: Transport, batch: Batch) -> dict[str, list[Tensor | None]]:
    """Output and gradients where every copy's expert multiplies by its slot's own small number."""
    x = [v.clone().requires_grad_() for v in own(transport, batch.x)]
    weights = [v.clone().requires_grad_() for v in own(transport, batch.weights)]
    received = transport.dispatcher.dispatch(x, own(transport, batch.slots), weights, batch.slots_per_rank)
    y = [
        (got.rows * (got.weights * (1 + got.slots % 3)).sum(1, keepdim=True)).to(got.rows.dtype)
        for got in received
    ]
    out = transport.dispatcher.combine(y, received)
    torch.stack([o.double().sum() for o in out]).sum().backward()
    return {"out": list(out), "x": [v.grad for v in x], "weights": [w.grad for w in weights]}


@EITHER
@SHAPED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_same_bits_as_by_ranks_where_sums_are_exact(
    dtype: torch.dtype, shape: tuple[int, int], capacity: int | None
) -> None:
    for batch in batches(shape[0], dtype):
        batch = whole_numbers(batch)
        by_nodes, by_ranks = (linear(local(*shape, capacity, d), batch) for d in ("node", "rank"))
        for name, values in by_nodes.items():
            for a, b in zip(values, by_ranks[name], strict=True):
                assert torch.equal(a, b), f"{batch.name}, {name}"


@EITHER
@SHAPED
def test_the_same_rows_and_all_but_the_same_sums_as_by_ranks(
    shape: tuple[int, int], capacity: int | None
) -> None:
    """What comes to a rank is the same to the bit, in another order; sums differ by their order in float64."""
    for batch in batches(shape[0]):
        by_nodes, by_ranks = (local(*shape, capacity, d) for d in ("node", "rank"))
        for a, b in zip(send(by_nodes, batch), send(by_ranks, batch), strict=True):
            assert a.max_copies == b.max_copies
            assert sorted(listed(a)) == sorted(listed(b)), batch.name
        wanted = layer(by_ranks, batch)
        for name, values in layer(by_nodes, batch).items():
            for value, want in zip(values, wanted[name], strict=True):
                torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)


@EITHER
@SHAPED
def test_a_token_may_go_to_one_slot_several_times(shape: tuple[int, int], capacity: int | None) -> None:
    batch = draw("repeated", shape[0], absent=0.1)
    for slots in batch.slots:
        slots[:, 2], slots[1::2, 3] = slots[:, 0], slots[1::2, 0]
    by_nodes, by_ranks = (local(*shape, capacity, d) for d in ("node", "rank"))
    wanted = layer(by_ranks, batch)
    for name, values in layer(by_nodes, batch).items():
        for value, want in zip(values, wanted[name], strict=True):
            torch.testing.assert_close(value, want, rtol=1e-12, atol=1e-12)


def listed(got: Any) -> list[Any]:
    return torch.cat([got.rows.double(), got.slots.double(), got.weights.double()], dim=1).tolist()


@EITHER
@SHAPED
def test_between_nodes_a_token_is_one_row_to_each(shape: tuple[int, int], capacity: int | None) -> None:
    ranks, per_node = shape
    node = np.arange(ranks) // per_node
    apart = node[:, None] != node
    fewer = 0
    for batch in batches(ranks):
        by_nodes, by_ranks = (local(*shape, capacity, d) for d in ("node", "rank"))
        send(by_nodes, batch)
        send(by_ranks, batch)
        pairs = sum(
            len(
                {slot // batch.slots_per_rank // per_node for slot in chosen if slot >= 0}
                - {source // per_node}
            )
            for source, slots in enumerate(batch.slots)
            for chosen in slots.tolist()
        )
        many = int(by_ranks.group.traffic.rows.numpy()[apart].sum())
        assert int(by_nodes.group.traffic.rows.numpy()[apart].sum()) == pairs <= many
        fewer += pairs < many
    assert fewer


def test_one_node_and_nodes_of_one_rank_are_dispatched_by_ranks() -> None:
    for topology in (Topology(4), Topology(4, 4), Topology(4, 1)):
        assert type(LocalTransport(topology, dispatch="node").dispatcher) is RowDispatcher
    assert type(LocalTransport(Topology(4, 2), dispatch="node").dispatcher) is NodeDispatcher
    assert type(LocalTransport(Topology(4, 2)).dispatcher) is RowDispatcher


def test_refused() -> None:
    with pytest.raises(ValueError, match="dispatch must be one of rank, node, got 'nodes'"):
        LocalTransport(Topology(4, 2), dispatch="nodes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks_per_node must divide num_ranks=4, got 3"):
        LocalTransport(Topology(4, 3), dispatch="node")
    with pytest.raises(ValueError, match="max_copies_per_rank must be at least the copies that rank . gets"):
        transport = LocalTransport(Topology(4, 2), MAX_TOKENS, 3, "node")
        send(transport, draw("too many copies", 4, absent=0.0))
    batch = draw("combine", 4)
    transport = local(4, 2, None)
    received = send(transport, batch)
    y = [got.rows for got in received]
    with pytest.raises(
        ValueError, match=r"own of rank 1 must be \[\d+, 7\] torch.float64 as the rank's tokens"
    ):
        transport.dispatcher.combine(y, received, [batch.x[0], batch.x[1][:0], *batch.x[2:]])
    with pytest.raises(
        ValueError, match="received must come from this dispatcher's dispatch, got a NoneType"
    ):
        transport.dispatcher.combine(y, [isoload.transport.Received(*[v] * 3, None) for v in y])


def fail_at(rank: int, stage: str, hop: int, capacity: int | None) -> None:
    """Rank 1 of two nodes of two dies as it comes to a stage's exchange, in its first or second hop."""
    transport = CollectiveTransport(Topology(4, 2), None, capacity, dispatch="node")
    batch, passed = draw("failing", 4, absent=0.0), Counter[str]()
    swap = transport.group.swap

    def reached(name: str, *how: Any) -> Any:
        passed[name] += 1
        if rank == 1 and (name, passed[name]) == (stage, hop):
            die()
        return swap(name, *how)

    transport.group.swap = reached  # type: ignore[method-assign]
    x = [leaf.requires_grad_() for leaf in own(transport, batch.x)]
    slots, weights = own(transport, batch.slots), own(transport, batch.weights)
    received = transport.dispatcher.dispatch(x, slots, weights, batch.slots_per_rank)
    transport.dispatcher.combine([received[0].rows * 2], received)[0].sum().backward()


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("hop", [1, 2])
@pytest.mark.parametrize("stage", ["dispatch", "combine", "combine backward", "dispatch backward"])
def test_a_rank_that_dies_in_either_hop_fails_the_others(stage: str, hop: int, capacity: int | None) -> None:
    outcomes = rank_outcomes(fail_at, 4, stage, hop, capacity, group_timeout=5.0)
    assert outcomes[1].error == "ended with exit code -9"
    for other in (0, 2, 3):
        assert f"RuntimeError: stage {stage} failed on rank {other}:" in (outcomes[other].error or "")


def test_ranks_that_differ_in_dispatch_raise_alike() -> None:
    def body(rank: int) -> None:
        CollectiveTransport(Topology(4, 2), dispatch="node" if rank == 3 else "rank")

    told = "ValueError: dispatch must be the same on all ranks, got rank on rank 0 and node on rank 3"
    found = [(o.error or "").strip().splitlines()[-1] for o in rank_outcomes(body, 4)]
    assert found == [told] * 4


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_a_bad_argument_on_one_rank_is_raised_on_every_rank(capacity: int | None) -> None:
    def body(rank: int) -> None:
        batch = draw("bad slots", 4, tokens=[4] * 4, absent=0.0)
        if rank == 2:
            batch.slots[rank][1, 1] = 99
        send(CollectiveTransport(Topology(4, 2), None, capacity, dispatch="node"), batch)

    told = "ValueError: rank 2 failed in stage dispatch, so all ranks stop; see the error of that rank"
    last = 4 * draw("bad slots", 4).slots_per_rank - 1
    mine = f"ValueError: slots of rank 2 must be in -1..{last}, got 99"
    found = [(o.error or "").strip().splitlines()[-1] for o in rank_outcomes(body, 4)]
    assert found == [told, told, mine, told]


def all_cases(rank: int, capacity: int | None, cases: list[str]) -> dict[str, str]:
    """The traceback of every case that fails; the rank goes on, as its peers do, so that each case is judged."""
    failed = {}
    for name in cases:
        try:
            CASES[name](lambda: CollectiveTransport(Topology(4, 2), None, capacity, dispatch="node"))
        except AssertionError:
            failed[name] = traceback.format_exc()
    return failed


MORE = [name for name in CASES if name not in FEW]


@pytest.mark.parametrize(
    ("cases", "capacity"),
    [
        (FEW[:2], MAX_TOKENS),
        pytest.param(FEW[2:], MAX_TOKENS, marks=pytest.mark.slow),
        pytest.param(MORE, None, marks=pytest.mark.slow),
        *slow((FEW, None), (MORE, MAX_TOKENS)),
    ],
)
def test_collective(cases: list[str], capacity: int | None) -> None:
    """Two nodes of two forked ranks."""
    for rank, failed in enumerate(run_ranks(all_cases, 4, capacity, cases, timeout=180.0)):
        assert not failed, f"rank {rank}: {failed}"
