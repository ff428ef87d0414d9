"""CapturedBalancer: a Balancer that runs on a GPU by replaying one CUDA graph, from topk_ids to slots.

Use it in code that runs eagerly. Engines that capture whole forward passes (SGLang, vLLM) call the Balancer inside
their own capture.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from isoload.balancing.balancer import Balancer, BatchRecorder
from isoload.balancing.counting import check_ids, check_one_each
from isoload.balancing.own_counts import described
from isoload.checks import values_readable
from isoload.policies import Policy
from isoload.policies.plan import Plan, in_backward
from isoload.transport import Call, error_code
from isoload.transport.group import raise_unlike

Replay = Callable[[], None]
Capture = Callable[[Callable[[], list[Tensor]]], tuple[Replay, list[Tensor]]]

NO_LIMIT = 2**31 - 1


def cuda_graph(call: Callable[[], list[Tensor]], pool: Any = None) -> tuple[Replay, list[Tensor]]:
    """Capture ``call()`` in a CUDA graph; return a function that replays it, and the result, which replays overwrite.
    ``call`` must have run once before, because the first use of a kernel loads it, which a capture cannot do. `pool`,
    from ``torch.cuda.graph_pool_handle()``, is only for graphs that are captured and replayed on one stream."""
    graph = torch.cuda.CUDAGraph()
    # Other threads may use CUDA during the capture, as NCCL's watchdog does.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = call()
    return graph.replay, result


class _Counts:
    """Recorder that stores the arguments of its last call and adds no counts."""

    stored: tuple[Any, ...]  # layer, counts, source, top_k, ids

    def add(self, *batch: Any) -> None:
        self.stored = batch


class _WithoutPadding:
    """Passes a recorder the first `filled` rows of every owned rank's buffer: one layer may replay a batch that another
    layer runs eagerly, and both must record the same rows."""

    def __init__(self, recorder: BatchRecorder, filled: list[int]) -> None:
        self.recorder, self.filled = recorder, filled

    def add(self, *batch: Any) -> None:
        layer, counts, source, top_k, ids = batch
        rows = [buffer[:number] for buffer, number in zip(ids, self.filled, strict=True)]
        self.recorder.add(layer, counts, source, top_k, rows)


@dataclass(frozen=True)
class _Graph:
    """A captured call: slots [tokens, top_k] of every owned rank, plan, loads, policy and exchanged bytes. Counts are
    added to the recorder after a replay."""

    replay: Replay
    slots: list[Tensor]
    plan: Plan | None
    loads: Tensor | None
    bytes: Counter[str]
    policy: Policy
    counts: _Counts


class CapturedBalancer:
    """Calls a Balancer through a CUDA graph: the same slots, plans, samples, records and errors, with one launch.

    The first batch runs eagerly, the second is captured, later ones replay the graph. Planned and unplanned batches
    (min_tokens) have a graph each. :meth:`Balancer.load` needs no new graph. Under ISOLOAD_CHECK=1 nothing is captured.

    All ranks capture in the same batch and agree on the result, for which the host waits once per graph: NCCL requires
    that all ranks capture and replay a collective together. If the capture fails on one rank, every rank warns and runs
    eagerly until :meth:`recapture`. A rank whose call fails replays the graph too, and every rank raises. Each rank may
    change the recorder at any time. Another policy needs :meth:`recapture` if other processes take part in the gather.

    The next call overwrites the slots, ``last_plan`` and ``last_loads``: clone results that must live longer. Inside
    another CUDA graph's capture call the Balancer instead.

    Args:
        balancer: no other code may call it, except in the same order on all ranks.
        tokens: largest number of rows of a batch; smaller batches cost the same. May differ between ranks.
        top_k: columns of topk_ids.
        dtype, device: of topk_ids.
        capture: records a call and returns its replay: :func:`cuda_graph`, with a pool to share memory between layers.
    """

    def __init__(
        self,
        balancer: Balancer,
        tokens: int,
        top_k: int,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str = "cuda",
        capture: Capture = cuda_graph,
    ) -> None:
        for name, number in (("tokens", tokens), ("top_k", top_k)):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        if dtype not in (torch.int32, torch.int64):
            raise ValueError(f"dtype must be int32 or int64, got {dtype}")
        if capture is cuda_graph and torch.device(device).type != "cuda":
            raise ValueError(f"device must be a CUDA device, got {device}")
        self.balancer, self._capture = balancer, capture
        with torch.inference_mode(False):  # otherwise only inference mode could write it
            shape = tokens, top_k
            self._ids = [torch.full(shape, -1, dtype=dtype, device=device) for _ in balancer.ranks]
            # The largest allowed count, or minus the error code if this process failed.
            self._limit = torch.full((), NO_LIMIT, dtype=torch.int32, device=device)
        self._filled = [0] * len(self._ids)  # rows whose values may differ from -1
        self._recorder: object = None  # the recorder at the previous batch, which has counted this layer
        self._replicated: bool | None = None  # Python reads this value in a capture, a graph does not
        self._graphs: dict[bool, _Graph | Literal["ran", "eager"]] = {}  # key: whether the batch is planned

    def recapture(self) -> None:
        """Drop the graphs: the next batch runs eagerly, the one after it is captured.

        All ranks call it together between batches, after they set another policy; all raise if the policies differ. The
        host waits.
        """
        with self.balancer.group.agreeing("capture") as facts:
            facts["policy"] = self.balancer.policy
        self._graphs.clear()

    def __call__(
        self, topk_ids: Tensor | Sequence[Tensor], num_tokens: int | None = None
    ) -> Tensor | list[Tensor]:
        """Return the [T, top_k] slots of every token copy, a view of memory that the next call writes.

        Args:
            topk_ids: [T, top_k] of the dtype and on the device captured, T at most ``tokens``; -1 = masked. A list over
                the owned ranks where this process owns several; then the result is a list.
            num_tokens: see :meth:`Balancer.__call__`.
        """
        ids: list[Tensor] = []
        planned = self.balancer.has_freedom  # so the other ranks gather, unless num_tokens excludes it
        call = Call(self.balancer.group)
        with call:
            ids = [topk_ids] if isinstance(topk_ids, Tensor) else list(topk_ids)
            self._check(ids)
            if self.balancer.tokens == "same" and num_tokens is None:
                num_tokens = len(ids[0])
            planned = self.balancer.plans(num_tokens)
            for n, rows in enumerate(ids):
                self._take(n, rows)
        if call.failure is not None and not (planned and self.balancer.exchanges):
            self.balancer.gather([], num_tokens, call)  # raises
        pairs = zip(self._run(num_tokens, planned, call), ids, strict=True)
        slots = [s.narrow(0, 0, len(rows)) for s, rows in pairs]
        return slots[0] if isinstance(topk_ids, Tensor) else slots

    def _check(self, ids: list[Tensor]) -> None:
        check_one_each(ids, len(self._ids))
        for rows, buffer in zip(ids, self._ids, strict=True):
            check_ids(rows)
            tokens, top_k = buffer.shape
            fits = rows.shape[1] == top_k and len(rows) <= tokens
            if not fits or rows.dtype != buffer.dtype or rows.device != buffer.device:
                raise ValueError(
                    f"topk_ids must be [T, {top_k}] {buffer.dtype} on {buffer.device} with T at most {tokens}, got "
                    f"{list(rows.shape)} {rows.dtype} on {rows.device}"
                )

    def _take(self, n: int, rows: Tensor) -> None:
        buffer, before = self._ids[n], self._filled[n]
        buffer.narrow(0, 0, len(rows)).copy_(rows)
        if len(rows) < before:
            buffer.narrow(0, len(rows), before - len(rows)).fill_(-1)
        self._filled[n] = len(rows)

    def _run(self, num_tokens: int | None, planned: bool, call: Call) -> list[Tensor]:
        """Run the batch eagerly, or capture and replay it, in the same way on every rank even if a call has failed."""
        balancer, group = self.balancer, self.balancer.group
        exchanges = planned and balancer.exchanges
        replicated = balancer.placed_on(self._ids[0].device).replicated
        if replicated != self._replicated:  # after a load, which all ranks run
            self._replicated = replicated
            self._graphs.clear()
        state = self._graphs.get(planned)
        if isinstance(state, _Graph) and state.policy != balancer.policy:
            if not exchanges or len(group.ranks) == group.topology.num_ranks:
                state = None
            else:
                with call:
                    raise ValueError(
                        f"policy must be {state.policy.name} as captured, got {balancer.policy.name}: call recapture() "
                        "on all ranks after they set another policy"
                    )
        if state is None:
            self._graphs[planned] = "ran"
        elif state == "ran" and not in_backward():  # a recompute records nothing
            state = self._graphs[planned] = self._captured(num_tokens, exchanges, call)
        if isinstance(state, _Graph):
            return self._replay(state, call)
        if call.failure is None:
            recorder = balancer.recorder
            with self._counting(None if recorder is None else _WithoutPadding(recorder, self._filled)):
                return self._call(num_tokens, exchanges)
        with self._failing(call):
            self._call(num_tokens, exchanges)
        call.stop()

    def _call(self, num_tokens: int | None, exchanges: bool) -> list[Tensor]:
        balancer = self.balancer
        if not exchanges:
            return list(balancer(self._ids, num_tokens=num_tokens))
        return balancer.route(balancer.balance(self._ids, call=Call(balancer.group, limit=self._limit)))

    @contextmanager
    def _failing(self, call: Call) -> Iterator[None]:
        """Transmit the call's failure in the gather inside; a failure inside fails the call."""
        if call.failure is not None:
            self._limit.fill_(-error_code(call.stage))
            if self.balancer.own_counts is not None:  # for the other nodes, at the next exchange
                self.balancer.own_counts.failure = described(call.failure)
        with self._counting(_Counts()), call:
            yield
        self._limit.fill_(NO_LIMIT)

    @contextmanager
    def _counting(self, counts: BatchRecorder | None) -> Iterator[None]:
        recorder, self.balancer.recorder = self.balancer.recorder, counts
        try:
            yield
        finally:
            self.balancer.recorder = recorder

    def _captured(self, num_tokens: int | None, exchanges: bool, call: Call) -> _Graph | Literal["eager"]:
        """Capture a batch without counting or running it; return "eager" if the capture failed on any rank."""
        balancer, group, counts = self.balancer, self.balancer.group, _Counts()
        before, batch = group.traffic.bytes.copy(), balancer.batch
        why: str | None = None
        checks = self._ids[0].device.type == "cuda" and values_readable(self._ids[0])
        try:
            if checks:
                raise RuntimeError("ISOLOAD_CHECK=1 is set")
            with self._counting(counts):
                replay, slots = self._capture(lambda: self._call(num_tokens, exchanges))
        except BaseException as error:
            why = described(error)
            if not isinstance(error, Exception):
                call.failure = error
        sent, balancer.batch = group.traffic.bytes - before, batch
        group.traffic.bytes.subtract(sent)
        votes = [(why, balancer.policy)]
        if exchanges:
            votes = group.gather_objects("capture", votes[0])
            raise_unlike("policy", [policy for _, policy in votes])
        if failed := [f"on rank {rank}: {vote}" for rank, (vote, _) in enumerate(votes) if vote is not None]:
            if not checks:
                warnings.warn(f"{balancer!r} runs eagerly: its CUDA graph failed {failed[0]}", stacklevel=4)
            return "eager"
        return _Graph(replay, slots, balancer.last_plan, balancer.last_loads, sent, balancer.policy, counts)

    def _replay(self, graph: _Graph, call: Call) -> list[Tensor]:
        balancer, recorder = self.balancer, self.balancer.recorder
        balancer.batch += 1
        balancer.group.traffic.bytes.update(graph.bytes)
        layer, counts, source, top_k, ids = graph.counts.stored
        if recorder is not None and recorder is not self._recorder:
            with call:  # while the gather can still transmit an error of the recorder
                nothing = [torch.zeros_like(row) for row in counts]
                recorder.add(layer, nothing, source, top_k, [rows[:0] for rows in ids])
                self._recorder = recorder
        if call.failure is not None:
            with self._failing(call):
                graph.replay()
            call.stop()
        graph.replay()
        placed = balancer.placed_on(self._ids[0].device)
        if graph.plan is not None and graph.plan.placed.host is not placed.host:  # a new placement was loaded
            graph = replace(graph, plan=replace(graph.plan, placed=graph.plan.placed.moved_to(placed)))
            self._graphs[True] = graph
        balancer.last_plan, balancer.last_loads = graph.plan, graph.loads
        if recorder is not None and not in_backward():
            _WithoutPadding(recorder, self._filled).add(layer, counts, source, top_k, ids)
        return graph.slots
