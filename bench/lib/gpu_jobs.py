"""What bench_cuda calls: every op on a layer of gpu_layers, and the chain from ids to slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isoload import ops
from lib.gpu_layers import EXPERTS, LAYERS, RANK, Layer, per_node, size


def counted(x: Layer) -> ops.Counted:
    return ops.Counted(x.ids, x.loads[RANK], x.numbers, x.parts)


def split_of_a_rank(x: Layer) -> ops.ExactSplit:
    """As a Balancer plans: the split, and this rank's send_counts."""
    return ops.plan_exact(x.loads, x.tables, rank=RANK, ranks_per_node=per_node(x))


def joint(x: Layer) -> ops.JointSplit:
    return ops.plan_joint(x.gathered, x.shared_tables, RANK, 1, size(x), ranks_per_node=per_node(x))


def route_joint(x: Layer, shared_row: Tensor) -> Tensor:
    """The slots of a batch whose routed copies follow x.row, and whose shared copies follow shared_row [R]."""
    of_ids = ops.Counted(x.shared_ids, x.gathered[RANK], x.shared_numbers, x.shared_parts)
    row = torch.nn.functional.pad(x.row.view(len(x.loads), -1), (0, 1)).flatten()
    columns = ops.SharedColumns(1, size(x), RANK, shared_row)
    return ops.route(of_ids, row, x.shared_tables, columns)


def chain(x: Layer) -> Tensor:
    """As a Balancer does, but for the gather."""
    return ops.route(ops.count(x.ids, EXPERTS), split_of_a_rank(x).send_counts, x.tables)


