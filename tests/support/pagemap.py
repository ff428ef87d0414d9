"""Bytes of paged tensors that take memory, as the kernel counts them."""

from __future__ import annotations

import mmap

import numpy as np

from isoload.weights.pages import PagedTensor, PagePool

# Bits of an entry in /proc/self/pagemap: the page is in memory, and it is this process's alone. A page that was read
# and never written is the kernel's page of zeros, which all processes share.
IN_MEMORY = np.uint64(1 << 63 | 1 << 56)
ENTRY_BYTES = 8


def resident_bytes(paged: PagedTensor) -> int:
    """The bytes of the tensor's pages that take memory now."""
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(paged.tensor.data_ptr() // mmap.PAGESIZE * ENTRY_BYTES)
        entries = np.frombuffer(file.read(ENTRY_BYTES * paged.layout.num_pages), dtype=np.uint64)
    return int(((entries & IN_MEMORY) == IN_MEMORY).sum()) * mmap.PAGESIZE


def resident_by_layer(pool: PagePool) -> dict[int, int]:
    return {layer: sum(map(resident_bytes, tensors)) for layer, tensors in pool.layers.items()}
