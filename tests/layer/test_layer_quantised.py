"""A layer with quantised experts is, to the bit, the layer with what they stand for: placed, moved, borrowed.

Their bytes, scales included, stay as they are on every way.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import isoload
from isoload.transport import CollectiveTransport
from isoload.weights.experts import ExpertWeights
from support.borrowed_layer import LLEP, Setup
from support.borrowed_layer import make_setup as make_borrowed
from support.deep_ep_double import EPBuffer
from support.processes import run_ranks
from support.quantised_experts import NAMES, open_quantised, random_quantised
from support.quantised_layer import (
    EVERY_FORMAT,
    EXPERTS,
    HIDDEN,
    assert_bytes,
    assert_same,
    draw_rows,
    experts,
    gate,
    place,
    same_bytes,
    virtual,
)
from support.stacks import Model
from support.stacks import run as run_layers
from support.sweeps import slow

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float16]


def with_formats(names: str, value: Any, others: list[Any]) -> pytest.MarkDecorator:
    """fp8 with the value, the format of most tensors with the others; the rest in `make test-all`."""

    def case(name: str, of: Any) -> tuple[Any, ...]:
        return (name, *of) if isinstance(of, tuple) else (name, of)

    few = [case("fp8", value), *(case("NVFP4", other) for other in others)]
    more = [case(name, of) for of in (value, *others) for name in NAMES if case(name, of) not in few]
    return pytest.mark.parametrize(f"name, {names}", [*few, *slow(*more)], ids=str)


def assert_borrowed(layer: isoload.MoE, weights: ExpertWeights) -> int:
    """Every filled spare slot of the owned ranks held its expert's bytes in the last batch; how many are filled."""
    plan, pool = layer.last_plan, layer.borrowing.pool
    spare = plan.slot_to_expert.view(layer.group.topology.num_ranks, -1)[:, -layer.borrowing.spare_slots :]
    for rank, stacks in zip(layer.group.ranks, pool.buffers[pool._next], strict=True):
        for name, stack in layer.weights[0].by_name(stacks).items():
            for row, expert in zip(stack, spare[rank].tolist(), strict=True):
                assert expert < 0 or same_bytes(row, getattr(weights, name)[expert]), name
    return int((spare >= 0).sum())


@with_formats("ranks, dtype", (4, torch.bfloat16), [(4, torch.float16), (1, torch.float32)])
def test_replicas_and_moves(ranks: int, dtype: torch.dtype, name: str) -> None:
    weights, rows = experts(name), draw_rows(ranks, dtype)
    layers = [virtual(w, place(ranks, 1)) for w in (weights, open_quantised(name, weights, dtype))]
    assert layers[0].has_replicas == (ranks > 1)
    assert_same(*layers, rows)
    for seed in (2, 4, 1):
        for layer in layers:
            layer.load_placement(place(ranks, seed), rows_per_chunk=2)
        assert_bytes(layers[0], weights)
        assert_same(*layers, rows)
    assert not any(p.requires_grad for p in layers[0].parameters())


@torch.no_grad()
@EVERY_FORMAT
def test_biases_and_empty_batches(name: str) -> None:
    """Biases in a dtype of their own; all copies masked; no rows at all."""
    weights = random_quantised(name, EXPERTS, 40, 24, 3, torch.float32)
    layers = [virtual(w, place(4, 1)) for w in (weights, open_quantised(name, weights, torch.bfloat16))]
    rows = [row[:, :40] for row in draw_rows(4)]
    assert_same(*layers, rows)
    assert_bytes(layers[0], weights)
    ids, gates = [torch.full((len(row), 2), -1) for row in rows], [torch.ones(len(row), 2) for row in rows]
    assert not any(y.any() for y in layers[0].compute(rows, ids, gates))
    assert all(len(y) == 0 for y in layers[0]([row[:0] for row in rows]))


