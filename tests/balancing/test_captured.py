"""CapturedBalancer: what the Balancer gives, batch by batch, out of a graph that a double of CUDA's replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CapturedBalancer, LocalGroup
from isoload.balancing import captured
from isoload.transport import Call, Group, error_code
from support.fake_ranks import OneRank, answer, kept_memos
from support.host_waits import HostWaits
from support.recorded_calls import as_if_capturing, recorded
from support.small_batches import EXPERTS, LAYERS, RANKS, K, draw_ids, gather, make_placement, make_topology

TOKENS = 37
POLICIES = [
    "static",
    "even",
    "exact",
    "exact_active",
    "lp",
    "dynamic",
    "lp_sampled",
    "grace",
]
ROWS = (37, 20, 37, 0, 31, 36)  # of the batches: shorter ones behind longer ones


def other_placement() -> isoload.Placement:
    counts = torch.randint(1, 900, (LAYERS, EXPERTS), generator=torch.Generator().manual_seed(8))
    return isoload.place(counts, make_topology(), slots_per_rank=6)


class Captures:
    """recorded, counted."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, call: Callable[[], list[Tensor]]) -> Any:
        self.number += 1
        return recorded(call)


def pair(how: dict[str, Any], tokens: int = TOKENS) -> tuple[Balancer, CapturedBalancer, Captures]:
    """A Balancer, and another in a graph."""
    placement = how.pop("placement", make_placement())
    own = how.get("tokens", "own") == "own"
    eager, inner = (
        Balancer(placement, 1, group=LocalGroup(make_topology()) if own else None, **how) for _ in range(2)
    )
    captures = Captures()
    top_k = K + placement.num_shared * how.get("shared_columns", True)
    return eager, CapturedBalancer(inner, tokens, top_k, device="cpu", capture=captures), captures


def check_same(eager: Balancer, graph: CapturedBalancer, ids: Any, num_tokens: int | None = None) -> None:
    wanted, got = eager(ids, num_tokens=num_tokens), graph(ids, num_tokens)
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b)
    inner = graph.balancer
    assert (eager.last_plan is None) == (inner.last_plan is None) and eager.batch == inner.batch
    if eager.last_plan is not None and inner.last_plan is not None:
        names = ("quota", "weights", "peak", "bound", "slot_to_expert")
        for name in names:
            of = [getattr(b.last_plan, name) for b in (eager, inner)]
            assert of[0] is None or torch.equal(*of), name
        assert torch.equal(eager.last_loads, inner.last_loads)
        assert inner.last_plan.placed.host is inner.placement
    if eager.group is not None:
        assert eager.group.traffic.bytes == inner.group.traffic.bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_every_batch_is_the_balancers(policy: str) -> None:
    eager, graph, captures = pair({"policy": policy})
    for batch, rows in enumerate(ROWS):
        check_same(eager, graph, [r[: rows - n if rows else 0] for n, r in enumerate(draw_ids(batch))])
    assert captures.number == 1


@pytest.mark.parametrize("policy", ["static", "exact", "dynamic"])
def test_of_the_same_tokens(policy: str) -> None:
    eager, graph, captures = pair({"policy": policy, "tokens": "same", "min_tokens": 25})
    for batch, rows in enumerate((37, 20, 30, 24, 37, 0)):
        check_same(eager, graph, draw_ids(batch)[0][:rows])
    assert captures.number == 2, "planned or not"


def test_small_batches_have_a_graph_of_their_own() -> None:
    eager, graph, captures = pair({"policy": "exact", "min_tokens": 100})
    for batch, num_tokens in enumerate((300, 99, 99, 300, 99, 300, None)):
        check_same(eager, graph, draw_ids(batch), num_tokens)
    assert captures.number == 2


@pytest.mark.parametrize("policy", ["exact", "static", "grace"])
def test_a_new_placement_is_taken_in_place(policy: str) -> None:
    eager, graph, captures = pair({"policy": policy})
    for batch in range(6):
        if batch == 3:
            before = graph(draw_ids(4))
            kept = [slots.clone() for slots in before]
            eager.batch += 1
            eager.group.traffic.bytes["gather"] = graph.balancer.group.traffic.bytes["gather"]
            for balancer in (eager, graph.balancer):
                balancer.load(other_placement())
            assert any(not torch.equal(a, b) for a, b in zip(kept, eager(draw_ids(4)), strict=True))
            graph(draw_ids(4))
        check_same(eager, graph, draw_ids(batch))
    assert captures.number == 1


def test_shared_experts_are_added_in_the_graph() -> None:
    counts = torch.arange(EXPERTS).expand(2, -1)
    placement = isoload.place(counts, make_topology(), slots_per_rank=7, num_shared=1)
    for columns, policy in ((False, "waterfill"), (True, "joint"), (False, "waterfill_sampled")):
        eager, graph, _ = pair({"placement": placement, "policy": policy, "shared_columns": columns})
        for batch in range(4):
            ids = draw_ids(batch)
            if columns:
                ids = [
                    torch.cat([r, torch.where((r >= 0).any(1, keepdim=True), EXPERTS, -1)], 1) for r in ids
                ]
            check_same(eager, graph, ids)


