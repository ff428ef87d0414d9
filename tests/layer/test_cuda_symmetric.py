"""Two processes on one GPU read each other's symmetric memory. bench/cuda.sh runs this last: peers may hang."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import isoload
from support.cuda_layer import check_borrowing_processes, in_processes
from support.small_batches import EXPERTS, K, draw_ids

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


def gather_by_boards(rank: int, ranks: int) -> list[torch.Tensor]:
    """Slots of eager batches, and of batches in a graph."""
    topology = isoload.Topology(ranks)
    placement = isoload.place(
        torch.arange(EXPERTS).expand(1, -1), topology, slots_per_rank=EXPERTS // ranks + 2
    )
    group = isoload.CollectiveGroup(topology, gather="symmetric")
    balancer = isoload.Balancer(placement, 0, "exact", group)
    captured = isoload.CapturedBalancer(balancer, 37, K)
    slots = []
    for batch in range(12):
        ids = draw_ids(batch)[rank].cuda()
        slots.append((captured if batch >= 4 else balancer)(ids).cpu())
    group.check()
    isoload.check_device("cuda")
    return slots


def test_loads_gathered_by_boards_on_one_gpu(tmp_path: Path) -> None:
    """Kernels of two processes wait for each other: the GPU changes between them."""
    got = in_processes(gather_by_boards, 2, tmp_path)
    topology = isoload.Topology(2)
    placement = isoload.place(torch.arange(EXPERTS).expand(1, -1), topology, slots_per_rank=EXPERTS // 2 + 2)
    balancer = isoload.Balancer(placement, 0, "exact", isoload.LocalGroup(topology))
    for batch in range(12):
        for rank, slots in enumerate(balancer(draw_ids(batch)[:2])):
            assert torch.equal(got[rank][batch], slots), (rank, batch)
