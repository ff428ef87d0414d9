"""Fuzzed splits of own counts: every copy is sent to its expert, and each of a batch of layers as if alone; exchanges
of ranks of which some are idle."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import isoload
from isoload import Balancer, LocalGroup, ops
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
    check_idle(rng)


def check_idle(rng: Rng) -> None:
    """Ranks are busy or idle in every batch, which may be too small to plan; an exchange returns the imbalance of the
    last batch, and ranks that were idle then send their next copies as if there were no targets."""
    nodes, size = int(rng.integers(2, 5)), int(rng.integers(2, 5))
    topology = isoload.Topology(nodes * size, ranks_per_node=size)
    experts, spare, shared = int(rng.integers(4, 65)), int(rng.integers(0, 4)), int(rng.integers(0, 2))
    likes = torch.from_numpy(rng.random((1, experts)) ** 4 + 1e-3)
    slots_per_rank = -(-experts // topology.num_ranks) + spare + shared
    placement = isoload.place(likes, topology, slots_per_rank, num_shared=shared)
    loads, min_tokens = rng.choice(["own", "node"]), int(rng.choice([0, 100]))
    how = {"loads": str(loads), "min_tokens": min_tokens, "shared_columns": False}
    layer, alone = (Balancer(placement, group=LocalGroup(topology), **how) for _ in "ab")  # type: ignore[arg-type]
    for _ in range(int(rng.integers(1, 6))):
        slots, tokens = layer_call(layer, draw_idle(rng, likes, topology.num_ranks))
    imbalance = layer.exchange().imbalance.item()
    carried = rank_copies(slots, placement)
    mean = carried.sum() / topology.num_ranks
    assert np.isnan(imbalance) if mean == 0 else abs(imbalance - carried.max() / mean) < 1e-9, imbalance
    own = layer.own_counts
    assert own is not None and int(own.offset.min()) >= 0 and int(own.offset.max()) <= 2**20
    sources = tokens_of_sources(tokens, nodes if loads == "node" else nodes * size)
    idle = [s for s, number in enumerate(sources) if number == 0]
    assert not own.offset[idle].any(), "a target of an idle source"
    ids = draw_idle(rng, likes, topology.num_ranks)
    (after, _), (before, _) = layer_call(layer, ids), layer_call(alone, ids)
    per_source = topology.num_ranks // len(sources)
    for s in idle:
        for rank in range(s * per_source, (s + 1) * per_source):
            assert torch.equal(after[rank], before[rank]), "copies of an idle source follow a target"


def draw_idle(rng: Rng, likes: Tensor, ranks: int) -> list[Tensor]:
    """[R][T, 2] ids; few or many tokens, none on idle ranks."""
    busy = rng.random(ranks) < rng.choice([0.1, 0.5, 1.0])
    draw = torch.Generator().manual_seed(int(rng.integers(2**31)))
    most = int(rng.choice([3, 100]))
    tokens = [int(rng.integers(1, most)) * int(b) for b in busy]
    return [torch.multinomial(likes[0].expand(max(n, 1), -1), 2, generator=draw)[:n] for n in tokens]


def layer_call(layer: Balancer, ids: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Slots of a batch, and the tokens of every rank."""
    tokens = [len(rows) for rows in ids]
    slots = layer(ids, num_tokens=sum(tokens))
    assert isinstance(slots, list)
    return slots, tokens


def rank_copies(slots: list[Tensor], placement: isoload.Placement) -> np.ndarray:
    """[R] copies that come to every rank."""
    routed = torch.cat([to.flatten() for to in slots]) // placement.slots_per_rank
    return torch.bincount(routed, minlength=placement.topology.num_ranks).numpy()


def tokens_of_sources(tokens: list[int], sources: int) -> list[int]:
    """Tokens of every source, a rank or a node."""
    return [int(sum(of)) for of in np.array_split(tokens, sources)]


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
