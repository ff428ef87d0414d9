"""gather_rows: every rank's row to every rank, through memory that all of them write; wrapper and fake kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isoload.ops.library import call, library

_gather_rows = library.gather_rows.default
LINE_WORDS = 32


def board_words(num_ranks: int, width: int) -> int:
    """The int32 words of a rank's board for rows [width]: two places for every rank, each beside its round's number."""
    return LINE_WORDS * (1 + 2 * num_ranks * (width // LINE_WORDS + 1))


def gather_rows(
    row: Tensor,
    boards: Tensor,
    board: Tensor,
    rank: int,
    *,
    beside: Sequence[int] = (),
    timeout: float = 60.0,
) -> tuple[Tensor, Tensor]:
    """All ranks' rows, without a collective: one kernel puts this rank's into every board and waits for the others'.

    All ranks call it together, each in one stream; the host waits for nothing. The number of the round lies in the
    board, so a captured graph may hold the call.

    Args:
        row: [W] int32; W is the same on all ranks.
        boards: [R] int64 address of every rank's board, as this rank reaches it.
        board: [board_words(R, W + F)] int32, this rank's, which all ranks write; zeros before the first round of any
            rank, else left alone.
        rank: this rank.
        beside: F integers of 32 bits that travel with the row, at most 32; F is the same on all ranks.
        timeout: seconds to wait for the other ranks' rows, in milliseconds.

    Returns:
        [R, W] and [R, F] int32, the same on all ranks. Where a rank was late, on CUDA: 2^31 - 1 in its rows, and 0 in
        all others, in this call and in all that follow with this board.

    Raises:
        RuntimeError: on the CPU, naming the rank that was late.
    """
    rows, told = call(_gather_rows, row, list(beside), boards, board, rank, round(timeout * 1000))
    return rows, told


@torch.library.register_fake("isoload::gather_rows")
def _(
    row: Tensor, beside: list[int], boards: Tensor, board: Tensor, rank: int, timeout_ms: int
) -> tuple[Tensor, Tensor]:
    ranks = boards.shape[0]
    return row.new_empty(ranks, row.shape[0]), row.new_empty(ranks, len(beside))
