"""Balancer(loads="own"): slots from a rank's own counts, with no exchange but that of the targets."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CollectiveGroup, LocalGroup, ops
from isoload.online.recorder import Recorder
from isoload.policies.exact import EvenPolicy
from support.fake_ranks import OneRank
from support.processes import rank_outcomes, run_ranks
from support.recorded_calls import recorded
from support.small_batches import EXPERTS, LAYERS, RANKS, K, draw_ids, gather, make_placement, make_topology


def own_balancers(layers: int = LAYERS, **how: Any) -> list[Balancer]:
    placement, group = make_placement(), LocalGroup(make_topology())
    return [Balancer(placement, i, group=group, **{"loads": "own", **how}) for i in range(layers)]


def rank_loads(slots: list[Tensor]) -> Tensor:
    """[R] copies that come to each rank."""
    routed = torch.cat([s.flatten() for s in slots])
    return torch.bincount(routed[routed >= 0] // 6, minlength=RANKS)


def expert_of(balancer: Balancer, slots: Tensor) -> Tensor:
    table = balancer.placed_on(torch.device("cpu")).slot_to_expert.long()
    return torch.where(slots >= 0, table[slots.clamp(min=0)], -1)


def test_every_copy_gets_a_slot_of_its_expert_as_the_ops_split() -> None:
    (balancer,) = own_balancers(1)
    none = torch.zeros(RANKS, dtype=torch.int32)
    for batch in range(3):
        ids = draw_ids(batch)
        slots = balancer(ids)
        assert balancer.last_plan is None
        for rank, (mine, to) in enumerate(zip(ids, slots, strict=True)):
            assert torch.equal(expert_of(balancer, to), mine)
            tables = balancer.placed_on(torch.device("cpu")).tables
            sent = ops.plan_own(isoload.count(mine, EXPERTS), tables, none, rank)
            assert torch.equal(torch.bincount(to[to >= 0], minlength=len(sent)), sent)


def domains(batch: int, tokens: int = 64) -> list[Tensor]:
    """[R][T, K] of ranks that each have a domain of their own: other experts are popular."""
    generator = torch.Generator().manual_seed(100 + batch)
    ids = []
    for rank in range(RANKS):
        likes = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(rank)) ** 4 + 1e-3
        ids.append(torch.multinomial(likes.expand(tokens, -1), K, generator=generator))
    return ids


def imbalance(balancer: Balancer, batches: range) -> float:
    """Mean of the largest rank load over the proved bound of all loads."""
    found = []
    for batch in batches:
        ids = domains(batch)
        bound = isoload.plan(gather(ids), balancer.placement, balancer.layer).bound
        found.append(int(rank_loads(balancer(ids)).max()) / int(bound))
    return float(np.mean(found))


def test_targets_make_up_for_domains_that_differ() -> None:
    (balancer,) = own_balancers(1)
    before = imbalance(balancer, range(16))
    balancer.exchange()
    after = imbalance(balancer, range(16, 32))
    assert after < before - 0.02 and after < 1.05, (before, after)
    balancer.load(balancer.placement)
    assert balancer.own_counts is not None and not balancer.own_counts.offset.any(), (
        "targets are of the placement"
    )


def test_what_others_leave_is_shared_out() -> None:
    """Without the 1 / R of an offset every source would make up for all of it: worse than no targets."""
    (balancer,) = own_balancers(1)
    imbalance(balancer, range(16))
    balancer.exchange()
    assert balancer.own_counts is not None
    good = imbalance(balancer, range(16, 24))
    balancer.own_counts.offset.mul_(RANKS).clamp_(max=2**20)
    assert imbalance(balancer, range(16, 24)) > good + 0.1


def test_targets_of_domains_that_change_in_each_batch_do_no_harm() -> None:
    (kept,), (alone,) = own_balancers(1), own_balancers(1)

    def turned(batch: int) -> list[Tensor]:
        ids = domains(batch)
        return ids[batch % RANKS :] + ids[: batch % RANKS]

    peaks: tuple[list[float], list[float]] = [], []
    for batch in range(48):
        ids = turned(batch)
        if batch % 16 == 0 and batch:
            kept.exchange()
        for found, balancer in zip(peaks, (kept, alone), strict=True):
            found.append(float(rank_loads(balancer(ids)).max() / rank_loads(ids).sum() * RANKS))
    assert np.mean(peaks[0]) < np.mean(peaks[1]) + 0.01


def test_layers_are_exchanged_together_as_one_by_one() -> None:
    together, single = own_balancers(), own_balancers()
    for batch in range(4):
        for a, b in zip(together, single, strict=True):
            a(draw_ids(batch + 10 * a.layer)), b(draw_ids(batch + 10 * a.layer))
    together[0].exchange(*together[1:])
    for a, b in zip(together, single, strict=True):
        b.exchange()
        assert a.own_counts is not None and b.own_counts is not None
        assert a.own_counts.offset.any() and torch.equal(a.own_counts.offset, b.own_counts.offset)


def test_memory_stays_where_it_is() -> None:
    (balancer,) = own_balancers(1)
    with torch.inference_mode():
        balancer(draw_ids(1))
    assert balancer.own_counts is not None
    at = [x.data_ptr() for x in (balancer.own_counts.recent, balancer.own_counts.offset)]
    balancer.exchange()
    balancer.load(balancer.placement)
    balancer(draw_ids(2))
    assert at == [x.data_ptr() for x in (balancer.own_counts.recent, balancer.own_counts.offset)]


def test_over_processes_without_an_exchange_in_the_forward() -> None:
    def on_rank(rank: int) -> tuple[list[Tensor], dict[str, int]]:
        group = CollectiveGroup.own(isoload.Topology(2))
        counts = torch.arange(1, 17).repeat(2, 1)
        placement = isoload.place(counts, group.topology, slots_per_rank=10)
        layers = [Balancer(placement, i, group=group, loads="own") for i in range(2)]
        group.reset_traffic()
        ids = [
            torch.randint(16, (20, 2), generator=torch.Generator().manual_seed(7 * rank + i))
            for i in range(2)
        ]
        if rank == 0:  # no other rank is waited for
            layers[0](ids[0])
        slots = [layer(rows) for layer, rows in zip(layers, ids, strict=True)]
        forward = dict(group.traffic.bytes)
        layers[0].exchange(layers[1])
        slots += [layer(rows) for layer, rows in zip(layers, ids, strict=True)]
        assert layers[0].own_counts is not None
        return [*slots, layers[0].own_counts.offset], forward

    (first, none), (second, _) = run_ranks(on_rank, 2)
    assert not none, "bytes of the forward"
    assert not torch.equal(first[-1], second[-1])


def test_exchanges_that_differ_raise_on_all_ranks() -> None:
    def on_rank(rank: int) -> str:
        group = CollectiveGroup.own(isoload.Topology(2))
        placement = isoload.place(torch.ones(2, 8), group.topology, slots_per_rank=5)
        layers = [Balancer(placement, i, group=group, loads="own") for i in range(2)]
        first, second = layers if rank == 0 else layers[::-1]
        with pytest.raises(ValueError) as raised:
            first.exchange(second)
        return str(raised.value)

    for text in run_ranks(on_rank, 2):
        assert text.startswith("layers of exchange must be the same on all ranks, got [{'layer': 0")


def test_a_rank_killed_in_an_exchange_is_named_on_the_others() -> None:
    def on_rank(rank: int) -> None:
        group = CollectiveGroup.own(isoload.Topology(2))
        placement = isoload.place(torch.ones(1, 8), group.topology, slots_per_rank=5)
        layer = Balancer(placement, group=group, loads="own")
        if rank == 1:
            raise SystemExit(3)
        layer(torch.zeros(4, 2, dtype=torch.int64))  # the others' plans need nothing of it
        layer.exchange()

    alive, gone = rank_outcomes(on_rank, 2)
    assert gone.error is not None and alive.error is not None and "exchange" in alive.error


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "word": (
        {"loads": "mine"},
        "loads must be gathered or, where tokens are own, node or own, got 'mine' for 'own' tokens",
    ),
    "same": (
        {"tokens": "same"},
        "loads must be gathered or, where tokens are own, node or own, got 'own' for 'same' tokens",
    ),
    "policy": (
        {"policy": "dynamic"},
        r"policy must be exact with objective spread for loads='own', got Dynamic",
    ),
    "objective": (
        {"objective": "local"},
        "policy must be exact with objective spread for loads='own', got Exact",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    how, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        Balancer(make_placement(), 0, **{"group": LocalGroup(make_topology()), "loads": "own", **how})


def test_refuses_another_policy_later_and_an_exchange_of_gathered_loads() -> None:
    (balancer,) = own_balancers(1)
    with pytest.raises(ValueError, match="policy must be exact"):
        balancer.policy = EvenPolicy()
    gathered = Balancer(make_placement(), group=LocalGroup(make_topology()))
    with pytest.raises(
        ValueError, match="loads must be own or node where counts are exchanged, got gathered"
    ):
        gathered.exchange()


def test_a_captured_graph_reads_what_an_exchange_writes() -> None:
    (eager,), (inner,) = own_balancers(1), own_balancers(1)
    graph = isoload.CapturedBalancer(inner, 64, K, device="cpu", capture=recorded)
    for batch in range(24):
        ids = domains(batch)
        for mine, theirs in zip(eager(ids), graph(ids), strict=True):
            assert torch.equal(mine, theirs)
        if batch % 8 == 7:
            eager.exchange(), inner.exchange()
    assert eager.own_counts is not None and inner.own_counts is not None
    assert torch.equal(eager.own_counts.recent, inner.own_counts.recent) and inner.own_counts.offset.any()


def test_own_counts_compile_whole_once_for_all_layers() -> None:
    """A layer's number must not be in the graph: an engine compiles its dispatch once, and its compiler gives up."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    group = OneRank(1, make_topology())
    eager, traced = (
        [Balancer(make_placement(), i, group=group, loads="own") for i in range(LAYERS)] for _ in "ab"
    )

    def slots(ids: Tensor, balancer: Balancer) -> Tensor:
        routed = balancer(ids)
        assert isinstance(routed, Tensor)
        return routed

    compiled = torch.compile(slots, dynamic=True, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9, 33):
        for a, b in zip(eager, traced, strict=True):
            ids = draw_ids(tokens, tokens)[0]
            assert torch.equal(slots(ids, a), compiled(ids, b))
    for a, b in zip(eager, traced, strict=True):
        assert a.own_counts is not None and b.own_counts is not None
        assert a.own_counts.recent.any() and torch.equal(a.own_counts.recent, b.own_counts.recent)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def one_of_all(rank: int, **how: Any) -> Balancer:
    """The Balancer of a process that owns one rank."""
    group = LocalGroup(make_topology())
    group.ranks = (rank,)
    return Balancer(make_placement(), group=group, loads="own", **how)


