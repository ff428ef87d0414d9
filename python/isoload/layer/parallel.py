"""Data parallelism and gradient clipping for models whose experts are distributed over ranks.

All other Parameters are replicated: clipping sums only the experts' norms over ranks, and data-parallel wrappers must
neither broadcast, shard nor reduce experts. Ranks that hold the same experts average their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from isoload.layer.checks import COPIES, check_copies
from isoload.layer.compiled import Recording
from isoload.layer.pretrained import stored_layers
from isoload.layer.stored import StoredExperts
from isoload.transport import CollectiveGroup, Group
from isoload.weights.shard import local_part

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their total norm is at most max_norm, on all ranks together; return the norm before.

    The norm counts each expert once and each other Parameter once, although every rank has a copy or a shard
    (fully_shard). The result is [], the same on all ranks. Not for experts of a Shard given as a function.

    Args:
        model: model with isoload layers, after backward and after the all-reduce of replicated gradients.
        max_norm: largest norm afterwards.
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
    """Return groups whose gradients torch computes with together: not DTensors of several meshes, nor plain tensors."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    return list(groups.values())


Model = TypeVar("Model", bound=nn.Module)


def ignore_in_ddp(model: Model, copies: dist.ProcessGroup | None = None) -> Model:
    """Exclude a model's experts from DistributedDataParallel, before the model is wrapped; return the model.

    From now on the layers divide the gradients of experts, which are sums over the tokens of all ranks, by the number
    of ranks, as DistributedDataParallel divides the other gradients: no loss has to be divided. Layers over virtual
    ranks do not change. Not for a Shard given as a function.

    Args:
        model: module that will be wrapped, or a module inside of it. Parameters that it ignored before remain ignored.
        copies: group of the ranks that hold the same experts, if the wrapper has more ranks than the layers
            (:func:`parallelize` passes it). Each backward averages the experts' gradients over it.
    """
    owned: set[int] = set()
    for name, layer in stored_layers(model).items():
        if layer.group.owns_all:
            continue
        if not layer.expert_parameters():
            raise ValueError(
                "model must have its experts' Parameters in its MoE layers, got a layer of a Shard given as a function"
            )
        if copies is not None:
            note_copies(name, layer, copies)
        owned.update(map(id, layer.weights.parameters()))
        for weights in layer._ranks():
            weights.gradient_divisor = layer.group.topology.num_ranks
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    parameters = model.named_parameters(remove_duplicate=False)
    ignored.update(name for name, parameter in parameters if id(parameter) in owned)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))
    return model


def note_copies(name: str, layer: StoredExperts, copies: dist.ProcessGroup) -> None:
    for weights in layer._ranks():
        COPIES[weights] = copies
    with layer.group.agreeing("copies"):
        check_copies(name, layer._ranks())
    average_in_backward(layer.expert_parameters(), copies)


