"""Transports over a double of DeepEP, for batches of any shape: a dispatcher and a buffer for each."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isoload import Topology
from isoload.transport import Call, CollectiveGroup, Dispatcher, Received, Transport
from isoload.transport.deep_ep import DeepEPDispatcher
from isoload.transport.deep_ep.transport import make_buffer
from isoload.transport.deep_ep.wires import WIRES, Shape
from support import deep_ep_double
from support.batches import MAX_TOKENS
from support.deep_ep_legacy_double import Buffer

BUFFERS: dict[str, Any] = {
    "EPBuffer": deep_ep_double.EPBuffer,
    "ElasticBuffer": deep_ep_double.ElasticBuffer,
    "Buffer": Buffer,
}


# by rank: what float32 keeps of the second depends on whether the others meet first
CANCELLING = (2.0**20, 1.0, -(2.0**20), 1.0)


class AnyShape(Dispatcher):
    """DeepEP's buffers are made for one H, K and S: makes one on every rank when a batch first has others."""

    def __init__(self, group: CollectiveGroup, made: Any, waits: bool, **how: Any) -> None:
        self.group, self.made, self.host_waits, self.how = group, made, waits, how
        self.max_tokens_per_rank = MAX_TOKENS
        self.dtypes, self.hidden_multiple = DeepEPDispatcher.dtypes, DeepEPDispatcher.hidden_multiple
        self.adds_by_rank = WIRES[made.__name__].adds_by_rank
        self._made: dict[tuple[int, ...], DeepEPDispatcher] = {}
        self._of: dict[int, tuple[object, DeepEPDispatcher]] = {}

    def dispatch(
        self, x: Any, slots: Any, weights: Any, slots_per_rank: int, call: Call | None = None
    ) -> list[Received]:
        shape = x[0].shape[1], slots[0].shape[1], slots_per_rank
        if shape not in self._made:
            self._made[shape] = make_dispatcher(self.group, self.made, *shape, self.host_waits, **self.how)
        received = self._made[shape].dispatch(x, slots, weights, slots_per_rank, call)
        self._of[id(received[0].handle)] = received[0].handle, self._made[shape]
        return received

    def combine(self, y: Any, received: list[Received], own: Any = None) -> list[Tensor]:
        return self._of[id(received[0].handle)][1].combine(y, received, own)

    def carry_failure(self, call: Call) -> None:
        next(iter(self._made.values())).carry_failure(call)


def make_dispatcher(
    group: CollectiveGroup,
    made: Any,
    hidden: int,
    top_k: int,
    slots_per_rank: int,
    waits: bool = True,
    **how: Any,
) -> DeepEPDispatcher:
    """Over a new buffer of a class, for batches of up to MAX_TOKENS tokens."""
    tokens = how.get("max_tokens_per_rank", MAX_TOKENS)
    shape = Shape(group.topology.num_ranks, slots_per_rank, top_k, hidden, tokens)
    low_latency, deterministic = how.get("low_latency", False), how.get("deterministic", True)
    buffer = make_buffer(made, group.process_group, shape, low_latency, deterministic, 0)
    return DeepEPDispatcher(group, buffer, shape, waits, how.get("expert_major", False))


def any_shape(topology: Topology, made: Any, waits: bool, **how: Any) -> Transport:
    group = CollectiveGroup(topology)
    return Transport(group, AnyShape(group, made, waits, **how))
