"""CUDA ops: the bits of the CPU ops on the whole case list; the chain captured in a graph, without a sync.

The ops' own tests run on CUDA too (conftest.py); here is what CUDA alone has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, byref, c_size_t, c_void_p
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import ops
from isoload.ops.tables import ReplicaTables
from support import fills, level_cases, pourings
from support.borrow_plans import SHAPES, draw_plan, draw_values
from support.cases import Case, draw, instances
from support.chain import NODES, chain, draw_batch
from support.routings import draw_row, draw_slots, routings
from support.shared_copies import draw_copies

no_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytestmark = [pytest.mark.cuda, no_device]

Rng = np.random.Generator


def to_cuda(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.cuda()
    if isinstance(value, ops.Counted):
        return ops.Counted(*map(to_cuda, value))
    return replace(value, data=value.data.cuda()) if isinstance(value, ReplicaTables) else value


def assert_same(name: str, op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The op gives both devices the same bits. Returns the CPU's."""
    mine = op(*args, **options)
    theirs = op(*map(to_cuda, args), **{key: to_cuda(value) for key, value in options.items()})
    pairs = [(mine, theirs)] if isinstance(mine, Tensor) else zip(mine, theirs, strict=True)
    for i, (cpu, cuda) in enumerate(pairs):
        assert cuda.is_cuda and cpu.dtype == cuda.dtype, (name, op.__name__, i)
        assert torch.equal(cpu, cuda.cpu()), (name, op.__name__, i)
    return mine


