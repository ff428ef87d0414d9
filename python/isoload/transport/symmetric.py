"""Trial of symmetric memory: whether every rank of a process group reads the memory of every other rank's GPU."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from isoload.transport.group import Group
from isoload.transport.peers import OVERLAP, SymmetricMemory

STAGE = "symmetric memory"


class Site(NamedTuple):
    """Where one rank runs."""

    host: str
    boot_id: str
    fabric: str | None
    gpu: str  # UUID
    device_index: int  # in its process
    pid: int
    word: int  # random

    @classmethod
    def here(cls, device: torch.device) -> Site:
        host, gpu = host_of(), gpu_of(device)
        return cls(*host, fabric_of(gpu), gpu, device.index or 0, os.getpid(), secrets.randbits(31))


def host_of() -> tuple[str, str]:
    """Return the host's name and boot id: containers differ in the name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot_id.read_text().strip() if boot_id.exists() else ""


def gpu_of(device: torch.device) -> str:
    """Return the UUID of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


def fabric_of(gpu: str) -> str | None:
    """Return the NVLink domain of a GPU that exports memory to other hosts; None where NVML reports none."""
    device = ctypes.c_void_p()
    info = (ctypes.c_ubyte * 64)()  # nvmlGpuFabricInfo_t: cluster, status, clique, state
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{gpu}".encode(), ctypes.byref(device))
            or nvml.nvmlDeviceGetGpuFabricInfo(device, info)
        )
    except (OSError, AttributeError):  # no driver, or one without fabrics
        return None
    completed = not any(info[16:20]) and info[24] == 3 and any(info[:16])
    exports = any(Path("/dev/nvidia-caps-imex-channels").glob("channel*"))
    return bytes(info[:24]).hex() if completed and exports and not failed else None


def check_hosts(sites: Sequence[Site]) -> None:
    """Raise RuntimeError unless the ranks at these sites [R] are on one host or in one fabric domain."""
    for rank, site in enumerate(sites):
        if site[:2] != sites[0][:2] and (site.fabric is None or site.fabric != sites[0].fabric):
            raise RuntimeError(
                f"ranks 0 and {rank} run on different hosts ({sites[0].host} and {site.host}) without a common NVLink "
                "fabric domain"
            )


def path_of(pid: int) -> Path:
    """Return a path in the folder where torch's processes exchange file descriptors."""
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
    return Path(next((os.environ[name] for name in names if name in os.environ), "/tmp")) / f"isoload-{pid}"


def check_paths(sites: Sequence[Site], rank: int) -> None:
    """Raise RuntimeError unless each peer's process id leads a rank to that peer."""
    for peer, site in enumerate(sites):
        if (read := path_of(site.pid).read_text()) != str(site.word):
            raise RuntimeError(
                f"rank {rank} read {read} in {path_of(site.pid)} where rank {peer} wrote {site.word}: containers of "
                "one host must share process ids and temporary files"
            )


def make_symmetric(
    group: Group, processes: dist.ProcessGroup, device: torch.device, timeout: timedelta, limit: timedelta
) -> SymmetricMemory:
    """Make symmetric memory on all ranks, or raise on all ranks.

    torch's rendezvous waits for file descriptors without a timeout and keeps Python's lock. It must not begin before
    all ranks have found that the descriptors will arrive.

    Args:
        group: the ranks that read each other's memory.
        processes: their process group.
        device: this rank's GPU.
        timeout: of the processes' exchanges.
        limit: of a rank's wait for others in the trial.
    """
    rank, own = group.ranks[0], path_of(os.getpid())
    try:
        with group.agreeing(STAGE):
            site = Site.here(device)
            with own.open("x") as file:
                file.write(str(site.word))
        sites: list[Site] = group.gather_objects(STAGE, site)
        with group.agreeing(STAGE):
            check_hosts(sites)
            if len({other[:2] for other in sites}) == 1:  # else handles of the fabric travel, not descriptors
                check_paths(sites, rank)
    finally:
        own.unlink(missing_ok=True)
    # Workers that see one GPU each all have the index 0, which torch takes for one GPU.
    indices, gpus = {(other.host, other.device_index) for other in sites}, {other.gpu for other in sites}
    masked = len(indices) < len(gpus) and OVERLAP not in os.environ
    store = dist.distributed_c10d._get_process_group_store(processes)
    before = store.timeout  # type: ignore[attr-defined]
    with group.agreeing(STAGE):
        store.set_timeout(limit)  # of ranks that wait for one that has failed
        try:
            memory = SymmetricMemory(processes, device, timeout, masked)
        finally:
            store.set_timeout(before)
        memory.pad.copy_(torch.tensor([rank, site.word]))
    words = group.gather_objects(STAGE, memory.pad.tolist())
    with group.agreeing(STAGE):
        for peer, (pad, wrote) in enumerate(zip(memory.reach([memory.pad]), words, strict=True)):
            if (read := pad.tolist()) != wrote:
                raise RuntimeError(
                    f"rank {rank} read {read} in the memory of rank {peer}, which wrote {wrote}"
                )
    return memory
