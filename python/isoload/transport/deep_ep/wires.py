"""Wires: one call for each operation of DeepEP's buffers, for every version; and the limits of these buffers.

Shapes: T tokens of this rank, N received rows, K choices, H columns, S slots per rank, R ranks, C tokens per rank. The
limits are those of sgl-deep-ep-v25 0.1.0rc0 and sgl-deep-ep 0.1.2.post1 (``layout/ep/workspace.cuh``,
``impls/ep/combine.cuh``, ``common/layout.cuh``, ``buffers/legacy.py``, ``csrc/kernels/legacy/``).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from isoload.checks import put_on


@dataclass(frozen=True)
class Shape:
    """The shape for which a buffer is made."""

    num_ranks: int  # R
    slots_per_rank: int  # S
    top_k: int  # K
    hidden: int  # H
    max_tokens_per_rank: int  # C

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.slots_per_rank


@dataclass(frozen=True)
class Limits:
    """Largest supported value of each size; for ranks and hidden, the supported values if only some are compiled in."""

    slots_per_rank: int
    num_slots: int
    top_k: int
    between_nodes: int = 1024  # slots_per_rank over more ranks than NODE
    most_hidden: int = 2**31 - 1  # H: a warp's part of a row must fit into its shared memory
    num_ranks: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    distinct: bool = False  # whether a token's slots must differ: otherwise the kernels trap
    tokens_multiple: int = 1  # R * C must be a multiple of it

    def check(self, kind: str, shape: Shape) -> None:
        for name in ("slots_per_rank", "top_k", "hidden", "max_tokens_per_rank"):
            if getattr(shape, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(shape, name)}")
        slots = (
            self.slots_per_rank if shape.num_ranks <= NODE else min(self.slots_per_rank, self.between_nodes)
        )
        for name, value, limit in (
            ("slots_per_rank", shape.slots_per_rank, slots),
            ("ranks x slots_per_rank", shape.num_slots, self.num_slots),
            ("top_k", shape.top_k, self.top_k),
            ("hidden", shape.hidden, self.most_hidden),
        ):
            if value > limit:
                raise ValueError(f"{name} must be at most {limit} for DeepEP's {kind}, got {value}")
        if shape.hidden % HIDDEN_MULTIPLE:
            raise ValueError(
                f"hidden must be a multiple of {HIDDEN_MULTIPLE} for DeepEP's {kind}, got {shape.hidden}"
            )
        for name, allowed in (("hidden", self.hidden), ("num_ranks", self.num_ranks)):
            if allowed and getattr(shape, name) not in allowed:
                values = ", ".join(map(str, allowed))
                raise ValueError(
                    f"{name} must be one of {values} for DeepEP's {kind}, got {getattr(shape, name)}"
                )
        rows = shape.num_ranks * shape.max_tokens_per_rank
        if rows % self.tokens_multiple:
            raise ValueError(
                f"ranks x max_tokens_per_rank must be a multiple of {self.tokens_multiple} for DeepEP's {kind}, "
                f"got {rows}"
            )


NODE = 8  # ranks that Buffer connects by NVLink
HIDDEN_MULTIPLE = 256  # a warp of 16-byte vectors of bfloat16, in every combine
_LEGACY_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # rank counts with a tuned config
LIMITS = {
    "EPBuffer": Limits(slots_per_rank=512, num_slots=2048, top_k=32, distinct=True),
    "ElasticBuffer": Limits(slots_per_rank=256, num_slots=2048, top_k=32, distinct=True),
    "Buffer": Limits(
        slots_per_rank=128,
        num_slots=160 * 64,
        top_k=32,
        between_nodes=64,
        most_hidden=7936,
        num_ranks=_LEGACY_RANKS,
    ),
    "Buffer, low latency": Limits(
        slots_per_rank=1024,
        num_slots=14 * 132,  # fewer than 15 for each of an H100's 132 multiprocessors
        top_k=11,
        hidden=(2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192),
        tokens_multiple=4,
    ),
}


@dataclass(frozen=True, eq=False)
class WireHandle:
    """A buffer's own handle of a dispatch, which rows are real (None: all), and where the rows of every slot end."""

    own: Any
    real: Tensor | None = None
    ends: list[int] | None = None


class Sent(NamedTuple):
    """What a dispatch brought, and its handle."""

    rows: Tensor  # [N, H]
    slots: Tensor  # [N, K] int64, local; -1 = on another rank, or padding
    weights: Tensor  # [N, K] float32
    handle: WireHandle


