"""route: over all ranks every slot receives its quota, by a stable rule; route_sampled: the weights' frequencies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

import reference
from isoload import ops
from isoload.ops.tables import ReplicaTables
from support.cases import draw, popularity

RANKS_AND_FAMILIES = [
    *((1, "random"), (2, "random"), (3, "eplb"), (7, "random"), (8, "eplb"), (8, "duplicates")),
    *((12, "empty_slots"), (12, "empty_ranks"), (16, "spare_slots"), (16, "no_replicas"), (31, "random")),
]


@dataclass(frozen=True)
class Batch:
    """Routed tokens of every rank on one layer: ids [R][T, K], loads [R, E], quota [P], share [R, P]."""

    name: str
    ids: list[Tensor]
    tables: ReplicaTables
    slot_to_expert: np.ndarray
    quota: Tensor
    share: Tensor


def draw_batch(family: str, ranks: int, seed: int, top_k: int, dtype: torch.dtype = torch.int64) -> Batch:
    """Skewed choices of distinct experts, some masked, ranks with different numbers of tokens (one with none)."""
    case = draw(family, ranks, seed)
    rng = np.random.default_rng([seed, ranks, top_k])
    routed = np.unique(case.slot_to_expert[case.slot_to_expert >= 0])
    weights = popularity(rng, len(routed))
    top_k = min(top_k, len(routed))
    ids = []
    for r in range(ranks):
        tokens = 0 if ranks > 1 and r == ranks // 2 else int(rng.integers(1, 60))
        keys = rng.random((tokens, len(routed))) ** (weights.mean() / weights)
        chosen = routed[np.argsort(-keys, axis=1)[:, :top_k]].astype(np.int64)
        chosen[rng.random(chosen.shape) < 0.1] = -1
        ids.append(torch.from_numpy(chosen).to(dtype))
    loads = torch.stack([ops.count(row, case.num_experts).counts for row in ids])
    quota = ops.plan_exact(loads, case.tables()).quota
    per_node = 4 if ranks % 4 == 0 else 1
    share = ops.share(loads, quota, case.tables(), per_node)
    return Batch(f"{case.name} K={top_k}", ids, case.tables(), case.slot_to_expert, quota, share)


def route(ids: Tensor, send_counts: Tensor, tables: ReplicaTables) -> Tensor:
    return ops.route(ops.count(ids, tables.num_experts), send_counts, tables)


def reference_route(ids: Tensor, send_counts: Tensor, tables: ReplicaTables) -> Tensor:
    return reference.route(ops.count(ids, tables.num_experts), send_counts, tables)


@pytest.mark.parametrize(("ranks", "family"), RANKS_AND_FAMILIES)
def test_every_slot_receives_its_quota(ranks: int, family: str) -> None:
    for top_k in (1, 2, 4, 8):
        batch = draw_batch(family, ranks, seed=top_k, top_k=top_k)
        received = torch.zeros_like(batch.quota)
        for r, ids in enumerate(batch.ids):
            slots = route(ids, batch.share[r], batch.tables)
            assert slots.shape == ids.shape and slots.dtype == ids.dtype
            held = np.append(batch.slot_to_expert, -1)[slots.numpy()]
            assert np.array_equal(held, ids.numpy()), f"{batch.name}: a copy in another expert's slot"
            counted = ops.count(slots, len(batch.quota)).counts
            assert torch.equal(counted, batch.share[r]), f"{batch.name}: rank {r}"
            received += counted
        assert torch.equal(received, batch.quota), batch.name


@pytest.mark.parametrize(("ranks", "family"), RANKS_AND_FAMILIES)
def test_the_ith_copy_goes_to_the_first_replica_whose_cumulative_share_exceeds_i(
    ranks: int, family: str
) -> None:
    batch = draw_batch(family, ranks, seed=50, top_k=3)
    offsets, listed = batch.tables.field("offsets").tolist(), batch.tables.field("slots").tolist()
    for r, ids in enumerate(batch.ids):
        slots = route(ids, batch.share[r], batch.tables)
        for e in range(batch.tables.num_experts):
            replicas = listed[offsets[e] : offsets[e + 1]]
            in_order = np.repeat(replicas, batch.share[r].numpy()[replicas]).tolist()
            assert slots[ids == e].tolist() == in_order, f"{batch.name}: rank {r}, expert {e}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("top_k", range(1, 9))
def test_equals_reference(top_k: int, dtype: torch.dtype) -> None:
    for ranks, family in RANKS_AND_FAMILIES[:-1]:
        batch = draw_batch(family, ranks, seed=70 + top_k, top_k=top_k, dtype=dtype)
        for r, ids in enumerate(batch.ids):
            mine = route(ids, batch.share[r], batch.tables)
            theirs = reference_route(ids, batch.share[r], batch.tables)
            assert mine.dtype == theirs.dtype == dtype and torch.equal(mine, theirs), (
                f"{batch.name}: rank {r}"
            )


def test_equals_reference_where_a_token_repeats_an_expert() -> None:
    rng = np.random.default_rng(2)
    batch = draw_batch("eplb", 8, seed=3, top_k=4)
    ids = torch.from_numpy(rng.integers(-1, 6, (50, 8)))
    loads = torch.zeros(8, batch.tables.num_experts, dtype=torch.int32)
    loads[2] = ops.count(ids, batch.tables.num_experts).counts
    share = ops.share(loads, ops.plan_exact(loads, batch.tables).quota, batch.tables, 4, rank=2)
    assert torch.equal(route(ids, share, batch.tables), reference_route(ids, share, batch.tables))


@pytest.mark.parametrize("tokens", [127, 128, 129, 4096, 4097])
def test_equals_reference_where_many_tokens_are_routed(tokens: int) -> None:
    """Up to 1024 copies are a kernel's block, up to 32768 one kernel."""
    rng = np.random.default_rng(tokens)
    tables = draw("eplb", 8, seed=5).tables()
    ids = torch.from_numpy(rng.zipf(1.5, (tokens, 8)) % (tables.num_experts + 1) - 1)
    loads = torch.stack(
        [ops.count(ids, tables.num_experts).counts, *torch.zeros(7, tables.num_experts, dtype=torch.int32)]
    )
    share = ops.share(loads, ops.plan_exact(loads, tables).quota, tables, 4, rank=0)
    assert torch.equal(route(ids, share, tables), reference_route(ids, share, tables))


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (3, 4)])
def test_nothing_to_route(shape: tuple[int, int]) -> None:
    ids, share = torch.full(shape, -1), torch.zeros(8, dtype=torch.int32)
    assert torch.equal(route(ids, share, TABLES), ids)
    assert torch.equal(ops.route_sampled(ids, torch.ones(8), TABLES, seed=1), ids)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, 2**64 - 1])
