"""The state of a whole program: found in a model whose layers share their experts over processes, and gathered.

One process writes: rank 0 of the default process group. Stacks of all experts exist for one layer at a time.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isoload.layer.stored import StoredExperts
from isoload.topology import Topology
from isoload.transport import CollectiveGroup, Group, LocalGroup, await_all

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and checkpoint_wrapper


def all_processes(call: str) -> Group:
    """Wait until all processes of the program make a call, and return the group of all of them."""
    await_all(call)
    if not dist.is_available() or not dist.is_initialized():
        return LocalGroup(Topology(1))
    return CollectiveGroup(Topology(dist.get_world_size()))


def is_writer() -> bool:
    """Whether this process writes what the program saves."""
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel and torch.compile, whose names the saved program has."""
    while True:
        inner = (
            model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        )
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def plain_name(name: str) -> str:
    """Return the name of a module or Parameter without those of wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def stored_layers(model: nn.Module) -> dict[str, StoredExperts]:
    """Return the layers of a model by name, in order."""
    return {plain_name(n): m for n, m in model.named_modules() if isinstance(m, StoredExperts)}


def check_layers(layers: dict[str, StoredExperts], processes: Group) -> None:
    """Raise ValueError unless this process can save all experts together with the other processes."""
    if not layers:
        raise ValueError("model must have isoload layers (isoload.MoE, isoload.balance), got none")
    size = processes.topology.num_ranks
    for name, layer in layers.items():
        group = layer.group
        if not group.owns_all and group.topology.num_ranks != size:
            raise ValueError(
                f"{name} must share its experts over all {size} processes of the program to be saved with it, got "
                f"{group.topology.num_ranks}: save each layer's full_state_dict() yourself"
            )
        if any(rank.reads_elsewhere for rank in layer._ranks()):
            raise ValueError(
                f"{name} must have its experts' Parameters to be saved, got a Shard given as a function: save them "
                "where they are registered"
            )


def whole_tensor(value: Any) -> Any:
    """Return a DTensor as a whole one; all processes together. Other values stay as they are."""
    gather: Callable[[], Tensor] | None = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state_dict with the experts of all ranks, in host memory, on the process that writes.

    The other processes, which all call it together, get no tensors.
    """
    return {key: value for part in whole_parts(model) for key, value in part.items()}


def whole_parts(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the same state in parts: what is no expert, then the experts of one layer after the other."""
    yield other_state(model)
    for name, module in holders(model).items():
        stacks = {name + key: stack.cpu() for key, stack in module.whole_experts().items()}
        yield stacks if is_writer() else {}


def other_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state_dict without experts, on the process that writes. All processes together."""
    kept: dict[str, Any] = {}
    for key, value in other_entries(model).items():
        whole = whole_tensor(value)
        if is_writer():
            kept[plain_name(key)] = whole
    return kept


def other_entries(model: nn.Module) -> dict[str, Any]:
    """Return the entries of this process's state_dict that are no experts."""
    prefixes = tuple(name + module.part_keys for name, module in holders(model).items())
    experts = {id(p) for layer in stored_layers(model).values() for p in layer.weights.parameters()}
    return {
        key: value.detach() if isinstance(value, Tensor) else value
        for key, value in model.state_dict(keep_vars=True).items()
        if not plain_name(key).startswith(prefixes) and id(value) not in experts
    }


def holders(model: nn.Module) -> dict[str, Any]:
    """Return the modules that save experts, with the prefix of their keys: BlockExperts and layers outside of these."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        name = f"{plain_name(name)}." if name else ""
        if hasattr(module, "whole_experts") and not any(name.startswith(outer) for outer in found):
            found[name] = module
    return found


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a new folder next to its target, which takes the target's place afterwards; if anything fails, nothing."""
    part, old = (target.with_name(f"{target.name}.{os.getpid()}.{kind}") for kind in ("part", "old"))
    try:
        part.mkdir(parents=True)
        yield part
        if target.exists():
            target.rename(old)
        part.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    finally:
        for folder in (part, old):
            shutil.rmtree(folder, ignore_errors=True)
