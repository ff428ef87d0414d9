"""Save and load a whole program, with experts and optimizer state, for any placement and number of ranks.

The folder contains ``isoload.json`` (layers and a format number), ``others.pt`` (the other Parameters and buffers,
their optimizer state, the parameter groups) and one file per layer with stacks [E, ...], from ``experts-0.pt`` on.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isoload.files import MAX_NOTES, open_regular, parse_json, read_text
from isoload.layer.pretrained import (
    all_processes,
    check_layers,
    is_writer,
    other_entries,
    other_state,
    plain_name,
    stored_layers,
    unwrapped,
    whole_tensor,
    written_aside,
)
from isoload.layer.stored import StoredExperts, gather_rows, load_full
from isoload.transport import Call, checksum
from isoload.weights.shard import FACTS, state_fields
from isoload.weights.storage import FULL, RankWeights
from isoload.wording import shown

State = dict[str, dict[str, Any]]  # optimizer state by stack and key


def full_optimizer_state(layer: StoredExperts, optimizer: Optimizer, reader: int | None = None) -> State:
    """Return the optimizer state of a layer's experts, independent of the placement. All ranks call it together.

    By stack (``experts.gate_up``) and key (``exp_avg``): [E, ...] on every process, or a copy of other state
    (``step``).

    Args:
        layer: layer whose expert Parameters the optimizer updates.
        optimizer: this process's optimizer; names and dtypes of its state are the same on all ranks.
        reader: the only rank that gets rows; other ranks get [0, ...]. None: every process gets them.
    """
    ranks, fields = layer._ranks(), list[list[tuple[str, str, str]]]()
    call = Call(layer.group, "placement", ranks[0].row_of_slot.device)
    with call:
        check_plain(ranks)
        fields = [state_fields(optimizer, rank) for rank in ranks]
    call.agree("placement", FACTS[-1:], [(checksum(rank_fields),) for rank_fields in fields])
    stacks = [
        [optimizer.state[getattr(rank, name)][key] for name, key, _ in rank_fields]
        for rank, rank_fields in zip(ranks, fields, strict=True)
    ]
    full: State = {
        FULL + name: {
            key: copy.deepcopy(value)
            for key, value in optimizer.state.get(parameter, {}).items()
            if getattr(value, "shape", None) != parameter.shape
        }
        for name, parameter in ranks[0].named_parameters(recurse=False)
    }
    if fields[0]:
        gathered = gather_rows(layer.group, layer.layouts, stacks, reader)
        for (name, key, _), rows in zip(fields[0], gathered, strict=True):
            full[FULL + name][key] = rows
    return full


@torch.no_grad()
def load_full_optimizer_state(layer: StoredExperts, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load the result of :func:`full_optimizer_state`, for any placement and number of ranks, each rank by itself.

    Options such as the learning rate do not change. Errors are raised before anything changes.

    Args:
        layer: layer whose expert Parameters the optimizer updates.
        optimizer: this process's optimizer.
        state: state by stack and key, with rows [E, ...].
    """
    ranks, num_experts = layer._ranks(), layer.placement.num_experts
    check_plain(ranks)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for _, name, parameter in trained(ranks):
        if id(parameter) not in groups:
            raise ValueError(f"optimizer must hold the layer's expert Parameters, {name} is missing")
        if FULL + name not in state:
            raise ValueError(f"state must hold {FULL}{name}, got {sorted(state)}")
        shape = [num_experts, *parameter.shape[1:]]
        for key, value in state[FULL + name].items():
            if isinstance(value, Tensor) and value.numel() != 1 and list(value.shape) != shape:
                raise ValueError(
                    f"{FULL}{name} {key} must be {shape} or one element, got {list(value.shape)}"
                )
    for rank, name, parameter in trained(ranks):
        shape = [num_experts, *parameter.shape[1:]]
        rank_state = optimizer.state[parameter] = {}
        for key, value in state[FULL + name].items():
            if isinstance(value, Tensor) and list(value.shape) == shape:
                rank_state[key] = value[list(rank.layout.homes)].to(parameter.device)
            else:
                rank_state[key] = single_value(value, parameter, groups[id(parameter)])


