"""The full state of a layer's experts: stacks [E, ...] in the order of experts, from all ranks and to each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isoload.experts.weights import NAMES
from isoload.transport import Group
from isoload.weights.layout import Layout, home_addresses
from isoload.weights.moves import Address, Move, move_rows
from isoload.weights.state import FULL, check_kind
from isoload.weights.storage import RankWeights


def gather_full(group: Group, ranks: Sequence[RankWeights], layouts: Sequence[Layout]) -> dict[str, Tensor]:
    """[E, ...] of every stack, on every process. All ranks call it together with the layouts [R]."""
    full = gather_rows(group, layouts, [rank.home_rows() for rank in ranks])
    return {FULL + name: stack for name, stack in ranks[0].by_name(full).items()}


def gather_rows(group: Group, layouts: Sequence[Layout], homes: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """[E, ...] on every process, from stacks [homes, ...] of every owned rank. All ranks call it together."""
    home = home_addresses(layouts)
    # a process that owns all ranks needs one copy
    readers = [0] if group.owns_all else range(len(layouts))
    moves = [Move(home[expert], Address(rank, expert)) for rank in readers for expert in range(len(home))]
    full = [
        [stack.detach().new_zeros(len(home) if rank in readers else 0, *stack.shape[1:]) for stack in stacks]
        for rank, stacks in zip(group.ranks, homes, strict=True)
    ]
    move_rows(group, "state", moves, [list(stacks) for stacks in homes], full)
    return full[0]


@torch.no_grad()
def load_full(ranks: Sequence[RankWeights], num_experts: int, state: Mapping[str, Any]) -> None:
    """Copies every rank's rows, replicas included, out of a full state."""
    for rank in ranks:
        rank.check_load()
        for name in NAMES:
            home = rank.homes().get(name)
            given = state.get(FULL + name)
            wanted = None if home is None else [num_experts, *home.shape[1:]]
            if (found := None if given is None else list(given.shape)) != wanted:
                raise ValueError(f"{FULL}{name} must be {wanted}, got {found}")
            if given is not None and home is not None:
                check_kind(FULL + name, given, home)
    for rank in ranks:
        homes, replicas = list(rank.layout.homes), list(rank.layout.replicas)
        stacks = [state[FULL + name] for name in rank.stored()]
        for stack, home, behind in zip(stacks, rank.home_rows(), rank.replica_rows(), strict=True):
            home.copy_(stack[homes])
            behind[: len(replicas)].copy_(stack[replicas])
        rank.note_refreshed()
