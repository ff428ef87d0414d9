"""Rule recorded of waterfill_sampled: rank loads of a recorded trace, by hand, and nothing of other ranks' batches."""

import numpy as np
import pytest
import torch

import isoload
from isoload.traces import Trace, write_trace
from reference import route_shared_sampled

RANKS, EXPERTS, TOKENS = 4, 8, 300


@pytest.fixture
def recorded(tmp_path):
    """[L, E] copies, and the file that has them in two batches."""
    counts = np.random.default_rng(3).integers(0, 900, (2, 2, EXPERTS))
    path = tmp_path / "recorded.npz"
    write_trace(
        Trace("recorded", EXPERTS, top_k=2, counts=counts, tokens_per_batch=counts.sum(2).max(1)), path
    )
    return counts.sum(0), str(path)


def make(layers=2, experts=EXPERTS):
    counts = torch.arange(1, experts + 1).expand(layers, -1)
    return isoload.place(counts, isoload.Topology(RANKS), slots_per_rank=experts // RANKS + 2, num_shared=1)


def draw(seed, rank_tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack(
        [torch.rand(rank_tokens, EXPERTS, generator=generator).topk(2).indices for _ in range(RANKS)]
    )
    return torch.cat([ids, torch.full((RANKS, rank_tokens, 1), EXPERTS)], dim=2)


def count(ids):
    return torch.stack([isoload.count(rows, EXPERTS + 1) for rows in ids])


def route(ids, placement, layer, path, rank):
    plan = isoload.plan(
        count(ids), placement, layer, "waterfill_sampled", rule="recorded", recorded=path, seed=5
    )
    return plan, isoload.route(ids[rank], count(ids), plan, rank)


@pytest.mark.parametrize("layer", [0, 1])
def test_loads_are_those_of_the_trace(recorded, layer):
    """Level and room by hand; the draw by the reference of rule blog."""
    counts, path = recorded
    placement, ids = make(), draw(1)
    size = placement.slots_per_rank
    held = placement.slot_to_expert[layer].tolist()
    share = [0.0] * RANKS
    for slot, expert in enumerate(held):
        if 0 <= expert < EXPERTS:
            share[slot // size] += counts[layer][expert] / held.count(expert) / counts[layer].sum()
    assert sum(share) == pytest.approx(1) and max(share) > 1.2 * min(share)
    for rank in range(RANKS):
        plan, slots = route(ids, placement, layer, path, rank)
        load = torch.tensor([int(part * TOKENS * 2) for part in share], dtype=torch.int32)
        own = torch.tensor([TOKENS * (r == rank) for r in range(RANKS)], dtype=torch.int32)
        seed = isoload.policies.sample_seed(plan, rank)
        wanted = route_shared_sampled(slots[:, :-1], load, own, size, rank, "blog", *seed)
        assert torch.equal(slots[:, -1:] // size, wanted.to(slots.dtype))
        level = -(-(int(load.sum()) + TOKENS) // RANKS)
        full = {r for r in range(RANKS) if load[r] >= level}
        assert set((slots[:, -1] // size).tolist()) <= set(range(RANKS)) - full | {rank}


def test_other_ranks_batches_change_nothing(recorded):
    placement, ids = make(), draw(1)
    others = draw(2)
    others[1] = ids[1]
    first, second = (route(given, placement, 0, recorded[1], 1)[1][:, -1] for given in (ids, others))
    replicas = isoload.count(placement.slot_to_expert[0][:, None].clamp(min=0), EXPERTS + 1)[:EXPERTS]
    alone = (replicas[ids[1][:, :-1]] == 1).all(1)  # of other tokens the routed copies may lie elsewhere
    assert alone.any() and torch.equal(first[alone], second[alone])


def test_refuses(recorded):
    path = recorded[1]
    for given in ({"rule": "recorded"}, {"recorded": path}):
        with pytest.raises(ValueError, match="recorded must be a trace's file with rule recorded alone, got"):
            isoload.policies.make_policy("waterfill_sampled", given)
    policy = isoload.policies.make_policy("waterfill_sampled", {"rule": "recorded", "recorded": path})
    for placement in (make(layers=1), make(experts=12)):
        with pytest.raises(
            ValueError, match=r"recorded must be a trace of \(\d, \d+\) layers and experts, got \(2, 8\)"
        ):
            policy.check(placement)
