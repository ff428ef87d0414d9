"""append_shared_expert: shared experts beside the routed ones; wrapper, fake and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isoload.ops.library import call, op


def _fake(a: Any) -> tuple[Tensor, Tensor]:
    shape = (a.slots.shape[0], a.slots.shape[1] + a.ranks.shape[1])
    return a.slots.new_empty(shape), a.weights.new_empty(shape)


_append_shared_expert = op("append_shared_expert", _fake)


def append_shared_expert(
    slots: Tensor,
    weights: Tensor,
    ranks: Tensor,
    routed_per_rank: int,
    slots_per_rank: int | None = None,
    weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Adds a column per shared expert and makes room for its slot behind every rank's routed ones.

    Routed slot p becomes ``p // routed_per_rank * S + p % routed_per_rank``; shared expert j on rank r is slot
    ``r * S + routed_per_rank + j``. With one shared expert this is SGLang's layout (PR 20089). The same call
    appends the *logical* ids of shared experts: slots = logical ids, ranks = 0 and routed_per_rank = E give
    E..E+n-1 and leave the routed ids alone.

    Args:
        slots: [T, K] int32 or int64 routed slots, routed_per_rank on every rank; -1 = absent.
        weights: [T, K] float32 or float64 gate weights; may require grad.
        ranks: [T, n] int32, the rank that computes each of the token's n shared experts; -1 = none.
        routed_per_rank: routed slots per rank in the ids given.
        slots_per_rank: S of the ids returned. Default: routed_per_rank + n.
        weight: gate weight of every shared copy, a constant. A model that scales the sum of its experts by
            ``routed_scaling_factor`` afterwards needs 1 / that factor (1.0 if it is 0).

    Returns:
        slots [T, K + n] and weights [T, K + n] in the dtypes given. Absent copies weigh 0; a token without any
        routed copy is padding, its shared copies are absent too.
    """
    return call(_append_shared_expert, slots, weights, ranks, routed_per_rank, slots_per_rank, weight)


def _save_slots(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _routed_gradient(ctx: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (slots,) = ctx.saved_tensors
    routed = gradient[:, : slots.shape[1]].masked_fill(slots < 0, 0)
    return None, routed, None, None, None, None


torch.library.register_autograd("isoload::append_shared_expert", _routed_gradient, setup_context=_save_slots)
