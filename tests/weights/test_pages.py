"""Pages of weights: which have memory, what is given back, and the slots of a rank that may have memory."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import mmap
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from isoload.weights import pages as module
from isoload.weights.pages import GpuPages, PagedTensor, PageLayout, PagePool, resident_slots
from support.gpu_pages import StandIn
from support.pagemap import resident_by_layer, resident_bytes

torch.set_num_threads(1)
DRAWN = 200_000


def test_a_row_with_memory_has_memory_for_all_of_its_bytes() -> None:
    """For 200,000 drawn tensors: the pages of the first rows cover them, and one page less would not."""
    draw = np.random.default_rng(0)
    page = draw.choice([4096, 16384, 65536, 2 << 20], DRAWN)
    row = draw.integers(1, 40, DRAWN) * draw.choice([1, 2, 511, 512, 4096, 1 << 20, (2 << 20) // 3], DRAWN)
    num = draw.integers(1, 21, DRAWN)
    rows = draw.integers(0, num + 1)
    pages, whole = np.empty(DRAWN, np.int64), np.empty(DRAWN, np.int64)
    for i, (a, b, c, d) in enumerate(
        zip(row.tolist(), num.tolist(), page.tolist(), rows.tolist(), strict=True)
    ):
        layout = PageLayout(a, b, c)
        pages[i], whole[i] = layout.pages_of(d), layout.num_pages
    assert (pages * page >= row * rows).all()
    assert ((pages - 1) * page < row * rows).all()
    assert (pages <= whole).all() and (pages[rows == num] == whole[rows == num]).all()
    assert ((rows == 0) == (pages == 0)).all()


@pytest.mark.parametrize("width", [1, 700, mmap.PAGESIZE // 4, 3 * mmap.PAGESIZE // 4 + 5])
def test_resident_bytes_are_those_of_the_rows_with_memory(width: int) -> None:
    values = torch.rand(6, width) + 1
    paged = PagedTensor(values, 4)
    layout = paged.layout
    for rows in (4, 2, 5, 6, 0, 1):
        before = paged.tensor.clone() if rows < paged.rows else None
        paged.resize(rows)
        if before is None:
            paged.tensor[:rows] = values[:rows]
        assert torch.equal(paged.tensor[:rows], values[:rows]), rows
        assert resident_bytes(paged) == layout.pages_of(rows) * mmap.PAGESIZE, rows
    first = layout.pages_of(1) * mmap.PAGESIZE
    assert not paged.tensor.view(-1).view(torch.uint8)[first:].any(), "absent rows read as zeros"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32])
def test_a_paged_copy_has_the_bytes_and_the_shape(dtype: torch.dtype) -> None:
    values = torch.randint(0, 100, (3, 5, 7)).to(dtype)
    paged = PagedTensor(values, 3).tensor
    assert paged.shape == values.shape and paged.dtype == dtype
    assert torch.equal(paged.view(torch.uint8), values.view(torch.uint8))


def test_a_rank_never_has_more_slots_than_at_the_start() -> None:
    pool, values = PagePool(), torch.rand(3, mmap.PAGESIZE)
    for layer, rows in ((3, 3), (5, 1)):
        pool.add(layer, [values, values[:, : mmap.PAGESIZE // 2]], rows)
    assert pool.limit == 4 and pool.slots == {3: 3, 5: 1}
    with pytest.raises(ValueError, match=re.escape("slots with memory must be at most 4 over all layers")):
        pool.resize({5: 2})
    assert pool.slots == {3: 3, 5: 1}
    pool.resize({5: 2, 3: 2})
    for tensors in pool.layers.values():
        for tensor in tensors:
            tensor.tensor[:2] = 1.0
    size = values[0].nbytes * 3 // 2
    assert pool.slots == {3: 2, 5: 2} and pool.slot_bytes() == {3: size, 5: size}
    assert resident_by_layer(pool) == {3: 2 * size, 5: 2 * size}


def test_pages_are_given_before_they_are_taken() -> None:
    pool, calls = PagePool(), []
    for layer in (0, 1):
        pool.add(layer, [torch.rand(2, 8)], 1 + layer)
        tensor = pool.layers[layer][0]
        tensor.resize = lambda rows, layer=layer: calls.append((layer, rows))  # type: ignore[method-assign]
    pool.resize({0: 2, 1: 1})
    assert calls == [(1, 1), (0, 2)]


def test_what_cannot_be_paged_is_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("weights must be on the CPU or on an NVIDIA GPU to be paged, got meta")
    ):
        PagePool().add(0, [torch.empty(2, 3, device="meta")], 1)
    with pytest.raises(ValueError, match=re.escape("weights on meta need the pages of that GPU")):
        PagedTensor(torch.empty(2, 3, device="meta"), 1)
    with pytest.raises(
        ValueError, match=re.escape("weights must have rows of at least one byte, got shape [2, 0]")
    ):
        PagedTensor(torch.empty(2, 0), 1)
    with pytest.raises(ValueError, match=r"rows must be in 0\.\.2, got 3"):
        PagedTensor(torch.empty(2, 3), 3)


def test_absent_slots_come_last_on_their_rank() -> None:
    table = torch.tensor([[0, 1, 2, -1], [0, -1, 1, 2]])
    assert resident_slots(table, 2).tolist() == [[2, 1], [1, 2]]
    with pytest.raises(
        ValueError, match="absent slots must be the last of their rank, not so in layer 1, rank 1"
    ):
        resident_slots(torch.tensor([[0, 1, 2, -1], [0, 1, -1, 2]]), 2)


@pytest.mark.parametrize("width", [1, 700, 4 * mmap.PAGESIZE, 5 * mmap.PAGESIZE + 3])
def test_gpu_pages_have_memory_for_the_rows_and_show_zeros_behind_them(width: int) -> None:
    driver = StandIn()
    pages = GpuPages(driver)
    values = torch.randint(1, 256, (6, width), dtype=torch.uint8)
    paged = PagedTensor(values, 4, pages)
    most = 0
    for rows in (4, 2, 5, 6, 0, 1, 6, 3):
        paged.resize(rows)
        paged.tensor[:rows] = values[:rows]
        assert torch.equal(paged.tensor[:rows], values[:rows]), rows
        own = paged.layout.pages_of(rows)
        assert driver.pages_of(paged.tensor) == own
        assert not paged.tensor.view(-1)[own * driver.page_bytes :].any(), "absent pages show zeros"
        most = max(most, own)
    assert driver.created == 1 + most, "pages are used again"


def test_gpu_pages_move_between_layers_and_no_page_has_two_rows() -> None:
    """200 drawn changes of a rank's slots over four layers with two tensors each."""
    draw = np.random.default_rng(1)
    driver = StandIn()
    pool = PagePool()
    pool._pages[torch.device("cpu")] = GpuPages(driver)
    pool._pages_of = lambda device: pool._pages[device]  # type: ignore[method-assign]
    widths = (driver.page_bytes, driver.page_bytes // 2)  # no page is shared by rows of different capacity
    slots = np.array([3, 3, 3, 3])
    for layer, rows in enumerate(slots):
        pool.add(layer, [torch.zeros(6, width, dtype=torch.uint8) for width in widths], int(rows))
    start = driver.created
    for change in range(200):
        slots = draw.multinomial(12, [0.25] * 4)
        while slots.max() > 6:
            slots = draw.multinomial(12, [0.25] * 4)
        pool.resize(dict(enumerate(slots.tolist())))
        for layer, tensors in pool.layers.items():
            for i, paged in enumerate(tensors):
                paged.tensor[: slots[layer]] = (37 * layer + 11 * i + change) % 251 + 1
        for layer, tensors in pool.layers.items():
            for i, paged in enumerate(tensors):
                assert (paged.tensor[: slots[layer]] == (37 * layer + 11 * i + change) % 251 + 1).all()
                assert not paged.tensor[slots[layer] + slots[layer] % 2 :].any()
    assert driver.created <= start + 4, "a rank takes at most one page per tensor of half a page"


def test_a_gpu_without_memory_for_more_slots_raises() -> None:
    driver = StandIn(capacity=3)
    with pytest.raises(RuntimeError, match="no memory left for a page"):
        PagedTensor(torch.ones(4, driver.page_bytes, dtype=torch.uint8), 3, GpuPages(driver))


def test_the_driver_is_called_as_cuda_h_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes, flags and the order of arguments of every call; the library is a stand-in."""
    calls = []

    class Library:
        def __getattr__(self, name: str):
            def call(*arguments):
                values = [getattr(argument, "value", argument) for argument in arguments]
                calls.append((name, values))
                if name == "cuMemGetAllocationGranularity":
                    arguments[0]._obj.value = 2 << 20
                elif name in ("cuMemAddressReserve", "cuMemCreate"):
                    arguments[0]._obj.value = 7 << 21
                return status

            return call

    status = 0
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: Library())
    monkeypatch.setattr(module.torch.cuda, "device", lambda device: contextlib.nullcontext())
    driver = module.CudaDriver(torch.device("cuda", 3))
    assert driver.page_bytes == 2 << 20
    address, page = driver.reserve(4 << 20), driver.create()
    driver.map(address, page)
    driver.allow(address, 2 << 20)
    driver.unmap(address)
    seen = {name: values for name, values in calls}
    assert seen["cuMemAddressReserve"][1:] == [4 << 20, 2 << 20, 0, 0]
    assert seen["cuMemCreate"][1] == 2 << 20 and seen["cuMemCreate"][3] == 0
    assert seen["cuMemMap"] == [7 << 21, 2 << 20, 0, 7 << 21, 0]
    assert seen["cuMemSetAccess"][:2] == [7 << 21, 2 << 20] and seen["cuMemSetAccess"][3] == 1
    assert seen["cuMemUnmap"] == [7 << 21, 2 << 20]
    allocation, access = driver._allocation, driver._access
    assert (allocation.type, allocation.handle_types) == (1, 0) and access.flags == 3
    assert allocation.location.id == access.location.id == 3 and allocation.location.type == 1
    status = 2
    with pytest.raises(RuntimeError, match="cuda:3 has no memory left for a page of 2097152 bytes"):
        driver.create()
    status = 999
    with pytest.raises(RuntimeError, match="cuMemUnmap failed on cuda:3 with CUDA driver error 999"):
        driver.unmap(address)


def test_structures_are_those_of_cuda_h(tmp_path: Path) -> None:
    headers = [Path(folder) / "include" for folder in sorted(glob.glob("/usr/local/cuda*"))]
    header = next((folder for folder in headers if (folder / "cuda.h").exists()), None)
    if header is None:
        pytest.skip("needs cuda.h of a CUDA toolkit")
    source = tmp_path / "layout.cpp"
    source.write_text(
        "#include <cuda.h>\n#include <cstddef>\n#include <cstdio>\n"
        'int main() { std::printf("%zu %zu %zu %zu %zu %zu %d %d %d %d", sizeof(CUmemAllocationProp), '
        "offsetof(CUmemAllocationProp, requestedHandleTypes), offsetof(CUmemAllocationProp, location), "
        "offsetof(CUmemAllocationProp, allocFlags), sizeof(CUmemAccessDesc), offsetof(CUmemAccessDesc, flags), "
        "CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, "
        "CUDA_ERROR_OUT_OF_MEMORY); }"
    )
    program = tmp_path / "layout"
    subprocess.run(["g++", f"-I{header}", source, "-o", program], check=True)
    theirs = [int(word) for word in subprocess.check_output([program], text=True).split()]
    allocation, access = module._Allocation, module._Access
    ours = [ctypes.sizeof(allocation)]
    ours += [getattr(allocation, name).offset for name in ("handle_types", "location", "flags")]
    ours += [ctypes.sizeof(access), access.flags.offset, 1, 1, 3, 2]
    assert ours == theirs
