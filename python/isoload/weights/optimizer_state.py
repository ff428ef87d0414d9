"""The full state that an optimizer keeps of a layer's experts: rows [E, ...] in the order of experts, as full_state."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isoload.transport import Call, Group, checksum
from isoload.weights.full_state import gather_rows
from isoload.weights.layout import Layout
from isoload.weights.migrate import state_fields
from isoload.weights.optimizer_steps import expert_parameters, has_rows, note_experts
from isoload.weights.state import FULL, HOMES
from isoload.weights.storage import RankWeights

State = dict[str, dict[str, Any]]  # by stack and key


def gather_optimizer(
    group: Group, ranks: Sequence[RankWeights], held: Sequence[Layout], optimizer: Optimizer
) -> State:
    """What the optimizer keeps of every expert, on every process. All ranks call it together with the layouts [R]."""
    fields: list[list[tuple[str, str, str]]] = []
    call = Call(group, "placement", ranks[0].row_of_slot.device)
    with call:
        _check_held(ranks)
        fields = [state_fields(optimizer, rank) for rank in ranks]
    names = ("checksum of the optimizer's state names and dtypes",)
    call.agree("placement", names, [(checksum(own),) for own in fields])
    stacks = [
        [optimizer.state[getattr(rank, name)][key] for name, key, _ in own]
        for rank, own in zip(ranks, fields, strict=True)
    ]
    full: State = {}
    for name, parameter in expert_parameters(ranks[0]):
        own = optimizer.state.get(parameter, {})
        whole = {
            key: copy.deepcopy(v) for key, v in own.items() if key != HOMES and not has_rows(v, parameter)
        }
        full[FULL + name] = whole
    if fields[0]:
        for (name, key, _), rows in zip(fields[0], gather_rows(group, held, stacks), strict=True):
            full[FULL + name][key] = rows
    return full


@torch.no_grad()
def load_optimizer(
    ranks: Sequence[RankWeights], num_experts: int, optimizer: Optimizer, state: Mapping[str, Any]
) -> None:
    """Gives the optimizer the rows of every owned rank's homes out of a full state.

    Raises:
        ValueError: before anything is changed, naming the key, the rule and the value.
    """
    _check_held(ranks)
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    trained = [[(n, p) for n, p in expert_parameters(rank) if p.requires_grad] for rank in ranks]
    for own in trained:
        for name, parameter in own:
            if id(parameter) not in groups:
                raise ValueError(f"optimizer must hold the layer's expert Parameters, {name} is missing")
            if FULL + name not in state:
                raise ValueError(f"state must hold {FULL}{name}, got {sorted(state)}")
            wanted = [num_experts, *parameter.shape[1:]]
            for key, value in state[FULL + name].items():
                if isinstance(value, Tensor) and value.numel() != 1 and list(value.shape) != wanted:
                    raise ValueError(
                        f"{FULL}{name} {key} must be {wanted} or one element, got {list(value.shape)}"
                    )
    for rank, own in zip(ranks, trained, strict=True):
        homes = list(rank.layout.homes)
        for name, parameter in own:
            how, wanted = groups[id(parameter)], [num_experts, *parameter.shape[1:]]
            counts_there = how.get("capturable", False) or how.get("fused", False)
            kept = {}
            for key, value in state[FULL + name].items():
                if isinstance(value, Tensor) and list(value.shape) == wanted:
                    kept[key] = value[homes].to(parameter.device)
                elif isinstance(value, Tensor):
                    kept[key] = value.clone().to(parameter.device if counts_there else value.device)
                else:
                    kept[key] = copy.deepcopy(value)
            optimizer.state[parameter] = kept
        note_experts(optimizer, rank)


def _check_held(ranks: Sequence[RankWeights]) -> None:
    """Raises ValueError unless all stacks are plain Parameters of the layer."""
    for rank in ranks:
        found = [name for name, p in expert_parameters(rank) if not hasattr(p, "to_local")]
        if len(found) != len(rank.stored()):
            raise ValueError(
                f"experts must be plain Parameters of the layer for their optimizer state, {list(rank.stored())}, got "
                f"{found} beside parametrized ones, DTensors or a Shard given as a function: keep it by its owner"
            )
