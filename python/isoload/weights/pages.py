"""Weights in pages: tensors [S, ...] whose last rows have no memory, and the slots of a rank that do.

Engines want equal numbers of slots in every layer and on every rank, where a ragged placement has fewer: tensors stay
rectangular in virtual memory, and the pages of absent slots are given back.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class PageLayout(NamedTuple):
    """Pages of a tensor of rows, of which the first have memory."""

    row_bytes: int
    num_rows: int
    page_bytes: int

    @property
    def num_pages(self) -> int:
        return self.pages_of(self.num_rows)

    def pages_of(self, rows: int) -> int:
        """Return how many pages, from the first on, have memory if this many rows have, the last one's included."""
        return -(-self.row_bytes * rows // self.page_bytes)

    def check(self, rows: int) -> None:
        if not 0 <= rows <= self.num_rows:
            raise ValueError(f"rows must be in 0..{self.num_rows}, got {rows}")


class HostMemory:
    """Virtual memory of the CPU: a page takes memory when it is written, and reads as zeros before that."""

    page_bytes = mmap.PAGESIZE

    def __init__(self, num_pages: int) -> None:
        self._memory = mmap.mmap(-1, num_pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a huge page would take memory for many small ones
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)

    def take(self, first: int, end: int) -> None:
        pass

    def give(self, first: int, end: int) -> None:
        self._memory.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)

    def tensor(self, num_bytes: int) -> Tensor:
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes)


class GpuPages:
    """Physical pages of one GPU. Those that a tensor gives back are kept for the tensors that grow. All absent pages
    show one page of zeros, because warm-up, autotuning and masked GEMMs read rows of all slots.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.driver, self.page_bytes = driver, driver.page_bytes
        self.unused: list[int] = []
        self.created = 0  # pages that take memory, without the page of zeros
        self.zeros = driver.create()
        address = driver.reserve(self.page_bytes)
        driver.map(address, self.zeros)
        driver.allow(address, self.page_bytes)
        driver.tensor(address, self.page_bytes, self).zero_()

    def pop(self) -> int:
        if self.unused:
            return self.unused.pop()
        self.created += 1
        return self.driver.create()


class GpuMemory:
    """Address range of a GPU whose pages get memory one by one; it lives as long as the process."""

    def __init__(self, pages: GpuPages, num_pages: int) -> None:
        self.page_bytes, self._pages = pages.page_bytes, pages
        self._address = pages.driver.reserve(num_pages * pages.page_bytes)
        self._mapped: list[int | None] = [None] * num_pages

    def take(self, first: int, end: int) -> None:
        """Give the pages first to end - 1 memory; their contents are undefined."""
        self._show(first, [self._pages.pop() for _ in range(first, end)])

    def give(self, first: int, end: int) -> None:
        """Take the memory of the pages first to end - 1, which show zeros then."""
        pages = [page for page in self._mapped[first:end] if page is not None]
        self._show(first, [self._pages.zeros] * (end - first))
        self._pages.unused += pages

    def tensor(self, num_bytes: int) -> Tensor:
        return self._pages.driver.tensor(self._address, num_bytes, self)

    def _show(self, first: int, pages: Sequence[int]) -> None:
        driver, size = self._pages.driver, self.page_bytes
        if not pages:
            return
        driver.wait()  # a kernel that still reads one of these pages would fail
        for i, page in enumerate(pages, first):
            if self._mapped[i] is not None:
                driver.unmap(self._address + i * size)
            driver.map(self._address + i * size, page)
            self._mapped[i] = page
        driver.allow(self._address + first * size, len(pages) * size)


class PagedTensor:
    """Copy of a tensor [S, ...] whose first rows alone have memory; absent rows read as zeros. Nothing may write to an
    absent row: the write would take memory that no pool has counted.
    """

    def __init__(self, values: Tensor, rows: int, pages: GpuPages | None = None) -> None:
        if pages is None and values.device.type != "cpu":
            raise ValueError(f"weights on {values.device} need the pages of that GPU: use PagePool.add")
        if values.dim() == 0 or values.nbytes == 0:
            raise ValueError(f"weights must have rows of at least one byte, got shape {list(values.shape)}")
        page_bytes = HostMemory.page_bytes if pages is None else pages.page_bytes
        self.layout = PageLayout(values.nbytes // len(values), len(values), page_bytes)
        self.layout.check(rows)
        num = self.layout.num_pages
        self._memory = HostMemory(num) if pages is None else GpuMemory(pages, num)
        present = self.layout.pages_of(rows)
        self._memory.take(0, present)
        if present < num:
            self._memory.give(present, num)
        self.tensor = self._memory.tensor(values.nbytes).view(values.dtype).view(values.shape)
        self.rows = rows
        self.tensor[:rows] = values[:rows]

    def resize(self, rows: int) -> None:
        """Give back the pages behind the first `rows` rows, or let further rows be written."""
        self.layout.check(rows)
        wanted, present = self.layout.pages_of(rows), self.layout.pages_of(self.rows)
        if wanted < present:
            self._memory.give(wanted, present)
        elif present < wanted:
            self._memory.take(present, wanted)
        self.rows = rows


class PagePool:
    """All paged tensors of one rank: the number of slots with memory, over all layers, never grows."""

    def __init__(self) -> None:
        self.layers: dict[int, list[PagedTensor]] = {}
        self.limit = 0  # slots with memory when the last layer was added
        self._pages: dict[torch.device, GpuPages] = {}

    def _pages_of(self, device: torch.device) -> GpuPages | None:
        if device.type == "cpu":
            return None
        if device not in self._pages:
            self._pages[device] = GpuPages(CudaDriver(device))
        return self._pages[device]

    def add(self, layer: int, tensors: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Copy a layer's tensors [S, ...] into pages, of which `rows` slots have memory; return the new tensors."""
        paged = [PagedTensor(tensor, rows, self._pages_of(tensor.device)) for tensor in tensors]
        self.layers[layer] = paged
        self.limit += rows
        return [copy.tensor for copy in paged]

    @property
    def on_gpu(self) -> bool:
        return bool(self._pages)

    @property
    def slots(self) -> dict[int, int]:
        return {layer: tensors[0].rows for layer, tensors in self.layers.items()}

    def resize(self, slots: Mapping[int, int]) -> None:
        """Change the number of slots of some layers: those that shrink give pages first. An error changes nothing."""
        wanted = sum((self.slots | dict(slots)).values())
        if wanted > self.limit:
            raise ValueError(
                f"slots with memory must be at most {self.limit} over all layers, as at the start, got {wanted}"
            )
        for layer, rows in sorted(slots.items(), key=lambda entry: entry[1] - self.slots[entry[0]]):
            for tensor in self.layers[layer]:
                tensor.resize(rows)

    def slot_bytes(self) -> dict[int, int]:
        return {layer: sum(t.layout.row_bytes for t in tensors) for layer, tensors in self.layers.items()}


