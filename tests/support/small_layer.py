"""A small layer and the dense one beside it."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import isoload
from isoload.weights.experts import ClampedGLU, ExpertWeights
from reference.experts import run_experts

HIDDEN, INNER, EXPERTS = 8, 6, 11


TOKENS = [7, 0, 13, 5, 1, 9, 4, 6]  # per rank; uneven, one rank without any


STACKS = ("gate_up", "down", "gate_up_bias", "down_bias")


def make_gate(top_k, masked=False, dtype=torch.float64):
    """A differentiable gate; with `masked` every fifth copy is absent."""
    weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(top_k), dtype=torch.float64)

    def gate(rows):
        logits = rows.double() @ weight.T + torch.linspace(2, 0, EXPERTS, dtype=torch.float64)
        weights, ids = logits.softmax(-1).topk(top_k)
        if masked:
            ids = torch.where(torch.arange(ids.numel()).view(ids.shape) % 5 == 4, -1, ids)
        return ids, weights if dtype == torch.float64 else weights.float()

    return gate


def make_setup(ranks, top_k=3, dtype=torch.float64, bias=False, masked=False, slots=0, tokens=None):
    """A dense layer, a placement with replicas for it, and every rank's rows."""
    draw = torch.Generator().manual_seed(100 * ranks + top_k)
    counts = torch.rand(2, EXPERTS, generator=draw) ** 3 * 100
    topology = isoload.Topology(ranks, 2 if ranks % 2 == 0 else 0)
    placement = isoload.place(
        counts, topology, slots_per_rank=slots or min(-(-EXPERTS // ranks) + 1, EXPERTS)
    )
    dense = ExpertWeights.random(EXPERTS, HIDDEN, INNER, bias=bias, generator=draw, dtype=dtype)
    sizes = (TOKENS if tokens is None else tokens)[:ranks]
    rows = [torch.randn(n, HIDDEN, generator=draw, dtype=torch.float64).to(dtype) for n in sizes]
    return SimpleNamespace(
        topology=topology, placement=placement, dense=dense, rows=rows, gate=make_gate(top_k, masked, dtype)
    )


def dense_layer(setup, rows, stacks, activation=None):
    """The layer without ranks: every copy computed where it is."""
    ids, weights = setup.gate(rows)
    clamped = (activation.alpha, activation.limit) if isinstance(activation, ClampedGLU) else None
    return run_experts(rows, ids, weights, *stacks, clamped=clamped)


def close(got, want, tolerance):
    """Whether no element is off by more than the tolerance of the largest; no gradient (T = 0) counts as zeros."""
    want = torch.zeros_like(got, dtype=torch.float64) if want is None else want
    got, want = got.detach(), want.detach()
    scale = max(float(want.abs().max()), 1e-30) if want.numel() else 1.0
    return got.shape == want.shape and (
        not got.numel() or float((got.double() - want).abs().max()) <= tolerance * scale
    )


def dense_stacks(dense, dtype):
    return [
        None if s is None else s.to(dtype).clone().requires_grad_()
        for s in (getattr(dense, n) for n in STACKS)
    ]


def train(layer_of, parameters, refresh, setup, steps=20):
    """Losses of a few AdamW steps towards a fixed target."""
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = sum(
            ((y - torch.sin(3 * x)) ** 2).sum() for x, y in zip(setup.rows, layer_of(setup.rows), strict=True)
        )
        loss.backward()
        optimizer.step()
        refresh()
        losses.append(float(loss.detach()))
    return losses


def with_shared(ranks, num_shared=1, **how):
    """make_setup with shared experts: the same routed ones, their stacks first, and a dense twin of the whole."""
    setup = make_setup(ranks, **how)
    draw = torch.Generator().manual_seed(ranks)
    setup.placement = isoload.place(
        torch.rand(2, EXPERTS, generator=draw),
        setup.topology,
        min(-(-EXPERTS // ranks) + 1, EXPERTS) + num_shared,
        num_shared=num_shared,
    )
    setup.routed = setup.gate
    setup.dense = ExpertWeights.random(
        EXPERTS + num_shared, HIDDEN, INNER, generator=draw, dtype=setup.dense.down.dtype
    )

    def gate(rows):
        ids, weights = setup.routed(rows)
        shared = torch.arange(EXPERTS, EXPERTS + num_shared).expand(len(rows), -1)
        used = (ids >= 0).any(1, keepdim=True)
        return (
            torch.cat([ids, torch.where(used, shared, -1)], 1),
            torch.cat([weights, weights.new_ones(shared.shape)], 1),
        )

    setup.gate = gate
    return setup


def run_layer(setup, layer):
    """Outputs and every gradient, ours and the dense layer's."""
    rows = [r.clone().requires_grad_() for r in setup.rows]
    outputs = layer(rows)
    sum((y**2).sum() for y in outputs).backward()
    twins = [r.clone().requires_grad_() for r in setup.rows]
    stacks = [getattr(setup.dense, name).clone().requires_grad_() for name in ("gate_up", "down")]
    wanted = [dense_layer(setup, r, [*stacks, None, None]) for r in twins]
    sum((y**2).sum() for y in wanted).backward()
    return outputs, wanted, rows, twins, stacks


def check_dense(setup, layer):
    """Outputs and gradients of rows and experts are the dense layer's."""
    outputs, wanted, rows, twins, stacks = run_layer(setup, layer)
    for a, b in zip(outputs, wanted, strict=True):
        assert close(a, b, 1e-12)
    for a, b in zip(rows, twins, strict=True):
        assert close(a.grad, b.grad, 4e-12)
    for weights in layer.weights:
        homes = list(weights.layout.homes)
        for name, stack in zip(("gate_up", "down"), stacks, strict=True):
            assert not homes or close(getattr(weights, name).grad, stack.grad[homes], 4e-12)
