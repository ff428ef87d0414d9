"""The gather through memory that all ranks write: the slots and errors of the collective one, over processes."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CapturedBalancer, CollectiveGroup, LocalGroup, Topology
from isoload.placed_layers import Filled
from isoload.policies.base import Demand, even_split
from isoload.policies.exact import ExactPolicy
from isoload.records import Plan
from isoload.transport import CollectiveTransport, collective, error_code, shared_memory
from isoload.transport import group as group_module
from isoload.transport.agreement import LATE, raise_failure
from isoload.transport.boards import Boards
from isoload.transport.peers import SameProcess
from support.processes import die, rank_outcomes, run_ranks
from support.recorded_calls import RecordedCalls, as_if_capturing
from support.small_batches import EXPERTS, draw_ids

RANKS = 3
TOPOLOGY = Topology(RANKS)


def make_placement() -> isoload.Placement:
    counts = torch.arange(EXPERTS).expand(1, -1)
    return isoload.place(counts, TOPOLOGY, slots_per_rank=EXPERTS // RANKS + 2)


def make_group() -> CollectiveGroup:
    return CollectiveGroup.own(TOPOLOGY, gather="symmetric")


def errors_of(body: Any, *args: Any, timeout: float = 5.0) -> list[str]:
    """The last line of every rank's exception, or how else it ended."""
    outcomes = rank_outcomes(body, RANKS, *args, group_timeout=timeout)
    return ["" if o.error is None else o.error.strip().splitlines()[-1] for o in outcomes]


def balance(rank: int, policy: str, batches: int) -> list[Tensor]:
    group = make_group()
    balancer = Balancer(make_placement(), 0, policy, group)
    first = balancer(draw_ids(0)[rank])  # ranks agree by a collective, once
    without = patch.object(isoload.ops, "plan_exact_share", None)  # the gather's kernel plans
    with patch.object(collective, "_all_gather", None), without:
        return [first, *(balancer(draw_ids(batch)[rank]) for batch in range(1, batches))]


@pytest.mark.parametrize("policy", ["exact", "dynamic"])
def test_slots_are_those_of_virtual_ranks(policy: str) -> None:
    got = run_ranks(balance, RANKS, policy, 50)
    balancer = Balancer(make_placement(), 0, policy, LocalGroup(TOPOLOGY))
    for batch in range(50):
        for rank, slots in enumerate(balancer(draw_ids(batch)[:RANKS])):
            assert torch.equal(got[rank][batch], slots), (rank, batch)


class Unlike(ExactPolicy):
    """Splits like ``even``."""

    def split(self, demand: Demand, filled: Filled) -> Plan:
        return Plan(filled, self, *even_split(demand, filled))


def balance_unlike(rank: int) -> list[Tensor]:
    balancer = Balancer(make_placement(), 0, Unlike(), make_group())
    return [balancer(draw_ids(batch)[rank]) for batch in range(3)]


def test_a_policy_that_splits_its_own_way_is_not_planned_by_the_gather() -> None:
    got = run_ranks(balance_unlike, RANKS)
    balancer = Balancer(make_placement(), 0, Unlike(), LocalGroup(TOPOLOGY))
    for batch in range(3):
        for rank, slots in enumerate(balancer(draw_ids(batch)[:RANKS])):
            assert torch.equal(got[rank][batch], slots), (rank, batch)


