"""Fuzzed splits of own counts: every copy is sent to its expert, and each of a batch of layers as if alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from isoload import ops
from support.fuzz_cases import FuzzCase, Rng

LAYERS = 64  # instances of a case


def check_own(case: FuzzCase) -> None:
    """Ranks up to 128, some dead, of unequal speed, with copies that stay; counts up to the most there may be."""
    rng = np.random.default_rng([case.seed, 5])
    ranks, size, experts = int(rng.integers(1, 129)), int(rng.integers(1, 9)), int(rng.integers(1, 257))
    experts = min(experts, ranks * size)
    slots = draw_slots(rng, ranks, size, experts)
    source = int(rng.integers(ranks))
    half = 2**30 // (ranks + 2)  # of the copies that there may be
    counts = draw_counts(rng, slots, experts, half)
    how: dict[str, Any] = {"offset": draw_offsets(rng, ranks), "layer": int(rng.integers(100))}
    if rng.random() < 0.5:  # shared experts at home
        how["fixed"] = torch.from_numpy(
            rng.integers(0, min(2**17, half // ranks), (LAYERS, ranks)).astype(np.int32)
        )
    if rng.random() < 0.3:
        how["ticks"] = torch.from_numpy(rng.integers(512, 4097, ranks).astype(np.int32))
    tables = ops.replica_tables(torch.from_numpy(slots), ranks, experts)
    given = torch.from_numpy(counts)
    found = ops.plan_own(given, tables, source=source, **how)
    sent = found.numpy().astype(np.int64)
    assert (sent >= 0).all() and not sent[slots < 0].any(), "copies to an empty slot"
    layer, slot = np.nonzero(slots >= 0)
    got = np.zeros(counts.shape, dtype=np.int64)
    np.add.at(got, (layer, slots[layer, slot]), sent[layer, slot])
    assert (got == counts).all(), "copies lost or made"
    one = int(rng.integers(LAYERS))
    alone = {name: value[one] if name in ("offset", "fixed") else value for name, value in how.items()}
    alone["layer"] += one
    assert torch.equal(ops.plan_own(given[one], tables[one], source=source, **alone), found[one])


def draw_slots(rng: Rng, ranks: int, size: int, experts: int) -> np.ndarray:
    """[LAYERS, P] int32: any expert anywhere, twice on a rank, too; dead ranks hold none, experts may have no slot."""
    slots = rng.integers(0, experts, (LAYERS, ranks, size), dtype=np.int32)
    slots[rng.random(slots.shape) < rng.choice([0.0, 0.2, 0.8])] = -1
    slots[:, rng.random(ranks) < rng.choice([0.0, 0.3])] = -1
    return slots.reshape(LAYERS, -1)


def draw_counts(rng: Rng, slots: np.ndarray, experts: int, total: int) -> np.ndarray:
    """[LAYERS, E] int32 of the experts that have a slot, skewed, at most total together."""
    most = min(rng.choice([1, 4, 100, 2**20, total // experts]), total // experts)
    counts = (most * rng.random((LAYERS, experts)) ** rng.choice([1, 4, 12])).astype(np.int32)
    counts[rng.random(counts.shape) < rng.choice([0.0, 0.3, 0.9])] = 0
    held = np.zeros((LAYERS, experts), dtype=bool)
    layer, slot = np.nonzero(slots >= 0)
    held[layer, slots[layer, slot]] = True
    return np.where(held, counts, 0)


def draw_offsets(rng: Rng, ranks: int) -> torch.Tensor:
    """[LAYERS, R] int32 parts of 2^20, whole ones too."""
    drawn = rng.integers(0, 2**20 + 1, (LAYERS, ranks)) >> rng.integers(0, 22)
    return torch.from_numpy(drawn.astype(np.int32))
