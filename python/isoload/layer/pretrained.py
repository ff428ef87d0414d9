"""save_pretrained for transformers models with experts on several processes; rank 0 writes, layer by layer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isoload.files import open_regular
from isoload.layer.stored import StoredExperts
from isoload.topology import Topology
from isoload.transport import Call, CollectiveGroup, Group, LocalGroup, await_all
from isoload.weights.checkpoints import FileTensors
from isoload.weights.storage import check_whole

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # torch.compile, checkpoint_wrapper


def all_processes(call: str) -> Group:
    """Wait until all processes of the program make a call, and return the group of all processes."""
    await_all(call)
    if not dist.is_available() or not dist.is_initialized():
        return LocalGroup(Topology(1))
    return CollectiveGroup(Topology(dist.get_world_size()))


def is_writer() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_rank() == 0


def unwrapped(model: nn.Module) -> nn.Module:
    name = "module" if isinstance(model, DistributedDataParallel) else "_orig_mod"
    inner = getattr(model, name, None)
    return unwrapped(inner) if isinstance(inner, nn.Module) else model


def plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def stored_layers(model: nn.Module) -> dict[str, StoredExperts]:
    return {plain_name(n): m for n, m in model.named_modules() if isinstance(m, StoredExperts)}


def check_layers(layers: dict[str, StoredExperts], processes: Group) -> None:
    size = processes.topology.num_ranks
    for name, layer in layers.items():
        group = layer.group
        if not group.owns_all and group.topology.num_ranks != size:
            raise ValueError(
                f"{name} must share its experts over all {size} processes of the program to be saved with it, got "
                f"{group.topology.num_ranks}: save isoload.layer.ProgramState(model, optimizer) by "
                "torch.distributed.checkpoint"
            )
    check_parameters(layers)


def check_parameters(layers: Mapping[str, StoredExperts]) -> None:
    if not layers:
        raise ValueError("model must have isoload layers (isoload.MoE, isoload.balance), got none")
    for name, layer in layers.items():
        if any(rank.reads_elsewhere for rank in layer._ranks()):
            raise ValueError(
                f"{name} must have its experts' Parameters to be saved, got a Shard given as a function: save them "
                "where they are registered"
            )


def whole_tensor(value: Any) -> Any:
    """Return the full tensor of a DTensor, for which all processes call it together; other values as they are."""
    gather: Callable[[], Tensor] | None = getattr(value, "full_tensor", None)
    return value if gather is None else gather()


def whole_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state_dict with the experts of all ranks, in host memory, on the process that writes."""
    return {key: value for part in whole_parts(model) for key, value in part.items()}


def whole_parts(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield the same state in parts: first without experts, then the experts of each layer."""
    yield other_state(model)
    for name, module in holders(model).items():
        stacks = {name + key: stack.cpu() for key, stack in module.whole_experts().items()}
        yield stacks if is_writer() else {}


def other_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state_dict without experts, on the process that writes. All processes together."""
    entries: dict[str, Any] = {}
    for key, value in other_entries(model).items():
        whole = whole_tensor(value)
        if is_writer():
            entries[plain_name(key)] = whole
    return entries


def other_entries(model: nn.Module) -> dict[str, Any]:
    prefixes = tuple(name + module.part_keys for name, module in holders(model).items())
    experts = {id(p) for layer in stored_layers(model).values() for p in layer.weights.parameters()}
    return {
        key: value.detach() if isinstance(value, Tensor) else value
        for key, value in model.state_dict(keep_vars=True).items()
        if not plain_name(key).startswith(prefixes) and id(value) not in experts
    }


def holders(model: nn.Module) -> dict[str, Any]:
    """Return the modules that save experts, by the prefix of their keys: BlockExperts, and layers outside of them."""
    modules: dict[str, Any] = {}
    for name, module in model.named_modules():
        name = f"{plain_name(name)}." if name else ""
        if hasattr(module, "whole_experts") and not any(name.startswith(outer) for outer in modules):
            modules[name] = module
    return modules


@contextmanager
def written_aside(target: Path) -> Iterator[Path]:
    """Yield a new folder that replaces the target on success; on failure the target does not change."""
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


def save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    push_to_hub: bool = False,
    **options: Any,
) -> None:
    """Write a checkpoint with all experts, which stock transformers loads. All ranks call it together; rank 0 writes.

    Every rank needs host memory for the experts of one layer, which have their own files of at most ``max_shard_size``.
    Files appear in the folder once all of them are written. Given a complete state_dict, each process writes it as in
    transformers; otherwise is_main_process is not used, and push_to_hub must be False.
    """
    kind: Any = type(model)  # the instance attribute save_pretrained is this function
    write = kind.save_pretrained
    if state_dict is not None:
        check_whole(state_dict)
        write(model, save_directory, is_main_process, state_dict, push_to_hub, **options)
        return
    processes, layers = all_processes("save_pretrained"), stored_layers(model)
    with processes.agreeing("save_pretrained"):
        target = Path(save_directory)
        check_layers(layers, processes)
        if push_to_hub:
            raise ValueError("push_to_hub must be False over processes: save, then push the folder, got True")
        if is_writer() and target.exists() and not target.is_dir():
            raise ValueError(f"save_directory must be a folder, got a file: {target}")
    written = target.with_name(f"{target.name}.{os.getpid()}.written")
    # Raised later if the writer fails, because the other ranks are in exchanges.
    call = Call(processes, "save_pretrained")
    with ExitStack() as aside:
        parts: list[Path] = []
        for number, part in enumerate(whole_parts(model)):
            with call:
                if is_writer() and call.failure is None:
                    folder = (
                        aside.enter_context(written_aside(written)) if not parts else parts[0] / str(number)
                    )
                    write(model, folder, True, part, **options)
                    parts.append(folder)
        with processes.agreeing("save_pretrained"):
            call.raise_failure()
            if is_writer():
                join_parts(parts, options.get("variant"))
                aside.close()
                take_files(target, written)


def join_parts(parts: list[Path], variant: str | None) -> None:
    """Move the weights of all parts into the first part's folder, with the names and the index of one checkpoint."""
    suffix = "" if variant is None else f".{variant}"
    stem = f"model{suffix}"
    files = [file for part in parts for file in sorted(part.glob(f"{stem}*.safetensors"))]
    weight_map: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files):
        name = f"{stem}-{number + 1:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(FileTensors(file).keys(), name)
        with open_regular(file) as opened:
            header = int.from_bytes(opened.read(8), "little")
        size += file.stat().st_size - 8 - header
        file.rename(parts[0] / f"{name}.new")  # parts of several files use such names, too
    for file in list(parts[0].glob("*.new")):
        file.rename(file.with_suffix(""))
    for part in parts[1:]:
        shutil.rmtree(part)
    index = parts[0] / f"model.safetensors.index{suffix}.json"
    content = {"metadata": {"total_size": size}, "weight_map": weight_map}
    index.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def take_files(target: Path, written: Path) -> None:
    """Move files into the target, remove its older weights, and remove the folder of the files."""
    target.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in written.iterdir()}
    for old in target.glob("model*.safetensors*"):
        if old.name not in names:
            old.unlink()
    for name in names:
        (written / name).replace(target / name)
    written.rmdir()
