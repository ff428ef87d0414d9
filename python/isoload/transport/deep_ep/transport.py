"""DeepEPTransport: a group over torch.distributed, and DeepEP for the rows."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from isoload.topology import Topology
from isoload.transport.collective import CollectiveGroup
from isoload.transport.deep_ep.dispatcher import DeepEPDispatcher
from isoload.transport.deep_ep.limits import LIMITS, NODE, Shape
from isoload.transport.deep_ep.packages import load_buffer
from isoload.transport.group import Group
from isoload.transport.transport import Transport

ALLOCATION = 2 * 2**20  # DeepEP 2.5 sizes its regions in steps of this
_BUFFER = ("DeepEP buffer",)


class DeepEPTransport(Transport):
    """One rank per process: loads and agreements over torch.distributed, rows by DeepEP.

    Args:
        topology: R ranks, or the number R, as many as the process group has.
        group: the process group, of NCCL; None = the default one.
        hidden: H.
        top_k: K, with the columns of shared experts.
        slots_per_rank: S; DeepEP's num_experts is R * S.
        max_tokens_per_rank: most tokens of a rank in a batch.
        waits, expert_major: see :class:`DeepEPDispatcher`.
        kind: "EPBuffer", "ElasticBuffer" or "Buffer"; None = the first that is installed.
        low_latency: Buffer's low-latency mode, forward only.
        deterministic: rows by source rank, then token, whatever the timing; costs a sort in every dispatch.
        borrow_bytes: memory of EPBuffer for borrowed experts (``borrow="deep_ep"``), rounded up to 2 MiB.
        buffer: one that is there already, in place of kind, low_latency, deterministic and borrow_bytes.

    Raises:
        ValueError: on all ranks: no such DeepEP, a limit of it passed, or facts that differ.
        RuntimeError: if the installed DeepEP does not start here.
    """

    def __init__(
        self,
        topology: Topology | int,
        group: dist.ProcessGroup | None = None,
        *,
        hidden: int,
        top_k: int,
        slots_per_rank: int,
        max_tokens_per_rank: int,
        waits: bool = True,
        expert_major: bool = False,
        kind: str | None = None,
        low_latency: bool = False,
        deterministic: bool = False,
        borrow_bytes: int = 0,
        buffer: Any = None,
    ) -> None:
        joined = CollectiveGroup(topology, group)
        shape = Shape(joined.topology.num_ranks, slots_per_rank, top_k, hidden, max_tokens_per_rank)
        if buffer is None:
            with joined.agreeing("construction"):
                made = load_buffer("Buffer" if low_latency else kind)
                name = f"{made.__name__}{', low latency' if low_latency else ''}"
                LIMITS[name].check(name, shape)
                if borrow_bytes and name != "EPBuffer":
                    raise ValueError(f"borrow_bytes must be 0 for DeepEP's {name}, got {borrow_bytes}")
            buffer = make_buffer(made, joined.process_group, shape, low_latency, deterministic, borrow_bytes)
        dispatcher = DeepEPDispatcher(joined, buffer, shape, waits, expert_major)
        joined.memo(_BUFFER, lambda: buffer)
        super().__init__(joined, dispatcher)


def shared_buffer(group: Group) -> Any:
    """The buffer of the group's DeepEPTransport; None where it has none."""
    return group.memo(_BUFFER, lambda: None)


def make_buffer(
    made: Any,
    group: dist.ProcessGroup | None,
    shape: Shape,
    low_latency: bool,
    deterministic: bool,
    borrow_bytes: int,
) -> Any:
    """A buffer of a class of DeepEP, sized for a shape as its own hints say."""
    if made.__name__ == "Buffer":
        ranks, row_bytes = shape.num_ranks, 2 * shape.hidden
        if low_latency:
            size = made.get_low_latency_rdma_size_hint(
                shape.max_tokens_per_rank, shape.hidden, ranks, shape.num_slots
            )
            return made(group, 0, size, low_latency_mode=True, num_qps_per_rank=shape.slots_per_rank)
        configs = made.get_dispatch_config(ranks), made.get_combine_config(ranks)
        nvlink = max(c.get_nvl_buffer_size_hint(row_bytes, ranks) for c in configs)
        rdma = 0
        if ranks > NODE:  # a DeepEP built without NVSHMEM has no hint
            rdma = max(c.get_rdma_buffer_size_hint(row_bytes, ranks) for c in configs)
        return made(group, nvlink, rdma)
    more = {}
    if made.__name__ == "EPBuffer":
        more["lb_allocation_plan_or_num_bytes"] = -(-borrow_bytes // ALLOCATION) * ALLOCATION
    return made(
        group,
        num_max_tokens_per_rank=shape.max_tokens_per_rank,
        hidden=shape.hidden,
        num_topk=shape.top_k,
        deterministic=deterministic,
        **more,
    )
