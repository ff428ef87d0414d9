"""Every kernel of csrc/cuda in a few calls: what barriers are removed under."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from isoload import ops
from isoload.ops.results import RowLayout
from isoload.ops.tables import ReplicaTables
from support import pourings
from support.borrow_plans import SHAPES, draw_plan, draw_values
from support.cases import draw
from support.chain import NODES, chain
from support.level_cases import LevelCase, in_order
from support.simt_build import ROOT

sys.path.append(str(ROOT / "bench"))
from lib.gpu_jobs import JOBS, spare_placement
from lib.gpu_layers import EXPERTS, RANK, Layer, make_layers, per_node, size

TOKENS = (
    "balance_own",
    "balance_same",
    "count",
    "count, shared columns",
    "route",
    "route, shared columns",
    "number_rows",
    "group_copies",
    "route_shared",
)
FEW, MANY, WIDE = (16, 32, 64), (16, 32, 4100), (32, 32, 64)  # ranks, replicas, tokens
TURNS, WIDER = (16, 32, 1100), (72, 32, 600)


@functools.cache
def layer(ranks: int, replicas: int, tokens: int) -> Layer:
    return make_layers(ranks, replicas, tokens, seed=0, layers=1)[0]


def borrow(backward: bool) -> list[torch.Tensor]:
    """One rank's loans, or their gradients, in float32."""
    rng, spare_slots = np.random.default_rng(3), 2
    plan = draw_plan(rng, 4, spare_slots)
    rank = int(np.argmax(plan.homes))

    def stacks(rows: int) -> list[torch.Tensor]:
        return [draw_values(rng, rows, shape, torch.float32) for shape in SHAPES if 0 not in shape]

    weights, pools = [stacks(n) for n in plan.homes], [stacks(spare_slots) for _ in plan.homes]
    if backward:
        of, totals = ops.addresses(pools), stacks(plan.homes[rank])
        ops.borrow_backward(
            plan.slot_to_expert, plan.home, of, totals, 4, rank, spare_slots, torch.float32, blocks=7
        )
        return totals
    ops.borrow(plan.slot_to_expert, plan.home, ops.addresses(weights), pools[rank], 4, rank, blocks=7)
    return pools[rank]


def speeds(x: Layer) -> torch.Tensor:
    """Ticks of every rank, hardly two alike."""
    return torch.arange(len(x.loads), dtype=torch.int32) * 37 % 400 + 900


def more(objective: str) -> Callable[[Layer], object]:
    return lambda x: ops.plan_exact(x.loads, x.tables, objective=objective, ranks_per_node=per_node(x))


def sampled_at_a_step(x: Layer) -> object:
    """The batch's number is read by the kernel."""
    step = torch.tensor(7)
    slots = ops.route_sampled(x.ids, x.weights, x.tables, 5, step, RANK)
    return slots, ops.route_shared_sampled(slots, x.tokens, x.tokens, size(x), RANK, "blog", 5, step)


def pack(x: Layer, rolls: int = 1) -> object:
    """Rows of five words, exactly and with a capacity; the payload's parts, without the gaps.

    With rolls a token goes to more ranks than a block looks for at a time.
    """
    slots, gates = (torch.cat([of.roll(i, 0) for i in range(rolls)], dim=1) for of in (x.slots, x.gates))
    ranks, tokens = len(x.loads), len(slots)
    rows = ops.number_rows(slots, size(x), ranks)
    values = torch.arange(tokens * 5, dtype=torch.float32).view(tokens, 5)
    found: list[torch.Tensor] = []
    for capacity, num_rows in ((None, int(rows.counts[0].sum())), (tokens, ranks * tokens)):
        packed = ops.pack_rows(values, slots, gates, rows, size(x), num_rows, capacity)
        found += [*RowLayout.of(values, gates).parts(packed.payload, values, gates), *packed[1:]]
    return found