@EVERY_FORMAT
def test_experts_of_a_shard(name: str) -> None:
    weights, placement, rows = experts(name), place(4, 1), draw_rows(4)
    homes = [placement.home_experts(0, rank) for rank in range(4)]
    own = [ExpertWeights(**{name: s[list(h)] for name, s in weights.stacks().items()}) for h in homes]
    shards = [isoload.weights.shard.Shard(h, w) for h, w in zip(homes, own, strict=True)]
    layer = isoload.MoE(gate, shards, isoload.LocalTransport(placement.topology), placement)
    dense = [
        isoload.weights.shard.Shard(h, open_quantised(name, w, torch.bfloat16))
        for h, w in zip(homes, own, strict=True)
    ]
    other = isoload.MoE(gate, dense, isoload.LocalTransport(placement.topology), placement)
    assert_same(layer, other, rows)


@EVERY_FORMAT
def test_changed_experts_are_refreshed(name: str) -> None:
    """In place, as an engine that loads weights does it."""
    layer, new, rows = virtual(experts(name), place(4, 1)), experts(name, 4), draw_rows(4)
    for held in layer.weights:
        for stack, home in held.homes().items():
            home.copy_(getattr(new, stack)[list(held.layout.homes)])
    with torch.no_grad(), pytest.raises(ValueError, match="replicas must be refreshed"):
        layer(rows)
    layer.refresh_replicas()
    assert_bytes(layer, new)
    assert_same(layer, virtual(new, place(4, 1)), rows)


@with_formats("borrow", "all_to_all", ["pull", "copy"])
@torch.no_grad()
def test_borrowed_on_virtual_ranks(borrow: str, name: str) -> None:
    """Batch after batch, so that a buffer has held other experts before."""
    setups = borrowed_setups(name, 4, torch.bfloat16)
    layers = [setup.layer(**LLEP, borrow=borrow) for setup in setups]
    borrowed, gates = [], list(map(setups[0].weights, setups[0].rows))
    for shift in range(4):
        ids = [(own + 3 * shift) % 16 for own in setups[0].ids]
        got, want = (layer.compute(setups[0].rows, ids, gates) for layer in layers)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert assert_borrowed(layers[0], setups[0].dense) > 0
        borrowed.append(layers[0].last_plan.slot_to_expert)
    assert len({tuple(slots.tolist()) for slots in borrowed}) == 4


