"""Boards: the memory through which ranks gather rows without a collective, see :func:`isoload.ops.gather_rows`."""

from __future__ import annotations

import torch
from torch import Tensor

from isoload.ops import board_words, gather_rows
from isoload.topology import Topology
from isoload.transport.peers import Peers


class Boards:
    """Boards of one rank among all on one device, one for each width of rows.

    Args:
        peers: all ranks' memory.
        device: of the rows.
        topology: R ranks.
        rank: this one.
        timeout: seconds until a rank is late.
    """

    def __init__(
        self, peers: Peers, device: torch.device, topology: Topology, rank: int, timeout: float
    ) -> None:
        self._peers, self._device, self._topology = peers, device, topology
        self._rank, self._timeout = rank, timeout
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # by width: the own board, and the addresses of all

    def gather(self, row: Tensor) -> Tensor:
        """[R, W] int32 of every rank's row [W]; all ranks call it together. The first of a width makes its boards."""
        if len(row) not in self._made:
            self._made[len(row)] = self._make(len(row))
        board, addresses = self._made[len(row)]
        return gather_rows(row, addresses, board, self._rank, timeout=self._timeout)

    def _make(self, width: int) -> tuple[Tensor, Tensor]:
        words = board_words(self._topology.num_ranks, width)
        with torch.inference_mode(False):  # else only inference could write it
            board = self._peers.new((words,), torch.int32, self._device)
            self._peers.meet()  # nobody puts a row before all boards are zeros
            at = [there.data_ptr() for there in self._peers.reach([board])]
            return board, torch.tensor(at, device=self._device)
