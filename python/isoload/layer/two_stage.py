"""The two stages of a layer's batch: copies on their own rank are computed while the others travel (Libra, papers/004).

Both orders make the same calls as MoE's pipeline, and the same sums: a rank's own part joins at the rank's place.
:func:`run_held` is the paper's (section 3.1): rows, choices and weights go to all ranks, so they need not wait for the
plan; every rank then routes the copies of all sources. A copy is *held* if its expert has a slot on its token's rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from isoload.balancing.planning import Gathered
from isoload.balancing.routing import route
from isoload.layer.moe import Chosen, MoE
from isoload.placement.placed_layers import PlacedLayers
from isoload.transport import Group, Received
from isoload.transport.transport import GatheredTokens, start_gather_tokens
from isoload.weights.borrowing import Borrowed

# Fetches for the next layer, given what this one computes with.
Ahead = Callable[[Borrowed | None], Borrowed | None]


@dataclass
class Span:
    """When a stage began and ended, in seconds of time.perf_counter: as the host sees it, so on a device enqueued."""

    begin: float
    end: float = 0.0


@dataclass(frozen=True, eq=False)
class Batch:
    """One layer's batch on its way through the stages.

    chosen, gathered  the rows and choices, and the loads
    filled            the slots it is planned with; None: the policy fills them from the loads
    borrowed          the weights of filled slots
    ahead             called once, when this batch's rows are on their way
    spans             by stage: dispatch (until the rows are there), fetch, local, remote, combine
    """

    layer: MoE
    chosen: Chosen
    gathered: Gathered
    filled: PlacedLayers | None
    borrowed: Borrowed | None
    ahead: Ahead
    spans: dict[str, Span] = field(default_factory=dict)

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        self.begin(stage)
        yield
        self.end(stage)

    def begin(self, stage: str) -> None:
        self.spans[stage] = Span(time.perf_counter())

    def end(self, stage: str) -> None:
        self.spans[stage].end = time.perf_counter()

    def fetch(self, borrowed: Borrowed | None) -> Borrowed | None:
        with self.span("fetch"):
            return self.ahead(borrowed)


def runs_apart(device: torch.device) -> bool:
    """Whether a device has streams: on the CPU nothing runs beside what the host computes."""
    return device.type == "cuda"


class Beside:
    """A context whose kernels run on a side stream, after those that the current stream had when this was made.

    On leaving, the current stream waits for them: only work that is enqueued in between runs at the same time. The
    caller keeps alive until then what they read. What they make belongs to the side stream, which uses its memory again
    behind the next fork alone, and so behind all uses before. Forks and joins are events: a CUDA graph captures them.

    Args:
        group: keeps a side stream for each stream that layers run on.
        device: without streams the context does nothing.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.apart = runs_apart(device)
        self._entered: AbstractContextManager[object] = nullcontext()
        if self.apart:
            self._main = torch.cuda.current_stream(device)
            self._side = group.memo(("beside", self._main), lambda: torch.cuda.Stream(device))
            self._side.wait_stream(self._main)

    def __enter__(self) -> None:
        if self.apart:
            self._entered = torch.cuda.stream(self._side)
        self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)  # type: ignore[arg-type]
        if self.apart:
            self._main.wait_stream(self._side)


def run_planned(batch: Batch) -> list[Tensor]:
    """[T, H] of every owned rank: plan, start dispatch of remote copies, compute local ones, then the remote ones."""
    layer, chosen = batch.layer, batch.chosen
    # A plan that the host must read first gets there while it waits for the row counts.
    early = layer.borrowing is not None and layer.borrowing.waits_for_plan
    device = batch.gathered.loads.device
    if runs_apart(device) and not early and batch.filled is not None and layer.policy.keeps_local:
        return run_local_first(batch, partial(send_planned, batch))
    balanced = layer.balancer.plan(batch.gathered, batch.filled)
    borrowed = batch.borrowed if batch.filled is not None else layer.borrow(balanced.plan, chosen)
    near, far, size = list[Tensor](), list[Tensor](), layer.placement.slots_per_rank
    for rank, slots in zip(layer.group.ranks, layer.balancer.route(balanced), strict=True):
        local = slots - rank * size
        local_copies = (local >= 0) & (local < size)
        near.append(torch.where(local_copies, local, -1).long())
        far.append(slots.masked_fill(local_copies, -1))
    coming = batch.fetch(borrowed) if early else None
    batch.begin("dispatch")
    started = layer.dispatcher.start_dispatch(*layer.sent(chosen, far))
    for waiting in (borrowed, coming):
        if waiting is not None:
            waiting.proceed()
    side_stream = Beside(layer.group, device)
    if not early and not side_stream.apart:
        batch.fetch(borrowed)
    with batch.span("local"):
        stacks = layer.stacks(chosen, borrowed)
        own_rows = layer.run_local(chosen.kept(near), stacks)
    if not early and side_stream.apart:
        with side_stream:
            batch.fetch(borrowed)
    received = started()
    batch.end("dispatch")
    with batch.span("remote"):
        computed = layer.run_local(received, stacks)
    with batch.span("combine"):
        return layer.dispatcher.combine(computed, received, own_rows)