def single_value(value: Any, parameter: Tensor, options: Mapping[str, Any]) -> Any:
    """Return a copy of a value of optimizer state that has not its Parameter's shape, for example the step."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    counts_there = options.get("capturable", False) or options.get("fused", False)
    return value.clone().to(parameter.device if counts_there else value.device)


def trained(ranks: list[RankWeights]) -> Iterator[tuple[RankWeights, str, nn.Parameter]]:
    for rank in ranks:
        for name, parameter in rank.named_parameters(recurse=False):
            if parameter.requires_grad:
                yield rank, name, parameter


def check_plain(ranks: list[RankWeights]) -> None:
    for rank in ranks:
        plain = [name for name, p in rank.named_parameters(recurse=False) if not hasattr(p, "to_local")]
        if len(plain) != len(rank.stored()):
            raise ValueError(
                f"experts must be plain Parameters of the layer for their optimizer state, {list(rank.stored())}, got "
                f"only {plain}; the rest are parametrized, DTensors or a Shard given as a function: save their state "
                "with the module that owns them"
            )


MANIFEST, FORMAT = "isoload.json", 1


def save(model: nn.Module, optimizer: Optimizer | None, folder: str | Path) -> None:
    """Save a model and its optimizer's state for :func:`load` on any number of ranks. All ranks call it together.

    Rank 0 writes and needs memory for the experts of one layer and their optimizer state. The folder appears once it is
    complete, and replaces a folder of an earlier call. Errors are raised on all ranks.

    Args:
        model: model with isoload layers. Other Parameters are equal on all ranks, or DTensors (fully_shard).
        optimizer: optimizer of these Parameters. None: no optimizer state is saved.
        folder: folder to write, on a file system that all ranks can read.
    """
    model, target = unwrapped(model), Path(folder)
    processes, layers = all_processes("isoload.save"), stored_layers(model)
    with ExitStack() as aside:
        with processes.agreeing("save") as facts:
            check_layers(layers, processes)
            facts["layers"] = described = describe(layers)
            facts.update(optimizer_facts(model, optimizer))
            if is_writer():
                check_target(target)
                part = aside.enter_context(written_aside(target))
        call = Call(processes, "save")  # an error of the writer is raised later: other ranks are in exchanges
        for name, content in contents(model, optimizer):
            with call:
                if is_writer() and call.failure is None:
                    torch.save(content, part / name)
        with processes.agreeing("save"):
            call.raise_failure()
            if is_writer():
                manifest = {"format": FORMAT, "id": uuid.uuid4().hex, "layers": described}
                (part / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
            aside.close()


def load(model: nn.Module, optimizer: Optimizer | None, folder: str | Path) -> None:
    """Load a program that :func:`save` wrote, for any placement and number of ranks. All ranks call it together.

    Errors are raised on all ranks and before anything changes, but a damaged file leaves an undefined model.

    Args:
        model: model whose layers have the same names, sizes and dtypes as the saved ones.
        optimizer: optimizer with the same parameter groups as the saved one. None: no optimizer state is loaded.
        folder: the saved program, the same on all ranks.
    """
    model, source = unwrapped(model), Path(folder)
    processes, layers = all_processes("isoload.load"), stored_layers(model)
    with processes.agreeing("load") as facts:
        check_layers(layers, processes)
        manifest = manifest_of(source)
        facts["saved program"] = f"{source} with the id {manifest['id']}"
    with processes.agreeing("load"):
        check_described(manifest["layers"], describe(layers))
        others = read(source / "others.pt")
        entries = {plain_name(key): key for key in other_entries(model)}
        if entries.keys() != others["model"].keys():
            odd = sorted(entries.keys() ^ others["model"].keys())
            raise ValueError(
                f"model must have the Parameters and buffers of {source}, got a difference in {odd}"
            )
        if optimizer is not None:
            check_groups(model, optimizer, others["optimizer"])
    with processes.agreeing("load"), torch.no_grad():
        current = other_entries(model)
        state = {key: placed_as(others["model"][name], current[key]) for name, key in entries.items()}
        model.load_state_dict(state, strict=False)
        if optimizer is not None:
            load_groups(model, optimizer, others["optimizer"])
        for number, layer in enumerate(layers.values()):
            saved = read(source / file_of(number))
            load_full(layer._ranks(), layer.placement.num_experts, saved["experts"])
            if optimizer is not None:
                load_full_optimizer_state(layer, optimizer, saved["optimizer"])


def contents(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and content of every file, in host memory of the process that writes. All processes call it."""
    for number, layer in enumerate(stored_layers(model).values()):
        experts = {FULL + name: stack.cpu() for name, stack in layer.full_experts(layer.writer).items()}
        state = {} if optimizer is None else full_optimizer_state(layer, optimizer, layer.writer)
        yield file_of(number), {"experts": experts, "optimizer": state}
    groups, state = [], {}
    if optimizer is not None:
        names, experts_of = names_of(model), expert_ids(model)
        for group in optimizer.param_groups:
            groups.append({**group, "params": group_names(group, names)})
            for parameter in group["params"]:
                if id(parameter) not in experts_of:
                    values = optimizer.state.get(parameter, {}).items()
                    state[names[id(parameter)]] = {key: whole_tensor(value) for key, value in values}
    saved = None if optimizer is None else {"groups": groups, "state": state if is_writer() else {}}
    yield "others.pt", {"model": other_state(model), "optimizer": saved}