def spare_placement(x: Layer) -> tuple[Tensor, Tensor, int, int]:
    """Plain expert parallelism with two spare slots per rank: slots, homes, ranks, spare slots."""
    ranks, device = len(x.loads), x.loads.device
    own = -(-EXPERTS // ranks)
    held = torch.arange(ranks * own, dtype=torch.int32, device=device)
    home = (held + held // own * 2)[:EXPERTS]
    held = torch.where(held < EXPERTS, held, -1).view(ranks, own)
    slots = torch.cat([held, held.new_full((ranks, 2), -1)], dim=1).flatten()
    return slots, home, ranks, 2


def packing(x: Layer) -> Callable[[], Any]:
    """Rows of 7168 bytes to every rank, one rank's behind the other's. How many there are is read before."""
    ranks = len(x.loads)
    num_rows = int(ops.number_rows(x.slots, size(x), ranks).counts[0].sum())

    def pack() -> Any:
        rows = ops.number_rows(x.slots, size(x), ranks)
        return ops.pack_rows(x.values, x.slots, x.gates, rows, size(x), num_rows)

    return pack


def balanced_same(x: Layer) -> list[Tensor]:
    slots, loads, split = ops.balance_same(x.ids, x.tables)
    return [slots, loads, *split]


PER_TOKEN = {"ids", "shared_ids", "slots"}  # fields of a layer


@dataclass(frozen=True)
class Job:
    """An op on a layer.

    name      the op's, of torch.ops.isoload, and behind a comma what is done with it
    reads     the fields that its bytes are counted of
    target    and quoted: microseconds
    of        the op, where the name does not begin with it
    layers    how many a bench takes; two where the CPU takes seconds for all
    prepare   makes the call once, where that is not part of it; its results are those of `call`
    captured  the call is a graph itself
    """

    name: str
    call: Callable[[Layer], Any]
    reads: tuple[str, ...]
    target: float | None = None
    quoted: str = ""
    of: str = ""
    layers: int = LAYERS
    prepare: Callable[[Layer], Callable[[], Any]] | None = None
    captured: bool = False

    @property
    def op(self) -> str:
        return self.of or self.name.split(",")[0]

    @property
    def tokens_matter(self) -> bool:
        return not PER_TOKEN.isdisjoint(self.reads)

    def on(self, layer: Layer) -> Callable[[], Any]:
        return self.prepare(layer) if self.prepare else partial(self.call, layer)


LPLB = "DeepSeek LPLB ~100"
ROUTED = ("ids", "numbers", "parts", "row", "tables")
WITH_SHARED = ("shared_ids", "shared_numbers", "shared_parts", "row", "shared_tables", "shared_row")
JOBS = (
    Job("count", lambda x: ops.count(x.ids, EXPERTS), ("ids",)),
    Job("count, shared columns", lambda x: ops.count(x.ids, EXPERTS, 1), ("ids",)),
    Job(
        "replica_tables",
        lambda x: ops.replica_tables(x.slot_to_expert, len(x.loads), EXPERTS).data,
        ("slot_to_expert",),
    ),
    Job("plan_exact", lambda x: ops.plan_exact(x.loads, x.tables), ("loads", "tables"), 10),
    Job(
        "plan_exact, joint",
        lambda x: ops.plan_exact(x.loads, x.tables, x.fixed, pour=x.pour),
        ("loads", "tables"),
        12,
    ),
    Job("plan_exact, of a rank", split_of_a_rank, ("loads", "tables"), 10),
    Job("plan_joint", joint, ("gathered", "shared_tables")),
    Job("plan_active", lambda x: ops.plan_active(x.loads, x.tables), ("loads", "tables")),
    Job("plan_lp", lambda x: ops.plan_lp(x.loads, x.tables), ("loads", "tables"), 25, LPLB),
    Job("round_split", lambda x: ops.round_split(x.split, x.loads, x.tables), ("split", "loads", "tables")),
    Job("plan_fill", lambda x: ops.plan_fill(x.loads, *spare_placement(x)), ("loads", "slot_to_expert")),
    Job("top_up", lambda x: ops.top_up(x.loads, *spare_placement(x)), ("loads", "slot_to_expert")),
    Job(
        "share, own row",
        lambda x: ops.share(x.loads, x.quota, x.tables, per_node(x), RANK),
        ("loads", "quota", "tables"),
    ),
    Job(
        "share_by_rank",
        lambda x: ops.share_by_rank(x.loads, x.quota, x.tables, per_node(x)),
        ("loads", "quota", "tables"),
    ),
    Job("plan_own", lambda x: ops.plan_own(x.loads[RANK], x.tables, x.fixed, RANK), ("row", "tables")),
    Job("balance_own", lambda x: ops.balance_own(x.ids, x.tables, x.fixed, RANK), ("ids", "tables")),
    Job("balance_same", balanced_same, ("ids", "tables")),
    Job("route", lambda x: ops.route(counted(x), x.row, x.tables), ROUTED, quoted="UltraEP reroute 37"),
    Job("route, shared columns", lambda x: route_joint(x, x.shared_row), WITH_SHARED),
    Job("route, shared columns, even", lambda x: route_joint(x, x.even_row), WITH_SHARED),
    Job(
        "route_sampled",
        lambda x: ops.route_sampled(x.ids, x.weights, x.tables, 5),
        ("ids", "weights", "tables"),
    ),
    Job("plan_waterfill", lambda x: ops.plan_waterfill(x.copies, x.tokens), ("copies", "tokens")),
    Job(
        "route_shared",
        lambda x: ops.route_shared(x.slots, x.shared_row, size(x), RANK),
        ("slots", "shared_row"),
    ),
    Job(
        "route_shared, even",
        lambda x: ops.route_shared(x.slots, x.even_row, size(x), RANK),
        ("slots", "even_row"),
    ),
    Job(
        "route_shared_sampled",
        lambda x: ops.route_shared_sampled(x.slots, x.tokens, None, size(x), RANK, "static"),
        ("slots", "tokens"),
    ),
    Job(
        "append_shared_expert",
        lambda x: ops.append_shared_expert(x.slots, x.gates, x.shared_ranks, size(x)),
        ("slots", "gates", "shared_ranks"),
    ),
    Job("number_rows", lambda x: ops.number_rows(x.slots, size(x), len(x.loads)), ("slots",)),
    Job(
        "number_rows and pack_rows",
        lambda x: packing(x)(),
        ("slots", "gates", "values"),
        of="pack_rows",
        layers=2,
        prepare=packing,
    ),
    Job("group_copies", lambda x: ops.group_copies(x.slots, RANK * size(x), size(x)), ("slots",)),
    Job("chain", chain, ("ids", "loads", "tables"), 25, of="route"),
)


def outputs(result: Any) -> list[Tensor]:
    """The tensors of what a call returned."""
    return [result] if isinstance(result, Tensor) else list(result)


def need_cuda() -> None:
    """Raises where a job would have nothing to run: no GPU, or a library built without its CUDA function."""
    if not torch.cuda.is_available():
        raise SystemExit("bench_cuda needs a GPU")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    missing = sorted({job.op for job in JOBS if not has(f"isoload::{job.op}", "CUDA")})
    if missing:
        raise SystemExit(f"this build of isoload has no CUDA function of {', '.join(missing)}")
