"""A layer that moves to another placement is the same layer: before, in between and after, training included."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch

from isoload.analysis.simulate import DEFAULT_POLICIES
from isoload.layer.moe import MoE
from isoload.transport import CollectiveTransport, LocalTransport
from isoload.weights.layout import layouts
from isoload.weights.schedule import plan_moves
from support.moved_layer import deal, homes_of, make_setup, pairs, run, same
from support.processes import run_ranks
from support.small_layer import (
    EXPERTS,
    HIDDEN,
    INNER,
    close,
    dense_layer,
    dense_stacks,
    train,
)
from support.sweeps import slow

ROW_BYTES = 8 * (3 * INNER * HIDDEN + 2 * INNER + HIDDEN)  # float64, with biases


def check_dense(setup, got):
    rows = [r.clone().requires_grad_() for r in setup.rows]
    stacks = dense_stacks(setup.dense, torch.float64)
    wanted = [dense_layer(setup, r, stacks) for r in rows]
    sum((y**2).sum() for y in wanted).backward()
    for a, b in zip([*got[0], *got[1]], [*wanted, *(r.grad for r in rows)], strict=True):
        assert close(a, b, 1e-12)
    for i, stack in enumerate(stacks):
        weights, grads = (torch.stack([got[2][e][i][j] for e in range(EXPERTS)]) for j in (0, 1))
        assert torch.equal(weights, stack) and close(grads, stack.grad, 1e-12)


def pointers(layer):
    tensors = [t for w in layer.weights for t in [*w.stored_rows(), w.row_of_slot, *w.parameters()]]
    placed = layer.balancer.placed_on(torch.device("cpu"))
    tensors += [placed.slot_to_expert, placed.home_slot, placed.tables.data]
    return [t.data_ptr() for t in tensors if t.numel()]


def arrivals(layer):
    """[R] the experts that each rank holds."""
    return [set(layout.experts) for layout in layer.layouts]


@pytest.mark.parametrize("ranks", [3, *slow(1, 2, 4, 5, 6, 7, 8)])
def test_is_the_same_layer_before_and_after(ranks):
    setup = make_setup(ranks)
    for name, before, after in pairs(ranks):
        transport = LocalTransport(setup.topology)
        layer = MoE(setup.gate, setup.dense, transport, before, weight_rows=before.slots_per_rank)
        fresh = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), after)
        first = run(layer, setup.rows)
        check_dense(setup, first)
        parameters, kept, held = list(layer.parameters()), pointers(layer), arrivals(layer)
        layer.load_placement(after, rows_per_chunk=100, optimizer="none")
        new = sum(len(now - then) for now, then in zip(arrivals(layer), held, strict=True))
        assert transport.group.traffic.bytes["placement"] == new * ROW_BYTES, name
        got = run(layer, setup.rows)
        check_dense(setup, got)
        assert same(got, run(fresh, setup.rows)), name
        assert layer.has_replicas == fresh.has_replicas
        assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
        # and back, in the smallest chunks
        layer.load_placement(before, rows_per_chunk=2, optimizer="none")
        assert same(run(layer, setup.rows), first), name
        assert [p for p in pointers(layer) if p in kept] == pointers(layer)
        transport.group.reset_traffic()
        layer.load_placement(before)
        assert transport.group.traffic.bytes["placement"] == 0, "nothing changes, nothing travels"


def test_replicas_are_fresh_after_the_move_and_train_on():
    setup = make_setup(4)
    _, before, after = list(pairs(4))[1]
    layer = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), before, weight_rows=6)
    layer.load_placement(after)
    home = {e: (w, i) for w in layer.weights for i, e in enumerate(w.layout.homes)}
    assert sum(len(w.layout.replicas) for w in layer.weights) > 0
    for weights in layer.weights:
        for i, expert in enumerate(weights.layout.replicas):
            owner, row = home[expert]
            for stored, homes in zip(weights.stored_rows(), owner.home_rows(), strict=True):
                replicas = stored[len(weights.layout.homes) :]
                assert torch.equal(replicas[i], homes[row])


@pytest.mark.parametrize("policy", ["none", *DEFAULT_POLICIES[1:]])
def test_plans_are_those_of_the_new_placement(policy):
    setup = make_setup(4)
    _, before, after = list(pairs(4))[4]
    layer = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), before, policy=policy, weight_rows=6)
    fresh = MoE(setup.gate, setup.dense, LocalTransport(setup.topology), after, policy=policy)
    run(layer, setup.rows)
    run(fresh, setup.rows)  # what is sampled depends on the batch's number
    layer.load_placement(after, optimizer="none")
    assert same(run(layer, setup.rows), run(fresh, setup.rows))
    assert torch.equal(layer.last_plan.slot_to_expert, fresh.last_plan.slot_to_expert)
    assert torch.equal(layer.last_plan.tables.data, fresh.last_plan.tables.data)


@pytest.mark.parametrize("policy", ["llep", *slow("exact", "static")])
def test_moves_in_and_out_of_inference_mode(policy):
    """Regression: what was made in inference mode could be written nowhere else."""
    setup = make_setup(2)
    _, before, after = list(pairs(2))[2]  # with spare slots
    for made, ran, moved in itertools.product((False, True), repeat=3):
        with torch.inference_mode(made):
            transport = LocalTransport(setup.topology)
            layer = MoE(setup.gate, setup.dense, transport, before, policy=policy, weight_rows=20)
        optimizer = torch.optim.Adam(layer.parameters())
        first = run(layer, setup.rows)
        optimizer.step()
        layer.refresh_replicas()
        first = run(layer, setup.rows)
        with torch.inference_mode(ran):
            layer(setup.rows)
        with torch.inference_mode(moved):
            layer.load_placement(after, optimizer=optimizer)
        second = run(layer, setup.rows)
        assert all(close(a, b, 1e-12) for a, b in zip(first[0], second[0], strict=True))
        optimizer.step()


def test_layers_move_one_by_one():
    setup = make_setup(4)
    draw = random.Random(5)
    before, after = (deal(draw, setup.topology, 5, layers=2) for _ in range(2))

    def make(*placements):
        return [
            MoE(setup.gate, setup.dense, LocalTransport(setup.topology), p, layer=i, weight_rows=5)
            for i, p in enumerate(placements)
        ]

    def outputs(layers):
        return layers[1](layers[0](setup.rows))

    layers = make(before, before)
    wanted = outputs(make(after, before))
    assert all(close(a, b, 1e-12) for a, b in zip(outputs(layers), wanted, strict=True))
    layers[0].load_placement(after)
    assert all(torch.equal(a, b) for a, b in zip(outputs(layers), wanted, strict=True))
    layers[1].load_placement(after)
    both = outputs(make(after, after))
    assert all(torch.equal(a, b) for a, b in zip(outputs(layers), both, strict=True))


def train_and_move(setup, before, after, transport, own, **how):
    """Losses of ten steps of AdamW, with a move after the fifth; and the layer."""
    layer = MoE(setup.gate, setup.dense, transport, before, weight_rows=before.slots_per_rank)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.05)
    losses = []
    for step in range(10):
        optimizer.zero_grad(set_to_none=True)
        rows = [setup.rows[r] for r in own]
        loss = sum(((y - torch.sin(3 * x)) ** 2).sum() for x, y in zip(rows, layer(rows), strict=True))
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        layer.refresh_replicas()
        if step == 4:
            optimizer.zero_grad(set_to_none=True)
            layer.load_placement(after, optimizer=optimizer, **how)  # while `loss` keeps the old graph
    return losses, {e: [w.detach() for w, _ in homes] for e, homes in homes_of(layer).items()}


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("kind", [1, 4, 5], ids=["eplb", "random", "empty rank"])
def test_training_over_a_move_is_dense_training(kind, chunk):
    setup = make_setup(4)
    _, before, after = list(pairs(4))[kind]
    losses, homes = train_and_move(
        setup, before, after, LocalTransport(setup.topology), range(4), rows_per_chunk=chunk
    )
    check_training(setup, losses, homes)


def check_training(setup, losses, homes):
    stacks = dense_stacks(setup.dense, torch.float64)
    wanted = train(
        lambda rows: [dense_layer(setup, r, stacks) for r in rows], stacks, lambda: None, setup, 10
    )
    assert losses == pytest.approx(wanted, rel=1e-9)
    for expert, parts in homes.items():
        for part, stack in zip(parts, stacks, strict=True):
            assert close(part, stack[expert], 1e-9)


def on_rank(rank, ranks, kind):
    """One process's training, its traffic, and what it gave and got."""
    setup = make_setup(ranks)
    _, before, after = list(pairs(ranks))[kind]
    transport = CollectiveTransport(setup.topology)
    losses, homes = train_and_move(setup, before, after, transport, [rank])
    return losses, homes, transport.group.traffic.bytes["placement"]