def spread(x: Layer) -> torch.Tensor:
    """Every rank takes shared copies, so tokens have to be chosen."""
    ranks, tokens = len(x.loads), len(x.ids)
    row = torch.full((ranks,), tokens // ranks, dtype=torch.int32)
    row[RANK] += tokens % ranks
    return ops.route_shared(x.slots, row, size(x), RANK)


def strangers(x: Layer) -> torch.Tensor:
    """One rank takes the copies of two shared experts, also of tokens that do not visit it."""
    row = torch.zeros(len(x.loads), dtype=torch.int32)
    row[-1] = 2 * len(x.ids)
    return ops.route_shared(x.slots, row, size(x), RANK, num_shared=2)


def refused(x: Layer) -> torch.Tensor:
    """Negative copies, by every planner: a CPU raises, kernels leave zeros."""
    loads, spares = -x.loads, spare_placement(x)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: ops.plan_exact(loads, x.tables).quota,
        lambda: ops.plan_exact(loads, x.tables, rank=RANK).quota,
        lambda: ops.plan_active(loads, x.tables).quota,
        lambda: ops.plan_lp(loads, x.tables).split,
        lambda: ops.round_split(x.split, loads, x.tables),
        lambda: ops.plan_waterfill(-x.copies, x.tokens).share,
        lambda: ops.plan_fill(loads, *spares).telemetry,
        lambda: ops.top_up(loads, *spares).telemetry,
        lambda: ops.plan_own(loads[RANK], x.tables, x.loads[0][: len(x.loads)], RANK),
        lambda: ops.balance_own(x.ids, x.tables, -1 - x.fixed, RANK)[0] + 1,
    ]
    for call in calls:
        with contextlib.suppress(ValueError):
            assert not call().any()
    return torch.zeros(())


def split_of_a_rank(x: Layer, **options: Any) -> object:
    return ops.plan_exact(x.loads, x.tables, rank=RANK, ranks_per_node=per_node(x), **options)


def joint_of_two(x: Layer, **options: Any) -> object:
    """Two shared experts, the second in the place behind the first."""
    gathered = torch.cat([x.gathered, x.gathered[:, -1:]], 1)
    slots = torch.nn.functional.pad(x.slot_to_expert.view(len(x.loads), -1), (0, 2), value=-1)
    tables = ops.replica_tables(slots.flatten(), len(x.loads), EXPERTS)
    return ops.plan_joint(gathered, tables, RANK, 2, size(x), ranks_per_node=per_node(x), **options)


def exact_of_many_ranks() -> object:
    """Of more than a warp has lanes, with paths to be found."""
    case = draw("duplicates", 64, 8)
    return ops.plan_exact(torch.from_numpy(case.loads), case.tables(), sweeps=1)


def more_ranks() -> object:
    """Than one word of a set has bits."""
    case = draw("eplb", 72, 7)
    loads, tables = torch.from_numpy(case.loads), case.tables()
    return [*ops.plan_exact(loads, tables, sweeps=1), *ops.plan_active(loads, tables)]


def pour(ranks: int, seed: int) -> object:
    """With paths of several levels to find, and a rest."""
    arguments, options = pourings.draw("contended", ranks, seed).arguments()
    return ops.plan_waterfill(*arguments, **options)


def lp_of_ranks(ranks: int) -> object:
    """In both dtypes; with more ranks than a warp has lanes, or than there are replicated experts."""
    case = draw("duplicates", ranks, 0)
    loads, tables = torch.from_numpy(case.loads), case.tables()
    return [
        field for real in (torch.float32, torch.float64) for field in ops.plan_lp(loads, tables, dtype=real)
    ]


def balanced_own(at: tuple[int, int, int], tokens: int, **how: Any) -> object:
    """With some masked, an offset and counts kept."""
    x = layer(*at)
    ids = x.ids[:tokens].masked_fill(torch.arange(tokens)[:, None] % 7 == 3, -1)
    ids = ids.masked_fill(torch.arange(ids.shape[1]) == 2, -1).int()
    recent = torch.arange(EXPERTS, dtype=torch.int64) << 16
    offset = x.fixed * 37 % 2**20
    slots, counts = ops.balance_own(ids, x.tables, offset, RANK, recent=recent, layer=3, **how)
    return [slots, counts, recent]


def rows_to_many_ranks() -> object:
    """So many that a block has fewer warps, which come round to their part of the copies twice."""
    return ops.number_rows(torch.arange(64 * 8).view(64, 8) * 37 % 13, 2, 304)


def share_of_a_few() -> object:
    """With experts that are no multiple of the lanes."""
    case = draw("eplb", 12, 1)
    loads, tables = torch.from_numpy(case.loads), case.tables()
    quota = ops.plan_exact(loads, tables).quota
    return torch.cat([ops.share(loads, quota, tables, 4, rank) for rank in range(3)])


def numbered(choices: int) -> object:
    """Of tokens with more choices a lane takes two copies at a time; of still more, a block its part in three steps."""
    x = layer(*MANY)
    ids = torch.cat([x.ids.roll(i, 0) for i in range(5)], dim=1)[:300, :choices]
    found = ops.count(ids, EXPERTS)
    loads = x.loads.clone()
    loads[RANK] = found.counts
    row = ops.share(loads, ops.plan_exact(loads, x.tables).quota, x.tables, per_node(x), RANK)
    return [*found, ops.route(found, row, x.tables)]


