"""A layer that moves between placements, beside a fresh one."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

import isoload
from isoload.weights.experts import ExpertWeights
from support.small_layer import (
    EXPERTS,
    HIDDEN,
    INNER,
    STACKS,
    TOKENS,
    make_gate,
)


def make_setup(ranks, seed=0):
    draw = torch.Generator().manual_seed(seed)
    dense = ExpertWeights.random(EXPERTS, HIDDEN, INNER, bias=True, generator=draw, dtype=torch.float64)
    rows = [torch.randn(n, HIDDEN, generator=draw, dtype=torch.float64) for n in TOKENS[:ranks]]
    topology = isoload.Topology(ranks)
    return SimpleNamespace(topology=topology, dense=dense, rows=rows, gate=make_gate(3))


def deal(draw, topology, size, spare=0, empty=(), layers=1, replicas=True):
    """A placement at random: any slot, any home, replicas, second slots on one rank, and slots without memory."""
    ranks = topology.num_ranks
    slots, homes = [], []
    for _ in range(layers):
        places = [r * size + i for r in range(ranks) if r not in empty for i in range(size - spare)]
        draw.shuffle(places)
        held = [-1] * (ranks * size)
        for expert, place in enumerate(places[:EXPERTS]):
            held[place] = expert
        for place in places[EXPERTS:]:
            held[place] = draw.choice([*range(EXPERTS), -1]) if replicas else -1
        # on the rank of a home, the home is the lowest of its expert's slots
        owners = [draw.choice([p for p in range(len(held)) if held[p] == e]) // size for e in range(EXPERTS)]
        homes.append([held.index(e, owner * size) for e, owner in enumerate(owners)])
        slots.append(held)
    return isoload.Placement(
        torch.tensor(slots), topology, EXPERTS, home_slot=torch.tensor(homes), spare_slots=spare
    )


def eplb(topology, size, seed, spare=0):
    counts = torch.rand(1, EXPERTS, generator=torch.Generator().manual_seed(seed)) ** 3
    return isoload.place(counts, topology, slots_per_rank=size, spare_slots=spare)


def pairs(ranks):
    """(before, after) placements of every kind, with one number of slots each."""
    draw = random.Random(f"{ranks}")
    topology = isoload.Topology(ranks)
    size = min(-(-EXPERTS // ranks) + 2, EXPERTS)
    trivial = isoload.place(torch.ones(1, EXPERTS), topology, slots_per_rank=size, placer="trivial")
    yield "trivial to eplb", trivial, eplb(topology, size, 1)
    yield "eplb to eplb", eplb(topology, size, 1), eplb(topology, size, 2)
    yield "spare slots", eplb(topology, size + 1, 1, 1), eplb(topology, size + 1, 2, 1)
    yield "no replicas to random", deal(draw, topology, size, replicas=False), deal(draw, topology, size)
    yield "random", deal(draw, topology, size), deal(draw, topology, size)
    if ranks > 1:
        size = EXPERTS
        yield (
            "empty rank",
            deal(draw, topology, size, empty=[0]),
            deal(draw, topology, size, empty=[ranks - 1]),
        )


def homes_of(layer):
    """Per expert, its rows and gradients [4], wherever its home is."""
    return {
        expert: [
            (getattr(w, n)[row].detach().clone(), w.get_parameter(n).grad[row])
            for n in STACKS
            if getattr(w, n) is not None
        ]
        for w in layer.weights
        for row, expert in enumerate(w.layout.homes)
    }


def run(layer, rows):
    """Outputs, gradients of the rows, and per expert its weights and their gradients; no gradient stays behind."""
    rows = [r.clone().requires_grad_() for r in rows]
    outputs = layer(rows)
    sum((y**2).sum() for y in outputs).backward()
    homes = homes_of(layer)
    layer.zero_grad()
    return [y.detach() for y in outputs], [r.grad for r in rows], homes


def same(a, b):
    outputs = all(torch.equal(x, y) for i in (0, 1) for x, y in zip(a[i], b[i], strict=True))
    return outputs and all(
        torch.equal(x, y)
        for expert in range(EXPERTS)
        for one, other in zip(a[2][expert], b[2][expert], strict=True)
        for x, y in zip(one, other, strict=True)
    )