@pytest.mark.parametrize(("ranks", "kind"), [(3, 3), *slow((2, 0), (4, 4), (2, 5))])
def test_processes_move_and_train_like_one(ranks, kind):
    results = run_ranks(on_rank, ranks, ranks, kind)
    setup = make_setup(ranks)
    _, before, after = list(pairs(ranks))[kind]
    transport = LocalTransport(setup.topology)
    losses, homes = train_and_move(setup, before, after, transport, range(ranks))
    assert [sum(parts) for parts in zip(*(r[0] for r in results), strict=True)] == pytest.approx(
        losses, 1e-12
    )
    assert sum(r[2] for r in results) == transport.group.traffic.bytes["placement"] > 0
    for _, own, _ in results:
        for expert, parts in own.items():
            assert all(torch.equal(a, b) for a, b in zip(parts, homes[expert], strict=True))
    check_training(setup, losses, homes)


def bytes_on_rank(rank, ranks):
    """Bytes that one process sends in a move between two placements with replicas."""
    setup = make_setup(ranks)
    _, before, after = list(pairs(ranks))[1]
    transport = CollectiveTransport(setup.topology)
    rows = before.slots_per_rank
    layer = MoE(setup.gate, setup.dense, transport, before, weight_rows=rows)
    layer.load_placement(after, optimizer="none")
    return transport.group.traffic.bytes["placement"]


def test_four_processes_send_what_the_schedule_says():
    """Each process's meter against the schedule's rows."""
    ranks = 4
    sent = run_ranks(bytes_on_rank, ranks, ranks)
    _, before, after = list(pairs(ranks))[1]
    now = layouts(before.layer(0, "cpu"))
    new = layouts(after.layer(0, "cpu"), now)
    chunks = plan_moves([own.experts for own in now], [own.experts for own in new], ranks)
    leaving = Counter(
        source.rank for chunk in chunks for source, target in chunk if source.rank != target.rank
    )
    assert sent == [leaving[rank] * ROW_BYTES for rank in range(ranks)]
    arriving = [set(own.experts) - set(old.experts) for own, old in zip(new, now, strict=True)]
    assert sum(sent) == sum(map(len, arriving)) * ROW_BYTES