def test_another_policy_is_captured_anew_and_another_recorder_needs_no_graph() -> None:
    eager, graph, captures = pair({"policy": "exact"})
    recorders = [isoload.Recorder(LAYERS, EXPERTS) for _ in range(2)]
    for batch in range(12):
        if batch == 3:
            eager.recorder, graph.balancer.recorder = recorders
        if batch == 7:
            eager.policy, graph.balancer.policy = (isoload.POLICIES["even"]() for _ in range(2))
        check_same(eager, graph, draw_ids(batch))
        for recorder in recorders:
            recorder.step()
    assert captures.number == 2
    first, second = (recorder.counts() for recorder in recorders)
    assert torch.equal(first, second) and first[3:, 1].sum(-1).all() and not first[:3].any()


def test_results_stay_where_they_are() -> None:
    _, graph, _ = pair({"policy": "exact"})
    ids = draw_ids(0)
    graph(ids)
    addresses = {tuple(slots.data_ptr() for slots in graph(draw_ids(batch))) for batch in range(3)}
    assert len(addresses) == 1


class OthersAreReady(Group):
    """One rank, whose peers' counts [R, E] are here already."""

    def __init__(self, rank: int, rows: Tensor) -> None:
        super().__init__(make_topology(), [rank])
        self.rows = rows

    def _gather(self, stage: str, rows: list[Tensor], in_node: bool = False) -> Tensor:
        if stage != "gather":
            return rows[0].expand(RANKS, -1)
        gathered = rows[0].expand(RANKS, -1).clone()  # facts as this rank's
        gathered[:, :EXPERTS] = self.rows
        gathered[self.ranks[0], :EXPERTS] = rows[0][:EXPERTS]
        return gathered

    def _swap(self, *given: Any) -> list[Tensor]:
        raise AssertionError

    def gather_objects(self, stage: str, given: object) -> list[Any]:
        return [given] * RANKS


def with_others(rank: int = 2) -> tuple[CapturedBalancer, OthersAreReady, list[Tensor]]:
    ids = draw_ids(0)
    group = OthersAreReady(rank, gather(ids))
    balancer = Balancer(make_placement(), 1, "exact", group)
    return CapturedBalancer(balancer, TOKENS, K, device="cpu", capture=recorded), group, ids


def test_one_rank_among_others() -> None:
    graph, _, ids = with_others()
    wanted = Balancer(make_placement(), 1, "exact", LocalGroup(make_topology()))(ids)[2]
    for _ in range(4):
        assert torch.equal(graph(ids[2]), wanted)


def replay_with_failure(
    graph: Callable[[Tensor], Any], group: OthersAreReady, rank: int, ids: Tensor
) -> None:
    """A batch in which another rank fails; on a device the planner would only note the counts that it sends."""
    counts = group.rows[rank].clone()
    group.rows[rank] = -error_code("count")
    with pytest.raises(RuntimeError, match="loads must not be negative"):
        graph(ids)
    group.rows[rank] = counts


def test_an_error_that_comes_with_any_replay_is_raised_by_the_next_check() -> None:
    """Regression: the codes of captured gathers were read where only the capture had written them, or never."""
    graph, group, ids = with_others()
    for _ in range(3):
        graph(ids[2])
    group.check()
    for failed in (4, 6):
        replay_with_failure(graph, group, failed, ids[2])
        graph(ids[2])  # a later batch without an error does not hide it
        with pytest.raises(ValueError, match=f"rank {failed} failed in stage count"):
            group.check()
        graph(ids[2])
        group.check()


def test_an_error_of_a_replay_reaches_the_exchange_of_row_counts() -> None:
    graph, group, ids = with_others()
    for _ in range(3):
        graph(ids[2])
    replay_with_failure(graph, group, 5, ids[2])
    group._swap = lambda _stage, buffers, *_: lambda: buffers  # type: ignore[method-assign]
    counts = [torch.zeros(2, RANKS, dtype=torch.int64)]
    with pytest.raises(ValueError, match="rank 5 failed in stage count"):
        Call(group).swap_counts("row counts", counts, [], [[]])
    graph(ids[2])
    Call(group).swap_counts("row counts", counts, [], [[]])


def test_a_refused_batch_tells_the_other_ranks() -> None:
    graph, group, ids = with_others()
    told: list[int] = []
    gather_rows = group._gather

    def note(stage: str, rows: list[Tensor], in_node: bool = False) -> Tensor:
        if stage == "gather":
            told.append(int(rows[0][0]))
        return gather_rows(stage, rows, in_node)

    group._gather = note  # type: ignore[method-assign]
    for _ in range(3):
        graph(ids[2])
    with pytest.raises(ValueError, match="topk_ids must be"):
        graph(torch.cat([ids[2], ids[2]]))
    counted = int(group.rows[2, 0])
    assert told == [counted, counted], "eager, captured: the refused batch is a replay"
    with pytest.raises(ValueError, match="rank 2 failed in stage count"):
        group.check()
    assert torch.equal(graph(ids[2]), with_others()[0](ids[2]))


