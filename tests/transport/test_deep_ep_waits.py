"""How often the host waits for a GPU in a dispatch by DeepEP, on fake tensors, and what it launches there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isoload.transport.deep_ep import DeepEPDispatcher
from isoload.transport.deep_ep.wires import Shape
from support.fake_ranks import RANKS, TOPOLOGY, Everything, OneRank, answer
from support.host_waits import HostWaits

HIDDEN, TOP_K, SLOTS, TOKENS = 256, 2, 4, 6


class ElasticBuffer:
    """A buffer whose rows come at once; `waits` has a line per wait of the host."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def dispatch(
        self, x: Tensor, topk_idx: Any, topk_weights: Tensor, num_experts: int, num_max_tokens_per_rank: int,
        do_handle_copy: bool, do_cpu_sync: bool, do_expand: bool, handle: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        self.waits += ["DeepEP"] * do_cpu_sync
        self.psum_num_recv_tokens_per_scaleup_rank = topk_idx.new_ones(RANKS)
        return x, topk_idx, topk_weights, self, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Any = None, bias: Any = None) -> Any:
        raise AssertionError


class Names(TorchDispatchMode):
    """The ops that reach torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


def test_waits_are_counted() -> None:
    """Regression: the read of the error word was not counted, and was a wait of its own."""
    group, buffer = OneRank(1, TOPOLOGY), ElasticBuffer()
    group._agreed = Everything()
    dispatcher = DeepEPDispatcher(group, buffer, Shape(RANKS, SLOTS, TOP_K, HIDDEN, TOKENS))
    with HostWaits(answer) as host, torch.no_grad():
        x = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        slots = torch.zeros(TOKENS, TOP_K, dtype=torch.int64, device="cuda")
        weights, names = torch.zeros(TOKENS, TOP_K, device="cuda"), Names()
        for batch in range(2):
            group.gather_loads([torch.zeros(8, dtype=torch.int32, device="cuda")])
            with names:
                dispatcher.dispatch([x], [slots], [weights], SLOTS)
            if batch == 0:  # the first one moves a table to the device
                host.waits.clear()
                buffer.waits.clear()
                group.traffic.host_syncs = 0
        seen = [*(wait.rsplit(":", 1)[0] for wait in host.waits), *buffer.waits]
    assert seen == ["tolist in transport/group.py", "DeepEP"]
    assert group.traffic.host_syncs == len(seen)
    assert not any("number_rows" in name for name in names.seen), "for a counter alone"