def test_one_op_sends_copies_as_count_plan_and_route_do() -> None:
    """Which run where a process owns several ranks; targets, decayed counts and records, too."""
    (whole,), alone = own_balancers(1), [one_of_all(rank) for rank in range(RANKS)]
    recorders = [Recorder(LAYERS, EXPERTS) for _ in range(2)]
    whole.recorder = recorders[0]
    alone[2].recorder = recorders[1]
    for batch in range(4):
        ids = draw_ids(batch)
        slots = whole(ids, len(ids[0]) - 1)
        for rank, (rows, expected) in enumerate(zip(ids, slots, strict=True)):
            given = [rows] if batch % 2 else rows
            found = alone[rank](given, len(ids[0]) - 1)
            assert torch.equal(found[0] if isinstance(found, list) else found, expected)
        if batch == 1:
            whole.exchange()
            assert whole.own_counts is not None
            for rank, balancer in enumerate(alone):
                assert balancer.own_counts is not None
                balancer.own_counts.offset.copy_(whole.own_counts.offset[rank : rank + 1])
    assert recorders[0]._now.any() and recorders[1]._now.any()
    for rank, balancer in enumerate(alone):
        assert balancer.own_counts is not None and balancer.batch == whole.batch == 4
        assert torch.equal(balancer.own_counts.recent[0], whole.own_counts.recent[rank])
        assert balancer.last_plan is None and balancer.last_loads is None


