"""Weights in pages on a GPU: the driver's memory, values, and a captured graph across a change of pages."""

from __future__ import annotations

import pytest
import torch

from isoload.weights.pages import PagePool

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SLOTS, WIDTH = 9, 3 << 20  # bytes of a row: one page and a half


def weights(layer: int) -> torch.Tensor:
    draw = torch.Generator("cuda").manual_seed(layer)
    return torch.randint(1, 255, (SLOTS, WIDTH), dtype=torch.uint8, device="cuda", generator=draw)


def test_absent_rows_take_no_memory_and_show_zeros() -> None:
    pool, values = PagePool(), weights(0)
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    (tensor,) = pool.add(0, [values], 4)
    taken = before - torch.cuda.mem_get_info()[0]
    (paged,) = pool.layers[0]
    page = paged.layout.page_bytes
    own = paged.layout.pages_of(4) * page
    assert own <= taken <= own + 4 * page, "the page of zeros, and what the driver needs"
    assert torch.equal(tensor[:4], values[:4])
    assert not tensor.view(-1)[own:].any()
    print(f"page {page >> 20} MiB, {taken >> 20} MiB for 4 of {SLOTS} rows of {WIDTH >> 20} MiB")


def test_pages_move_between_layers() -> None:
    pool, values = PagePool(), [weights(layer) for layer in range(3)]
    tensors = [pool.add(layer, [values[layer]], 5)[0] for layer in range(3)]
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    for slots in ([9, 3, 3], [1, 7, 7], [5, 5, 5], [4, 2, 9]):
        pool.resize(dict(enumerate(slots)))
        for tensor, value, rows in zip(tensors, values, slots, strict=True):
            tensor[:rows] = value[:rows]
        for tensor, value, rows in zip(tensors, values, slots, strict=True):
            assert torch.equal(tensor[:rows], value[:rows])
    (paged, *_) = pool.layers[0]
    assert before - torch.cuda.mem_get_info()[0] <= 4 * paged.layout.page_bytes


def test_a_captured_graph_reads_the_pages_of_today() -> None:
    pool, values = PagePool(), weights(5)
    (tensor,) = pool.add(0, [values], 3)
    out = torch.empty(SLOTS, dtype=torch.int64, device="cuda")
    torch.sum(tensor, 1, out=out)  # outside of the capture first: a kernel is loaded at its first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.sum(tensor, 1, out=out)
    pool.limit = SLOTS
    for rows in (3, 8, 2, 9):
        pool.resize({0: rows})
        tensor[:rows] = values[:rows]
        graph.replay()
        assert torch.equal(out[:rows], values[:rows].sum(1)), rows


def test_a_product_over_pages_has_the_bits_of_plain_memory() -> None:
    shape = (SLOTS, 512, 1024)
    plain = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    (tensor,) = PagePool().add(0, [plain], 6)
    rows = torch.randn(SLOTS, 64, 512, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(torch.bmm(rows, tensor)[:6], torch.bmm(rows, plain)[:6])
