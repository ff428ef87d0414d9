"""What one batch borrows, and how those weights come to spare places and their gradients return, by any backend.

Lists run over the ranks that the process owns. held: a rank's W weight stacks [rows, ...]; pools: its W spare stacks
[spare_slots, ...]; totals: its W gradients [homes, ...], in the pools' dtype or in max(float32, dtype). Gradients are
added as :func:`isoload.weights.moves.add_back` says: by ascending borrowing rank, then place, rounded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from isoload.transport import Group
from isoload.transport.peers import Peers
from isoload.weights.moves import Address, Move, Stacks, Wait


@dataclass(eq=False)
class BorrowPlan:
    """What one batch and layer borrows, the same on every rank: from home rows to places in the spare pools.

    slot_to_expert  [P] int32  of the plan: its last spare_slots of every rank say what is borrowed
    home            [E, 2] int32 rank and weight row of every expert's home
    home_rows       the same on the host
    """

    slot_to_expert: Tensor
    home: Tensor
    home_rows: Mapping[int, Address]
    num_ranks: int
    spare_slots: int
    _copy: tuple[Tensor, torch.cuda.Event] | None = field(default=None, init=False)

    @property
    def on_host(self) -> bool:
        """Whether the plan lies on the host."""
        return self.slot_to_expert.device.type == "cpu"

    def start_copy(self) -> None:
        """Begins to copy a device's plan to the host; :attr:`moves` does not wait where dispatch has waited since."""
        if self.on_host or self._copy is not None:
            return
        spare = self.spare
        pinned = torch.empty(spare.shape, dtype=spare.dtype, pin_memory=True)
        pinned.copy_(spare, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(spare.device))
        self._copy = pinned, event

    @property
    def has_arrived(self) -> bool:
        """Whether :attr:`moves` can be read without a wait."""
        return self.on_host or (self._copy is not None and bool(self._copy[1].query()))

    @cached_property
    def moves(self) -> list[Move]:
        """By borrowing rank, then place of its pool. Waits for a plan on a device."""
        self.start_copy()
        spare = self.spare
        if self._copy is not None:
            spare, event = self._copy
            event.synchronize()
        return [
            Move(self.home_rows[expert], Address(rank, place))
            for rank, experts in enumerate(spare.tolist())
            for place, expert in enumerate(experts)
            if expert >= 0
        ]

    @property
    def rows(self) -> int:
        """The fewest weight rows that hold every rank's homes, the same on every rank."""
        return 1 + max(address.row for address in self.home_rows.values())

    @property
    def spare(self) -> Tensor:
        """[R, spare_slots] the borrowed experts, -1 = none."""
        per_rank = self.slot_to_expert.view(self.num_ranks, -1)
        return per_rank.narrow(1, per_rank.shape[1] - self.spare_slots, self.spare_slots)


class Backend(ABC):
    """How weights are borrowed; one for all layers of a group. All ranks make the same calls in the same order.

    why: the reason for the choice of this backend.
    """

    why = "the ranks read each other's memory"
    name: ClassVar[str]
    reads_moves: ClassVar[bool] = True  # whether the host must have the plan's moves
    reads_peers: ClassVar[bool] = False  # whether it reads other ranks' memory: of the same shape on all

    def __init__(self, group: Group, peers: Peers | None = None) -> None:
        self.group, self.peers = group, peers

    @abstractmethod
    def start(self, stage: str, plan: BorrowPlan, held: Stacks, pools: Stacks) -> Wait:
        """Begins to copy what the owned ranks borrow into their pools; the result waits for it.

        The field's names: DeepEP's ``lb_prefetch_weights``, MoonEP's ``prefetch_weights``.
        """

    @abstractmethod
    def add_back(self, stage: str, plan: BorrowPlan, grads: Stacks, totals: Stacks) -> None:
        """Adds the gradients of all places to the totals of their homes: the field's ``reduce_grad``."""

    def meet(self) -> None:  # noqa: B027  # only backends that read peers' memory have a reader to wait for
        """Make what the current stream writes to home rows later wait for peers that still read them. All ranks call it
        together."""

    def new_stack(self, like: Tensor, rows: int) -> Tensor:
        """[rows, ...] zeros that this backend can read on every rank."""
        return like.new_zeros(rows, *like.shape[1:])

    def new_spare(self, like: Tensor, rows: int) -> Tensor:
        """[rows, ...] zeros that this backend can bring weights to."""
        return like.new_zeros(rows, *like.shape[1:])