def other_placement() -> isoload.Placement:
    counts = torch.arange(EXPERTS).flip(0).expand(1, -1)
    return isoload.place(counts, TOPOLOGY, slots_per_rank=EXPERTS // RANKS + 2)


def replace_after_the_gather(rank: int, what: str) -> Tensor:
    balancer = Balancer(make_placement(), 0, "exact", make_group())
    balancer(draw_ids(0)[rank])
    gathered = balancer.gather([draw_ids(1)[rank]])
    assert gathered.ahead is not None and gathered.ahead.plan is not None
    if what == "policy":
        balancer.policy = isoload.policies.make_policy("even", {})
    else:
        balancer.load(other_placement())
    return balancer.route(balancer.plan(gathered))[0]


@pytest.mark.parametrize("what", ["policy", "placement"])
def test_a_plan_of_the_gather_serves_no_other_policy_or_placement(what: str) -> None:
    placement = other_placement() if what == "placement" else make_placement()
    balancer = Balancer(placement, 0, "even" if what == "policy" else "exact", LocalGroup(TOPOLOGY))
    wanted = balancer(draw_ids(1)[:RANKS])
    for got, slots in zip(run_ranks(replace_after_the_gather, RANKS, what), wanted, strict=True):
        assert torch.equal(got, slots)


def replay_from_the_second(call: Any) -> Any:
    """A graph's double whose capture is its first replay: what other ranks put here meanwhile cannot be undone."""
    calls, ran = RecordedCalls(), []
    with as_if_capturing(), calls:
        result = call()

    def replay() -> None:
        if ran:
            calls.replay()
        ran.append(True)

    return replay, result


def balance_in_a_graph(rank: int, batches: int) -> list[Tensor]:
    balancer = Balancer(make_placement(), 0, "exact", make_group())
    graph = CapturedBalancer(balancer, 37, 4, device="cpu", capture=replay_from_the_second)
    with patch.object(
        group_module, "values_readable", lambda _tensor: False
    ):  # as on a GPU: no facts in the row
        first = [
            balancer(draw_ids(batch)[rank]) for batch in range(rank)
        ]  # not all capture in the same batch
        return first + [graph(draw_ids(batch)[rank]).clone() for batch in range(rank, batches)]


def test_the_number_of_the_round_is_read_by_every_replay() -> None:
    got = run_ranks(balance_in_a_graph, RANKS, 30)
    balancer = Balancer(make_placement(), 0, "exact", LocalGroup(TOPOLOGY))
    for batch in range(30):
        for rank, slots in enumerate(balancer(draw_ids(batch)[:RANKS])):
            assert torch.equal(got[rank][batch], slots), (rank, batch)


def rows_of_other_widths(rank: int) -> bool:
    group = make_group()
    for number in range(20):
        width = 1 + number % 3 * 40
        counts = torch.full((width,), 100 * number + rank, dtype=torch.int32)
        loads = group.gather_loads([counts])
        wanted = [[100 * number + r] * width for r in range(RANKS)]
        assert loads.tolist() == wanted
    return True


def test_rows_of_other_widths_have_boards_of_their_own() -> None:
    assert run_ranks(rows_of_other_widths, RANKS) == [True] * RANKS


def train(rank: int, gather: str) -> list[Tensor]:
    """Outputs and gradients of a layer under two batches."""
    torch.manual_seed(5)
    dense = isoload.ExpertWeights.random(EXPERTS, 8, 16)
    router = torch.randn(8, EXPERTS)

    def gate(rows: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = (rows @ router).softmax(-1).topk(4)
        return ids, weights

    layer = isoload.MoE(gate, dense, CollectiveTransport(TOPOLOGY, gather=gather), make_placement())
    rows = [torch.randn(9, 8, generator=torch.Generator().manual_seed(rank + 10 * n)) for n in range(2)]
    outputs = [layer(x) for x in rows]
    sum(y.square().sum() for y in outputs).backward()
    return [y.detach() for y in outputs] + [p.grad for p in layer.parameters() if p.grad is not None]


def test_a_layer_computes_the_same() -> None:
    for wanted, got in zip(
        *(run_ranks(train, RANKS, how) for how in ("collective", "symmetric")), strict=True
    ):
        assert len(wanted) > 2 and all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))


def fail(rank: int, what: str) -> None:
    group = make_group()
    counts = torch.ones(4, dtype=torch.int32)
    group.gather_loads([counts])
    if what == "error":
        group.gather_loads([counts], [error_code("count") if rank == 1 else 0])
    if what == "facts":
        group.gather_loads([counts], None, {"layer": int(rank == 2)})
    if what == "ids":
        ids = draw_ids(0)[rank] + (EXPERTS if rank == 1 else 0)
        Balancer(make_placement(), 0, "exact", group)(ids)


def test_what_travels_in_the_row_is_raised_on_every_rank() -> None:
    told = "ValueError: rank 1 failed in stage count, so all ranks stop; its own error says why"
    assert errors_of(fail, "error") == [told] * RANKS
    told = "ValueError: layer must be the same on all ranks, got 0 on rank 0 and 1 on rank 2"
    assert errors_of(fail, "facts") == [told] * RANKS
    others = "ValueError: rank 1 failed in stage count, so all ranks stop; its own error says why"
    assert errors_of(fail, "ids")[::2] == [others] * 2


def lose_one(rank: int) -> list[str]:
    group = make_group()
    counts = torch.ones(4, dtype=torch.int32)
    group.gather_loads([counts])
    if rank == 1:
        die()
    said = []
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            group.gather_loads([counts])
        said.append(str(caught.value).split(";")[0])
    assert time.monotonic() - start < 1
    return said