class _Location(ctypes.Structure):
    """CUmemLocation of cuda.h."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp of cuda.h; the last field has the allocation's flags, all 0."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc of cuda.h."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """Virtual memory of one NVIDIA GPU, on which torch has a context, by the CUDA driver API."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or torch.version.hip:
            raise ValueError(f"weights must be on the CPU or on an NVIDIA GPU to be paged, got {device}")
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ValueError(f"pages on {self.device} need the CUDA driver's library: {error}") from None
        location = _Location(1, self.device.index)  # CU_MEM_LOCATION_TYPE_DEVICE
        self._allocation = _Allocation(1, 0, location)  # CU_MEM_ALLOCATION_TYPE_PINNED, not exported
        self._access = _Access(location, 3)  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        size, recommended = ctypes.c_size_t(), ctypes.c_int(1)
        allocation = ctypes.byref(self._allocation)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), allocation, recommended)
        self.page_bytes = size.value

    def reserve(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAddressReserve", ctypes.byref(address), num_bytes, self.page_bytes, 0, 0)
        return address.value

    def create(self) -> int:
        page = ctypes.c_uint64()
        self._call("cuMemCreate", ctypes.byref(page), self.page_bytes, ctypes.byref(self._allocation), 0)
        return page.value

    def map(self, address: int, page: int) -> None:
        self._call("cuMemMap", address, self.page_bytes, 0, page, 0)

    def unmap(self, address: int) -> None:
        self._call("cuMemUnmap", address, self.page_bytes)

    def allow(self, address: int, num_bytes: int) -> None:
        self._call("cuMemSetAccess", address, num_bytes, ctypes.byref(self._access), 1)

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """Return a uint8 tensor over mapped memory; the tensor keeps the owner alive."""
        array = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        view = SimpleNamespace(owner=owner, __cuda_array_interface__=array)
        tensor = torch.as_tensor(view, device=self.device)
        if tensor.data_ptr() != address:
            raise RuntimeError(f"torch copied pages of {self.device} instead of using them")
        return tensor

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver; an int is one of its 64-bit addresses, sizes, handles and flags."""
        values = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments]
        with torch.cuda.device(self.device):
            status = getattr(self._library, name)(*values)
        if status == 2:
            raise RuntimeError(
                f"{name}: {self.device} has no memory left for a page of {self.page_bytes} bytes of expert weights"
            )
        if status:
            raise RuntimeError(f"{name} failed on {self.device} with CUDA driver error {status}")


def resident_slots(table: Tensor, num_ranks: int) -> Tensor:
    """Return [L, R] slots with an expert, which must be the first of their rank, from a table [L, P]; -1 = absent."""
    filled = table.reshape(len(table), num_ranks, -1) >= 0
    slots = filled.sum(2)
    wrong = filled != (torch.arange(filled.shape[2], device=table.device) < slots[:, :, None])
    if wrong.any():
        layer, rank, _ = wrong.nonzero()[0].tolist()
        raise ValueError(f"absent slots must be the last of their rank, not so in layer {layer}, rank {rank}")
    return slots
