"""Gradient clipping and DistributedDataParallel for models whose experts are distributed over ranks.

All other Parameters are replicated. Clipping therefore sums only the experts' norms over ranks, and
DistributedDataParallel must neither broadcast nor reduce experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from isoload.layer.moe import MoE
from isoload.layer.pretrained import stored_layers
from isoload.transport import Group
from isoload.weights.shard import local_part


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their total norm is at most max_norm. All ranks call it together.

    The norm counts each expert once, on its home rank. It counts each other Parameter once, although every rank has a
    copy or a shard (fully_shard, over any mesh). All ranks therefore scale by the same number, and copies remain
    equal. With data parallelism around the layer's ranks every copy of an expert has the same, complete gradient.

    Args:
        model: model with isoload layers, after backward and after the all-reduce of replicated gradients, also those of
            experts that several data-parallel ranks hold.
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
            parts += [local_part(p.grad) for p in rank.parameters() if p.grad is not None]
            device = rank.row_of_slot.device
    for group, of_ranks in by_group.items():
        rows = [(get_total_norm(parts).double() ** 2).reshape(1).to(device) for parts in of_ranks]
        squares.append(group.gather("gradient norm", rows).sum())
    trained = [p for p in model.parameters() if p.grad is not None]
    for alike in by_mesh([p for p in trained if id(p) not in experts]):
        norm = get_total_norm([p.grad for p in alike if p.grad is not None])
        whole: Callable[[], Tensor] | None = getattr(norm, "full_tensor", None)
        squares.append((norm if whole is None else whole()).double() ** 2)
    device = squares[0].device if squares else torch.device("cpu")
    total = torch.stack([square.to(device) for square in squares] or [torch.zeros(())]).sum().sqrt()
    for alike in by_mesh(trained):
        clip_grads_with_norm_(alike, max_norm, total)
    return total


def by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return Parameters with gradients in groups whose gradients torch computes with together.

    torch computes neither with DTensors of several meshes together, nor with DTensors and plain tensors.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


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
