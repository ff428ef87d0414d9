"""ProgramState: a whole program for torch.distributed.checkpoint, for any placement and number of ranks.

Each stack of experts is a DTensor [E, ...] in the order of the experts, on the Parameter's memory if the placement
assigns the homes in this order. Otherwise rows travel to the ranks of the slices and back.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from isoload.layer.pretrained import (
    all_processes,
    check_parameters,
    other_entries,
    plain_name,
    stored_layers,
    unwrapped,
)
from isoload.layer.state import (
    check_described,
    check_groups,
    check_plain,
    describe,
    expert_ids,
    group_names,
    names_of,
    optimizer_facts,
)
from isoload.layer.stored import StoredExperts, gather_rows, load_full
from isoload.transport import CollectiveGroup
from isoload.weights.layout import Address, Move, home_addresses, move_rows
from isoload.weights.shard import local_part
from isoload.weights.storage import FULL


class ProgramState:
    """A model and its optimizer, for ``torch.distributed.checkpoint.save({"program": program}, checkpoint_id=folder)``
    and ``load`` with the same arguments, which all ranks call together.

    A saved program can be loaded under any placement and number of ranks, by ``async_save`` too, with or without
    fully_shard. The methods are those of torch's protocol ``Stateful``, which torch calls on all ranks.

    Args:
        model: model with isoload layers. Other Parameters are equal on all ranks, or DTensors (fully_shard).
        optimizer: optimizer of these Parameters. None: no optimizer state is saved or loaded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the state with DTensors [E, ...] for experts, on the memory of the model if possible, and with
        optimizer state that does not exist yet, so that a checkpoint can be read into it. "facts" are bytes of
        torch.save.
        """
        model, optimizer = unwrapped(self.model), self.optimizer
        layers = stored_layers(model)
        with all_processes("ProgramState.state_dict").agreeing("state") as facts:
            self._check(layers)
            facts["layers"] = describe(layers)
            facts.update(optimizer_facts(model, optimizer))
        for layer in layers.values():
            layer.meet_readers()  # the state is written in place when a checkpoint is read
        entries = {plain_name(name): value for name, value in other_entries(model).items()}
        for name, layer in layers.items():
            homes = [[stack.detach() for stack in rank.home_rows()] for rank in layer._ranks()]
            stacks = layer._ranks()[0].by_name(slices(layer, homes))
            entries |= {f"{name}.{FULL}{stack}": rows for stack, rows in stacks.items()}
        described = {"layers": describe(layers)}
        if optimizer is None:
            return {"facts": as_bytes(described), "model": entries}
        states, groups = self._optimizer_state(layers)
        return {"facts": as_bytes({**described, **groups}), "model": entries, "optimizer": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a result of :meth:`state_dict`, replicas included. If it does not fit, all ranks raise; if torch has
        read the state into the memory of the model before, the model's values are undefined.
        """
        model, optimizer = unwrapped(self.model), self.optimizer
        layers, values = stored_layers(model), state["model"]
        facts = torch.load(io.BytesIO(state["facts"]), map_location="cpu", weights_only=True)
        with all_processes("ProgramState.load_state_dict").agreeing("load"):
            self._check(layers)
            check_described(facts["layers"], describe(layers))
            if optimizer is not None:
                check_groups(model, optimizer, facts if "groups" in facts else None)
        others = {name: values[plain_name(name)] for name in other_entries(model)}
        model.load_state_dict(others, strict=False)
        for name, layer in layers.items():
            layer.meet_readers()
            ranks = layer._ranks()
            stacks = {stack: values[f"{name}.{FULL}{stack}"] for stack in ranks[0].stored()}
            if layer.group.owns_all:
                full = {FULL + stack: rows for stack, rows in stacks.items()}
                load_full(ranks, layer.placement.num_experts, full)
            else:
                put_slices(layer, list(stacks.values()), [rank.home_rows() for rank in ranks])
                layer.refresh_replicas()
        if optimizer is not None:
            self._load_optimizer(layers, facts, state["optimizer"])

    def _check(self, layers: Mapping[str, StoredExperts]) -> None:
        check_parameters(layers)
        for layer in layers.values() if self.optimizer is not None else ():
            check_plain(layer._ranks())

    def _optimizer_state(self, layers: Mapping[str, StoredExperts]) -> tuple[dict[str, Any], dict[str, Any]]:
        assert self.optimizer is not None
        model = unwrapped(self.model)
        names, experts = names_of(model), expert_ids(model)
        by_id: dict[int, dict[str, Any]] = {}
        unused = set()  # names of trained Parameters without state in the optimizer
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                values = self.optimizer.state.get(parameter)
                if not values and parameter.requires_grad:
                    unused.add(names[id(parameter)])
                    values = first_state(self.optimizer, group, parameter)
                if values:
                    by_id[id(parameter)] = dict(values)
        state = {names[i]: values for i, values in by_id.items() if i not in experts}
        for name, layer in layers.items():
            state |= {f"{name}.{FULL}{stack}": v for stack, v in expert_states(layer, by_id).items()}
        groups = [{**g, "params": group_names(g, names)} for g in self.optimizer.param_groups]
        return state, {"groups": groups, "unused": sorted(unused)}

    def _load_optimizer(
        self, layers: Mapping[str, StoredExperts], facts: Mapping[str, Any], saved: Mapping[str, Any]
    ) -> None:
        assert self.optimizer is not None
        model, optimizer = unwrapped(self.model), self.optimizer
        names, experts = names_of(model), expert_ids(model)
        for group, saved_group in zip(optimizer.param_groups, facts["groups"], strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "params"})
            for parameter in group["params"]:
                name = names[id(parameter)]
                if name in facts["unused"] or name not in saved:
                    optimizer.state.pop(parameter, None)
                elif id(parameter) not in experts:
                    optimizer.state[parameter] = dict(saved[name])
        for name, layer in layers.items():
            for stack in layer._ranks()[0].stored():
                key = f"{name}.{FULL}{stack}"
                if key in saved and key not in facts["unused"]:
                    load_expert_state(layer, optimizer, stack, saved[key])


