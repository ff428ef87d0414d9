"""Dispatch and combine over a wire, differentiable: each is the other's backward, by the handle of the dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from isoload.transport.collective import CollectiveGroup
from isoload.transport.deep_ep.wires import Wire, WireHandle


class Dispatch(torch.autograd.Function):
    """x [T, H], weights [T, K] -> link [], rows [N, H], slots [N, K], weights [N, K], the handle."""

    @staticmethod
    def forward(
        ctx: Any,
        group: CollectiveGroup,
        wire: Wire,
        topk_idx: Tensor,
        _anchor: Tensor,
        x: Tensor,
        weights: Tensor,
    ) -> tuple[Any, ...]:
        with group.named("dispatch"):
            sent = wire.dispatch(x, topk_idx, weights)
        ctx.group, ctx.wire, ctx.handle = group, wire, sent.handle
        ctx.save_for_backward(sent.slots)
        ctx.mark_non_differentiable(sent.slots)
        # EPBuffer sends all weights of a token to each of its ranks
        local = sent.weights.masked_fill(sent.slots < 0, 0)
        return x.new_zeros(()), sent.rows, sent.slots, local, sent.handle

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _link: Tensor, rows: Tensor, _slots: Any, weights: Tensor, _handle: Any) -> Any:
        (slots,) = ctx.saved_tensors
        # Buffer adds the weights of all ranks up: zeros from the others make that sum exact
        to_weights = weights.masked_fill(slots < 0, 0).contiguous()
        with ctx.group.named("dispatch backward"):
            returned = ctx.wire.combine(rows.contiguous(), ctx.handle, to_weights)
        return None, None, None, None, *returned


class Combine(torch.autograd.Function):
    """y [N, H] and, if given, own contributions [T, H] -> [T, H]; the link makes dispatch's backward run."""

    @staticmethod
    def forward(
        ctx: Any,
        group: CollectiveGroup,
        wire: Wire,
        handle: WireHandle,
        _link: Tensor,
        y: Tensor,
        *own: Tensor,
    ) -> Tensor:
        ctx.group, ctx.wire, ctx.handle, ctx.has_own = group, wire, handle, bool(own)
        with group.named("combine"):
            return wire.combine(y.contiguous(), handle, None, own[0].contiguous() if own else None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with ctx.group.named("combine backward"):
            to_y = ctx.wire.dispatch_again(grad.contiguous(), ctx.handle)
        return None, None, None, grad.new_zeros(()), to_y, *((grad,) if ctx.has_own else ())