class Wire(ABC):
    """A buffer in use for one shape. All ranks make the same calls in the same order."""

    kind: ClassVar[str]
    needs: ClassVar[dict[str, str]]  # arguments of each of the buffer's methods that isoload passes
    adds_by_rank: ClassVar[bool] = True
    weights_at_source: ClassVar[bool] = False
    differentiable: ClassVar[bool] = True
    expands: ClassVar[bool] = False  # whether rows can come by expert

    def __init__(self, buffer: Any, shape: Shape, waits: bool, expert_major: bool = False) -> None:
        LIMITS[self.kind].check(self.kind, shape)
        if expert_major and not self.expands:
            raise ValueError(f"expert_major must be False for DeepEP's {self.kind}, got True")
        if expert_major and not waits:
            raise ValueError(
                "waits must be True for expert_major, whose rows are counted by expert, got False"
            )
        for method, missing in self.lacks(buffer):
            raise ValueError(
                f"buffer.{method} must take {', '.join(missing)} as the {self.kind} that isoload was written "
                f"for, got a {type(buffer).__name__} of another version"
            )
        self.buffer, self.shape, self.waits, self.expert_major = buffer, shape, waits, expert_major

    @classmethod
    def lacks(cls, buffer: Any) -> Iterator[tuple[str, list[str]]]:
        """Yield each method of `needs` that lacks arguments in a buffer, and these arguments."""
        for method, names in cls.needs.items():
            function = getattr(buffer, method, None)
            parameters = inspect.signature(function).parameters if callable(function) else {}
            if missing := [name for name in names.split() if name not in parameters]:
                yield method, missing

    @abstractmethod
    def dispatch(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Sent:
        """Send x [T, H] bfloat16, topk_idx [T, K] int64, weights [T, K] float32; contiguous; topk_idx is kept."""

    def dispatch_again(self, x: Tensor, handle: WireHandle) -> Tensor:
        """Return [N, H] rows of another x [T, H], in the order of the first dispatch."""
        rows: Tensor = self.buffer.dispatch(x, handle=handle.own, **self.as_before())[0]
        return rows if handle.real is None else rows.masked_fill(~handle.real, 0)

    def as_before(self) -> dict[str, Any]:
        return {}

    def combine(
        self, y: Tensor, handle: WireHandle, weights: Tensor | None = None, own: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the sums [T, H] of y [N, H], plus own; and weights [N, K] -> [T, K], each from its copy's rank."""
        if self.expert_major and weights is not None:
            weights = weights.squeeze(1)
        sums, returned, _ = self.buffer.combine(y, handle=handle.own, topk_weights=weights, bias=own)
        return sums, returned


class ElasticWire(Wire):
    """ElasticBuffer of DeepEP 2.1."""

    kind = "ElasticBuffer"
    needs: ClassVar = {
        "dispatch": "topk_idx topk_weights num_experts num_max_tokens_per_rank handle do_handle_copy do_cpu_sync "
        "do_expand",
        "combine": "handle topk_weights bias",
    }
    adds_by_rank = False
    expands = True

    def dispatch(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Sent:
        rows, slots, gates, handle, _ = self.buffer.dispatch(
            x,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_experts=self.shape.num_slots,
            num_max_tokens_per_rank=self.shape.max_tokens_per_rank,
            do_handle_copy=False,
            do_cpu_sync=self.waits,
            do_expand=self.expert_major,
        )
        if self.expert_major:
            counts = handle.num_recv_tokens_per_expert_list
            slot = torch.arange(self.shape.slots_per_rank, device=rows.device)
            slots = slot.repeat_interleave(put_on(rows.device, counts), output_size=len(rows)).unsqueeze(1)
            ends = list(accumulate(counts))
            return Sent(rows, slots, gates.unsqueeze(1), WireHandle(handle, ends=ends))
        if self.waits:
            return Sent(rows, slots, gates, WireHandle(handle))
        # Memory after the last received row is not written.
        count = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        real = (torch.arange(len(rows), device=rows.device) < count).unsqueeze(1)
        return Sent(rows.masked_fill(~real, 0), slots.masked_fill(~real, -1), gates, WireHandle(handle, real))

    def as_before(self) -> dict[str, Any]:
        # num_experts must be given although the handle has it: the number of SMs is derived from the argument.
        return {"num_experts": self.shape.num_slots, "do_expand": self.expert_major}


class EPWire(ElasticWire):
    """EPBuffer of DeepEP 2.5: the same calls."""

    kind = "EPBuffer"


class LegacyWire(Wire):
    """Buffer of DeepEP 1."""

    kind = "Buffer"
    needs: ClassVar = {
        "get_dispatch_layout": "topk_idx num_experts",
        "dispatch": "handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank num_tokens_per_expert "
        "topk_idx topk_weights num_worst_tokens",
        "combine": "handle topk_weights bias",
    }

    def dispatch(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Sent:
        per_rank, per_rdma_rank, per_slot, in_rank, _ = self.buffer.get_dispatch_layout(
            topk_idx, self.shape.num_slots
        )
        rows, slots, gates, _, handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_slot,
            topk_idx=topk_idx,
            topk_weights=weights,
            num_worst_tokens=0 if self.waits else self.shape.num_ranks * self.shape.max_tokens_per_rank,
        )
        if self.waits:
            return Sent(rows, slots, gates, WireHandle(handle))
        real = (slots >= 0).any(1, keepdim=True)
        return Sent(rows.masked_fill(~real, 0), slots, gates, WireHandle(handle, real))


class LowLatencyWire(Wire):
    """Buffer of DeepEP 1 in its low-latency mode, forward only: a row per copy, in the buffer's memory, which two
    dispatches use alternately: a third one overwrites the rows of the first."""

    kind = "Buffer, low latency"
    needs: ClassVar = {
        "low_latency_dispatch": "topk_idx num_max_dispatch_tokens_per_rank num_experts use_fp8",
        "low_latency_combine": "topk_idx topk_weights handle",
    }
    weights_at_source = True
    differentiable = False

    def dispatch(self, x: Tensor, topk_idx: Tensor, weights: Tensor) -> Sent:
        rows, counts, handle, _, _ = self.buffer.low_latency_dispatch(
            x, topk_idx, self.shape.max_tokens_per_rank, self.shape.num_slots, use_fp8=False
        )
        per_slot = rows.shape[1]
        slot = torch.arange(len(counts), device=rows.device).unsqueeze(1).expand(-1, per_slot)
        real = torch.arange(per_slot, device=rows.device) < counts.unsqueeze(1)
        slots = slot.masked_fill(~real, -1).reshape(-1, 1)
        # Places without a copy contain old values. Nothing reads them, and zeroing them costs more than the copies.
        return Sent(
            rows.flatten(0, 1), slots, weights.new_ones(slots.shape), WireHandle((handle, topk_idx, weights))
        )

    def combine(
        self, y: Tensor, handle: WireHandle, weights: Tensor | None = None, own: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        inner, topk_idx, gates = handle.own
        places = y.view(self.shape.slots_per_rank, -1, y.shape[1])
        sums, _, _ = self.buffer.low_latency_combine(places, topk_idx, gates, inner)
        return (sums if own is None else (sums.float() + own.float()).to(sums.dtype)), None


# By class of the buffer.
WIRES: dict[str, type[Wire]] = {w.kind: w for w in (EPWire, ElasticWire, LegacyWire)}


def wire_of(buffer: Any, shape: Shape, waits: bool, expert_major: bool = False) -> Wire:
    name = next((c.__name__ for c in type(buffer).__mro__ if c.__name__ in WIRES), None)
    low_latency = getattr(buffer, "low_latency_mode", False)
    if name is None:
        legacy, fast = (not any(wire.lacks(buffer)) for wire in (LegacyWire, LowLatencyWire))
        if not (legacy or fast):
            raise ValueError(
                f"buffer must be one of {', '.join(WIRES)} of DeepEP, or have the methods of Buffer with their "
                f"arguments, got {type(buffer).__name__}"
            )
        name, low_latency = LegacyWire.kind, getattr(buffer, "low_latency_mode", not legacy)
    if low_latency:
        if waits:
            raise ValueError("waits must be False for DeepEP's Buffer, low latency, got True")
        return LowLatencyWire(buffer, shape, waits, expert_major)
    if name == "Buffer" and not waits and shape.num_ranks > NODE:
        raise ValueError(
            f"waits must be True for DeepEP's Buffer over more than {NODE} ranks, got False over "
            f"{shape.num_ranks}"
        )
    return WIRES[name](buffer, shape, waits, expert_major)
