"""DeepEPTransport: rows by DeepEP, whose version is read from files, because importing DeepEP needs a GPU."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.checks import values_readable
from isoload.topology import Topology
from isoload.transport.collective import CollectiveGroup
from isoload.transport.deep_ep.wires import HIDDEN_MULTIPLE, LIMITS, NODE, Shape, WireHandle, wire_of
from isoload.transport.dispatcher import FACTS, Dispatcher, Received, anchor, dispatch_facts
from isoload.transport.exchanges import Owned
from isoload.transport.group import Call, Group
from isoload.transport.transport import Transport
from isoload.wording import not_one_of


@dataclass(frozen=True, eq=False)
class DeepEPHandle:
    """State of a dispatch for combine: DeepEP's handle, T, and the link that connects both in autograd."""

    own: WireHandle
    num_tokens: int
    link: Tensor


class DeepEPDispatcher(Dispatcher):
    """One rank per process over DeepEP; rows are bfloat16. All ranks construct it together, with the same arguments.

    ``received`` has the rows by source rank, then token, for Buffer and for the other buffers made with
    ``deterministic=True``, else in order of arrival. Sums are accumulated in float32 and rounded once per rank and once
    over the ranks: by ascending rank in Buffer, else by the place of a rank's last copy among a token's choices. If a
    rank fails, the other ranks raise only on CPU, under ISOLOAD_CHECK=1, or if the gather of loads transmitted the
    failure and `waits` is set. Otherwise they end by DeepEP's own timeouts.

    Args:
        group: the ranks.
        buffer: an EPBuffer, ElasticBuffer or Buffer, or an object with Buffer's methods, made for at least this shape.
        shape: of a batch.
        waits: whether the host waits for the number of received rows; else N = R * C (low latency: S * R * C) always.
        expert_major: whether a row comes once per copy, by slot (EPBuffer, ElasticBuffer); DeepEP adds the copies.
    """

    group: CollectiveGroup
    dtypes = (torch.bfloat16,)
    hidden_multiple = HIDDEN_MULTIPLE

    def __init__(
        self,
        group: CollectiveGroup,
        buffer: Any,
        shape: Shape,
        waits: bool = True,
        expert_major: bool = False,
    ) -> None:
        with group.agreeing("construction") as facts:
            self.wire = wire_of(buffer, shape, waits, expert_major)
            facts.update({"shape of DeepEP": shape, "kind of DeepEP": self.wire.kind, "waits": waits})
            facts["expert_major"] = expert_major
        self.group, self.shape = group, shape
        self.max_tokens_per_rank = shape.max_tokens_per_rank
        self.host_waits = waits
        self.weights_at_source = self.wire.weights_at_source
        self.adds_by_rank = self.wire.adds_by_rank

    def dispatch(
        self, x: Owned, slots: Owned, weights: Owned, slots_per_rank: int, call: Call | None = None
    ) -> list[Received]:
        call = self.check_dispatch(x, slots, weights, call)
        facts: list[tuple[int, ...]] = []
        with call.at("dispatch"):
            facts = [self._check(x[0], slots[0], weights[0], slots_per_rank)]
        self._meet(call, facts, x[0])
        rows = x[0]
        # A new tensor, because DeepEP keeps it until backward and a route may be overwritten for the next batch.
        topk_idx = slots[0].to(torch.int64, copy=True, memory_format=torch.contiguous_format)
        link, received, local, gates, handle = Dispatch.apply(
            self, topk_idx, self._anchor(), rows.contiguous(), weights[0].contiguous()
        )
        traffic = self.group.traffic
        traffic.host_syncs += self.host_waits
        traffic.move_to(rows.device)
        return [Received(received, local, gates, DeepEPHandle(handle, len(rows), link), ends=handle.ends)]

    def combine(self, y: Owned, received: list[Received], own: Owned | None = None) -> Owned:
        (handle,) = self.check_received(y, received, DeepEPHandle)
        self.check_own(own, received, [handle.num_tokens])
        self._refuse_gradients("y", *y, *(own or []))
        link = handle.link if handle.link.requires_grad else self._anchor()
        sums: Tensor = Combine.apply(self, handle.own, link, y[0], *(own or []))
        return [sums]

    def carry_failure(self, call: Call) -> None:
        self._meet(call, [], torch.empty(0, device=call.device))

    def _meet(self, call: Call, facts: list[tuple[int, ...]], like: Tensor) -> None:
        """Let all ranks agree on facts before any of them dispatches, where values can be read."""
        if values_readable(like):
            call.agree("dispatch", FACTS, facts)
        call.raise_failure()
        if self.host_waits and not values_readable(like):
            self.group.check()  # raises a failure from the loads' gather: DeepEP would wait for the failed rank

    def _check(self, x: Tensor, slots: Tensor, weights: Tensor, slots_per_rank: int) -> tuple[int, ...]:
        (rank,), shape = self.group.ranks, self.shape
        facts = dispatch_facts(rank, x, slots, weights, slots_per_rank, shape.num_ranks)
        if x.dtype not in self.dtypes:
            raise ValueError(f"x of rank {rank} must be bfloat16 for DeepEP, got {x.dtype}")
        values = {"hidden": x.shape[1], "top_k": slots.shape[1], "slots_per_rank": slots_per_rank}
        for name, value in values.items():
            if value != getattr(shape, name):
                raise ValueError(
                    f"{name} of rank {rank} must be {getattr(shape, name)}, as the dispatcher was made for, got {value}"
                )
        if len(x) > shape.max_tokens_per_rank:
            raise ValueError(
                f"x of rank {rank} must have at most max_tokens_per_rank={shape.max_tokens_per_rank} tokens, "
                f"got {len(x)}"
            )
        self._refuse_gradients("x and weights", x, weights)
        if values_readable(slots) and LIMITS[self.wire.kind].distinct:
            ordered = slots.sort(1).values
            twice = (ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)
            if twice.any():
                slot = int(ordered[:, 1:][twice][0])
                raise ValueError(
                    f"slots of rank {rank} must differ within a token for DeepEP's {self.wire.kind}, got {slot} twice"
                )
        return facts

    def _anchor(self) -> Tensor:
        return anchor() if self.wire.differentiable else torch.zeros(())

    def _refuse_gradients(self, name: str, *tensors: Tensor) -> None:
        needed = torch.is_grad_enabled() and any(value.requires_grad for value in tensors)
        if needed and not self.wire.differentiable:
            raise ValueError(
                f"{name} must not require a gradient for DeepEP's {self.wire.kind}, which has no backward, "
                "got requires_grad=True"
            )


