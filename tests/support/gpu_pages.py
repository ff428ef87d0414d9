"""A GPU's virtual memory on the CPU: the rules of the CUDA driver's calls, over one file in memory whose pages can show
at several addresses.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
NONE, READ_WRITE, SHARED, PRIVATE, FIXED, ANONYMOUS = 0, 3, 1, 2, 0x10, 0x20


class StandIn:
    """Stand-in for CudaDriver; a wrong call fails as the driver's does.

    capacity: pages that the device has; None = any number.
    """

    def __init__(self, page_bytes: int = 4 * mmap.PAGESIZE, capacity: int | None = None) -> None:
        self.page_bytes, self.capacity = page_bytes, capacity
        self.created, self.waits = 0, 0
        self.ranges: list[tuple[int, int]] = []
        self.mapped: dict[int, int] = {}  # address -> page
        self.waited = False
        self._file = os.memfd_create("pages")

    def reserve(self, num_bytes: int) -> int:
        assert num_bytes > 0 and num_bytes % self.page_bytes == 0
        address = self._map(0, num_bytes, NONE, PRIVATE | ANONYMOUS, -1, 0)
        self.ranges.append((address, address + num_bytes))
        return address

    def create(self) -> int:
        if self.created == self.capacity:
            raise RuntimeError("no memory left for a page")
        self.created += 1
        os.ftruncate(self._file, self.created * self.page_bytes)
        return self.created - 1

    def map(self, address: int, page: int) -> None:
        assert 0 <= page < self.created and address not in self.mapped, "mapped twice"
        assert any(first <= address and address + self.page_bytes <= end for first, end in self.ranges)
        assert all(
            (address - first) % self.page_bytes == 0 for first, end in self.ranges if first <= address < end
        )
        self._map(address, self.page_bytes, NONE, SHARED | FIXED, self._file, page * self.page_bytes)
        self.mapped[address] = page

    def unmap(self, address: int) -> None:
        assert self.waited, "a kernel may still read the page"
        del self.mapped[address]
        self._map(address, self.page_bytes, NONE, PRIVATE | ANONYMOUS | FIXED, -1, 0)

    def allow(self, address: int, num_bytes: int) -> None:
        pages = range(address, address + num_bytes, self.page_bytes)
        assert num_bytes > 0 and all(page in self.mapped for page in pages), "access to a page without memory"
        assert LIBC.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), READ_WRITE) == 0
        self.waited = False  # a kernel may use the pages from now on

    def tensor(self, address: int, num_bytes: int, owner: object) -> Tensor:
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(memory, dtype=torch.uint8)

    def wait(self) -> None:
        self.waits, self.waited = self.waits + 1, True

    def pages_of(self, tensor: Tensor) -> int:
        """Pages with memory of their own behind a tensor of uint8."""
        first = tensor.data_ptr()
        return sum(
            first <= address < first + tensor.nbytes and page > 0 for address, page in self.mapped.items()
        )

    def _map(self, address: int, size: int, access: int, flags: int, file: int, offset: int) -> int:
        got = LIBC.mmap(
            ctypes.c_void_p(address), ctypes.c_size_t(size), access, flags, file, ctypes.c_long(offset)
        )
        assert got not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        assert address in (0, got)
        return int(got)
