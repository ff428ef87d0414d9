"""Boards: the memory through which ranks gather rows without a collective, see :func:`isoload.ops.gather_rows`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    def gather(
        self,
        row: Tensor,
        beside: Sequence[int] = (),
        by: Callable[..., tuple[Tensor, Tensor]] = gather_rows,
    ) -> tuple[Tensor, Tensor]:
        """[R, W] and [R, F] int32 of every rank's row [W] and F integers; all ranks call it together.

        The first of a width W + F makes its boards.
        """
        width = len(row) + len(beside)
        if width not in self._made:
            self._made[width] = self._make(width)
        board, addresses = self._made[width]
        return by(row, addresses, board, self._rank, beside=beside, timeout=self._timeout)

    def _make(self, width: int) -> tuple[Tensor, Tensor]:
        words = board_words(self._topology.num_ranks, width)
        with torch.inference_mode(False):  # else only inference could write it
            board = self._peers.new((words,), torch.int32, self._device)
            self._peers.meet()  # nobody puts a row before all boards are zeros
            at = [there.data_ptr() for there in self._peers.reach([board])]
            return board, torch.tensor(at, device=self._device)
