"""Loans: which experts a plan lends for one batch, from whose weight rows to whose spare places."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class Loan(NamedTuple):
    """One expert's weights: row of the lender's storages -> spare place of the borrower's pool."""

    lender: int
    row: int
    borrower: int
    place: int


@dataclass(frozen=True)
class RankLoans:
    """One rank's part: what leaves by borrower, then place; what comes by lender, then place.

    rows    weight rows that leave
    places  spare places that what comes goes to
    sent    [R] how many go to every rank; got [R] how many come from it
    """

    rows: list[int]
    places: list[int]
    sent: list[int]
    got: list[int]


class Loans:
    """All loans of one batch and layer, the same on every rank.

    Args:
        slot_to_expert: [P] int32, of the plan: its last spare_slots of every rank say what is borrowed.
        home: [E, 2] int32 rank and weight row of every expert's home.
        home_rows: the same on the host.
        num_ranks: R.
        spare_slots: of every rank.
    """

    def __init__(
        self,
        slot_to_expert: Tensor,
        home: Tensor,
        home_rows: list[tuple[int, int]],
        num_ranks: int,
        spare_slots: int,
    ) -> None:
        self.slot_to_expert, self.home = slot_to_expert, home
        self.num_ranks, self.spare_slots = num_ranks, spare_slots
        self._home_rows = home_rows
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None

    @property
    def on_host(self) -> bool:
        """Whether the plan lies on the host."""
        return self.slot_to_expert.device.type == "cpu"

    def ask(self) -> None:
        """Begins to copy a device's plan to the host: who reads it after dispatch has waited does not wait again."""
        if self.on_host or self._copy is not None:
            return
        spare = self._spare()
        pinned = torch.empty(spare.shape, dtype=spare.dtype, pin_memory=True)
        pinned.copy_(spare, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(spare.device))
        self._copy = pinned, event

    @property
    def has_arrived(self) -> bool:
        """Whether :attr:`each` can be read without a wait."""
        return self.on_host or (self._copy is not None and bool(self._copy[1].query()))

    @cached_property
    def each(self) -> list[Loan]:
        """By borrower, then place. Waits for a plan on a device."""
        self.ask()
        spare = self._spare()
        if self._copy is not None:
            spare, event = self._copy
            event.synchronize()
        return [
            Loan(lender, row, borrower, place)
            for borrower, experts in enumerate(spare.tolist())
            for place, expert in enumerate(experts)
            if expert >= 0
            for lender, row in (self._home_rows[expert],)
        ]

    def of_rank(self, rank: int) -> RankLoans:
        out = [loan for loan in self.each if loan.lender == rank]
        came = [loan for loan in self.each if loan.borrower == rank]
        came.sort(key=lambda loan: (loan.lender, loan.place))
        return RankLoans(
            rows=[loan.row for loan in out],
            places=[loan.place for loan in came],
            sent=[sum(loan.borrower == r for loan in out) for r in range(self.num_ranks)],
            got=[sum(loan.lender == r for loan in came) for r in range(self.num_ranks)],
        )

    def _spare(self) -> Tensor:
        """[R, spare_slots] the borrowed experts, -1 = none."""
        per_rank = self.slot_to_expert.view(self.num_ranks, -1)
        return per_rank.narrow(1, per_rank.shape[1] - self.spare_slots, self.spare_slots)
