"""exchange(): what it finds out, targets, shared experts in them, and what is refused or lost in it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CollectiveGroup, LocalGroup, ops
from isoload.balancing.targets import offsets, strength
from support.processes import die, rank_outcomes, run_ranks
from support.small_batches import EXPERTS, RANKS, draw_ids, make_placement, make_topology

BY_COUNTS = pytest.mark.parametrize("loads", ["own", "node"])
WORDS = {"own": 1, "node": 4}  # ranks of a source in make_topology


def balancers(layers: int = 1, **how: Any) -> list[Balancer]:
    placement, group = make_placement(), LocalGroup(make_topology())
    return [Balancer(placement, i, group=group, **{"loads": "own", **how}) for i in range(layers)]


def rank_loads(slots: list[Tensor], size: int, ranks: int) -> Tensor:
    """[R] copies that come to each rank."""
    routed = torch.cat([s.flatten() for s in slots])
    return torch.bincount(routed[routed >= 0] // size, minlength=ranks)


@BY_COUNTS
def test_it_tells_the_imbalance_of_the_last_batch(loads: str) -> None:
    layers = balancers(3, loads=loads)
    assert layers[0].exchange(*layers[1:]).imbalance.isnan().all(), "of no batch"
    for batch in range(2):
        wanted = []
        for layer in layers:
            carried = rank_loads(layer(draw_ids(3 * batch + layer.layer)), 6, RANKS)
            wanted.append(float(carried.max() / carried.sum() * RANKS))
        found = layers[0].exchange(*layers[1:]).imbalance
        assert found.dtype == torch.float64 and found.tolist() == pytest.approx(wanted)
    layers[0].load(layers[0].placement)
    assert layers[0].exchange().imbalance.isnan().all(), "of another placement"


def test_with_speeds_it_is_of_cost() -> None:
    topology = isoload.Topology(4, speeds=(1.0, 0.5, 1.0, 2.0))
    placement = isoload.place(torch.arange(1, 9)[None], topology, slots_per_rank=4)
    layer = Balancer(placement, group=LocalGroup(topology), loads="own")
    draw = torch.Generator().manual_seed(0)
    slots = layer([torch.rand(9, 8, generator=draw).topk(2).indices for _ in range(4)])
    cost = rank_loads(slots, 4, 4) * torch.tensor([1024, 2048, 1024, 512])
    level = 9 * 4 * 2 * 1024 / 4.5  # all ranks together are 4.5 nominal ones
    assert layer.exchange().imbalance.tolist() == pytest.approx([float(cost.max()) / level])


@BY_COUNTS
def test_what_a_source_caused_is_judged_by_its_own_copies(loads: str) -> None:
    (layer,) = balancers(loads=loads)
    assert layer.own_counts is not None and layer.own_counts.last is None
    ids = draw_ids(1)
    slots = layer(ids)
    split, size = layer.own_counts.last, WORDS[loads]
    assert split is not None and split.own_peak.shape == (RANKS // size,)
    for i, (peak, bound) in enumerate(zip(split.own_peak.tolist(), split.own_bound.tolist(), strict=True)):
        own = ids[i * size : (i + 1) * size]
        assert peak == int(rank_loads(slots[i * size : (i + 1) * size], 6, RANKS).max())
        counts = isoload.count(torch.cat(own), EXPERTS)
        assert bound == int(isoload.plan(counts, layer.placement, 0).bound) and bound <= peak


# Shared experts


def with_shared(num_shared: int, **how: Any) -> Balancer:
    topology = isoload.Topology(8, ranks_per_node=4, alive=how.pop("alive", None))
    placement = isoload.place(
        torch.rand(1, 16, generator=torch.Generator().manual_seed(1)), topology, 5, num_shared=num_shared
    )
    return Balancer(placement, group=LocalGroup(topology), shared_columns=False, **{"loads": "own", **how})


@BY_COUNTS
@pytest.mark.parametrize("alive", [None, (True,) * 6 + (False, True)])
def test_shared_copies_stay_home_and_the_others_make_room(loads: str, alive: Any) -> None:
    """Rank 2 has most tokens: its own shared copies leave less room there than on others, at once and by targets."""
    layer = with_shared(2, loads=loads, alive=alive)
    placed = layer.placed_on(torch.device("cpu"))
    draw, size = torch.Generator().manual_seed(4), WORDS[loads]
    for batch in range(4):
        tokens = [5, 0, 90, 20, 7, 30, 11, 3]
        ids = [torch.rand(n, 16, generator=draw).topk(3).indices for n in tokens]
        ids[3][::4] = -1
        slots = layer(ids)
        for rank, (mine, to) in enumerate(zip(ids, slots, strict=True)):
            shared = torch.where((mine >= 0).any(1, keepdim=True), torch.tensor([16, 17]), -1)
            expert = torch.where(to >= 0, placed.slot_to_expert.long()[to.clamp(min=0)], -1)
            assert torch.equal(expert, torch.cat([mine, shared], 1))
            home = placed.home_rank(rank)
            assert ((to[:, 3:] // 5 == home) | (to[:, 3:] < 0)).all()
        assert layer.own_counts is not None and layer.own_counts.last is not None
        split = layer.own_counts.last
        for i, counts in enumerate(split.counts):
            fixed = torch.zeros(8, dtype=torch.int32)
            for rank in range(i * size, (i + 1) * size):
                fixed[placed.home_rank(rank)] += 2 * int((ids[rank] >= 0).any(1).sum())
            again = ops.plan_own(counts, placed.tables, layer.own_counts.offset[i], i, fixed=fixed)
            assert torch.equal(again.view(8, -1).sum(1) + fixed, split.copies[i])
            assert torch.equal(split.fixed[i], fixed)
        if batch == 1:
            exchanged = layer.exchange()
            carried = rank_loads(slots, 5, 8)
            assert exchanged.imbalance.item() == pytest.approx(
                float(carried.max() / carried.sum()) * (8 - bool(alive))
            )


def test_targets_leave_room_for_the_shared_copies_of_others() -> None:
    layer = with_shared(1)

    def carried(batches: range) -> float:
        found = []
        for batch in batches:
            draw = torch.Generator().manual_seed(batch)
            tokens = [10, 10, 60, 10, 10, 10, 10, 10]
            slots = layer([torch.rand(n, 16, generator=draw).topk(3).indices for n in tokens])
            found.append(float(rank_loads(slots, 5, 8).max()))
        return float(np.mean(found))

    before = carried(range(16))
    layer.exchange()
    after = carried(range(16, 32))
    assert after < 0.98 * before, (before, after)


@pytest.mark.parametrize("policy", ["waterfill", "joint", "llep", "lp_sampled"])
@BY_COUNTS
def test_refuses_policies_that_place_shared_copies_borrow_or_draw(policy: str, loads: str) -> None:
    message = f"policy must be exact with objective spread for loads={loads!r}, got .*: pass loads='gathered' for other"
    with pytest.raises(ValueError, match=message):
        with_shared(1, loads=loads, policy=policy)


# Targets


@pytest.mark.parametrize("sources", [8, 2])
def test_offsets_are_the_targets_less_what_a_source_causes(sources: int) -> None:
    """Of ranks and of nodes, by the definition in fractions: T / |T| - T_s / |T_s|, times the strength."""
    rng = np.random.default_rng(sources)
    placed = make_placement().layer(0, "cpu")
    recent = torch.from_numpy(
        rng.integers(0, 2**20, (1, sources, EXPERTS)) * rng.integers(1, 9, (1, sources, 1))
    )
    fixed = torch.from_numpy(rng.integers(0, 2**20, (1, sources, RANKS)))
    mass = recent.sum(2) + fixed.sum(2)
    last = mass * torch.from_numpy(rng.integers(90, 100, (1, sources)))
    loads = recent.sum(1).to(torch.int32)
    quota = ops.plan_exact(loads[0], placed.tables, fixed.sum(1)[0].to(torch.int32)).quota.tolist()
    targets = fixed[0].double()  # [N, R]
    for slot, expert in enumerate(placed.slot_to_expert.tolist()):
        for s in range(sources):
            part = float(recent[0, s, expert]) / max(int(loads[0, expert]), 1)
            targets[s, slot // 6] += part * quota[slot]
    at = placed.host.layers("cpu").tables
    tables = replace(at, data=at.data[:1])
    for s in range(sources):
        wanted = targets.sum(0) / targets.sum() - targets[s] / targets[s].sum()
        wanted = wanted - wanted.min()
        followed = strength(mass, last, s)[0] / 2**20
        assert 0 < followed < 1
        given = recent, last, s, tables, placed.slot_to_expert[None], make_topology(), fixed
        found = offsets(*given)[0] / 2**20
        assert torch.allclose(found.double(), (wanted * followed).clamp(max=1.0), atol=1e-5)


def test_offsets_of_many_copies_stay_in_range() -> None:
    placed = make_placement().layers("cpu")
    recent = torch.full((3, RANKS, EXPERTS), 2**43)
    last = torch.full((3, RANKS), 2**29)
    at = placed.tables, placed.slot_to_expert, make_topology()
    for source in (0, RANKS - 1):
        found = offsets(recent, last, source, *at)
        assert found.dtype == torch.int32 and int(found.min()) >= 0 and int(found.max()) <= 2**20


# What is refused, and what is lost


def test_refuses_layers_that_do_not_belong_together() -> None:
    (own,) = balancers()
    shape = isoload.place(torch.ones(1, EXPERTS), make_topology(), slots_per_rank=7)
    cases = {
        "balancers must share one group, but the balancer at position 1 has another group": balancers()[0],
        "placement must have the layer's num_layers=3, got 1": Balancer(shape, group=own.group, loads="own"),
        "balancers must have the same loads, got own and node": Balancer(
            make_placement(), group=own.group, loads="node"
        ),
        "loads must be own or node where counts are exchanged, got gathered": Balancer(
            make_placement(), group=own.group
        ),
    }
    for message, other in cases.items():
        with pytest.raises(ValueError, match=message):
            own.exchange(other)
    with pytest.raises(
        ValueError, match="loads must be own or node where counts are exchanged, got gathered"
    ):
        Balancer(make_placement(), tokens="same").exchange()


def test_refuses_to_be_captured() -> None:
    (layer,) = balancers()
    with (
        patch("isoload.balancing.targets.capturing", lambda _device: True),
        pytest.raises(
            ValueError, match="exchange must be outside of a CUDA graph: it waits for the other ranks"
        ),
    ):
        layer.exchange()


def two(**how: Any) -> Balancer:
    group = CollectiveGroup.own(isoload.Topology(2))
    placement = isoload.place(torch.arange(1, 9)[None], group.topology, slots_per_rank=5)
    return Balancer(placement, group=group, **{"loads": "own", **how})


def ids_of(rank: int, seed: int) -> Tensor:
    return torch.rand(6, 8, generator=torch.Generator().manual_seed(10 * seed + rank)).topk(2).indices


@pytest.mark.slow
def test_one_missed_by_a_rank_ends_on_both() -> None:
    def on_rank(rank: int) -> None:
        layer = two()
        layer(ids_of(rank, 0))
        if rank == 1:
            time.sleep(5)  # another rank's timeout has passed
        layer.exchange()

    for rank, outcome in enumerate(rank_outcomes(on_rank, 2, group_timeout=3.0)):
        assert (
            outcome.error is not None
            and f"RuntimeError: stage exchange failed on rank {rank}" in outcome.error
        )


def test_another_call_in_its_place_names_both() -> None:
    def on_rank(rank: int) -> str:
        layer = two()
        with pytest.raises(ValueError) as raised:
            layer.exchange() if rank == 0 else layer.load(layer.placement)
        return str(raised.value)

    told = "stage must be the same on all ranks, got exchange on rank 0 and placement on rank 1"
    for text in run_ranks(on_rank, 2):
        assert text.startswith(told)


def test_a_rank_killed_in_one_is_named_and_changes_no_plan_before_it() -> None:
    def on_rank(rank: int) -> Tensor:
        layer = two()
        layer(ids_of(rank, 0))
        layer.exchange()
        if rank == 1:
            with patch.object(layer.group, "gather", lambda *_: die()):
                layer.exchange()
        slots = layer(ids_of(0, 1))
        try:
            layer.exchange()
        except RuntimeError as error:
            assert "stage exchange failed on rank 0" in str(error)
            after = layer(ids_of(0, 1))
            assert after.shape == slots.shape, "and this rank goes on by the targets that it has"
            return slots
        raise AssertionError("an exchange without the other rank")

    alive, gone = rank_outcomes(on_rank, 2, group_timeout=8.0)
    assert gone.error is not None and alive.error is None, alive.error

    def undisturbed(rank: int) -> Tensor:
        layer = two()
        layer(ids_of(rank, 0))
        layer.exchange()
        return layer(ids_of(rank, 1))

    assert torch.equal(alive.value, run_ranks(undisturbed, 2)[0])


def test_a_failed_batch_is_named_on_all_ranks_and_the_next_exchange_is_none_the_worse() -> None:
    def on_rank(rank: int) -> str:
        layer = two()
        if rank == 1:
            with pytest.raises(ValueError, match="topk_ids must be"):
                layer(ids_of(rank, 0) + 9)
        else:
            layer(ids_of(rank, 0))
        with pytest.raises(ValueError) as raised:
            layer.exchange()
        layer.exchange()
        return str(raised.value)

    told = "a batch has failed since the last exchange: ValueError: topk_ids must be in -1..7"
    first, second = run_ranks(on_rank, 2)
    assert second.startswith(told)
    assert first.startswith(
        f"rank 1 failed in stage exchange, so all ranks stop; see the error of that rank: ValueError: {told}"
    )
