"""Backend: how borrowed weights come to spare places and their gradients return. One result, whichever does it.

Lists run over the ranks that the process owns. held: a rank's W weight stacks [rows, ...]; pools: its W spare stacks
[spare_slots, ...]; totals: its W gradients [homes, ...], in the pools' dtype or in max(float32, dtype). Gradients are
added as :func:`isoload.weights.moves.add_back` says: by ascending borrowing rank, then place, rounded once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from isoload.transport import Group
from isoload.transport.peers import Peers
from isoload.weights.borrow_plan import BorrowPlan
from isoload.weights.moves import Stacks, Wait


class Backend(ABC):
    """How weights are borrowed; one for all layers of a group. All ranks make the same calls in the same order."""

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

    def new_stack(self, like: Tensor, rows: int) -> Tensor:
        """[rows, ...] zeros that this backend can read on every rank."""
        return like.new_zeros(rows, *like.shape[1:])

    def new_spare(self, like: Tensor, rows: int) -> Tensor:
        """[rows, ...] zeros that this backend can bring weights to."""
        return like.new_zeros(rows, *like.shape[1:])
