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


@dataclass(frozen=True, eq=False)
class Loans:
    """All loans of one batch and layer, the same on every rank.

    slot_to_expert  [P] int32    of the plan: its last spare_slots of every rank say what is borrowed
    home            [E, 2] int32 rank and weight row of every expert's home
    home_rows       the same on the host
    """

    slot_to_expert: Tensor
    home: Tensor
    home_rows: list[list[int]]
    num_ranks: int
    spare_slots: int

    def __post_init__(self) -> None:
        if self.on_host:
            return
        # Asked for now, so that whoever reads it after dispatch has waited for the host does not wait again.
        spare = self._spare()
        pinned = torch.empty(spare.shape, dtype=spare.dtype, pin_memory=True)
        pinned.copy_(spare, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self.__dict__["_copied"] = pinned, event

    @property
    def on_host(self) -> bool:
        """Whether the plan can be read without a wait."""
        return self.slot_to_expert.device.type == "cpu"

    @property
    def has_arrived(self) -> bool:
        """Whether the plan's copy on the host is complete."""
        return self.on_host or bool(self.__dict__["_copied"][1].query())

    @cached_property
    def each(self) -> list[Loan]:
        """By borrower, then place. Waits for a plan on a device."""
        if self.on_host:
            spare = self._spare().tolist()
        else:
            pinned, event = self.__dict__["_copied"]
            event.synchronize()
            spare = pinned.tolist()
        return [
            Loan(self.home_rows[expert][0], self.home_rows[expert][1], borrower, place)
            for borrower, experts in enumerate(spare)
            for place, expert in enumerate(experts)
            if expert >= 0
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
