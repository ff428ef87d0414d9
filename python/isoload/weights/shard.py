"""Shard: home rows in a model's own memory (Parameters, DTensors, views); the migration to a new placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement, check_same_shape
from isoload.transport import Group, checksum
from isoload.weights.experts import NAMES, ExpertWeights
from isoload.weights.layout import Address, Layout, move_rows, replica_moves
from isoload.weights.schedule import plan_moves, spread_moves
from isoload.weights.storage import RankWeights, new_stack, version_of


@dataclass(frozen=True)
class Shard:
    """The home experts of one rank in the model's own memory: nothing is copied, gradients reach its Parameters.

    A layer made of shards allocates memory for replicas only, and ``load_placement`` moves only replicas.

    Args:
        experts: the rank's home experts in the placement, ascending; row i of every stack belongs to experts[i].
        weights: stacks of Parameters, DTensors (their local part is used), or tensors without gradients: the layer
            registers them as its Parameters. Or a function that returns the stacks as differentiable views of
            Parameters that are registered elsewhere, DTensors unchanged; it is called several times in a batch.
    """

    experts: Sequence[int]
    weights: ExpertWeights | Callable[[], ExpertWeights]

    def owner_stacks(self) -> ExpertWeights:
        """Return the stacks as the owner has them."""
        return self.weights if isinstance(self.weights, ExpertWeights) else self.weights()

    def read(self) -> ExpertWeights:
        """Return the stacks [homes, ...] on this process."""
        weights = self.owner_stacks()
        return replace(weights, **{name: local_part(stack) for name, stack in weights.stacks().items()})


def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's part on this process, connected in autograd; other tensors unchanged."""
    read: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if read is None else read()