class Dispatch(torch.autograd.Function):
    """x [T, H], weights [T, K] -> link [], rows [N, H], slots [N, K], weights [N, K], the handle."""

    @staticmethod
    def forward(
        ctx: Any, dispatcher: DeepEPDispatcher, topk_idx: Tensor, _anchor: Tensor, x: Tensor, weights: Tensor
    ) -> tuple[Any, ...]:
        with dispatcher.group.named("dispatch"):
            sent = dispatcher.wire.dispatch(x, topk_idx, weights)
        ctx.of, ctx.handle = dispatcher, sent.handle
        ctx.save_for_backward(sent.slots)
        ctx.mark_non_differentiable(sent.slots)
        # EPBuffer sends all weights of a token to each of its ranks.
        local = sent.weights.masked_fill(sent.slots < 0, 0)
        return x.new_zeros(()), sent.rows, sent.slots, local, sent.handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _link: Tensor, rows: Tensor, _slots: Any, weights: Tensor, _handle: Any) -> Any:
        (slots,) = ctx.saved_tensors
        # Buffer adds up the weights of all ranks: zeros from other ranks keep that sum exact.
        to_weights = weights.masked_fill(slots < 0, 0).contiguous()
        with ctx.of.group.named("dispatch backward"):
            returned = ctx.of.wire.combine(rows.contiguous(), ctx.handle, to_weights)
        return None, None, None, *returned


