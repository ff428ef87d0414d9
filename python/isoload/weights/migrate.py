"""From one placement to the next: what ranks must agree on first, then the rows of weights and of optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from isoload.placement.placed_layers import PlacedLayers
from isoload.placement.placement import Placement, check_same_shape
from isoload.transport import Group, checksum
from isoload.weights.layout import Layout, replica_moves
from isoload.weights.moves import Address, move_rows
from isoload.weights.schedule import plan_moves, spread_moves
from isoload.weights.shard import ShardWeights, check_homes_stay
from isoload.weights.storage import RankWeights

# What every rank must give load_placement alike, in the order of move_facts
FACTS = (
    "layer",
    "rows_per_chunk",
    "checksum of slot_to_expert",
    "checksum of home_slot",
    "checksum of the rows held before",
    "checksum of the optimizer's state names and dtypes",
)


def check_move(now: Placement, new: Placement, rows_per_chunk: int, ranks: Sequence[RankWeights]) -> None:
    """Raises ValueError if a layer cannot go from one placement to another, or cannot be moved now."""
    check_same_shape(now, new)
    if rows_per_chunk < 2:
        raise ValueError(f"rows_per_chunk must be at least 2, got {rows_per_chunk}")
    for rank in ranks:
        rank.check_move()


def check_no_state(before: Sequence[Layout], after: Sequence[Layout], ranks: Sequence[RankWeights]) -> None:
    """Raises ValueError if an optimizer may keep state of home rows that get other experts."""
    moved = any(now.homes != new.homes for now, new in zip(before, after, strict=True))
    if moved and any(rank.had_gradients for rank in ranks):
        raise ValueError(
            "optimizer must be given where experts that had gradients move, since it may keep state by row, or be "
            "'none' where none keeps any, got None"
        )


def move_facts(
    placed: PlacedLayers,
    before: Sequence[Layout],
    after: Sequence[Layout],
    num_rows: Sequence[int],
    rows_per_chunk: int,
    ranks: Sequence[RankWeights],
    optimizer: Optimizer | None,
) -> list[list[int]]:
    """FACTS of every owned rank."""
    for rank, (layout, rows) in enumerate(zip(after, num_rows, strict=True)):
        if len(layout.experts) > rows:
            raise ValueError(
                f"placement must fit in the {rows} weight rows of rank {rank}, got {len(layout.experts)} experts "
                "(see weight_rows)"
            )
    if isinstance(ranks[0], ShardWeights):
        check_homes_stay(before, after)
    assert placed.layer is not None
    slots, homes = (array[placed.layer].tolist() for array in placed.host.arrays)
    shared = [placed.layer, rows_per_chunk, *map(checksum, (slots, homes, [r.experts for r in before]))]
    return [[*shared, checksum(optimizer and state_fields(optimizer, rank))] for rank in ranks]


def move_weights(
    group: Group,
    ranks: Sequence[RankWeights],
    before: Sequence[Layout],
    after: Sequence[Layout],
    rows_per_chunk: int,
) -> None:
    """Moves the storages of a layer from one layout [R] to the next; the Parameters are to be settled after it.

    Where home rows stay, of a Shard, they are copied into the replica rows that get another expert.
    """
    if isinstance(ranks[0], ShardWeights):
        held, into = [r.home_rows() for r in ranks], [r.replica_rows() for r in ranks]
        moves = [
            m for m in replica_moves(after) if replica_at(after, m.target) != replica_at(before, m.target)
        ]
        chunks = spread_moves(moves, rows_per_chunk, len(after))
    else:
        held = into = [rank.stored_rows() for rank in ranks]
        chunks = plan_moves([r.experts for r in before], [r.experts for r in after], rows_per_chunk)
    for chunk in chunks:
        move_rows(group, "placement", chunk, held, into)


def replica_at(layouts: Sequence[Layout], place: Address) -> Sequence[int]:
    """The expert in a replica row, none behind the last."""
    return layouts[place.rank].replicas[place.row : place.row + 1]


@torch.inference_mode(False)  # else only inference could step on it
def move_state(
    group: Group,
    ranks: Sequence[RankWeights],
    optimizer: Optimizer,
    before: Sequence[Layout],
    after: Sequence[Layout],
    rows_per_chunk: int,
) -> None:
    """Moves the optimizer's state of home rows along, one kind of state after the other.

    A rank whose number of homes changes gets new tensors; others are written in place.
    """
    chunks = plan_moves([r.homes for r in before], [r.homes for r in after], rows_per_chunk)
    for name, key in sorted({field[:2] for rank in ranks for field in state_fields(optimizer, rank)}):
        states = [optimizer.state[getattr(rank, name)] for rank in ranks]
        counts = [len(after[rank].homes) for rank in group.ranks]
        rooms = [_make_room(state[key], count) for state, count in zip(states, counts, strict=True)]
        for chunk in chunks:
            move_rows(group, "placement state", chunk, [[room] for room in rooms], [[room] for room in rooms])
        for state, room, count in zip(states, rooms, counts, strict=True):
            state[key] = room if len(room) == count else room[:count].clone()


def _make_room(tensor: Tensor, count: int) -> Tensor:
    """The tensor with at least so many rows, contiguous."""
    missing = count - len(tensor)
    if missing <= 0:
        return tensor.contiguous()
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def state_fields(optimizer: Optimizer, rank: RankWeights) -> list[tuple[str, str, str]]:
    """(stack, key, dtype) of all state with a row per expert that the optimizer keeps for a rank's Parameters."""
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
