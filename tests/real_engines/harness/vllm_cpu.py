"""A vLLM plug-in of the tests: what a real engine needs to run expert parallelism and EPLB on CPUs, which vLLM offers
for GPUs alone, and a record of the slots that every layer's copies went to.

It is in every engine that the tests start, with isoload and without.
"""

import json
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

KNUTH = 2654435769  # of vLLM's choice of a replica


class Standing:
    """A module or object with some names replaced."""

    def __init__(self, real: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class Event:
    """A timed event of a device without a clock of its own: sync EPLB times itself with two."""

    def __init__(self, **_: Any) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other.seconds - self.seconds)


class Stream:
    def __init__(self, **_: Any) -> None: ...

    def synchronize(self) -> None: ...


class Untimed:
    """An event of a device on which everything is done when it is called."""

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...


def register() -> None:
    import vllm.config.parallel as parallel

    # EPLB is refused unless the platform is one of these.
    parallel.current_platform = Standing(parallel.current_platform, is_xpu=lambda: True)
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.distributed.eplb import async_worker, eplb_communicator, eplb_state, eplb_utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.router import base_router
    from vllm.v1.worker import cpu_model_runner

    accelerator = Standing(
        torch.accelerator, current_stream=lambda *_: Stream(), set_stream=lambda *_: None,
        set_device_index=lambda *_: None, current_accelerator=lambda *_: None,
    )  # fmt: skip
    for module in (eplb_communicator, async_worker, eplb_utils):
        module.torch = Standing(torch, accelerator=accelerator, Stream=Stream, Event=Untimed)
    eplb_state.torch = Standing(torch, Event=Event)
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    wrap(cpu_moe.CPUUnquantizedExperts, "apply", local_experts)
    wrap(cpu_model_runner.CPUModelRunner, "load_model", load_model)
    base_router.eplb_map_to_physical_and_record = (
        map_and_record  # vLLM's is a Triton kernel, on a CPU the identity
    )
    if os.environ.get("ENGINE_RECORD"):
        wrap(base_router.BaseRouter, "_apply_eplb_mapping", record_slots)


def wrap(owner: Any, name: str, around: Any) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def local_experts(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The CPU's grouped GEMM reads rows of its weights by global id: ids become local, others' copies get weight 0."""
    expert_map, ids, weights = kwargs["expert_map"], kwargs["topk_ids"], kwargs["topk_weights"]
    if expert_map is not None:
        local = expert_map[ids.long()]
        kwargs["topk_weights"] = torch.where(local >= 0, weights, 0.0)
        kwargs["topk_ids"] = local.clamp(min=0).to(ids.dtype)
    original(self, *args, **kwargs)


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows of all ranks, which hold different numbers of them; the CPU's communicator has none of this."""
    if isinstance(input_, list):
        return [all_gatherv(self, rows, dim, sizes) for rows in input_]
    sizes = [len(input_)] * self.world_size if sizes is None else sizes
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=self.device_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """This rank's rows of the sum over ranks."""
    total = input_.clone()
    dist.all_reduce(total, group=self.device_group)
    sizes = [len(total) // self.world_size] * self.world_size if sizes is None else sizes
    return total.split(sizes)[self.rank_in_group]


def load_model(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The CPU's runner steps an EPLB state, and makes none."""
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.v1.worker.gpu_model_runner import get_mixture_of_experts_model

    original(self, *args, **kwargs)
    if self.parallel_config.enable_eplb:
        self._moe_model = get_mixture_of_experts_model(self.model)
        self.eplb_state = EplbState(self.parallel_config, self.device)
        self.eplb_state.device_index = 0  # of asynchronous EPLB's thread
        self.eplb_state.add_model(self._moe_model, self.model_config)
        if calm := os.environ.get("ENGINE_CALM"):  # passes before the first rebalance
            self.eplb_state.expert_rearrangement_step = (
                self.eplb_state.expert_rearrangement_step_interval - int(calm)
            )
        self.eplb_state.start_async_loop()  # nothing where EPLB is synchronous


def map_and_record(
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor,
    num_unpadded_tokens: Tensor | None = None,
) -> Tensor:
    """vLLM's rule: replicas by a hash of the row; copies of rows that are no padding are counted."""
    ids = topk_ids.long()
    known = (ids >= 0) & (ids < len(logical_replica_count))
    ids = torch.where(known, ids, 0)
    row = torch.arange(len(ids)).unsqueeze(1)
    replica = (row * KNUTH & 0xFFFFFFFF) % logical_replica_count[ids].clamp(min=1)
    slots = torch.where(known, logical_to_physical_map[ids, replica], -1)
    if record_enabled:
        real = slots if num_unpadded_tokens is None else slots[: int(num_unpadded_tokens)]
        counts = torch.bincount(real[real >= 0], minlength=len(expert_load_view))
        expert_load_view += counts.to(expert_load_view.dtype)
    return slots.to(topk_ids.dtype)


def record_slots(original: Any, self: Any, topk_ids: Tensor) -> Tensor:
    """A line per layer and batch, padding aside: logical ids in, slots out, the expert in each of the layer's slots."""
    slots: Tensor = original(self, topk_ids)
    if (state := self.eplb_state) is not None:
        valid, maps = int(state.num_unpadded_tokens_tensors[0]), state.logical_to_physical_map
        table = [-1] * len(state.expert_load_view)
        for expert, places in enumerate(maps[:, : int(state.logical_replica_count.max())].tolist()):
            for slot in places:
                if slot >= 0:
                    table[slot] = expert
        line = {"layer": maps.storage_offset() // maps.numel(), "table": table}
        line |= {"ids": topk_ids[:valid].tolist(), "slots": slots[:valid].tolist()}
        with open(f"{os.environ['ENGINE_RECORD']}.{os.getpid()}", "a") as file:
            print(json.dumps(line), file=file)
    return slots
