"""Symmetric memory is tried only where it can work, and used only where every rank reads the words of every peer."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import isoload
from isoload.transport import CollectiveGroup, collective
from isoload.transport import collective as symmetric
from isoload.transport.exchanges import OVERLAP, Peers
from support.processes import run_ranks
from support.shared_memory import CPU, Stream, shared_memory


def peers_of(rank: int, ranks: int, seconds: float = 1, **how: Any) -> tuple[Any, int, float]:
    """What a trial returns on a rank, how many rendezvous it made, and the seconds that it took."""
    how = {name: value(rank) if callable(value) else value for name, value in how.items()}
    start = time.monotonic()
    with shared_memory(**how) as double, patch.object(collective, "TRIAL_WAIT", timedelta(seconds=seconds)):
        peers = CollectiveGroup(isoload.Topology(ranks)).peers(CPU)
        reason = peers if isinstance(peers, str) else ""
        return reason, double.meetings, time.monotonic() - start


def reasons(ranks: int, **how: Any) -> tuple[str, int]:
    """The reason [R], alike on all ranks, and the rendezvous made."""
    found = run_ranks(lambda rank: peers_of(rank, ranks, **how), ranks)
    assert len({reason for reason, _, _ in found}) == 1, found
    assert max(seconds for _, _, seconds in found) < 15, found
    return found[0][0], max(meetings for _, meetings, _ in found)


def test_ranks_of_one_host_read_each_other() -> None:
    assert reasons(3) == ("", 1)


def test_two_hosts_have_no_rendezvous() -> None:
    reason, meetings = reasons(4, host=lambda rank: f"node{rank // 2}")
    assert "ranks 0 and 2 run on different hosts (node0 and node1) without a common NVLink fabric" in reason
    assert meetings == 0


def test_two_hosts_of_one_fabric_domain_have_one() -> None:
    assert reasons(2, host=lambda rank: f"node{rank}", fabric="rack") == ("", 1)
    reason, meetings = reasons(2, host=lambda rank: f"node{rank}", fabric=lambda rank: f"rack{rank}")
    assert "run on different hosts" in reason and meetings == 0


def nvml(cluster: bytes, status: int, clique: int, state: int, rc: int = 0) -> SimpleNamespace:
    def fill(_device: Any, info: Any) -> int:
        info[:25] = struct.pack("<16sIIB", cluster, status, clique, state)
        return rc

    return SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda _uuid, _device: 0,
        nvmlDeviceGetGpuFabricInfo=fill,
    )


@pytest.mark.parametrize(
    ("library", "channels", "known"),
    [
        (nvml(b"c" * 16, 0, 5, 3), 1, True),
        (nvml(b"c" * 16, 0, 5, 3), 0, False),
        (nvml(b"c" * 16, 0, 5, 2), 1, False),
        (nvml(b"c" * 16, 9, 5, 3), 1, False),
        (nvml(bytes(16), 0, 5, 3), 1, False),
        (nvml(b"c" * 16, 0, 5, 3, rc=3), 1, False),
        (SimpleNamespace(), 1, False),
    ],
)
def test_a_fabric_domain_is_one_that_is_complete_and_exports(
    library: Any, channels: int, known: bool
) -> None:
    with (
        patch.object(symmetric.ctypes, "CDLL", lambda _name: library),
        patch.object(symmetric.Path, "glob", lambda _path, _name: range(1, channels + 1)),
    ):
        found = symmetric.fabric_of("0")
    assert found == ((b"c" * 16 + struct.pack("<II", 0, 5)).hex() if known else None)


def in_containers(rank: int, shared: bool, folder: str) -> Any:
    """Two containers with a process 7 each, which share their temporary files or do not."""
    here = folder if shared else f"{folder}/{rank}"
    os.makedirs(here, exist_ok=True)
    with patch.object(os, "getpid", lambda: 7), patch.dict(os.environ, TMPDIR=here):
        return peers_of(rank, 2)[:2]


@pytest.mark.parametrize(("shared", "named"), [(False, "where rank 1 wrote"), (True, "File exists")])
def test_containers_with_the_same_process_ids_have_no_rendezvous(
    shared: bool, named: str, tmp_path: Any
) -> None:
    for reason, meetings in run_ranks(in_containers, 2, shared, str(tmp_path)):
        assert named in reason and meetings == 0, reason


def test_memory_that_is_not_the_peers_is_named_with_what_was_read() -> None:
    reason, _ = reasons(2, peer=lambda rank: lambda _other: rank)
    assert "rank 0 read [0, " in reason and "in the memory of rank 1, which wrote [1, " in reason


def fail() -> None:
    raise RuntimeError("cuMemImportFromShareableHandle failed")


def test_a_rank_that_fails_does_not_leave_the_others_waiting() -> None:
    reason, _ = reasons(3, fail=lambda rank: fail if rank == 1 else None)
    assert reason == "Wait timeout; cuMemImportFromShareableHandle failed"


def test_workers_that_see_one_gpu_each_are_told_apart_by_uuid() -> None:
    def on_rank(rank: int) -> tuple[Any, str | None]:
        return peers_of(rank, 2)[0], os.environ.get(OVERLAP)

    assert run_ranks(on_rank, 2) == [("", None)] * 2
    reason, meetings = reasons(2, gpu="GPU 5")
    assert "detected allocations from overlapping devices" in reason and meetings == 1


def in_subgroup(rank: int, alone: bool) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if alone and rank >= 2:
        return None
    with shared_memory() as double, patch.object(collective, "TRIAL_WAIT", timedelta(seconds=1)):
        peers = CollectiveGroup(isoload.Topology(2), groups[rank // 2]).peers(CPU)
        return peers if isinstance(peers, str) else "", double.meetings


def test_groups_that_partition_the_processes_have_a_rendezvous() -> None:
    assert run_ranks(in_subgroup, 4, False) == [("", 1)] * 4


def test_a_group_beside_other_processes_has_none() -> None:
    for reason, meetings in run_ranks(in_subgroup, 4, True)[:2]:
        assert "construction of a layer that borrows, but ranks [2, 3] have not within 1 seconds" in reason
        assert meetings == 0


def with_memory(body: Callable[[Any, Any], Any]) -> Any:
    """What a body returns for the peers' memory and its double, in one process."""

    def on_rank(_rank: int) -> Any:
        with shared_memory() as double:
            return body(CollectiveGroup(isoload.Topology(1)).peers(CPU), double)

    return run_ranks(on_rank, 1, group_timeout=90.0)[0]


def test_barriers_have_the_timeout_of_the_group() -> None:
    def meet(memory: Peers, double: Any) -> Any:
        memory.meet()
        return double.barriers

    assert with_memory(meet) == [(0, 90_000)]


def test_a_barrier_waits_for_the_last_one_on_another_stream() -> None:
    def meet(memory: Peers, _double: Any) -> Any:
        streams = [Stream("first"), Stream("second")]
        for stream in streams:
            with patch.object(torch.cuda, "current_stream", lambda _device, stream=stream: stream):
                memory.meet()
        return streams[1].waited

    assert with_memory(meet) == ["first"]


def test_memory_is_freed_with_its_tensor() -> None:
    def make(memory: Peers, double: Any) -> Any:
        before, live = double.live, []
        for _ in range(3):
            tensor = memory.new((4, 2), torch.float32, CPU)
            memory.reach([tensor])
            live.append(double.live - before)
        del tensor
        return live, double.live - before

    live, left = with_memory(make)
    assert max(live) <= 2 and left == 0
