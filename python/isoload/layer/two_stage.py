"""The two stages of a layer's batch: local copies are computed while other copies travel (Libra, papers/004).

A copy is local ("held") if its expert has a slot on its token's rank. Both orders make the same calls and the same sums
as MoE's pipeline: combine adds a rank's own part in that rank's position.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from isoload.balancing.known_routes import KnownPlan
from isoload.balancing.planning import Gathered
from isoload.balancing.routing import route
from isoload.layer.compiled import Choice, Choose
from isoload.layer.moe import Chosen, MoE
from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.plan import Plan, in_backward
from isoload.transport import Group, Received
from isoload.transport.transport import GatheredTokens, start_gather_tokens
from isoload.weights.borrowing import Borrowed

# Fetches weights for the next layer, given the borrowed weights that this layer uses.
Ahead = Callable[[Borrowed | None], Borrowed | None]


@dataclass
class Span:
    """Begin and end of a stage on the host, in seconds of time.perf_counter; on a device, the times of enqueueing."""

    begin: float
    end: float = 0.0


@dataclass(frozen=True, eq=False)
class Batch:
    """One layer's batch during the stages."""

    layer: MoE
    chosen: Chosen
    gathered: Gathered
    filled: PlacedLayers | None  # slots for the plan; None: the policy fills them from the loads
    borrowed: Borrowed | None  # weights of filled slots
    ahead: Ahead  # called once, when this batch's rows have been sent
    # Times by stage: dispatch (until rows have arrived), fetch, local, remote, combine.
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
    """Return whether a device has streams; on the CPU nothing runs in parallel to the host."""
    return device.type == "cuda"


class Beside:
    """Context whose kernels run on a side stream, after all kernels that the current stream had at construction. On
    exit the current stream waits for the side stream. Until then the caller keeps the inputs of these kernels alive.
    Their results belong to the side stream, whose memory is reused only after the next fork, and so after all uses.
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
    """Return [T, H] of every owned rank: plan, start dispatch, compute local copies, then the received ones."""
    layer, chosen = batch.layer, batch.chosen
    # A plan that the host must read is copied while the host waits for the row counts.
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
    """Return [T, H] of every owned rank: gather rows, compute local copies, plan and compute the rest."""
    layer, chosen = batch.layer, batch.chosen
    capacity = layer.dispatcher.max_tokens_per_rank
    assert capacity is not None
    batch.begin("dispatch")
    arriving = start_gather_tokens(layer.group, capacity, chosen.rows, chosen.ids, chosen.weights)
    return run_local_first(batch, partial(take_gathered, batch, arriving))


def run_local_first(batch: Batch, bring: Callable[[Tensor], list[Received]]) -> list[Tensor]:
    """Return [T, H] of every owned rank: compute local copies, plan and fetch the rest, compute the rest. `bring` maps
    local slots, see :func:`held_slots`, to the received rows of other copies.
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
    """Plan with local copies fixed, and select the remaining copies of the owned ranks from the tokens of all ranks."""
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
    layer, chosen = batch.layer, batch.chosen
    balanced = layer.balancer.plan(batch.gathered, batch.filled)
    of_ranks = zip(layer.group.ranks, chosen.ids, layer.balancer.route(balanced), strict=True)
    far = [slots.masked_fill(local_slots[rank][ids] >= 0, -1) for rank, ids, slots in of_ranks]
    batch.begin("dispatch")
    return layer.dispatcher.start_dispatch(*layer.sent(chosen, far))()


def held_slots(filled: PlacedLayers) -> Tensor:
    """Return every rank's lowest local slot of an expert, [R, E + 1] int64, -1 = none and for masked copies."""
    host = filled.host
    experts = filled.slot_to_expert.view(host.topology.num_ranks, -1).long()
    num_ranks, size = experts.shape
    column = torch.where(experts < 0, host.num_experts, experts)
    places = torch.arange(size, device=experts.device).expand(num_ranks, -1)
    lowest = torch.full((num_ranks, host.num_experts + 1), size, device=experts.device)
    lowest.scatter_reduce_(1, column, places, "amin")
    lowest.select(1, host.num_experts).fill_(size)
    return lowest.masked_fill(lowest == size, -1)


Source = TypeVar("Source")


class Fetched(Generic[Source]):
    """Weights of a layer's spare slots (None: nothing is borrowed) that travel ahead, for filled slots or a plan."""

    def __init__(self, layer: MoE, source: Source, borrowed: Borrowed | None) -> None:
        self.layer, self.source, self.borrowed = layer, source, borrowed
        self._marks = [rank.marks() for rank in layer._ranks()]

    def is_current(self) -> bool:
        """Return whether the layer's Parameters are unchanged since the weights were sent."""
        marked = zip(self.layer._ranks(), self._marks, strict=True)
        return all(rank.is_marked(marks) for rank, marks in marked)


