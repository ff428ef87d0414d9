"""CapturedBalancer: a Balancer whose calls on a GPU are replays of one CUDA graph, from topk_ids to slots.

For code that runs eagerly. Engines that capture whole forward passes (SGLang, vLLM) call the Balancer itself in their
capture: it allocates from the capture's pool alone, the host reads nothing, and what persists between batches (the
layer's tables, the number of the batch, a recorder's sums, the ranks' error codes) keeps its address.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isoload.balancing.balancer import Balancer
from isoload.balancing.counting import check_ids, check_one_each
from isoload.records.plan import Plan
from isoload.transport import Call
from isoload.value_checks import values_readable

Replay = Callable[[], None]
Capture = Callable[[Callable[[], list[Tensor]]], tuple[Replay, list[Tensor]]]


def cuda_graph(call: Callable[[], list[Tensor]], pool: Any = None) -> tuple[Replay, list[Tensor]]:
    """Captures ``call()``.

    Args:
        call: has run before: the first use of a kernel loads it, which a capture cannot.
        pool: memory that graphs share, from ``torch.cuda.graph_pool_handle()``: only for graphs that are captured and
            replayed on one stream. None: memory of its own.

    Returns:
        what replays the graph on the current stream, and the result, which each replay writes anew.
    """
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on using CUDA, as NCCL's watchdog does.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = call()
    return graph.replay, result


@dataclass(frozen=True)
class _Graph:
    """A captured call: slots [tokens, top_k] of every owned rank, the plan and loads, and the bytes it exchanges."""

    replay: Replay
    slots: list[Tensor]
    plan: Plan | None
    loads: Tensor | None
    bytes: Counter[str]


class CapturedBalancer:
    """Calls a Balancer by a CUDA graph: the same slots, plans, draws, records and errors, one launch from the host.

    The first batch runs as the Balancer does, the second is captured, from then on the graph is replayed. Each is one
    gather, so ranks need not capture in the same batch. Batches that are planned and those that are not (min_tokens)
    have a graph each; another policy or recorder of the Balancer is captured anew. A :meth:`Balancer.load` in place
    needs no new graph. Under ISOLOAD_CHECK=1 nothing is captured: every op looks at its values.

    Results stay where they are: slots, ``last_plan`` and ``last_loads`` hold until the next call. Clone what must live
    longer. Not to be called while a CUDA graph is being captured: call the Balancer there.

    Args:
        balancer: called by nothing else meanwhile, or else in the same order on all ranks.
        tokens: most rows of a batch; fewer cost as much as all. May differ between ranks.
        top_k: columns of topk_ids.
        dtype: of topk_ids.
        device: of topk_ids.
        capture: records a call and says how to replay it: :func:`cuda_graph`, or it with a pool for several layers.

    Raises:
        ValueError: naming the argument, the rule and the value.
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
        with torch.inference_mode(False):  # else only inference could write it
            shape = tokens, top_k
            self._ids = [torch.full(shape, -1, dtype=dtype, device=device) for _ in balancer.ranks]
        self._filled = [0] * len(self._ids)  # rows that may hold more than -1
        self._read: tuple[object, ...] = ()  # what Python reads in a capture and a graph does not
        self._graphs: dict[bool, _Graph | None] = {}  # by whether batches are planned; None: ran once

    def __call__(
        self, topk_ids: Tensor | Sequence[Tensor], num_tokens: int | None = None
    ) -> Tensor | list[Tensor]:
        """The slot of every token copy, as :meth:`Balancer.__call__`.

        Args:
            topk_ids: [T, top_k] of the dtype and on the device captured, T at most ``tokens``; -1 = masked. A list over
                the owned ranks, where this process owns several.
            num_tokens: see :meth:`Balancer.__call__`.

        Returns:
            [T, top_k] slots, a view of memory that the next call writes; a list as topk_ids.

        Raises:
            ValueError: naming the argument, the rule and the value. The other ranks raise it from the gather.
        """
        ids: list[Tensor] = []
        call = Call(self.balancer.group)
        with call:
            ids = [topk_ids] if isinstance(topk_ids, Tensor) else list(topk_ids)
            self._check(ids)
            if self.balancer.tokens == "same" and num_tokens is None:
                num_tokens = len(ids[0])
            self.balancer.plans(num_tokens)
            for n, rows in enumerate(ids):
                self._take(n, rows)
        if call.failure is not None:
            self.balancer.gather([], num_tokens, call)  # in which the other ranks hear of it; raises
        slots = [s.narrow(0, 0, len(rows)) for s, rows in zip(self._run(num_tokens), ids, strict=True)]
        return slots[0] if isinstance(topk_ids, Tensor) else slots

    def _check(self, ids: list[Tensor]) -> None:
        check_one_each(ids, len(self._ids))
        for rows, own in zip(ids, self._ids, strict=True):
            check_ids(rows)
            tokens, top_k = own.shape
            fits = rows.shape[1] == top_k and len(rows) <= tokens
            if not fits or rows.dtype != own.dtype or rows.device != own.device:
                raise ValueError(
                    f"topk_ids must be [T, {top_k}] {own.dtype} on {own.device} with T at most {tokens}, got "
                    f"{list(rows.shape)} {rows.dtype} on {rows.device}"
                )

    def _take(self, n: int, rows: Tensor) -> None:
        """Copies an owned rank's rows to where the graph reads them; those of a longer batch before become -1."""
        own, before = self._ids[n], self._filled[n]
        own.narrow(0, 0, len(rows)).copy_(rows)
        if len(rows) < before:
            own.narrow(0, len(rows), before - len(rows)).fill_(-1)
        self._filled[n] = len(rows)

    def _run(self, num_tokens: int | None) -> list[Tensor]:
        balancer, planned = self.balancer, self.balancer.plans(num_tokens)
        device = self._ids[0].device
        placed = balancer.placed_on(device)
        read = (balancer.policy, balancer.recorder, placed.replicated)
        if [id(x) for x in read] != [id(x) for x in self._read]:
            self._read = read
            self._graphs.clear()
        if planned not in self._graphs or (device.type == "cuda" and values_readable(self._ids[0])):
            self._graphs[planned] = None
            return self._call(num_tokens)
        graph = self._graphs[planned]
        if graph is None:
            graph = self._graphs[planned] = self._captured(num_tokens)
        else:
            balancer.batch += 1
            balancer.group.traffic.bytes.update(graph.bytes)
        graph.replay()
        if graph.plan is not None and graph.plan.placed.host is not placed.host:  # loaded since
            plan = replace(graph.plan, placed=graph.plan.placed.moved_to(placed))
            graph = self._graphs[planned] = replace(graph, plan=plan)
        balancer.last_plan, balancer.last_loads = graph.plan, graph.loads
        return graph.slots

    def _call(self, num_tokens: int | None) -> list[Tensor]:
        return list(self.balancer(self._ids, num_tokens=num_tokens))

    def _captured(self, num_tokens: int | None) -> _Graph:
        """The graph of a batch, which its capture counts but does not run."""
        group, batch = self.balancer.group, self.balancer.batch
        before = group.traffic.bytes.copy()
        try:
            replay, slots = self._capture(lambda: self._call(num_tokens))
        except BaseException as error:
            self.balancer.batch = batch
            self.balancer.gather([], num_tokens, Call(group, failure=error))  # for which the other ranks wait
            raise
        sent = group.traffic.bytes - before
        return _Graph(replay, slots, self.balancer.last_plan, self.balancer.last_loads, sent)
