"""DistributedDataParallel around a model with MoE layers: it must neither broadcast nor reduce what one rank owns."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isoload.layer.moe import MoE

Model = TypeVar("Model", bound=nn.Module)


def ignore_in_ddp(model: Model) -> Model:
    """Makes DistributedDataParallel leave the experts of all MoE layers in a model alone. To be called before it.

        ddp = DistributedDataParallel(isoload.layer.ignore_in_ddp(model))

    Each rank keeps its own experts, whose gradients are sums over the tokens of all ranks. From now on the layers
    divide them by the number of ranks, as DistributedDataParallel divides the others': both are gradients of the mean
    of the ranks' losses, so no loss has to be divided. Layers over ranks of one process (LocalTransport) stay as they
    are: each process has all of their experts.

    Args:
        model: that is wrapped, itself or with the layers anywhere inside. What it ignored before stays ignored.

    Returns:
        The model.

    Raises:
        ValueError: for a layer whose experts are a Shard given as a function: which Parameters it reads is not known.
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
    named = model.named_parameters(remove_duplicate=False)
    ignored.update(name for name, own in named if id(own) in owned)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return model