def test_a_gather_must_run_before_it_is_captured() -> None:
    graph, _, ids = with_others()
    with (
        as_if_capturing(),
        pytest.raises(ValueError, match="stage gather must run once before it is captured"),
    ):
        graph.balancer(ids[2])


def fake_batches(graph: Callable[[Tensor], Any]) -> None:
    for rows in (9, 4, 9):
        graph(torch.zeros(rows, K, dtype=torch.int64, device="cuda"))


def test_checked_values_are_not_captured() -> None:
    """As under ISOLOAD_CHECK=1, where every op of a GPU waits for its values."""

    def refuse(_call: object) -> Any:
        raise AssertionError("captured")

    balancer = Balancer(make_placement(), 1, "exact", tokens="same")
    with HostWaits(answer), patch.object(captured, "values_readable", lambda _tensor: True):
        fake_batches(CapturedBalancer(balancer, TOKENS, K, device="cuda", capture=refuse))


@pytest.mark.parametrize("policy", ["exact", "dynamic"])
def test_the_host_never_waits_on_a_gpu(policy: str) -> None:
    """Nor in what is captured, but for what ranks agree on before."""
    topology = make_topology()
    balancer = Balancer(make_placement(), 1, policy, OneRank(2, topology))
    with HostWaits(answer) as host:
        device = torch.zeros((), device="cuda").device
        balancer._own[device] = balancer.placed_on(device)
        graph = CapturedBalancer(balancer, TOKENS, K, device=device, capture=lambda call: (int, call()))
        graph(torch.zeros(9, K, dtype=torch.int64, device=device))
        host.waits.clear()
        with kept_memos():
            fake_batches(graph)
        assert host.waits == []


REFUSED: dict[str, tuple[Callable[[Balancer], Any], str]] = {
    "tokens": (lambda b: CapturedBalancer(b, 0, K), "tokens must be at least 1, got 0"),
    "top_k": (lambda b: CapturedBalancer(b, 9, 0), "top_k must be at least 1, got 0"),
    "dtype": (lambda b: CapturedBalancer(b, 9, K, torch.int16), "dtype must be int32 or int64, got torch.int16"),
    "device": (lambda b: CapturedBalancer(b, 9, K, device="cpu"), "device must be a CUDA device, got cpu"),
    "rows": (
        lambda b: small(b)(torch.zeros(10, K, dtype=torch.int64)),
        r"topk_ids must be \[T, 4\] torch.int64 on cpu with T at most 9, got \[10, 4\] torch.int64 on cpu",
    ),
    "columns": (lambda b: small(b)(torch.zeros(9, 3, dtype=torch.int64)), r"topk_ids must be .* got \[9, 3\]"),
    "dims": (lambda b: small(b)(torch.zeros((), dtype=torch.int64)), r"topk_ids must be .* got \[\]"),
    "ids' dtype": (lambda b: small(b)(torch.zeros(9, K, dtype=torch.int32)), "topk_ids must be .* torch.int32 on cpu"),
    "ids' device": (lambda b: small(b)(torch.zeros(9, K, dtype=torch.int64, device="meta")), "on meta"),
    "ranks": (lambda b: small(b)([]), r"topk_ids must have one tensor per owned rank \(1\), got 0"),
}  # fmt: skip


def small(balancer: Balancer) -> CapturedBalancer:
    return CapturedBalancer(balancer, 9, K, device="cpu", capture=recorded)


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        call(Balancer(make_placement(), 1, "exact", tokens="same"))


def test_made_in_inference_mode_it_runs_outside() -> None:
    with torch.inference_mode():
        eager, graph, _ = pair({"policy": "dynamic"})
    for batch in range(4):
        with torch.inference_mode(batch % 2 == 0):
            check_same(eager, graph, draw_ids(batch))


class InBackward(torch.autograd.Function):
    """Runs a call in the backward pass, as a checkpoint's recompute does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], Any]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.call()
        return grad, None


def test_a_recompute_is_neither_captured_nor_recorded() -> None:
    """A recompute passes no counts to a recorder, so a graph of one would have none to add."""
    _, graph, captures = pair({"policy": "exact"})
    graph.balancer.recorder = recorder = isoload.Recorder(LAYERS, EXPERTS)
    ids = draw_ids(0)

    def recompute() -> None:
        InBackward.apply(torch.ones((), requires_grad=True), lambda: graph(ids)).backward()

    graph(ids)
    recompute()
    assert captures.number == 0
    graph(ids)
    recompute()
    assert captures.number == 1
    recorder.step()
    assert int(recorder.counts().sum()) == 2 * sum(int((rows >= 0).sum()) for rows in ids)