def file_of(number: int) -> str:
    return f"experts-{number}.pt"


def read(path: Path) -> dict[str, Any]:
    open_regular(path).close()  # a pipe would block
    content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return content


def describe(layers: Mapping[str, StoredExperts]) -> dict[str, Any]:
    return {
        name: {
            "experts": layer.placement.num_experts,
            **{n: [list(s.shape[1:]), str(s.dtype)] for n, s in layer._ranks()[0].homes().items()},
        }
        for name, layer in layers.items()
    }


def check_described(saved: Mapping[str, Any], described: Mapping[str, Any]) -> None:
    if list(saved) != list(described):
        raise ValueError(f"model must have the layers {list(saved)}, as saved, got {list(described)}")
    for name, value in saved.items():
        if described[name] != value:
            raise ValueError(f"{name} must have {value}, as saved, got {described[name]}")


def check_target(target: Path) -> None:
    """Raise ValueError if the target is neither missing, empty nor a saved program, because it would be replaced."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        manifest_of(target)


def manifest_of(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        advice = ": a state that one rank saved is loaded by model.load_state_dict on that rank"
        raise ValueError(
            f"folder must be one that isoload.save wrote, with a file {MANIFEST}, got {folder}"
            f"{advice if folder.is_file() else ''}"
        )
    manifest = parse_json(read_text(path, MAX_NOTES))
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} must hold one JSON object, got {shown(manifest)}")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} must have format {FORMAT}, got {manifest.get('format')}")
    return manifest


def expert_ids(model: nn.Module) -> set[int]:
    return {id(p) for layer in stored_layers(model).values() for p in layer.weights.parameters()}


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the name of every Parameter by id; a stack of experts has one name on all ranks."""
    names = {id(p): plain_name(name) for name, p in model.named_parameters()}
    for prefix, layer in stored_layers(model).items():
        for rank in layer._ranks():
            names |= {id(p): f"{prefix}.{FULL}{name}" for name, p in rank.named_parameters(recurse=False)}
    return names


def group_names(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    if strange := [list(p.shape) for p in group["params"] if id(p) not in names]:
        raise ValueError(
            f"optimizer must hold only Parameters of the model, got another of shape {strange[0]}"
        )
    return list(dict.fromkeys(names[id(p)] for p in group["params"]))


def optimizer_facts(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the facts of an optimizer that must be equal on all ranks, because one copy of its state is saved."""
    if optimizer is None:
        return {"optimizer": None}
    names, experts = names_of(model), expert_ids(model)
    groups = [group_names(group, names) for group in optimizer.param_groups]
    facts: dict[str, Any] = {"optimizer": type(optimizer).__name__, "parameter groups": checksum(groups)}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if id(parameter) not in experts:
            state = optimizer.state.get(parameter, {}).items()
            kinds = {key: list(value.shape) if isinstance(value, Tensor) else None for key, value in state}
            facts[f"optimizer state of {names[id(parameter)]}"] = str(kinds)
    return facts


def check_groups(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any] | None) -> None:
    if saved is None:
        raise ValueError("optimizer must be None for a program that was saved without one")
    names = names_of(model)
    groups = [group_names(group, names) for group in optimizer.param_groups]
    saved_groups = [group["params"] for group in saved["groups"]]
    if [set(group) for group in groups] != [set(group) for group in saved_groups]:
        raise ValueError(
            f"optimizer must have the parameter groups {saved_groups}, as saved, in this order, got {groups}"
        )


def load_groups(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    names, experts = names_of(model), expert_ids(model)
    for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update({key: value for key, value in saved_group.items() if key != "params"})
        for parameter in (p for p in group["params"] if id(p) not in experts):
            state = saved["state"].get(names[id(parameter)], {})
            optimizer.state[parameter] = {
                key: placed_as(value, parameter)
                if getattr(value, "shape", None) == parameter.shape
                else single_value(value, parameter, group)
                for key, value in state.items()
            }


def placed_as(value: Any, like: Any) -> Any:
    """Return a copy of a saved value on the device of `like`, sharded like it if it is a DTensor."""
    if not isinstance(value, Tensor) or not isinstance(like, Tensor):
        return value
    if not hasattr(like, "full_tensor"):
        return value.to(like.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(like.device), mesh, placements, src_data_rank=None)