class Combine(torch.autograd.Function):
    """y [N, H] and optionally own contributions [T, H] -> [T, H]; the link makes dispatch's backward run."""

    @staticmethod
    def forward(
        ctx: Any, dispatcher: DeepEPDispatcher, handle: WireHandle, _link: Tensor, y: Tensor, *local: Tensor
    ) -> Tensor:
        ctx.of, ctx.handle, ctx.has_own = dispatcher, handle, bool(local)
        with dispatcher.group.named("combine"):
            return dispatcher.wire.combine(
                y.contiguous(), handle, None, local[0].contiguous() if local else None
            )[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with ctx.of.group.named("combine backward"):
            to_y = ctx.of.wire.dispatch_again(grad.contiguous(), ctx.handle)
        return None, None, grad.new_zeros(()), to_y, *((grad,) if ctx.has_own else ())


MODULES = ("deep_ep", "deep_ep_v25")
BUFFERS = ("EPBuffer", "ElasticBuffer", "Buffer")  # the first one that is installed is used


@dataclass(frozen=True)
class Package:
    """An installed DeepEP: its module, its distribution and version, its buffers, and whether it moves weights."""

    module: str
    distribution: str
    version: str
    buffers: tuple[str, ...]
    borrows: bool

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


def installed() -> list[Package]:
    """Return the installed packages, the one with the preferred buffer first; one without buffers is not DeepSeek's."""
    packages = []
    for module in MODULES:
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            continue
        sources = [p.read_text() for p in Path(next(iter(spec.submodule_search_locations))).rglob("*.py")]
        text = "\n".join(sources)
        buffers = tuple(name for name in BUFFERS if re.search(rf"^class {name}\b", text, re.M))
        written = re.search(r"^__version__ = ['\"](.+)['\"]", text, re.M)
        name, version = module, written.group(1) if written else "of unknown version"
        if names := importlib.metadata.packages_distributions().get(module):
            name, version = names[0], importlib.metadata.version(names[0])
        borrows = "EPBuffer" in buffers and "def lb_prefetch_weights" in text
        packages.append(Package(module, name, version, buffers, borrows))
    return sorted(packages, key=lambda p: min(map(BUFFERS.index, p.buffers), default=len(BUFFERS)))


def load_buffer(name: str | None = None) -> Any:
    """Import and return the class of a buffer of BUFFERS; None = the preferred one of the installed packages."""
    if name is not None and name not in BUFFERS:
        raise ValueError(not_one_of("kind", BUFFERS, name))
    for package in installed():
        buffer = name or next(iter(package.buffers), None)
        if buffer in package.buffers:
            return getattr(_start(package), str(buffer))
    packages = ", ".join(f"{p} with {', '.join(p.buffers) or 'no buffer'}" for p in installed()) or "none"
    raise ValueError(f"DeepEP must be installed with {name or ' or '.join(BUFFERS)}, got {packages}")


def _start(package: Package) -> Any:
    try:
        module = importlib.import_module(package.module)
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise RuntimeError(f"{package} does not start here: {type(error).__name__}: {error}") from error
    bits = getattr(module, "topk_idx_t", None)
    if str(bits) not in ("torch.int64", "None"):
        raise ValueError(f"DeepEP must be built with topk_idx_t of torch.int64, got {bits} in {package}")
    return module


ALLOCATION = 2 * 2**20  # DeepEP 2.5 sizes its regions in steps of this
_BUFFER = ("DeepEP buffer",)


class DeepEPTransport(Transport):
    """One rank per process: loads and agreements over torch.distributed, rows by DeepEP. Equal arguments on all ranks.

    Args:
        topology: R ranks, or the number R, as many as the process group has.
        group: the process group, of NCCL; None = the default group.
        hidden: H.
        top_k: K, with the columns of shared experts.
        slots_per_rank: S; DeepEP's num_experts is R * S.
        max_tokens_per_rank: largest number of tokens of a rank in a batch.
        waits, expert_major: see :class:`DeepEPDispatcher`.
        kind: "EPBuffer", "ElasticBuffer" or "Buffer"; None = the first that is installed.
        low_latency: Buffer's low-latency mode, forward only.
        deterministic: rows by source rank, then token, independent of timing; costs a sort in every dispatch.
        borrow_bytes: memory of EPBuffer for borrowed experts (``borrow="deep_ep"``), rounded up to 2 MiB.
        buffer: an existing buffer; replaces kind, low_latency, deterministic and borrow_bytes.
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
                buffer_class = load_buffer("Buffer" if low_latency else kind)
                name = f"{buffer_class.__name__}{', low latency' if low_latency else ''}"
                LIMITS[name].check(name, shape)
                if borrow_bytes and name != "EPBuffer":
                    raise ValueError(f"borrow_bytes must be 0 for DeepEP's {name}, got {borrow_bytes}")
            with joined.agreeing("construction of the buffer"):
                buffer = make_buffer(
                    buffer_class, joined.process_group, shape, low_latency, deterministic, borrow_bytes
                )
        dispatcher = DeepEPDispatcher(joined, buffer, shape, waits, expert_major)
        joined.memo(_BUFFER, lambda: buffer)
        super().__init__(joined, dispatcher)


def shared_buffer(group: Group) -> Any:
    return group.memo(_BUFFER, lambda: None)


def make_buffer(
    buffer_class: Any,
    group: dist.ProcessGroup | None,
    shape: Shape,
    low_latency: bool,
    deterministic: bool,
    borrow_bytes: int,
) -> Any:
    if buffer_class.__name__ == "Buffer":
        ranks, row_bytes = shape.num_ranks, 2 * shape.hidden
        if low_latency:
            size = buffer_class.get_low_latency_rdma_size_hint(
                shape.max_tokens_per_rank, shape.hidden, ranks, shape.num_slots
            )
            return buffer_class(group, 0, size, low_latency_mode=True, num_qps_per_rank=shape.slots_per_rank)
        configs = buffer_class.get_dispatch_config(ranks), buffer_class.get_combine_config(ranks)
        nvlink = max(c.get_nvl_buffer_size_hint(row_bytes, ranks) for c in configs)
        rdma = 0
        if ranks > NODE:  # a DeepEP built without NVSHMEM has no such hint
            rdma = max(c.get_rdma_buffer_size_hint(row_bytes, ranks) for c in configs)
        return buffer_class(group, nvlink, rdma)
    options = {}
    if buffer_class.__name__ == "EPBuffer":
        options["lb_allocation_plan_or_num_bytes"] = -(-borrow_bytes // ALLOCATION) * ALLOCATION
    return buffer_class(
        group,
        num_max_tokens_per_rank=shape.max_tokens_per_rank,
        hidden=shape.hidden,
        num_topk=shape.top_k,
        deterministic=deterministic,
        **options,
    )
