"""Two micro-batches of one pass (--enable-dbo) on vLLM's own contexts, over two processes: what they share in a layer.

vLLM runs them in threads of which one goes on at a time, and on one compute stream: its routers come one after another
on the host and on the device. Streams and events are doubles: a CPU has none.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from vllm import forward_context
from vllm.v1.worker import ubatching
from vllm_cpu import Event, Standing

import isoload
from isoload import Balancer, CollectiveGroup
from isoload.engines.vllm.layers import Layer
from support.processes import run_ranks

EXPERTS, K, RANKS, LAYERS, STEPS = 16, 4, 2, 3, 4
PLACEMENT = isoload.place(
    torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(1)).pow(4),
    isoload.Topology(RANKS),
    10,
)


class Streams(threading.local):
    """The current one of every thread."""

    current = "default"

    def set(self, stream: str) -> None:
        self.current = stream


class Recorded(Event):
    def record(self, stream: Any = None) -> None: ...


class Stream(str):
    def wait_event(self, event: Any) -> None: ...


def make_layers(loads: str = "own") -> list[Layer]:
    group = CollectiveGroup(isoload.Topology(RANKS), dist.group.WORLD)
    runner = Standing(None, do_naive_dispatch_combine=False)
    how: dict[str, Any] = {"loads": loads, "group": group, "shared_columns": False}
    return [Layer(Balancer(PLACEMENT, i, **how), None, runner, "own") for i in range(LAYERS)]


def draw(rank: int, step: int, half: int, layer: int) -> Tensor:
    seed = ((10 * step + half) * 10 + layer) * 10 + rank
    return torch.rand(20 + half, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(K).indices.int()


def route(layer: Layer, ids: Tensor) -> Tensor:
    loads = torch.zeros(PLACEMENT.num_slots, dtype=torch.int32)
    return layer.map_and_record(ids, loads, torch.tensor(False), None)


def two_at_once(layers: list[Layer], rank: int, step: int) -> tuple[dict[tuple[int, int], Tensor], list[Any]]:
    """As UBatchWrapper runs them: (slots by micro-batch and layer, (micro-batch, stream) of each call in order)."""
    ready, slots, calls = threading.Barrier(3), {}, []
    contexts = ubatching.make_ubatch_contexts(2, Stream("compute"), Stream("comm"), [object()] * 2, ready)

    def run(context: Any) -> None:
        with context:
            for i, layer in enumerate(layers):
                calls.append((ubatching.dbo_current_ubatch_id(), str(ubatching.current_stream())))
                slots[context.id, i] = route(layer, draw(rank, step, context.id, i))
                ubatching.dbo_yield_and_switch_from_compute_to_comm()  # where DeepEP dispatches, then combines
                ubatching.dbo_switch_to_compute_sync()

    threads = [threading.Thread(target=run, args=(context,)) for context in contexts]
    for thread in threads:
        thread.start()
    ready.wait()
    contexts[0].cpu_wait_event.set()
    for thread in threads:
        thread.join()
    return slots, calls


def serve(rank: int) -> None:
    streams = Streams()
    ubatching.current_stream = lambda: streams.current
    ubatching.torch = Standing(torch, Event=Recorded, cuda=Standing(torch.cuda, set_stream=streams.set))
    together, alone = make_layers(), make_layers()
    for step in range(STEPS):
        split = step % 2 == rank  # ranks need not split alike
        want = {
            (half, i): route(alone[i], draw(rank, step, half, i)) for half in (0, 1) for i in range(LAYERS)
        }
        if split:
            with forward_context.override_forward_context(None):
                found, calls = two_at_once(together, rank, step)
            assert calls == [(half, "compute") for i in range(LAYERS) for half in (0, 1)]
        else:
            found = {key: route(together[key[1]], draw(rank, step, *key)) for key in want}
        for key, slots in found.items():
            assert torch.equal(slots, want[key])
            assert torch.equal(PLACEMENT.slot_to_expert[key[1]][slots.long()], draw(rank, step, *key))
    for layers in (together, alone):
        layers[0].balancer.exchange(*[layer.balancer for layer in layers[1:]])
    for ours, theirs in zip(together, alone, strict=True):
        a, b = ours.balancer.own_counts, theirs.balancer.own_counts
        assert a is not None and b is not None and a.recent.any()
        assert torch.equal(a.recent, b.recent) and torch.equal(a.offset, b.offset)


def test_micro_batches_add_up_as_batches_one_after_another() -> None:
    run_ranks(serve, RANKS)