def test_a_killed_rank_is_named_within_the_groups_timeout() -> None:
    outcomes = rank_outcomes(lose_one, RANKS, group_timeout=2.0)
    for rank in (0, 2):
        told = f"stage gather failed on rank {rank}: gather_rows: rank 1 put no row within 2000 ms"
        assert outcomes[rank].value == [told] * 2, outcomes[rank].error


def test_a_row_that_did_not_come_to_a_gpu_is_named() -> None:
    """By what the kernel leaves in its place, read where the host looks next; a later gather does not hide it."""
    group = LocalGroup(TOPOLOGY)
    group._errors = torch.tensor([0, 0, LATE], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="stage gather failed: rank 2 put no row in time"):
        group.gather_loads([torch.zeros(2, dtype=torch.int32)] * RANKS)
    with pytest.raises(RuntimeError, match="rank 1 put no row in time"):
        raise_failure([0, LATE])


def of_one_rank_else(rank: int) -> None:
    CollectiveGroup(TOPOLOGY, gather="symmetric" if rank else "collective")


def of_no_kind(rank: int) -> None:
    CollectiveGroup(TOPOLOGY, gather="shared")  # type: ignore[arg-type]


def on_another_machine(rank: int) -> None:
    if rank == 2:
        shared_memory.Path = lambda path: Path(path + " elsewhere")  # type: ignore[assignment,misc]
    make_group()


def compiled(rank: int) -> None:
    balancer = Balancer(make_placement(), 0, "exact", make_group())
    balancer(draw_ids(0)[rank])
    torch.compile(balancer, backend="eager", fullgraph=True)(draw_ids(0)[rank])


def test_refuses() -> None:
    different = "gather must be the same on all ranks, got collective on rank 0 and symmetric on rank 1"
    assert errors_of(of_one_rank_else) == [f"ValueError: {different}"] * RANKS
    assert (
        errors_of(of_no_kind) == ["ValueError: gather must be collective or symmetric, got 'shared'"] * RANKS
    )
    first, second, third = errors_of(on_another_machine)
    told = "ValueError: rank 2 failed in stage shared memory, so all ranks stop; its own error says why"
    assert first == second and first.startswith(
        f"{told}: ValueError: memory of rank 0 must be on this machine"
    )
    assert "ValueError: memory of rank 0 must be on this machine, got no " in third
    outcomes = rank_outcomes(compiled, RANKS)
    assert all("gather must be 'collective' in compiled code" in str(o.error) for o in outcomes)


def test_where_a_gpu_has_no_symmetric_memory() -> None:
    group = object.__new__(CollectiveGroup)
    group.process_group = object()  # type: ignore[assignment]
    group.peers = lambda _device: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="gather must be 'collective' where cuda:0 has no symmetric memory"):
        group._make_boards(torch.device("cuda", 0))


class NotedPeers(SameProcess):
    """Of one rank, whose barriers are noted."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def new(self, *given: Any) -> Tensor:
        self.done.append("new")
        return super().new(*given)

    def meet(self) -> None:
        self.done.append("meet")


def test_no_row_is_put_before_all_boards_are_zeros() -> None:
    peers = NotedPeers()
    boards = Boards(peers, torch.device("cpu"), Topology(1), 0, 1.0)
    row = torch.arange(3, dtype=torch.int32)
    for added, beside in ((0, []), (1, []), (2, [4])):
        rows, told = boards.gather(row[: 3 - len(beside)] + added, beside)
        assert torch.equal(rows[0], row[: 3 - len(beside)] + added) and told.tolist() == [beside]
    assert peers.done == ["new", "meet"]


def made(rank: int) -> int:
    make_group()
    return len(list(Path(shared_memory.FOLDER).glob("isoload-*")))


def without_room(rank: int) -> None:
    def full(_file: int, _start: int, _size: int) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        shared_memory.os.posix_fallocate = full  # type: ignore[attr-defined]
    make_group()


def test_a_rank_without_room_is_named() -> None:
    first, second, third = errors_of(without_room)
    assert re.fullmatch(r"ValueError: /\S+ must have \d+ bytes free, got: No space left on device", second)
    told = "ValueError: rank 1 failed in stage shared memory, so all ranks stop; its own error says why: "
    assert first == third == told + second
    assert not list(Path(shared_memory.FOLDER).glob("isoload-*"))


def test_no_file_is_left() -> None:
    run_ranks(made, RANKS)
    assert not list(Path(shared_memory.FOLDER).glob("isoload-*"))
