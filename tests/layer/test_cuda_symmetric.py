"""Two processes on one GPU read each other's symmetric memory. bench/cuda.sh runs this last: peers may hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from support.cuda_layer import check_borrowing_processes, in_processes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def one_device_for_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch refuses it otherwise."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def read_peers(rank: int, ranks: int) -> list[int]:
    import torch.distributed._symmetric_memory as symmetric_memory

    mine = symmetric_memory.empty(4, dtype=torch.int32, device="cuda").fill_(rank + 1)
    handle = symmetric_memory.rendezvous(mine, dist.group.WORLD)
    torch.cuda.synchronize()
    dist.barrier()
    read = [int(handle.get_buffer(peer, (4,), torch.int32)[0]) for peer in range(ranks)]
    dist.barrier()  # nobody frees what another still reads
    return read


def test_symmetric_memory_of_processes_on_one_gpu(tmp_path: Path) -> None:
    assert in_processes(read_peers, 2, tmp_path) == [[1, 2], [1, 2]]


def test_pull_between_processes_on_one_gpu(tmp_path: Path) -> None:
    check_borrowing_processes("pull", tmp_path)