def average_in_backward(parameters: Sequence[nn.Parameter], copies: dist.ProcessGroup) -> None:
    """Average the gradients of Parameters over ranks at the end of every backward that changes them, because ranks must
    not wait for copies while others wait for the layer's ranks. Gradients may be accumulated. Those that
    torch.autograd.grad returns are refused, because their owner adds them only after that.
    """
    computed, changed, last = set[int](), set[int](), -1

    def expect(parameter: Tensor) -> None:
        nonlocal last
        if Recording.computing:
            return
        backward = torch._C._current_graph_task_id()
        if backward != last:  # which an error may have ended
            last = backward
            computed.clear()
            changed.clear()
            torch.autograd.Variable._execution_engine.queue_callback(average)  # type: ignore[attr-defined]
        computed.add(id(parameter))

    @torch.no_grad()
    def average() -> None:
        due, apart = [p for p in parameters if id(p) in changed], computed - changed
        if apart:
            raise RuntimeError(
                "gradients of experts with copies on other ranks must be computed by backward, which averages them, "
                "got torch.autograd.grad, as in the schedules InterleavedZeroBubble, ZBVZeroBubble and DualPipeV: use "
                "1F1B, GPipe, LoopedBFS or Interleaved1F1B"
            )
        for parameter in due:
            assert parameter.grad is not None
            gradient = local_part(parameter.grad)
            gradient /= copies.size()
            dist.all_reduce(gradient, group=copies)

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_hook(lambda _, parameter=parameter: expect(parameter))
            parameter.register_post_accumulate_grad_hook(lambda p: changed.add(id(p)))


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    shard: Sequence[nn.Module] | None = None,
    hybrid: bool = False,
    **options: Any,
) -> nn.Module:
    """Wrap a model for training over more ranks than those that share its experts, or over the same ranks.

    Return a DistributedDataParallel, or the model itself. Gradients belong to the mean of the ranks' losses; no loss
    has to be divided. Create the optimizer afterwards; call ``refresh_replicas()`` of the layers after each of its
    steps.

    Args:
        model: model with isoload layers, with the same values on all ranks.
        mesh: all ranks that train the model on tokens of their own, with names of the dimensions. The layers' ranks are
            all of them, or one dimension; the ranks along the other dimensions then hold copies of the same experts.
        shard: modules for ``fully_shard``, inner modules first; the model is sharded last. Experts are not sharded.
            None: DistributedDataParallel over all ranks.
        hybrid: shard over the last dimension of a mesh [N, M] only (HSDP). False: over all ranks.
        **options: of DistributedDataParallel, or of fully_shard.
    """
    layers = stored_layers(model)
    if not layers:
        raise ValueError("model must have isoload layers (isoload.MoE, isoload.balance), got none")
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh must have names for its dimensions: init_device_mesh(mesh_dim_names=...), got {mesh}"
        )
    if hybrid and (shard is None or mesh.ndim != 2):
        raise ValueError(
            "hybrid=True must come with shard=modules and a mesh of two dimensions, got shard="
            f"{None if shard is None else 'modules'} and {mesh}"
        )
    ignore_in_ddp(model, copies_in(mesh, layers))
    flat = mesh if mesh.ndim == 1 or hybrid else mesh._flatten()
    if shard is None:
        if split := [name for name, p in model.named_parameters() if hasattr(p, "full_tensor")]:
            raise ValueError(
                "Parameters must be plain tensors for DistributedDataParallel: pass shard=modules to use fully_shard, "
                f"which takes DTensors of tensor parallelism, got a DTensor {split[0]}"
            )
        return DistributedDataParallel(model, process_group=flat.get_group(), **options)
    from torch.distributed.fsdp import fully_shard

    over_processes = {n: layer for n, layer in layers.items() if isinstance(layer.group, CollectiveGroup)}
    for name, layer in over_processes.items():
        if layer.group.owns_all and mesh.size() > 1:  # every rank has all experts
            note_copies(name, layer, (mesh if mesh.ndim == 1 else mesh._flatten()).get_group())
    experts = {p for layer in over_processes.values() for p in layer.expert_parameters()}
    ignored = experts | options.pop("ignored_params", set())
    for module in [*(module for module in shard if module is not model), model]:
        fully_shard(module, mesh=flat, ignored_params=ignored, **options)
    return model


def copies_in(mesh: DeviceMesh, layers: Mapping[str, StoredExperts]) -> dist.ProcessGroup | None:
    """Return the group of the ranks with the same experts as this rank; None if no other rank has them."""
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    members = [dist.get_process_group_ranks(group) for group in groups]
    dims: dict[int, str] = {}
    for name, layer in layers.items():
        if not isinstance(layer.group, CollectiveGroup) or layer.group.owns_all:
            continue
        assert layer.group.process_group is not None
        ranks = dist.get_process_group_ranks(layer.group.process_group)
        if ranks == mesh.mesh.flatten().tolist():
            dims.setdefault(-1, name)
            continue
        if ranks not in members:
            raise ValueError(
                f"the ranks of {name} must be the mesh's or one dimension of it, {' or '.join(map(str, members))} on "
                f"rank {dist.get_rank()}, got {ranks}: create the layer with CollectiveTransport(topology, "
                "mesh.get_group(dimension))"
            )
        dims.setdefault(members.index(ranks), name)
    if len(dims) > 1:
        raise ValueError(
            f"all layers must have the same ranks, got {' and '.join(dims.values())} with different ranks"
        )
    others = [dim for dim in range(mesh.ndim) if dim not in dims and mesh.size(dim) > 1]
    if not dims or -1 in dims or not others:
        return None
    if len(others) == 1:
        return groups[others[0]]
    return mesh[tuple((mesh.mesh_dim_names or ())[dim] for dim in others)]._flatten().get_group()