def test_one_op_for_rows_that_all_ranks_hold() -> None:
    """The slots, plan, loads and records of the chain, which the other methods of a Balancer use."""
    for options in ({}, {"tolerance": 0.1}, {"objective": "local"}):
        at_once, chain = (Balancer(make_placement(), 1, tokens="same", **options) for _ in range(2))
        at_once.recorder, chain.recorder = Recorder(LAYERS, EXPERTS), Recorder(LAYERS, EXPERTS)
        for batch in range(3):
            rows = draw_ids(batch)[0].int()
            (expected,) = chain.route(chain.balance([rows]))
            assert torch.equal(at_once(rows), expected)
            mine, theirs = at_once.last_plan, chain.last_plan
            assert (
                mine is not None and theirs is not None and torch.equal(at_once.last_loads, chain.last_loads)
            )
            for name in ("quota", "peak", "bound", "telemetry"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
            assert at_once.batch == chain.batch == batch + 1
        assert torch.equal(at_once.recorder._layers[1], chain.recorder._layers[1])
        assert bool(at_once.recorder._layers[1].any())


def test_few_tokens_and_no_freedom_are_not_planned() -> None:
    balancer, rows = one_of_all(1, min_tokens=1000), draw_ids(0)[1]
    fixed = balancer(rows, num_tokens=999)
    assert balancer.own_counts is not None and not balancer.own_counts.recent.any()
    assert torch.equal(expert_of(balancer, fixed), rows)
    balancer(rows, num_tokens=1000)
    assert balancer.own_counts.recent.any() and balancer.batch == 2
    with pytest.raises(ValueError, match="num_tokens must be an integer, got 1.5"):
        balancer(rows, num_tokens=1.5)  # type: ignore[arg-type]


def test_a_refused_batch_of_one_op_leaves_no_trace() -> None:
    balancer = one_of_all(0)
    balancer.recorder = Recorder(LAYERS, EXPERTS)
    with pytest.raises(ValueError, match=f"topk_ids must be in -1..{EXPERTS - 1}, got {EXPERTS}"):
        balancer(torch.tensor([[0, EXPERTS]]))
    assert balancer.own_counts is not None and not balancer.own_counts.recent.any()
    assert not balancer.recorder._now.any()


def test_a_recompute_counts_no_batch_again() -> None:
    """As a checkpoint's: inside of a backward pass."""
    balancer, rows = one_of_all(0), draw_ids(0)[0]
    balancer.recorder, found = Recorder(LAYERS, EXPERTS), []
    found.append(balancer(rows))
    assert balancer.own_counts is not None
    recent, recorded = balancer.own_counts.recent.clone(), balancer.recorder._now.clone()
    x = torch.ones((), requires_grad=True)
    y = x * 1
    y.register_hook(lambda _: found.append(balancer(rows)))
    y.backward()
    assert len(found) == 2 and torch.equal(found[0], found[1])
    assert torch.equal(balancer.own_counts.recent, recent)
    assert torch.equal(balancer.recorder._now, recorded)


def test_a_copy_keeps_counts_of_its_own() -> None:
    first, rows = one_of_all(0), draw_ids(0)[0]
    second = copy.deepcopy(first)
    first(rows)
    assert second.own_counts is not None and not second.own_counts.recent.any()
    second(rows)
    assert first.own_counts is not None and torch.equal(second.own_counts.recent, first.own_counts.recent)
    third = pickle.loads(pickle.dumps(first.own_counts))  # whose memory pickle would give each view anew
    third.offset[:, 0] = 2**20
    placed = first.placed_on(rows.device)
    assert not torch.equal(third.balance(rows, placed, 0)[0], second.own_counts.balance(rows, placed, 0)[0])
    assert torch.equal(third.recent, second.own_counts.recent)


@pytest.mark.parametrize("tokens", ["own", "same"])
def test_one_op_in_compiled_code(tokens: Any) -> None:
    rows = draw_ids(0)[0]
    made = [one_of_all(0) if tokens == "own" else Balancer(make_placement(), tokens="same") for _ in range(2)]
    made[1](rows)
    made[0](rows)  # places its tables
    compiled = torch.compile(made[1], backend="eager", fullgraph=True)
    for batch in range(2):
        rows = draw_ids(batch)[0]
        assert torch.equal(compiled(rows), made[0](rows))
    if tokens == "own":
        assert made[0].own_counts is not None and made[1].own_counts is not None
        assert torch.equal(made[0].own_counts.recent, made[1].own_counts.recent)
