"""Shard: a rank's home rows in memory that is not the layer's own: a model's Parameters, DTensors, views of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from isoload.weights.experts import NAMES, ExpertWeights
from isoload.weights.layout import Layout
from isoload.weights.storage import RankWeights, new_stack, version_of


@dataclass(frozen=True)
class Shard:
    """The experts at home on one rank, where they lie already: nothing is copied, gradients reach their Parameters.

    A layer made of shards has memory of its own for replicas only. Home experts stay where they are:
    ``load_placement`` moves replicas. Home rows and replicas are multiplied by a grouped GEMM each.

    Args:
        experts: those at home on the rank by the placement, ascending; row i of every stack belongs to experts[i].
        weights: stacks of Parameters, DTensors of which the local part is meant, or tensors without gradients: the
            layer registers them as its Parameters. Or a function that returns the stacks as differentiable views of
            Parameters that are registered elsewhere, DTensors as they are; it is called several times in a batch.
    """

    experts: Sequence[int]
    weights: ExpertWeights | Callable[[], ExpertWeights]

    def given(self) -> ExpertWeights:
        """The stacks as the owner has them."""
        return self.weights if isinstance(self.weights, ExpertWeights) else self.weights()

    def read(self) -> ExpertWeights:
        """The stacks [homes, ...] on this process."""
        given = self.given()
        return replace(given, **{name: local_part(stack) for name, stack in given.stacks().items()})


def local_part(tensor: Tensor) -> Tensor:
    """A DTensor's part on this process, which autograd follows; others as they are."""
    read: Callable[[], Tensor] | None = getattr(tensor, "to_local", None)
    return tensor if read is None else read()


class ShardWeights(RankWeights):
    """One rank's weight rows of a layer: home rows of a Shard, replica rows in a storage of their own.

    Args:
        layout: the experts of its rows; homes in the order of the shard.
        shard: the home rows.
        num_rows, spare_slots, new_stack: as RankWeights.
    """

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
        given, here = shard.weights, shard.read()
        self._shard = None if isinstance(given, ExpertWeights) else shard
        self.reads_elsewhere = self._shard is not None
        for name in NAMES:
            own = as_parameter(getattr(given, name)) if isinstance(given, ExpertWeights) else None
            self.register_parameter(name, own)
            stack: Tensor | None = getattr(here, name)
            stored = None if stack is None else new_stack(stack.detach(), num_rows - len(layout.homes))
            setattr(self, f"stored_{name}", stored)
        self.place_rows(num_rows, spare_slots, here.down.device)
        self._refreshed = None  # no replica is there yet

    def homes(self) -> dict[str, Tensor]:
        if self._shard is not None:
            return self._shard.read().stacks()
        return {name: local_part(p) for name, p in super().homes().items()}

    def versions(self) -> list[int]:
        # An in-place step on a DTensor counts on the DTensor, not on its local part.
        own = super().homes() if self._shard is None else self._shard.given().stacks()
        return [version_of(stack) for stack in own.values()]

    def replica_rows(self) -> list[Tensor]:
        return self.stored_rows()

    def shows_storage(self) -> bool:
        return False

    def check_move(self) -> None:
        """Home rows stay: nothing of theirs can be in the way."""

    def check_load(self) -> None:
        if self._shard is not None:
            raise ValueError(
                "experts of a Shard given as a function must be loaded where their Parameters are registered, then "
                "refresh_replicas() called on all ranks, got a state for the layer"
            )
        super().check_load()

    def _show_homes(self) -> None:
        """They lie where they are."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if self._shard is None:  # else the owner of the Parameters saves them
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict[str, Any]:
        if self._shard is not None:
            raise TypeError(
                "experts of a Shard given as a function cannot be copied or pickled, since the copy would read the "
                "original's Parameters: copy their state_dict(), and make a layer of the copy's own"
            )
        return super().__getstate__()


def as_parameter(stack: Tensor | None) -> nn.Parameter | None:
    """The Parameter itself, or one on the memory of a tensor without gradients."""
    if stack is None or isinstance(stack, nn.Parameter):
        return stack
    return nn.Parameter(stack, requires_grad=False)


def check_shard(shard: Shard, homes: Sequence[int], rank: int) -> ExpertWeights:
    """A rank's shard, read. Raises ValueError if it cannot hold these home experts."""
    if list(shard.experts) != list(homes):
        raise ValueError(
            f"experts of rank {rank}'s shard must be those at home there by the placement, ascending, {list(homes)}, "
            f"got {list(shard.experts)}"
        )
    given = shard.weights
    for name, stack in given.stacks().items() if isinstance(given, ExpertWeights) else ():
        if stack.requires_grad and not isinstance(stack, nn.Parameter):
            raise ValueError(
                f"{name} of rank {rank}'s shard must be a Parameter or have no gradient, got a tensor with one: give a "
                "function that returns it"
            )
    here = shard.read()
    if here.num_slots != len(homes):
        raise ValueError(
            f"rank {rank}'s shard must hold the {len(homes)} experts {list(homes)}, got {here.num_slots}"
        )
    return here


def check_homes_stay(before: Sequence[Layout], after: Sequence[Layout]) -> None:
    """Raises ValueError if a placement moves experts whose home rows are not the layer's own."""
    for rank, (now, new) in enumerate(zip(before, after, strict=True)):
        if now.homes != new.homes:
            raise ValueError(
                f"placement must keep the homes of experts given as shards, on rank {rank} {sorted(now.homes)}, "
                f"got {sorted(new.homes)}"
            )