class KnownStages:
    """Runs the layers of a stack by plans that were made ahead, and fetches the experts of the plan that comes next.
    After the last layer comes the next micro-batch's first layer or, if gradients are recorded, the backward of the
    same layer, whose weights are still there. In backward the order is reversed. If another plan comes than the
    one whose experts were fetched, its experts are fetched again.
    """

    def __init__(self, layers: Sequence[MoE]) -> None:
        self.layers = layers
        self.fetched: Fetched[KnownPlan] | None = None
        # Backward and a recompute use the weights that the forward fetched, as long as autograd keeps them.
        self.by_plan: WeakValueDictionary[KnownPlan, Borrowed] = WeakValueDictionary()

    def following(self, index: int, plan: KnownPlan) -> tuple[int, KnownPlan] | None:
        """Return the layer and the plan that are expected next; None: the backward of this layer, or nothing."""
        last, backward = len(self.layers) - 1, in_backward()
        if index != (0 if backward else last):
            index, batches = index + (-1 if backward else 1), 0
        elif backward or not torch.is_grad_enabled():
            index, batches = 0, 1
        else:
            return None
        known = plan.near(self.layers[index].balancer.layer, batches)
        return None if known is None else (index, known)

    def note(self, index: int, plan: KnownPlan, borrowed: Borrowed, dtype: torch.dtype | None) -> None:
        """Record the weights of a plan for its backward, which then fetches those of the plan before."""
        self.by_plan[plan] = borrowed
        borrowed.then = partial(self.fetch_next, index, plan, dtype)

    def fetch_next(
        self, index: int, plan: KnownPlan, dtype: torch.dtype | None, in_use: Borrowed | None
    ) -> None:
        """Fetch the weights of the plan that follows, into the buffer that this layer does not use."""
        before, self.fetched, after = self.fetched, None, self.following(index, plan)
        if after is None:
            return
        index, known = after
        layer = self.layers[index]
        borrowed = self.by_plan.get(known) if in_backward() else None
        if borrowed is None:
            filled = known.placed_in(layer.balancer.placed_on(known.loads.device)).placed
            if layer.borrowing is None or filled.unfilled is None:
                return
            borrowed = layer.borrowing.borrow(filled, in_use, dtype)
            if borrowed is None:  # the host finds that nothing is borrowed
                return
            self.note(index, known, borrowed, dtype)
        elif before is not None and before.borrowed is borrowed:  # a recompute has fetched them
            self.fetched = before
            return
        elif in_use is None or not borrowed.shares_buffer(in_use):
            borrowed.begin("borrow backward")
        self.fetched = Fetched(layer, known, borrowed)


@dataclass(eq=False)
class KnownBatch:
    """One layer's batch of :class:`KnownStages`; ready: whether its weights travel already, the same on all ranks."""

    stages: KnownStages
    index: int
    plan: KnownPlan | None
    ready: int = 0

    def checked(self, choose: Choose) -> Sequence[Choice]:
        stages, fetched = self.stages, self.stages.fetched
        if fetched is not None and not (fetched.source is self.plan and fetched.is_current()):
            stages.fetched = None
        self.ready = int(stages.fetched is not None)
        if isinstance(self.plan, KnownPlan) and (after := stages.following(self.index, self.plan)):
            layer = stages.layers[after[0]]
            layer._check_weights()
            after[1].placed_in(layer.balancer.placed_on(after[1].loads.device))
        return choose()

    def fetch(self, plan: Plan | None, chosen: Chosen) -> Borrowed | None:
        assert self.plan is not None
        layer, dtype = self.stages.layers[self.index], self.stages.layers[self.index]._dtype_of(chosen.rows)
        fetched, self.stages.fetched = self.stages.fetched, None
        borrowed = self.stages.by_plan.get(self.plan) if in_backward() else None
        if borrowed is None and fetched is not None and fetched.source is self.plan and fetched.is_current():
            borrowed = fetched.borrowed
        if borrowed is not None:
            borrowed.begin("borrow")  # fetches again if other layers have used the buffer
        else:
            borrowed = layer.borrow(plan, chosen)
            if borrowed is not None:
                self.stages.note(self.index, self.plan, borrowed, dtype)
        if borrowed is not None:
            borrowed.proceed()
        self.stages.fetch_next(self.index, self.plan, dtype, borrowed)
        return borrowed