def test_sampled_equals_reference(seed: int, dtype: torch.dtype) -> None:
    for ranks, family in RANKS_AND_FAMILIES:
        batch = draw_batch(family, ranks, seed=30, top_k=3, dtype=dtype)
        weights = torch.rand(len(batch.quota), generator=torch.Generator().manual_seed(ranks)) + 1e-3
        for ids in batch.ids:
            mine = ops.route_sampled(ids, weights, batch.tables, seed)
            theirs = reference.route_sampled(ids, weights, batch.tables, seed)
            assert mine.dtype == dtype and torch.equal(mine, theirs), batch.name
            held = np.append(batch.slot_to_expert, -1)[mine.numpy()]
            assert np.array_equal(held, ids.numpy()), batch.name


def test_sampled_with_a_step_on_the_device_equals_the_reference_and_draws_by_rank_and_step() -> None:
    batch = draw_batch("eplb", 8, seed=30, top_k=3)
    ids, weights = batch.ids[0], torch.ones(len(batch.quota))
    drawn = []
    for seed, step, rank in (
        (1, 0, 0),
        (1, 1, 0),
        (1, 1, 1),
        (2, 1, 1),
        (2**64 - 1, -(2**63), 7),
        (3, 2**63 - 1, 0),
    ):
        number = torch.tensor(step)
        mine = ops.route_sampled(ids, weights, batch.tables, seed, number, rank)
        assert torch.equal(mine, reference.route_sampled(ids, weights, batch.tables, seed, number, rank))
        assert torch.equal(mine, ops.route_sampled(ids, weights, batch.tables, seed, number[None], rank))
        drawn.append(tuple(mine.flatten().tolist()))
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_sampled_frequencies_follow_the_weights(seed: int) -> None:
    """Pearson's chi-square of 60,000 draws stays below its 99.9 % point; a replica of weight 0 gets nothing."""
    tables = ops.replica_tables(torch.zeros(6, dtype=torch.int32), 6, 1)
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 4.0, 0.25])
    slots = ops.route_sampled(torch.zeros(20_000, 3, dtype=torch.int64), weights, tables, seed)
    drawn, expected = ops.count(slots, 6).counts.double(), 60_000 * weights.double() / weights.sum()
    assert drawn[1] == 0
    kept = weights > 0
    statistic = ((drawn - expected)[kept] ** 2 / expected[kept]).sum().item()
    assert statistic < chi2.ppf(0.999, df=int(kept.sum()) - 1)


def test_seeds_give_different_streams_and_prefixes_agree() -> None:
    tables = ops.replica_tables(torch.zeros(4, dtype=torch.int32), 4, 1)
    ids, weights = torch.zeros(500, 2, dtype=torch.int64), torch.ones(4)
    first, second = (ops.route_sampled(ids, weights, tables, seed) for seed in (1, 2))
    assert 0.6 < (first != second).double().mean() < 0.9
    assert torch.equal(ops.route_sampled(ids[:100], weights, tables, 1), first[:100])


TABLES = ops.replica_tables(torch.tensor([0, 1, 1, 2, 2, 0, 3, 3], dtype=torch.int32), 4, 4)