class ShardWeights(RankWeights):
    """One rank's weight rows of a layer: home rows of a Shard, replica rows in a storage of their own."""

    def __init__(
        self,
        layout: Layout,
        shard: Shard,
        num_rows: int,
        spare_slots: int = 0,
        new_stack: Callable[[Tensor, int], Tensor] = new_stack,
    ) -> None:
        nn.Module.__init__(self)
        self.layout = layout
        weights, local = shard.weights, shard.read()
        self._shard = None if isinstance(weights, ExpertWeights) else shard
        self.reads_elsewhere = self._shard is not None
        for name in NAMES:
            parameter = getattr(weights, name) if isinstance(weights, ExpertWeights) else None
            if parameter is not None and not isinstance(parameter, nn.Parameter):
                parameter = nn.Parameter(parameter, requires_grad=False)  # on the same memory
            self.register_parameter(name, parameter)
            stack: Tensor | None = getattr(local, name)
            stored = None if stack is None else new_stack(stack.detach(), num_rows - len(layout.homes))
            setattr(self, f"stored_{name}", stored)
        self.place_rows(num_rows, spare_slots, local.down.device)
        self._refreshed = None  # no replica has been copied yet

    def homes(self) -> dict[str, Tensor]:
        if self._shard is not None:
            return self._shard.read().stacks()
        return {name: local_part(p) for name, p in super().homes().items()}

    def versions(self) -> list[int]:
        # An in-place step on a DTensor is counted on the DTensor, not on its local part.
        stacks = super().homes() if self._shard is None else self._shard.owner_stacks().stacks()
        return [version_of(stack) for stack in stacks.values()]

    def check(self, replicated: bool) -> None:
        if replicated and self._shard is not None and not self.is_refreshed():
            again = self.home_rows()
            if any(a.data_ptr() != b.data_ptr() for a, b in zip(self.home_rows(), again, strict=True)):
                raise ValueError(
                    "a Shard given as a function must return views of the same memory in each call if experts have "
                    "replicas, got new memory: return views of the Parameters, or place without replicas"
                )
        super().check(replicated)

    def replica_rows(self) -> list[Tensor]:
        return self.stored_rows()

    def shows_storage(self) -> bool:
        return False

    def check_move(self) -> None:
        """Accept every move, because home rows stay in place."""

    def check_load(self) -> None:
        if self._shard is not None:
            raise ValueError(
                "experts of a Shard given as a function must be loaded where their Parameters are registered, then "
                "refresh_replicas() called on all ranks, got a state for the layer"
            )
        super().check_load()

    def _show_homes(self) -> None:
        """Do nothing, because home rows stay in the model's memory."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._shard is None:  # otherwise the owner of the Parameters saves them
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict[str, Any]:
        if self._shard is not None:
            raise TypeError(
                "experts of a Shard given as a function cannot be copied or pickled, since the copy would read the "
                "original's Parameters: copy their state_dict(), and make a layer of the copy's own"
            )
        return super().__getstate__()


def check_shard(shard: Shard, homes: Sequence[int], rank: int) -> ExpertWeights:
    if list(shard.experts) != list(homes):
        raise ValueError(
            f"experts of rank {rank}'s shard must be its home experts in the placement, ascending, {list(homes)}, "
            f"got {list(shard.experts)}"
        )
    weights = shard.weights
    for name, stack in weights.stacks().items() if isinstance(weights, ExpertWeights) else ():
        if stack.requires_grad and not isinstance(stack, nn.Parameter):
            raise ValueError(
                f"{name} of rank {rank}'s shard must be a Parameter or have no gradient, got a tensor with one: give a "
                "function that returns it"
            )
    local = shard.read()
    if local.num_slots != len(homes):
        raise ValueError(
            f"rank {rank}'s shard must hold the {len(homes)} experts {list(homes)}, got {local.num_slots}"
        )
    return local


# Facts that every rank must give load_placement identically, in the order of move_facts.
FACTS = (
    "layer",
    "rows_per_chunk",
    "checksum of slot_to_expert",
    "checksum of home_slot",
    "checksum of the earlier rows",
    "checksum of the optimizer's state names and dtypes",
)


def check_move(now: Placement, new: Placement, rows_per_chunk: int, ranks: Sequence[RankWeights]) -> None:
    check_same_shape(now, new)
    if rows_per_chunk < 2:
        raise ValueError(f"rows_per_chunk must be at least 2, got {rows_per_chunk}")
    for rank in ranks:
        rank.check_move()


def move_facts(
    placed: PlacedLayers,
    before: Sequence[Layout],
    after: Sequence[Layout],
    num_rows: Sequence[int],
    rows_per_chunk: int,
    ranks: Sequence[RankWeights],
    optimizer: Optimizer | Literal["none"] | None,
) -> list[list[int]]:
    for rank, (layout, rows) in enumerate(zip(after, num_rows, strict=True)):
        if len(layout.experts) > rows:
            raise ValueError(
                f"placement must fit in the {rows} weight rows of rank {rank}, got {len(layout.experts)} experts "
                "(see weight_rows)"
            )
    for rank, (now, new) in enumerate(zip(before, after, strict=True)):
        if isinstance(ranks[0], ShardWeights) and now.homes != new.homes:
            raise ValueError(
                f"placement must keep the homes of experts given as shards, on rank {rank} {sorted(now.homes)}, "
                f"got {sorted(new.homes)}"
            )
    assert placed.layer is not None
    slots, homes = (array[placed.layer].tolist() for array in placed.host.arrays)
    shared = [placed.layer, rows_per_chunk, *map(checksum, (slots, homes, [r.experts for r in before]))]
    moved = None if isinstance(optimizer, str) else optimizer
    facts = [[*shared, checksum(moved and state_fields(moved, rank))] for rank in ranks]
    homes_move = any(now.homes != new.homes for now, new in zip(before, after, strict=True))
    if optimizer is None and homes_move and any(rank.had_gradients for rank in ranks):
        raise ValueError(
            "optimizer must be given if experts that had gradients move, because it may keep state by row; pass 'none' "
            "if no optimizer keeps state, got None"
        )
    return facts


def move_weights(
    group: Group,
    ranks: Sequence[RankWeights],
    before: Sequence[Layout],
    after: Sequence[Layout],
    rows_per_chunk: int,
) -> None:
    """Move the storages of a layer from one layout [R] to the next; the caller then updates the Parameters."""
    if isinstance(ranks[0], ShardWeights):
        sources, targets = [r.home_rows() for r in ranks], [r.replica_rows() for r in ranks]
        moves = [
            m for m in replica_moves(after) if replica_at(after, m.target) != replica_at(before, m.target)
        ]
        chunks = spread_moves(moves, rows_per_chunk, len(after))
    else:
        sources = targets = [rank.stored_rows() for rank in ranks]
        chunks = plan_moves([r.experts for r in before], [r.experts for r in after], rows_per_chunk)
    for chunk in chunks:
        move_rows(group, "placement", chunk, sources, targets)


def replica_at(layouts: Sequence[Layout], place: Address) -> Sequence[int]:
    return layouts[place.rank].replicas[place.row : place.row + 1]


@torch.inference_mode(False)  # otherwise only inference mode could step on it
def move_state(
    group: Group,
    ranks: Sequence[RankWeights],
    optimizer: Optimizer,
    before: Sequence[Layout],
    after: Sequence[Layout],
    rows_per_chunk: int,
) -> None:
    """Move the optimizer's state of home rows; a rank whose number of homes changes gets new tensors."""
    chunks = plan_moves([r.homes for r in before], [r.homes for r in after], rows_per_chunk)
    for name, key in sorted({field[:2] for rank in ranks for field in state_fields(optimizer, rank)}):
        states = [optimizer.state[getattr(rank, name)] for rank in ranks]
        counts = [len(after[rank].homes) for rank in group.ranks]
        stacks = [_resized(state[key], count) for state, count in zip(states, counts, strict=True)]
        for chunk in chunks:
            move_rows(group, "placement state", chunk, [[s] for s in stacks], [[s] for s in stacks])
        for state, stack, count in zip(states, stacks, counts, strict=True):
            state[key] = stack if len(stack) == count else stack[:count].clone()


def _resized(tensor: Tensor, count: int) -> Tensor:
    missing = count - len(tensor)
    if missing <= 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def state_fields(optimizer: Optimizer, rank: RankWeights) -> list[tuple[str, str, str]]:
    """Return (stack, key, dtype) of all state with a row per expert that the optimizer keeps for a rank."""
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    fields = []
    for name, parameter in rank.named_parameters(recurse=False):
        if not parameter.requires_grad:
            continue
        if id(parameter) not in known:
            raise ValueError(f"optimizer must hold the layer's expert Parameters, {name} is missing")
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.shape == parameter.shape:
                fields.append((name, key, str(value.dtype)))
            elif value.numel() != 1:
                raise ValueError(
                    f"optimizer state {key} of {name} must have the shape {list(parameter.shape)} or one element, "
                    f"got {list(value.shape)}"
                )
    return sorted(fields)
