"""Weights in pages: tensors [S, ...] whose last rows have no memory, and the slots of a rank that do.

An engine wants the same number of slots in every layer and on every rank. A ragged placement has fewer on some. The
tensors stay rectangular in virtual memory, and the pages of absent slots are given back to the operating system. On
the CPU the memory is an anonymous mapping. There is no CUDA backing yet.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class PageLayout(NamedTuple):
    """Pages of a tensor of rows, of which the first have memory.

    row_bytes: of one row. num_rows: S. page_bytes: of one page.
    """

    row_bytes: int
    num_rows: int
    page_bytes: int

    @property
    def num_pages(self) -> int:
        """Pages of the whole tensor."""
        return self.pages_of(self.num_rows)

    def pages_of(self, rows: int) -> int:
        """Return the number of pages, from the first on, that have memory if this many rows have memory.

        The last row's page has memory even if the row fills only a part of the page.
        """
        return -(-self.row_bytes * rows // self.page_bytes)

    def check(self, rows: int) -> None:
        if not 0 <= rows <= self.num_rows:
            raise ValueError(f"rows must be in 0..{self.num_rows}, got {rows}")


class PagedTensor:
    """Copy of a tensor [S, ...] whose first rows alone have memory; absent rows read as zeros.

    Nothing may write to an absent row: the write would take memory that no pool has counted.

    Args:
        values: [S, ...] on the CPU; the first `rows` rows are copied.
        rows: number of rows with memory.

    Raises:
        ValueError: the tensor is on another device, or has no bytes.
    """

    def __init__(self, values: Tensor, rows: int) -> None:
        if values.device.type != "cpu":
            raise ValueError(
                f"weights must be on the CPU to be paged, got {values.device}: pages on CUDA are not implemented"
            )
        if values.dim() == 0 or values.nbytes == 0:
            raise ValueError(f"weights must have rows of at least one byte, got shape {list(values.shape)}")
        self.layout = PageLayout(values.nbytes // len(values), len(values), mmap.PAGESIZE)
        self.layout.check(rows)
        self._memory = mmap.mmap(
            -1, self.layout.num_pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take memory for many small ones
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8, count=values.nbytes)
        self.tensor = whole.view(values.dtype).view(values.shape)
        self.tensor[:rows] = values[:rows]
        self.rows = rows

    def resize(self, rows: int) -> None:
        """Give back the pages behind the first `rows` rows, or let further rows be written."""
        self.layout.check(rows)
        first, end = (self.layout.pages_of(number) * mmap.PAGESIZE for number in (rows, self.rows))
        if first < end:
            self._memory.madvise(mmap.MADV_DONTNEED, first, end - first)
        self.rows = rows


class PagePool:
    """All paged tensors of one rank: the number of slots with memory, over all layers, never grows.

    Tensors of one layer have the same number of slots. A page that two rows share is counted with the first of them,
    so after a move between layers a rank may have one page per tensor more or fewer than before.
    """

    def __init__(self) -> None:
        self.layers: dict[int, list[PagedTensor]] = {}
        self.limit = 0  # slots with memory when the last layer was added

    def add(self, layer: int, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Copy a layer's tensors [S, ...] into pages, of which `rows` slots have memory; return the new tensors."""
        paged = [PagedTensor(tensor, rows) for tensor in tensors]
        self.layers[layer] = paged
        self.limit += rows
        return [copy.tensor for copy in paged]

    @property
    def slots(self) -> dict[int, int]:
        """Slots with memory by layer."""
        return {layer: tensors[0].rows for layer, tensors in self.layers.items()}

    def resize(self, slots: Mapping[int, int]) -> None:
        """Change the number of slots of some layers: layers that shrink give pages before others take them.

        Raises:
            ValueError: all layers together would have more slots than at the start; nothing has changed then.
        """
        wanted = sum((self.slots | dict(slots)).values())
        if wanted > self.limit:
            raise ValueError(
                f"slots with memory must be at most {self.limit} over all layers, as at the start, got {wanted}"
            )
        for layer, rows in sorted(slots.items(), key=lambda entry: entry[1] - self.slots[entry[0]]):
            for tensor in self.layers[layer]:
                tensor.resize(rows)

    def slot_bytes(self) -> dict[int, int]:
        """Return the bytes of one slot, by layer."""
        return {layer: sum(t.layout.row_bytes for t in tensors) for layer, tensors in self.layers.items()}


def resident_slots(table: Tensor, num_ranks: int) -> Tensor:
    """Return [L, R] slots with an expert on every rank.

    Args:
        table: [L, P] expert in each slot; -1 = absent.
        num_ranks: R.

    Raises:
        ValueError: an absent slot comes before a slot with an expert on its rank; names layer and rank.
    """
    filled = table.reshape(len(table), num_ranks, -1) >= 0
    slots = filled.sum(2)
    wrong = filled != (torch.arange(filled.shape[2], device=table.device) < slots[:, :, None])
    if wrong.any():
        layer, rank, _ = wrong.nonzero()[0].tolist()
        raise ValueError(f"absent slots must be the last of their rank, not so in layer {layer}, rank {rank}")
    return slots