@torch.no_grad()
@with_formats("local", "held", ["planned"])
def test_borrowed_ahead_in_a_stack(local: str, name: str) -> None:
    model = Model(4, dtype=torch.bfloat16)
    sizes = {"hidden": model.dense[0].down.shape[1], "intermediate": model.dense[0].down.shape[2]}
    weights = [experts(name, i, model.dense[0].num_slots, **sizes) for i in range(len(model.dense))]
    found = []
    for kinds in (weights, [open_quantised(name, w, torch.bfloat16) for w in weights]):
        model.dense = kinds
        layers = model.layers(isoload.LocalTransport(model.topology, 16))
        isoload.LibraStack(layers, "last", local=local)
        found.append([y for batch in range(3) for y in run_layers(layers, model.rows(batch))])
    assert any(layer.last_plan.slot_to_expert.view(4, -1)[:, -2:].max() >= 0 for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def borrowed_setups(name: str, ranks: int, dtype: torch.dtype, **sizes: int) -> list[Setup]:
    """The same batch over quantised experts, and over what they stand for."""
    setup = make_borrowed(ranks, hidden=sizes.get("hidden", HIDDEN), dtype=dtype)
    weights = experts(name, num=16, **sizes)
    return [
        Setup(setup.ids, setup.rows, setup.placement, w)
        for w in (weights, open_quantised(name, weights, dtype))
    ]


def over_processes(rank: int, ranks: int, borrow: str) -> int:
    found = []
    for name in NAMES:
        setups = borrowed_setups(name, ranks, torch.bfloat16)
        transport = CollectiveTransport(setups[0].placement.topology)
        layers = [setup.layer(transport, **LLEP, borrow=borrow) for setup in setups]
        with torch.no_grad():
            got, want = (layer(setups[0].rows[rank]) for layer in layers)
            found.append(assert_borrowed_after(layers[0], setups[0], rank))
        assert torch.equal(got, want)
    return min(found)


def assert_borrowed_after(layer: isoload.MoE, setup: Setup, rank: int) -> int:
    """The batch once more, so that the pool's last is this layer's; see :func:`assert_borrowed`."""
    layer(setup.rows[rank])
    return assert_borrowed(layer, setup.dense)


@pytest.mark.slow
@pytest.mark.parametrize("borrow", ["all_to_all"])
def test_borrowed_over_processes(borrow: str) -> None:
    assert min(run_ranks(over_processes, 3, 3, borrow)) > 0


def over_deep_ep(rank: int, ranks: int, name: str, inner: int, expert_major: bool) -> int:
    """Weights travel by DeepEP's double."""
    from isoload.transport.deep_ep import DeepEPTransport

    setups = borrowed_setups(name, ranks, torch.bfloat16, hidden=512, intermediate=inner)
    placement, rows = setups[0].placement, setups[0].rows[rank]

    def transport() -> DeepEPTransport:
        group = isoload.CollectiveGroup(placement.topology).process_group
        shape = {"hidden": 512, "top_k": 3, "max_tokens_per_rank": 16}
        buffer = EPBuffer(group, num_max_tokens_per_rank=16, lb_allocation_plan_or_num_bytes=2**23)
        return DeepEPTransport(
            placement.topology,
            slots_per_rank=placement.slots_per_rank,
            buffer=buffer,
            expert_major=expert_major,
            **shape,
        )

    layer = setups[0].layer(transport(), **LLEP, borrow="deep_ep")
    other = setups[1].layer(transport(), **LLEP, borrow="all_to_all")
    gates = setups[0].weights(rows)
    with torch.no_grad():
        got = layer.compute(rows, setups[0].ids[rank], gates)
        want = other.compute(rows, setups[0].ids[rank], gates)
    assert torch.equal(got, want) and got.any() == (len(rows) > 0)
    return assert_borrowed(layer, setups[0].dense)


@pytest.mark.parametrize("expert_major", [True, *slow(False)])
def test_borrowed_by_deep_ep(expert_major: bool) -> None:
    assert min(run_ranks(over_deep_ep, 2, 2, "fp8", 256, expert_major, timeout=150)) > 0


@pytest.mark.parametrize("name", ["NVFP4", *slow(*(name for name in NAMES if name != "NVFP4"))])
def test_deep_ep_borrows_rows_of_any_size(name: str) -> None:
    """Scales of 4 bytes and more: DeepEP moves multiples of 32."""
    assert min(run_ranks(over_deep_ep, 2, 2, name, 40, False, timeout=150)) > 0


@torch.no_grad()
@EVERY_FORMAT
def test_a_rank_without_experts_and_copies_of_a_layer(name: str) -> None:
    """Rank 1 has none, slot 3 of rank 0 none; rank 2 has replicas alone."""
    weights, rows = experts(name, num=3, hidden=16, intermediate=16), draw_rows(3)
    slots = torch.tensor([[0, 1, 2, -1, -1, -1, -1, -1, 2, 0, -1, -1]])
    placement = isoload.Placement(slots, isoload.Topology(3), 3)
    layers = [virtual(w, placement) for w in (weights, open_quantised(name, weights, torch.bfloat16))]
    ids, rows = [torch.arange(2 * len(row)).view(-1, 2) % 3 for row in rows], [row[:, :16] for row in rows]
    gates = [torch.ones(len(row), 2) for row in rows]
    want = layers[1].compute(rows, ids, gates)
    torch.save(layers[0], file := io.BytesIO())
    file.seek(0)
    for layer in (layers[0], copy.deepcopy(layers[0]), torch.load(file, weights_only=False)):
        assert_bytes(layer, weights)
        assert all(torch.equal(a, b) for a, b in zip(layer.compute(rows, ids, gates), want, strict=True))
        layer.half()
        if name != "MXFP4":
            with pytest.raises(ValueError, match="quantised experts cannot be cast"):
                layer.compute([row.half() for row in rows], ids, gates)