def fill_levels(spare_slots: int, **rules: Any) -> object:
    """More slots than lanes; ten of the ranks have all copies, in experts so small that spare slots are scarce."""
    loads = np.random.default_rng(5).integers(50, 1000, 256) * (np.arange(256) < 160)
    return in_order(loads, 16, spare_slots, **rules).fill()


def fill_many_ranks() -> object:
    """Of more than a warp has lanes, in nodes that lend within themselves; what is cut is cut again."""
    loads = np.random.default_rng(7).integers(50, 1000, 160) * (np.arange(160) % 32 < 12)
    return in_order(loads, 40, 1, ranks_per_node=8, within="node").fill()


def fill_beside_replicas() -> object:
    """A slot more on every rank, for a replica of an expert with copies: it starts from their exact split."""
    loads = np.random.default_rng(5).integers(50, 1000, 256) * (np.arange(256) < 160)
    slots = np.full((16, 18), -1)
    slots[:, :16], slots[:, 16] = np.arange(256).reshape(16, 16), np.arange(16) * 10
    home = np.arange(256) // 16 * 18 + np.arange(256) % 16
    case = LevelCase("replicas", 16, 1, *(x.ravel().astype(np.int32) for x in (slots, home, loads)))
    return case.split_exactly().fill()


@functools.cache
def large(experts: int) -> tuple[torch.Tensor, ReplicaTables, torch.Tensor, torch.Tensor]:
    """Loads of 16 ranks, tables, a quota and the ids [64, 8] of the last rank, for kernels with work in shared memory
    of 128 to 226 KB: there on an H100, with fewer warps or in global memory where a block has less."""
    rng = np.random.default_rng(6)
    slots = rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, 80)]))
    tables = ops.replica_tables(torch.from_numpy(slots.astype(np.int32)), 16, experts)
    ids = torch.from_numpy(rng.integers(-1, experts, (64, 8)))
    loads = torch.from_numpy(rng.integers(0, 40, (16, experts)).astype(np.int32))
    loads[-1] = ops.count(ids, experts).counts
    return loads, tables, ops.plan_exact(loads, tables).quota, ids


def large_route(experts: int) -> object:
    loads, tables, quota, ids = large(experts)
    return ops.route(ops.count(ids, experts), ops.share(loads, quota, tables, 8, 15), tables)


def large_split_of_a_rank(experts: int) -> object:
    return ops.plan_exact(*large(experts)[:2], rank=3, ranks_per_node=8)