def run_held(batch: Batch) -> list[Tensor]:
    """[T, H] of every owned rank: gather, compute held copies, plan the others around them, compute these."""
    layer, chosen = batch.layer, batch.chosen
    capacity = layer.dispatcher.max_tokens_per_rank
    assert capacity is not None
    batch.begin("dispatch")
    arriving = start_gather_tokens(layer.group, capacity, chosen.rows, chosen.ids, chosen.weights)
    return run_local_first(batch, partial(take_gathered, batch, arriving))


def run_local_first(batch: Batch, bring: Callable[[Tensor], list[Received]]) -> list[Tensor]:
    """[T, H] of every owned rank: compute held copies; plan and bring the others, on a GPU meanwhile; compute these.

    On a GPU the next layer's weights are fetched once the others are on their way, elsewhere before anything computes.

    Args:
        batch: with slots filled before.
        bring: held slots as of :func:`held_slots` -> what arrived of the copies without one.
    """
    layer, chosen, borrowed = batch.layer, batch.chosen, batch.borrowed
    assert batch.filled is not None
    local_slots = held_slots(batch.filled)
    overlaps = runs_apart(local_slots.device)
    coming = None if overlaps else batch.fetch(borrowed)
    for waiting in (borrowed, coming):
        if waiting is not None:
            waiting.proceed()
    side_stream = Beside(layer.group, local_slots.device)
    with batch.span("local"):
        stacks = layer.stacks(chosen, borrowed)
        near = [local_slots[rank][ids] for rank, ids in zip(layer.group.ranks, chosen.ids, strict=True)]
        own_rows = layer.run_local(chosen.kept(near), stacks)
    with side_stream:
        received = bring(local_slots)
    batch.end("dispatch")
    with batch.span("remote"):
        computed = layer.run_local(received, stacks)
    if overlaps:
        with side_stream:
            coming = batch.fetch(borrowed)
            if coming is not None:
                coming.proceed()
    with batch.span("combine"):
        return layer.dispatcher.combine(computed, received, own_rows)


def take_gathered(
    batch: Batch, arriving: Callable[[], GatheredTokens], local_slots: Tensor
) -> list[Received]:
    """Plans around what is held, and takes the rest of what comes to the owned ranks from the tokens of all."""
    layer, chosen = batch.layer, batch.chosen
    balanced = layer.balancer.plan(batch.gathered, batch.filled, keep_local=True)
    assert balanced.plan is not None
    tokens, far = arriving(), list[Tensor]()
    for source, ids in enumerate(tokens.ids):
        slots = route(ids, balanced.loads, balanced.plan, source)
        far.append(slots.masked_fill(local_slots[source][ids] >= 0, -1))
    return tokens.received(
        layer.group.ranks, list(map(len, chosen.rows)), far, layer.placement.slots_per_rank
    )


def send_planned(batch: Batch, local_slots: Tensor) -> list[Received]:
    """Plans by a policy that leaves alone what is held, and dispatches the rest."""
    layer, chosen = batch.layer, batch.chosen
    balanced = layer.balancer.plan(batch.gathered, batch.filled)
    of_ranks = zip(layer.group.ranks, chosen.ids, layer.balancer.route(balanced), strict=True)
    far = [slots.masked_fill(local_slots[rank][ids] >= 0, -1) for rank, ids, slots in of_ranks]
    batch.begin("dispatch")
    return layer.dispatcher.start_dispatch(*layer.sent(chosen, far))()


def held_slots(filled: PlacedLayers) -> Tensor:
    """[R, E + 1] int64 every rank's lowest local slot of an expert, shared ones included, -1 = none.

    The last column is -1: there index -1 leads, of a copy that is not there.
    """
    host = filled.host
    experts = filled.slot_to_expert.view(host.topology.num_ranks, -1).long()
    num_ranks, size = experts.shape
    column = torch.where(experts < 0, host.num_experts, experts)
    places = torch.arange(size, device=experts.device).expand(num_ranks, -1)
    lowest = torch.full((num_ranks, host.num_experts + 1), size, device=experts.device)
    lowest.scatter_reduce_(1, column, places, "amin")
    lowest.select(1, host.num_experts).fill_(size)
    return lowest.masked_fill(lowest == size, -1)
