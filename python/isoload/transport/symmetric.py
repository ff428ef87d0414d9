"""Trial of symmetric memory: whether every rank of a process group reads the memory of every other rank's GPU."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections import Counter
from collections.abc import Generator, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from isoload.transport.peers import OVERLAP, SymmetricMemory

LIMIT = timedelta(seconds=30)  # of every wait of a trial
_partitions = count()  # trials on groups that are not the default one


class Site(NamedTuple):
    """Where one rank runs."""

    host: str
    boot_id: str
    fabric: str | None  # NVLink domain of its GPU, None where NVML reports none
    gpu: str  # UUID
    number: int  # device index in its process
    shares: bool  # whether the user lets several ranks share a GPU
    pid: int
    word: int  # random

    @classmethod
    def here(cls, device: torch.device) -> Site:
        boot_id, gpu = Path("/proc/sys/kernel/random/boot_id"), gpu_of(device)
        machine = socket.gethostname(), boot_id.read_text().strip() if boot_id.exists() else ""
        shares = os.environ.get(OVERLAP) == "1"
        return cls(
            *machine, fabric_of(gpu), gpu, device.index or 0, shares, os.getpid(), secrets.randbits(31)
        )


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def fabric_of(gpu: str) -> str | None:
    """Return cluster UUID and clique of a GPU that exports memory to other hosts; None where NVML reports none."""
    device, info = (
        ctypes.c_void_p(),
        (ctypes.c_ubyte * 64)(),
    )  # nvmlGpuFabricInfo_t: UUID, status, clique, state
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}".encode(), ctypes.byref(device))
            or nvml.nvmlDeviceGetGpuFabricInfo(device, info)
        )
    except (OSError, AttributeError):  # no driver, or one that knows no fabrics
        return None
    completed = not any(info[16:20]) and info[24] == 3 and any(info[:16])
    exports = any(Path("/dev/nvidia-caps-imex-channels").glob("channel*"))
    return bytes(info[:24]).hex() if completed and exports and not failed else None


def check_sites(sites: Sequence[Site]) -> None:
    """Raise RuntimeError if ranks at these sites [R] cannot read each other's memory."""
    first, ranks = sites[0], dict[str, int]()
    for rank, site in enumerate(sites):
        if site[:2] != first[:2] and (site.fabric is None or site.fabric != first.fabric):
            raise RuntimeError(
                f"ranks 0 and {rank} run on different hosts ({first.host} and {site.host}) without a common NVLink "
                "fabric domain"
            )
        other = ranks.setdefault(site.gpu, rank)
        if other != rank and not (site.shares and sites[other].shares):
            raise RuntimeError(f"ranks {other} and {rank} share the GPU {site.gpu} ({OVERLAP}=1 allows that)")


def check_partition(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Raise RuntimeError unless all processes of the default group make this call, with groups that partition it.

    torch counts the rendezvous of a process, whatever their groups. After one that only some processes make, the next
    one of the default group hangs (pytorch #196082).
    """
    members, size = dist.get_process_group_ranks(group), dist.get_world_size()
    if len(members) == size:
        return
    store, prefix = dist.distributed_c10d._get_default_store(), f"isoload/partition/{next(_partitions)}"
    keys = [f"{prefix}/{rank}" for rank in range(size)]
    store.set(keys[dist.get_rank()], " ".join(map(str, members)))
    try:
        store.wait(keys, limit)
        parts = Counter(store.get(key) for key in keys)
        whole = all(number == len(part.split()) for part, number in parts.items())
    except RuntimeError:
        whole = False
    # The first process to decide does so for all, since a group must not have a rendezvous without the other groups.
    if store.compare_set(f"{prefix}/whole", "", str(whole)) != b"True":
        raise RuntimeError(
            f"processes {members} make a layer, but not all {size} processes at once, each in one group"
        )


def socket_of(pid: int) -> Path:
    """Return a path in the folder where torch's processes exchange file descriptors by sockets."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    return Path(next((os.environ[name] for name in names if name in os.environ), "/tmp")) / f"isoload-{pid}"


def trial(
    group: dist.ProcessGroup, device: torch.device, rank: int, timeout: timedelta
) -> Generator[Any, list[Any], SymmetricMemory]:
    """Make symmetric memory in steps. Each yields a value and takes the values [R] of all ranks, if none has failed.

    torch's rendezvous waits for descriptors without a timeout and keeps Python's lock, so that it must not begin before
    all ranks have found that the descriptors will arrive.
    """
    own, limit = socket_of(os.getpid()), min(LIMIT, timeout / 2)
    site = Site.here(device)
    with own.open("x") as file:
        file.write(str(site.word))
    try:
        sites: list[Site] = yield site
        check_sites(sites)
        check_partition(group, limit)
        same_host = (
            len({other[:2] for other in sites}) == 1
        )  # else handles of the fabric travel, not descriptors
        for peer, other in enumerate(sites if same_host else ()):
            if (found := socket_of(other.pid).read_text()) != str(other.word):
                raise RuntimeError(
                    f"rank {rank} read {found} in {socket_of(other.pid)} where rank {peer} wrote {other.word}: their "
                    "containers must share process ids and temporary files"
                )
        yield None
    finally:
        own.unlink()
    # Workers that see one GPU each all have the index 0, which torch takes for one GPU.
    masked = len({(other.host, other.number) for other in sites}) < len(sites)
    store = dist.distributed_c10d._get_process_group_store(group)
    before = store.timeout  # type: ignore[attr-defined]
    store.set_timeout(limit)  # of ranks that wait for one that has failed
    try:
        memory = SymmetricMemory(group, device, timeout, masked)
    finally:
        store.set_timeout(before)
    memory.pad.copy_(torch.tensor([rank, site.word]))
    words = yield memory.pad.tolist()
    for peer, (pad, word) in enumerate(zip(memory.reach([memory.pad]), words, strict=True)):
        if (read := pad.tolist()) != word:
            raise RuntimeError(
                f"rank {rank} read {read} in symmetric memory of rank {peer}, which wrote {word}"
            )
    return memory