def large_joint(experts: int) -> object:
    loads, tables, _, _ = large(experts)
    gathered = torch.cat([loads, loads.amax(1, keepdim=True)], 1)
    return ops.plan_joint(gathered, tables, 3, 1, tables.num_slots // 16 - 1, ranks_per_node=8)


def large_fill(experts: int) -> object:
    """An expert's own slots in order, two spare ones behind each rank's."""
    own = experts // 16
    held = torch.arange(experts, dtype=torch.int32)
    slots = torch.nn.functional.pad(held.view(16, own), (0, 2), value=-1).flatten()
    given = large(experts)[0], slots, held + held // own * 2, 16, 2
    return [*ops.plan_fill(*given), *ops.top_up(*given)]


__all__ = ["EXPERTS", "LARGE", "OF_LAYERS", "SCENARIOS", "bits", "layer", "make_inputs"]
OF_LAYERS: dict[str, tuple[Callable[[Layer], object], tuple[int, int, int]]] = {
    **{job.name: (job.call, FEW) for job in JOBS if job.name != "chain"},
    **{f"{job.name}, many tokens": (job.call, MANY) for job in JOBS if job.name in TOKENS},
    "plan_lp, wide": (next(job.call for job in JOBS if job.name == "plan_lp"), WIDE),
    "plan_exact, speeds": (lambda x: ops.plan_exact(x.loads, x.tables, ticks=speeds(x)), FEW),
    "plan_waterfill, speeds": (lambda x: ops.plan_waterfill(x.copies, x.tokens, ticks=speeds(x)), FEW),
    "plan_exact, local": (more("local"), FEW),
    "plan_exact, of a rank, local": (functools.partial(split_of_a_rank, objective="local"), FEW),
    "plan_joint, two shared": (joint_of_two, FEW),
    "plan_joint, in parts": (lambda x: joint_of_two(x, ticks=speeds(x), objective="local"), FEW),
    "route, shared columns, blocks": (
        next(job.call for job in JOBS if job.name == "route, shared columns"),
        TURNS,
    ),
    "route_shared, spread": (spread, FEW),
    "route_shared, by bits": (lambda x: [spread(x), strangers(x)], MANY),
    "route_shared, more ranks": (lambda x: [spread(x), strangers(x)], WIDER),
    "route_shared, strangers": (strangers, FEW),
    "group_copies, more slots": (lambda x: ops.group_copies(x.slots, 0, 3 * size(x)), FEW),
    "group_copies, more slots, many tokens": (lambda x: ops.group_copies(x.slots, 0, 3 * size(x)), MANY),
    "refused": (refused, FEW),
    "sampled at a step": (sampled_at_a_step, FEW),
    "pack_rows, both": (pack, FEW),
    "pack_rows, wide": (functools.partial(pack, rolls=3), WIDE),
    "share, all rows": (lambda x: ops.share(x.loads, x.quota, x.tables, per_node(x)), FEW),
}
SCENARIOS: dict[str, Callable[[], object]] = {
    **{name: functools.partial(lambda call, at: call(layer(*at)), *of) for name, of in OF_LAYERS.items()},
    "number_rows, many ranks": rows_to_many_ranks,
    "numbered, 12 choices": lambda: numbered(12),
    "numbered, 40 choices": lambda: numbered(40),
    "plan_exact, many ranks": exact_of_many_ranks,
    "more ranks": more_ranks,
    "plan_waterfill, paths": lambda: pour(16, 59),
    "plan_waterfill, more ranks than a warp": lambda: pour(48, 7),
    "plan_waterfill, more ranks": lambda: pour(72, 7),
    "plan_lp, many ranks": lambda: lp_of_ranks(48),
    "plan_lp, more ranks": lambda: lp_of_ranks(72),
    "share, few experts": share_of_a_few,
    "balance_own, most": lambda: balanced_own(TURNS, 1024),
    "balance_own, more": lambda: balanced_own(TURNS, 1100),
    "balance_own, speeds": lambda: balanced_own(FEW, 64, ticks=speeds(layer(*FEW))),
    "balance_own, more ranks": lambda: balanced_own(WIDE, 64),
    "balance_own, no sweeps": lambda: balanced_own(FEW, 64, sweeps=0),
    "plan_fill, levels": lambda: fill_levels(1),
    "plan_fill, many ranks": fill_many_ranks,
    "plan_fill, replicas": fill_beside_replicas,
    "plan_fill, prices": lambda: fill_levels(
        2, import_costs=(50, 200), export_costs=(50, 200), ranks_per_node=8
    ),
    **{f"chain, {tokens} tokens": lambda tokens=tokens: chain(tokens)() for tokens in NODES},
    "borrow": lambda: borrow(False),
    "borrow_backward": lambda: borrow(True),
}


LARGE: dict[str, Callable[[], object]] = {
    "count": lambda: ops.count(large(2560)[3], 2560),
    "replica_tables": lambda: ops.replica_tables(torch.arange(6400, dtype=torch.int32), 16, 6400).data,
    "plan_exact": lambda: ops.plan_exact(*large(1600)[:2]),
    "plan_exact, of a rank": lambda: large_split_of_a_rank(1600),
    "plan_joint": lambda: large_joint(1600),
    "plan_active": lambda: ops.plan_active(*large(4000)[:2]),
    "plan_lp": lambda: ops.plan_lp(*large(1600)[:2]),
    "fills": lambda: large_fill(1600),
    "share": lambda: ops.share(large(1600)[0], large(1600)[2], large(1600)[1], 8, 3),
    "share_by_rank": lambda: ops.share_by_rank(large(1600)[0], large(1600)[2], large(1600)[1], 8),
    "route": lambda: large_route(1600),
    "group_copies": lambda: ops.group_copies(large(1600)[3], 0, 1600),
}


def make_inputs() -> None:
    for tokens in NODES:
        chain(tokens)
    for at in (FEW, MANY, WIDE, TURNS, WIDER):
        layer(*at)


def bits(result: object) -> str:
    """A digest of what a scenario returns."""
    tensors = [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]
    parts = [f"{x.dtype} {list(x.shape)} ".encode() + x.contiguous().numpy().tobytes() for x in tensors]
    return hashlib.sha256(b"".join(parts)).hexdigest()
