"""Fuzzed layers that are frozen, checkpointed and copied, against the dense one: kinds of their own."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import isoload
from isoload.transport import LocalTransport
from support.fuzz_cases import FuzzCase
from support.fuzz_layers import Dense, batch, compare


def check_frozen(case: FuzzCase) -> None:
    """One stack or both without gradients, on all ranks: the dense layer's are left out, too."""
    dense = Dense(case)
    frozen = [["gate_up"], ["down"], ["gate_up", "down"]][case.seed % 3]
    layer = dense.layer(LocalTransport(case.topology))
    for weights in layer.weights:
        for name in frozen:
            getattr(weights, name).requires_grad_(False)
    for move in (False, True):
        if move:
            layer.load_placement(case.after, optimizer="none")
        mine = [rows.clone().requires_grad_() for rows in dense.rows]
        sum((y**2).sum() for y in layer(mine)).backward()
        twins = [rows.clone().requires_grad_() for rows in dense.rows]
        sum((dense(rank, rows) ** 2).sum() for rank, rows in enumerate(twins)).backward()
        for rank, weights in enumerate(layer.weights):
            compare(f"gradient of rank {rank}'s rows", mine[rank].grad, twins[rank].grad)
            for name in ("gate_up", "down"):
                own, homes = getattr(weights, name), list(weights.layout.homes)
                assert own.requires_grad == (name not in frozen), f"{name} of rank {rank} has another flag"
                assert own.grad is None or name not in frozen, f"a gradient for {name} of rank {rank}"
                if own.grad is not None and homes:
                    compare(f"gradient of {name} of rank {rank}", own.grad, getattr(dense, name).grad[homes])
        layer.zero_grad(set_to_none=True)
        dense.gate_up.grad = dense.down.grad = None


def check_checkpoints(case: FuzzCase) -> None:
    """Some batches before the backward of any, in any order, nested or not: outputs and gradients of plain ones."""
    rng, dense = np.random.default_rng([case.seed, 3]), Dense(case)
    modes = [int(rng.integers(3)) for _ in range(int(rng.integers(1, 4)))]
    order, found = rng.permutation(len(modes)), list[list[Tensor]]()
    for plain in (True, False):
        layer = dense.layer(LocalTransport(case.topology))

        def run(*rows: Tensor, layer: isoload.MoE = layer) -> tuple[Tensor, ...]:
            return tuple(layer(list(rows)))

        leaves, losses = [], []
        for n, mode in enumerate(modes):
            rows = [(row + n).requires_grad_() for row in dense.rows]
            leaves += rows
            if plain:
                ys = run(*rows)
            elif mode == 2:
                ys = checkpoint(
                    lambda *r, run=run: checkpoint(run, *r, use_reentrant=False), *rows, use_reentrant=False
                )
            else:
                ys = checkpoint(run, *rows, use_reentrant=bool(mode))
            losses.append(sum((y**2).sum() for y in ys))
        for n in order:
            losses[n].backward()
        found.append([*losses, *(leaf.grad for leaf in (*leaves, *layer.parameters()))])
    for wanted, got in zip(*found, strict=True):
        compare("a loss or gradient under a checkpoint", got, wanted)


def check_copies(case: FuzzCase) -> None:
    """A copy after a batch, a layer of its own: it trains and moves as the dense one, the first stays as it is."""
    dense = Dense(case)
    layer = dense.layer(LocalTransport(case.topology))
    layer.balancer.recorder = isoload.Recorder(case.placement.num_layers, case.placement.num_routed)
    with torch.no_grad():
        before = layer(dense.rows)
    other = copy.deepcopy(layer)
    batch(dense, other, range(case.num_ranks))
    dense.gate_up.grad = dense.down.grad = None
    other.zero_grad(set_to_none=True)
    other.load_placement(case.after, optimizer="none")
    batch(dense, other, range(case.num_ranks))
    with torch.no_grad():
        for stack in other.parameters():
            stack.add_(1.0)
        after = layer(dense.rows)
    for rank, (a, b) in enumerate(zip(before, after, strict=True)):
        compare(f"output of rank {rank} of the layer that was copied", b, a)