def draw_ids(rng: Rng, case: Case, rank: int, dtype: torch.dtype, top_k: int = 4) -> Tensor:
    """[T, top_k] of one rank's copies in random order, the rest -1."""
    ids = rng.permutation(np.repeat(np.arange(case.num_experts), case.loads[rank]))
    padded = np.full((len(ids) + 2 * top_k) // top_k * top_k, -1)
    padded[rng.permutation(len(padded))[: len(ids)]] = ids
    return torch.from_numpy(padded.reshape(-1, top_k)).to(dtype)


def every_case() -> Iterator[tuple[Case, Rng]]:
    for i, case in enumerate(instances(1, seed=77)):
        yield case, np.random.default_rng([77, i])


def test_tables_plans_and_shares() -> None:
    for case, rng in every_case():
        slots, loads, R = torch.from_numpy(case.slot_to_expert), torch.from_numpy(case.loads), case.num_ranks
        tables = case.tables()
        made = ops.replica_tables(slots.cuda(), R, case.num_experts)
        assert torch.equal(tables.data, made.data.cpu()), case.name
        per_node = max(n for n in (1, 2, 4, 8) if R % n == 0)
        ticks = torch.from_numpy(rng.integers(1, 3000, R).astype(np.int32))
        for aim in ("spread", "local"):
            assert_same(case.name, ops.plan_exact, loads, tables, objective=aim, ranks_per_node=per_node)
        quota = assert_same(case.name, ops.plan_exact, loads, tables).quota
        if case.total < 2**30:
            fixed = torch.from_numpy(rng.integers(0, 50, R).astype(np.int32))
            pour = torch.tensor(int(rng.integers(0, 10_000)), dtype=torch.int32)
            assert_same(case.name, ops.plan_exact, loads, tables, fixed, ticks=ticks, pour=pour)
            assert_same(case.name, ops.plan_exact, loads, tables, fixed, 0.01, 3, pour=pour)
        offset = torch.from_numpy(rng.integers(0, 2**20, R).astype(np.int32))
        assert_same(case.name, ops.plan_active, loads, tables)
        for costs in (None, ticks):
            assert_same(case.name, ops.plan_own, loads[R // 2] // 4, tables, offset, R // 2, ticks=costs)
        for order in ("locality", "rank_major"):
            assert_same(case.name, ops.share, loads, quota, tables, per_node, None, order)
            assert_same(case.name, ops.share, loads, quota, tables, per_node, R // 2, order)
            assert_same(case.name, ops.share_by_rank, loads, quota, tables, per_node, order)


def test_layers_at_once() -> None:
    cases = [draw("split_256", 8, seed) for seed in range(5)]
    slots = torch.from_numpy(np.stack([case.slot_to_expert for case in cases]))
    loads = torch.from_numpy(np.stack([case.loads for case in cases]))
    tables = ops.replica_tables(slots, 8, 256)
    assert torch.equal(tables.data, ops.replica_tables(slots.cuda(), 8, 256).data.cpu())
    quota = assert_same("layers", ops.plan_exact, loads, tables).quota
    assert_same("layers", ops.plan_active, loads, tables)
    assert_same("layers", ops.share, loads, quota, tables, 4)
    assert_same("layers", ops.share, loads, quota, tables, 4, 3)
    assert_same("layers", ops.share_by_rank, loads, quota, tables, 4)
    assert_same("layers", ops.plan_own, loads[:, 3], tables, loads[:, 2, :8], 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_real_valued_splits(dtype: torch.dtype) -> None:
    for case, rng in every_case():
        tables, loads = case.tables(), torch.from_numpy(case.loads)
        split = assert_same(case.name, ops.plan_lp, loads, tables, dtype=dtype).split
        assert_same(case.name, ops.round_split, split, loads, tables)
        base = torch.from_numpy(rng.uniform(500, 2000, case.num_ranks)).to(dtype)
        assert_same(case.name, ops.plan_lp, loads, tables, base=base, dtype=dtype)


def test_fills_by_levels() -> None:
    for seed in range(78_000, 78_300):
        case = level_cases.draw(seed)
        assert_same(case.name, ops.plan_fill, *case.arguments(), **case.options())


def test_fills_ahead() -> None:
    for case in fills.fill_cases(100, seed=79_000):
        alive = case.alive_tensor()
        loads, _, home, *others = case.arguments()
        filled = assert_same(case.name, ops.plan_fill, *case.arguments(), alive=alive).slot_to_expert
        assert_same(case.name, ops.top_up, loads, filled, home, *others, alive=alive)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_count_and_routes(dtype: torch.dtype) -> None:
    routed = 0
    for case, rng in every_case():
        rank, tables = case.num_ranks // 3, case.tables()
        if case.loads[rank].sum() > 300_000:
            continue
        ids, loads = draw_ids(rng, case, rank, dtype), torch.from_numpy(case.loads)
        counted = assert_same(case.name, ops.count, ids, case.num_experts)
        assert torch.equal(counted.counts, loads[rank])
        row = ops.share(loads, ops.plan_exact(loads, tables).quota, tables, 1, rank)
        assert_same(case.name, ops.route, counted, row, tables)
        weights = torch.from_numpy(rng.random(tables.num_slots).astype(np.float32) + 0.01)
        seed = int(rng.integers(2**62))
        assert_same(case.name, ops.route_sampled, ids, weights, tables, seed)
        assert_same(case.name, ops.route_sampled, ids, weights, tables, seed, torch.tensor(seed + 5), rank)
        routed += ids.numel()
    assert routed > 100_000


def test_waterfill_on_every_pouring() -> None:
    for family in pourings.FAMILIES:
        for ranks in pourings.RANKS:
            arguments, options = pourings.draw(family, ranks, 5).arguments()
            assert_same(f"{family}-{ranks}", ops.plan_waterfill, *arguments, **options)


@pytest.mark.parametrize(("ranks", "tokens"), [(16, 16_384), (64, 8_000), (8, 40_000)])
def test_shared_routes_of_many_tokens(ranks: int, tokens: int) -> None:
    rng = np.random.default_rng([32, ranks, tokens])
    slots, slots_per_rank = draw_slots(rng, ranks, tokens)
    row = draw_row(rng, ranks, 2 * int((slots >= 0).any(1).sum()))
    assert_same(f"{ranks}", ops.route_shared, slots, row, slots_per_rank, 1, 2)


@pytest.mark.parametrize("num_shared", [1, 3])
def test_shared_routes(num_shared: int) -> None:
    for i, (slots, row, slots_per_rank, rank) in enumerate(routings(30, num_shared)):
        assert_same(f"{i}", ops.route_shared, slots, row, slots_per_rank, rank, num_shared)
        rng = np.random.default_rng([31, i])
        load, tokens = (torch.from_numpy(rng.integers(0, 900, len(row)).astype(np.int32)) for _ in "ab")
        for rule in ("static", "dynamic", "blog", "blog_all"):
            for loads in (load, load.long()):
                assert_same(
                    f"{i}", ops.route_shared_sampled, slots, loads, tokens, slots_per_rank, rank, rule, i
                )
                step = torch.tensor(i - 5)
                assert_same(
                    f"{i}",
                    ops.route_shared_sampled,
                    slots,
                    loads,
                    tokens,
                    slots_per_rank,
                    rank,
                    rule,
                    i,
                    step,
                )


@pytest.mark.parametrize("num_shared", [1, 2])
def test_appended_shared_experts(num_shared: int) -> None:
    for tokens in (0, 1, 300):
        slots, weights, ranks = draw_copies(3, tokens, 4, num_shared, 16, 3)
        for dtype, real in ((torch.int32, torch.float32), (torch.int64, torch.float64)):
            assert_same(
                "append", ops.append_shared_expert, slots.to(dtype), weights.to(real), ranks, 3, 7, weight=0.4
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_borrowing_in_a_graph_without_a_sync(dtype: torch.dtype) -> None:
    """All ranks on one device: captured once, replayed with other experts in the spare slots, the CPU's bits."""
    rng, ranks, spare_slots, exact = np.random.default_rng(8), 8, 2, torch.promote_types(dtype, torch.float32)
    plan = draw_plan(rng, ranks, spare_slots)
    rank, shapes = int(np.argmax(plan.homes)), [shape for shape in SHAPES if 0 not in shape]
    weights = [[draw_values(rng, n, shape, dtype) for shape in shapes] for n in plan.homes]
    pools = [[draw_values(rng, spare_slots, shape, dtype) for shape in shapes] for _ in range(ranks)]
    totals = [draw_values(rng, plan.homes[rank], shape, exact) for shape in shapes]

    def run(
        slots: Tensor, home: Tensor, tables: list[Tensor], pool: list[Tensor], sums: list[Tensor]
    ) -> None:
        ops.borrow(slots, home, tables[0], pool, ranks, rank, blocks=7)
        ops.borrow_backward(slots, home, tables[1], sums, ranks, rank, spare_slots, dtype, blocks=7)

    sides = []
    for device in ("cpu", "cuda"):
        held = [[[s.to(device) for s in stacks] for stacks in of] for of in (weights, pools)]
        pool, sums = ([s.to(device, copy=True) for s in stacks] for stacks in (pools[rank], totals))
        tables = [ops.addresses(stacks) for stacks in held]
        sides.append((plan.slot_to_expert.to(device), plan.home.to(device), tables, pool, sums, held))
    (slots, *cpu, _), (on_cuda, *cuda, _) = sides
    run(on_cuda, *cuda)  # the first use of a kernel loads it, which no capture may do
    run(slots, *cpu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(on_cuda, *cuda)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(10):
        spare = slots.view(ranks, -1)[:, -spare_slots:]
        spare.copy_(torch.from_numpy(rng.integers(1, len(plan.home), spare.shape)))
        spare[torch.from_numpy(rng.random(spare.shape) < 0.3)] = -1
        on_cuda.copy_(slots)
        run(slots, *cpu)
        graph.replay()
        for mine, theirs in zip(cpu[2] + cpu[3], cuda[2] + cuda[3], strict=True):
            assert torch.equal(mine, theirs.cpu())


def test_what_cannot_be_borrowed_stays() -> None:
    """An id that is no expert, an expert without a home, a home out of range, an address 0: nothing is written."""
    slots = torch.tensor([9, 1, 2, 3, 4], dtype=torch.int32).cuda()
    home = torch.tensor([[0, 0], [-1, -1], [7, 0], [0, -3], [1, 0]], dtype=torch.int32).cuda()
    stack = torch.ones(5, 3).cuda()
    peers = torch.tensor([[stack.data_ptr()], [0]]).cuda()
    slots = torch.cat([slots, torch.full((5,), -1, dtype=torch.int32).cuda()])
    written = torch.full((5, 3), 7.0).cuda()
    ops.borrow(slots, home, peers, [written], 2, 0)
    assert (written == 7).all()
    home[1] = torch.tensor([0, 5])  # beyond the totals
    home[4] = torch.tensor([1, 0])
    ops.borrow_backward(slots, home, peers, [written], 2, 0, 5, torch.float32)
    ops.borrow_backward(slots, home, peers * 0, [written], 2, 1, 5, torch.float32)
    assert (written == 7).all()
    assert ops.device_errors("cuda") == 1 << 16 | 1 << 17  # which also clears them for the next test


@pytest.mark.parametrize("copies", [32_768, 32_776, 131_072, 1_000_000])
def test_many_copies(copies: int) -> None:
    """One kernel, two kernels, and chunks of more than 1024 copies."""
    case, rng = draw("eplb", 16, 4), np.random.default_rng(copies)
    tables = case.tables()
    ids = torch.from_numpy(rng.zipf(1.3, (copies // 8, 8)) % (case.num_experts + 1) - 1)
    loads = torch.zeros(16, case.num_experts, dtype=torch.int32)
    counted = assert_same(f"{copies}", ops.count, ids, case.num_experts)
    loads[3] = counted.counts
    row = ops.share(loads, ops.plan_exact(loads, tables).quota, tables, 8, 3)
    assert_same(f"{copies}", ops.route, counted, row, tables)


def test_ids_out_of_range_count_as_masked() -> None:
    ids = torch.tensor([[0, 7], [-1, 1], [4, -5]], device="cuda")
    counted = ops.count(ids, 4)
    assert counted.counts.tolist() == [1, 1, 0, 0]
    tables = ops.replica_tables(torch.arange(4, dtype=torch.int32).cuda(), 2, 4)
    row = torch.tensor([1, 1, 0, 0], dtype=torch.int32).cuda()
    assert ops.route(counted, row, tables).tolist() == [[0, -1], [-1, 1], [-1, -1]]
    assert ops.device_errors("cuda") == 1 << 0 | 1 << 6


def test_a_refused_problem_says_so() -> None:
    tables = ops.replica_tables(torch.tensor([0, 1], dtype=torch.int32).cuda(), 2, 3)
    split = ops.plan_exact(
        torch.tensor([5, 5, 1], dtype=torch.int32).cuda(), tables
    )  # no replica of expert 2
    assert split.quota.tolist() == [0, 0] and (split.peak.item(), split.bound.item()) == (-1, -1)
    with pytest.raises(ValueError, match="plan_exact: loads, fixed and pour must not be negative"):
        isoload.ops.check_device("cuda")
    loads = torch.tensor([5, -5, 1], dtype=torch.int32).cuda()
    lp = ops.plan_lp(loads, tables)
    assert [part.tolist() for part in lp] == [[0, 0], -1, -1, 0, 2]
    assert ops.round_split(lp.split, loads, tables).tolist() == [0, 0]
    slots, home = (torch.tensor(ids, dtype=torch.int32).cuda() for ids in ([0, 1, -1, 2, -1, -1], [0, 1, 3]))
    fill = ops.plan_fill(loads, slots, home, 2, 1)
    assert [part.tolist() for part in fill] == [slots.tolist(), [0] * 5]
    with pytest.raises(ValueError, match=r"plan_lp: .*round_split: .*plan_fill: "):
        isoload.ops.check_device("cuda")


def test_arguments_of_two_devices_are_refused() -> None:
    case = draw("eplb", 8, 3)
    with pytest.raises(ValueError, match="tables must be on the device of loads"):
        ops.plan_exact(torch.from_numpy(case.loads).cuda(), case.tables())


def plan_and_route(ids: Tensor, others: Tensor, tables: ReplicaTables) -> Tensor:
    """Rank 0's route: its own counts join those of the others [R, E], as a gather would."""
    counted = ops.count(ids, tables.num_experts)
    loads = torch.cat([counted.counts[None], others])
    quota = ops.plan_exact(loads, tables).quota
    return ops.route(counted, ops.share(loads, quota, tables, 1, 0), tables)


@contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The call in a graph, and the tensors that its replays write."""
    call()  # the first use of a kernel loads it, which no capture may do
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph), no_sync():
        result = call()
    return graph, result


def num_nodes(graph: torch.cuda.CUDAGraph) -> int:
    nodes = c_size_t()
    handle = c_void_p(graph.raw_cuda_graph())
    assert CDLL("libcuda.so.1").cuGraphGetNodes(handle, None, byref(nodes)) == 0
    return nodes.value


@pytest.mark.parametrize("tokens", [1, 512, 4096, 5000])
def test_chain_in_a_graph_without_a_sync(tokens: int) -> None:
    """Captured once, replayed with ten batches: each time what the CPU gives."""
    case, rng = draw("eplb", 16, 9), np.random.default_rng(tokens)
    tables, batches = case.tables(), [draw_batch(case, rng, tokens) for _ in range(10)]
    inputs, on_cuda = tuple(t.cuda() for t in batches[0]), to_cuda(tables)
    graph, routed = captured(lambda: plan_and_route(*inputs, on_cuda))
    with no_sync():
        plan_and_route(*inputs, on_cuda)
    for batch in batches:
        for held, new in zip(inputs, batch, strict=True):
            held.copy_(new)
        graph.replay()
        assert torch.equal(routed.cpu(), plan_and_route(*batch, tables))
    assert ops.device_errors("cuda") == 0


@pytest.mark.parametrize("tokens", NODES)
def test_nodes_of_the_chain(tokens: int) -> None:
    graph, _ = captured(chain(tokens, "cuda"))
    assert num_nodes(graph) == NODES[tokens]


def test_a_replayed_graph_notes_what_is_wrong() -> None:
    tables = ops.replica_tables(torch.arange(4, dtype=torch.int32).cuda(), 2, 4)
    row = torch.tensor([2, 1, 0, 0], dtype=torch.int32).cuda()
    ids = torch.tensor([[0, 0], [1, -1]]).cuda()
    counted = ops.count(ids, 4)
    graph, slots = captured(lambda: ops.route(counted, row, tables))
    graph.replay()
    isoload.ops.check_device("cuda")
    ids.copy_(torch.tensor([[0, 9], [1, -1]]))
    graph.replay()
    with pytest.raises(ValueError, match=r"^route: topk_ids must be in -1..E-1 \(found on cuda;"):
        isoload.ops.check_device("cuda")
    assert slots.tolist() == [[0, -1], [1, -1]]


def test_each_op_is_checked_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOLOAD_CHECK", "1")
    with pytest.raises(ValueError, match="count: topk_ids must be in -1..E-1"):
        ops.count(torch.tensor([[0, 7]], device="cuda"), 4)
    assert ops.count(torch.tensor([[0, 3]], device="cuda"), 4).counts.tolist() == [1, 0, 0, 1]