def as_bytes(facts: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    torch.save(facts, file)
    return file.getvalue()


def first_state(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return the state that an optimizer creates for a Parameter in its first step; neither changes."""
    stand_in = nn.Parameter(torch.zeros_like(parameter.detach()))
    stand_in.grad = torch.zeros_like(stand_in)
    twin: Any = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}
    twin.__dict__ = {**vars(optimizer), **hooks}
    twin.__dict__.pop("step", None)  # a learning rate scheduler counts the steps of its optimizer
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": [stand_in]}
    ]
    twin.step()
    return dict(twin.state.get(stand_in, {}))


def slice_size(layer: StoredExperts) -> int:
    """Return how many experts each rank has, except the last, if a DTensor splits them over the ranks."""
    return -(-layer.placement.num_experts // layer.group.topology.num_ranks)


def slice_moves(layer: StoredExperts) -> list[Move]:
    """Return moves from the home rows to the rows of the ranks' slices; none if every home row is there already."""
    size, homes = slice_size(layer), home_addresses(layer.layouts)
    moves = [Move(homes[e], Address(e // size, e % size)) for e in range(layer.placement.num_experts)]
    return moves if any(source != target for source, target in moves) else []


def slices(layer: StoredExperts, homes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return stacks [E, ...] of all experts, from stacks [homes, ...] of every owned rank. All ranks call it together.
    DTensors, on the memory of the home rows if possible; plain tensors if the process owns all ranks.
    """
    group, num_experts = layer.group, layer.placement.num_experts
    if group.owns_all:
        return gather_rows(group, layer.layouts, homes)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Split

    parts = list(homes[0])
    if moves := slice_moves(layer):
        size = slice_size(layer)
        count = min(size, max(0, num_experts - group.ranks[0] * size))
        parts = [stack.new_zeros(count, *stack.shape[1:]) for stack in parts]
        move_rows(group, "state", moves, [list(homes[0])], [parts])
    assert isinstance(group, CollectiveGroup)
    processes = group.process_group or dist.group.WORLD
    assert processes is not None
    mesh = DeviceMesh.from_group(processes, layer._device().type)
    whole = [torch.empty(num_experts, *part.shape[1:], device="meta") for part in parts]
    return [
        DTensor.from_local(part, mesh, [Split(0)], run_check=False, shape=like.shape, stride=like.stride())
        for part, like in zip(parts, whole, strict=True)
    ]


def put_slices(layer: StoredExperts, stacks: Sequence[Tensor], homes: Sequence[Sequence[Tensor]]) -> None:
    """Write stacks of :func:`slices` into home rows [homes, ...]. All ranks call it together."""
    parts = [[local_part(stack).contiguous() for stack in stacks]]
    moves = [Move(target, source) for source, target in slice_moves(layer)]
    if moves:
        move_rows(layer.group, "state", moves, parts, [list(rows) for rows in homes])
        return
    with torch.no_grad():
        for home, part in zip(homes[0], parts[0], strict=True):
            home.copy_(part)


def expert_states(layer: StoredExperts, by_id: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the optimizer state of a layer's experts by stack and key. All ranks call it together."""
    ranks = layer._ranks()
    result: dict[str, dict[str, Any]] = {}
    for stack, parameter in ranks[0].named_parameters(recurse=False):
        states = [by_id.get(id(getattr(rank, stack)), {}) for rank in ranks]
        for key, value in states[0].items():
            if getattr(value, "shape", None) == parameter.shape:
                [value] = slices(layer, [[state[key]] for state in states])
            result.setdefault(stack, {})[key] = value
    return result


def load_expert_state(
    layer: StoredExperts, optimizer: Optimizer, stack: str, saved: Mapping[str, Any]
) -> None:
    """Load the optimizer state of one stack of a layer's experts. All ranks call it together."""
    ranks = layer._ranks()
    parameters = [getattr(rank, stack) for rank in ranks]
    shape = [layer.placement.num_experts, *parameters[0].shape[1:]]
    for parameter in parameters:
        optimizer.state[parameter] = {
            key: copy.deepcopy(v) for key, v in saved.items() if list(getattr(v, "shape", ())) != shape
        }
    for key, value in saved.items():
        if list(getattr(value, "shape", ())) != shape:
            continue
        if layer.group.owns_all:
            rows = [value[list(rank.layout.homes)] for rank in ranks]
        else:
            rows = [torch.empty_like(p, dtype=value.dtype, requires_grad=False) for p in parameters]
            put_slices(layer, [value], [[row] for row in rows])
        for parameter, row in zip(parameters, rows, strict=True):
            optimizer.state[parameter][key] = row
