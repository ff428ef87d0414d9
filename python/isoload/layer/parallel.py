"""Gradient clipping and DistributedDataParallel for models whose experts are distributed over ranks.

All other Parameters are replicated. Clipping therefore sums only the experts' norms over ranks, and
DistributedDataParallel must neither broadcast nor reduce experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from isoload.layer.moe import MoE
from isoload.layer.pretrained import stored_layers
from isoload.transport import Group


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their total norm is at most max_norm. All ranks call it together.

    The norm counts each expert once, on its home rank. It counts each other Parameter once, although every rank has a
    copy or a shard (fully_shard). All ranks therefore scale by the same number, and copies remain equal.

    Args:
        model: model with isoload layers, after backward and after the all-reduce of replicated Parameters' gradients.
        max_norm: largest norm afterwards.

    Returns:
        The norm before clipping, [], the same on all ranks.

    Raises:
        ValueError: the experts of a layer are a Shard given as a function.
    """
    squares, experts = list[Tensor](), set[int]()
    by_group: dict[Group, list[list[Tensor]]] = {}  # gradients of every owned rank
    for name, layer in stored_layers(model).items():
        gradients = by_group.setdefault(layer.group, [[] for _ in layer.group.ranks])
        for parts, rank in zip(gradients, layer._ranks(), strict=True):
            if rank.reads_elsewhere:
                raise ValueError(
                    f"{name} must have its experts' Parameters to clip their gradients, got a Shard given as a function"
                )
            experts |= {id(p) for p in rank.parameters()}
            parts += [p.grad for p in rank.parameters() if p.grad is not None]
    for group, of_ranks in by_group.items():
        rows = [(get_total_norm(parts).double() ** 2).reshape(1) for parts in of_ranks]
        squares.append(group.gather("gradient norm", rows).sum())
    others = [p.grad for p in model.parameters() if p.grad is not None and id(p) not in experts]
    for shared in (True, False):  # norms of DTensors and of plain tensors cannot be taken together
        norm = get_total_norm([g for g in others if hasattr(g, "full_tensor") == shared])
        whole: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)
        squares.append((norm if whole is None else whole()).double() ** 2)
    device = squares[0].device
    total = torch.stack([square.to(device) for square in squares]).sum().sqrt()
    for sharded in (True, False):
        parts = [
            p for p in model.parameters() if p.grad is not None and hasattr(p.grad, "full_tensor") == sharded
        ]
        clip_grads_with_norm_(parts, max_norm, total)
    return total


Model = TypeVar("Model", bound=nn.Module)


def ignore_in_ddp(model: Model) -> Model:
    """Exclude the experts of all MoE layers of a model from DistributedDataParallel. Call it before wrapping.

        ddp = DistributedDataParallel(isoload.layer.ignore_in_ddp(model))

    The gradients of experts are sums over the tokens of all ranks. From now on the layers divide them by the number of
    ranks, as DistributedDataParallel divides the other gradients. All gradients then belong to the mean of the ranks'
    losses, and no loss has to be divided. Layers over virtual ranks (LocalTransport) do not change, because each
    process has all of their experts.

    Args:
        model: module that will be wrapped. Parameters that it ignored before remain ignored.

    Returns:
        The model.

    Raises:
        ValueError: the experts of a layer are a Shard given as a function, so that its Parameters are unknown.
    """
    owned: set[int] = set()
    for layer in model.modules():
        if not isinstance(layer, MoE) or layer.group.owns_all:
            continue
        if not layer.expert_parameters():
            raise ValueError(
                "model must have its experts' Parameters in its MoE layers, got a layer of a Shard given as a function"
            )
        owned.update(map(id, layer.weights.parameters()))
        for weights in layer._ranks():
            weights.gradient_divisor = layer.group.topology.num_ranks
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = model.named_parameters(remove_duplicate=False)
    ignored.update(name for name, parameter in parameters if id(parameter) in owned)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return model
