"""CollectiveGroup: one rank per process over torch.distributed, with symmetric memory where a trial of it succeeds."""

from __future__ import annotations

import ctypes
import math
import os
import secrets
import socket
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn.functional import pad

from isoload.checks import values_readable
from isoload.topology import Topology
from isoload.transport.exchanges import OVERLAP, Owned, Peers, PerRank, SymmetricMemory
from isoload.transport.group import STAGE_BYTES, Group, raise_other_stage, stage_header

STAGE = "symmetric memory"


class Site(NamedTuple):
    """Host, process and GPU of one rank."""

    host: str
    boot_id: str
    fabric: str | None
    gpu: str  # UUID
    device_index: int  # in its process
    pid: int
    token: int  # random number

    @classmethod
    def here(cls, device: torch.device) -> Site:
        host, gpu = host_of(), gpu_of(device)
        return cls(*host, fabric_of(gpu), gpu, device.index or 0, os.getpid(), secrets.randbits(31))


def host_of() -> tuple[str, str]:
    """Return the host's name and boot id: containers differ in the name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname(), boot_id.read_text().strip() if boot_id.exists() else ""


def gpu_of(device: torch.device) -> str:
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
    """Raise RuntimeError unless each peer's process id identifies that peer on this rank too."""
    for peer, site in enumerate(sites):
        if (read := path_of(site.pid).read_text()) != str(site.token):
            raise RuntimeError(
                f"rank {rank} read {read} in {path_of(site.pid)} where rank {peer} wrote {site.token}: containers of "
                "one host must share process ids and temporary files"
            )


def make_symmetric(
    group: Group, processes: dist.ProcessGroup, device: torch.device, timeout: timedelta, limit: timedelta
) -> SymmetricMemory:
    """Make symmetric memory on all ranks, or raise on all ranks. torch's rendezvous waits for file descriptors without
    a timeout and without releasing Python's lock: all ranks first check that the descriptors will arrive.
    """
    rank, path = group.ranks[0], path_of(os.getpid())
    try:
        with group.agreeing(STAGE):
            site = Site.here(device)
            with path.open("x") as file:
                file.write(str(site.token))
        sites: list[Site] = group.gather_objects(STAGE, site)
        with group.agreeing(STAGE):
            check_hosts(sites)
            if len({other[:2] for other in sites}) == 1:  # otherwise fabric handles travel, not descriptors
                check_paths(sites, rank)
    finally:
        path.unlink(missing_ok=True)
    # Workers that see one GPU each all have index 0, which torch treats as one GPU.
    indices, gpus = {(other.host, other.device_index) for other in sites}, {other.gpu for other in sites}
    masked = len(indices) < len(gpus) and OVERLAP not in os.environ
    store = dist.distributed_c10d._get_process_group_store(processes)
    before = store.timeout  # type: ignore[attr-defined]
    with group.agreeing(STAGE):
        store.set_timeout(limit)  # for ranks that wait for a rank that has failed
        try:
            memory = SymmetricMemory(processes, device, timeout, masked)
        finally:
            store.set_timeout(before)
        memory.pad.copy_(torch.tensor([rank, site.token]))
    words = group.gather_objects(STAGE, memory.pad.tolist())
    with group.agreeing(STAGE):
        for peer, (pad, wrote) in enumerate(zip(memory.reach([memory.pad]), words, strict=True)):
            if (read := pad.tolist()) != wrote:
                raise RuntimeError(
                    f"rank {rank} read {read} in the memory of rank {peer}, which wrote {wrote}"
                )
    return memory


# Name since torch 2.13, and the earlier name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def device_of(process_group: dist.ProcessGroup) -> torch.device:
    if torch.cuda.is_available() and "cuda:" in dist.get_backend_config(process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def timeout_of(process_group: dist.ProcessGroup) -> timedelta:
    options = getattr(process_group._get_backend(device_of(process_group)), "options", None)
    timeout: timedelta = getattr(options, "_timeout", default_pg_timeout)
    return timeout


HEADER = STAGE_BYTES + 8  # bytes of stage_header
FRAME = 2048  # bytes of the frame that processes on CPU exchange: a header and a row of up to 500 counts
FIRST_WAIT = timedelta(seconds=10)  # after which a waiting process warns
TRIAL_WAIT = timedelta(seconds=30)  # for which a process waits for others in the trial of symmetric memory


def await_all(call: str, limit: timedelta | None = None) -> None:
    """Wait until all processes make a call, without a collective: warn after FIRST_WAIT, raise after the limit."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store, rank, size = dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    assert dist.group.WORLD is not None
    calls = _calls.setdefault(dist.group.WORLD, Counter())
    limit, number = limit or timeout_of(dist.group.WORLD), calls[call]
    keys = [f"isoload/{call}/{number}/{other}" for other in range(size)]
    store.set(keys[rank], "1")

    def missing() -> str:
        return f"rank {rank} has called {call}, but ranks {[r for r in range(size) if not store.check([keys[r]])]} have"

    try:
        try:
            store.wait(keys, first := min(FIRST_WAIT, limit / 2))
        except RuntimeError:
            warnings.warn(f"{missing()} not yet: call it on all ranks", stacklevel=4)
            store.wait(keys, limit - first)
    except RuntimeError:
        message = f"{missing()} not within {limit.total_seconds():.0f} seconds: call it on all ranks"
        store.delete_key(keys[rank])  # a later call must not count this one
        raise RuntimeError(message) from None
    if number:
        store.delete_key(f"isoload/{call}/{number - 1}/{rank}")  # all processes have left that call
    calls[call] += 1


# For each default group: how often all its processes have made a call together.
_calls: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()


class CollectiveGroup(Group):
    """One rank per process. All ranks construct it together. If a peer dies, each call raises a RuntimeError that names
    the stage: at once if the backend finds the connection closed, else after the process group's timeout.

    Args:
        topology: R ranks, or the number R, as many as the process group has. Must be the same on all ranks.
        process_group: None = the default group.
    """

    def __init__(self, topology: Topology | int, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group if process_group is not None else dist.group.WORLD
        super().__init__(topology, [dist.get_rank(self.process_group)])
        size = dist.get_world_size(self.process_group)
        with self.agreeing("construction") as facts:
            facts["topology"] = self.topology
        if self.topology.num_ranks != size:
            raise ValueError(f"topology must have the group's {size} ranks, got {self.topology.num_ranks}")

    @classmethod
    def own(cls, topology: Topology | int, like: dist.ProcessGroup | None = None) -> CollectiveGroup:
        """Create a group with a communicator that no other code uses; all processes of the default group call it
        together.

        Args:
            topology: R ranks, or the number R: as many as `like` has.
            like: group whose processes join and whose timeout applies; None = all processes.
        """
        ranks = None if like is None else dist.get_process_group_ranks(like)
        process_group = dist.group.WORLD if like is None else like
        assert process_group is not None
        return cls(topology, dist.new_group(ranks, timeout=timeout_of(process_group)))

    def _gather(self, stage: str, rows: Owned, in_node: bool = False) -> Tensor:
        node, num_ranks, row = self.join_node() if in_node else None, self.topology.num_ranks, rows[0]
        near = self.topology.node_of(self.ranks[0]) if in_node else range(num_ranks)
        with self.named(stage):
            met = self._meet(stage, row, row.nbytes, node, row)
            if met is not None and not in_node:
                return met
            gathered = (row.new_zeros if in_node else row.new_empty)(num_ranks, len(row))
            if met is not None:
                gathered[near.start : near.stop] = met
            else:
                _all_gather(gathered[near.start : near.stop].flatten(), row, group=node or self.process_group)
        return gathered

    def join_node(self) -> dist.ProcessGroup:
        def make() -> dist.ProcessGroup:
            assert self.process_group is not None
            near = self.topology.node_of(self.ranks[0])
            members = [dist.get_process_group_ranks(self.process_group)[rank] for rank in near]
            # Local synchronisation: ranks outside of this group need not call it.
            process_group = dist.new_group(
                members, timeout=timeout_of(self.process_group), use_local_synchronization=True
            )
            assert isinstance(process_group, dist.ProcessGroup)
            return process_group

        return self.memo(("node",), make)

    def _start_gather(self, stage: str, rows: Owned) -> Callable[[], Tensor]:
        row, num_ranks = rows[0], self.topology.num_ranks
        with self.named(stage):
            met = self._meet(stage, row, row.nbytes, row=row)
            if met is not None:
                return lambda: met
            gathered = row.new_empty(num_ranks * len(row))
            work = _all_gather(gathered, row, group=self.process_group, async_op=True)

        def wait() -> Tensor:
            with self.named(stage):
                work.wait()
            return gathered.view(num_ranks, -1)

        return wait

    def _swap(
        self, stage: str, buffers: Owned, sent: PerRank, got: PerRank, begun: bool = False
    ) -> Callable[[], Owned]:
        arrived = buffers[0].new_empty(sum(got[0]), *buffers[0].shape[1:])
        leaving = buffers[0].contiguous()
        with self.named(stage):
            self._meet(stage, buffers[0], buffers[0].element_size() * math.prod(buffers[0].shape[1:]))
            work = dist.all_to_all_single(
                arrived, leaving, got[0], sent[0], group=self.process_group, async_op=begun
            )

        def wait() -> Owned:
            if begun:
                with self.named(stage):
                    work.wait()
                leaving.untyped_storage()  # keeps the memory until here
            return [arrived]

        return wait

    def _meet(
        self,
        stage: str,
        like: Tensor,
        size: int,
        node: dist.ProcessGroup | None = None,
        row: Tensor | None = None,
    ) -> Tensor | None:
        """On CPU, raise on all ranks unless all are in this stage with rows of one size; gloo would abort. Return all
        ranks' rows [n, F] if `row` [F] travelled along. On a GPU a frame would be one more collective and a host wait.
        """
        if not values_readable(like) or like.device.type != "cpu":
            return None
        frame = self.memo(("frame", stage, size), lambda: pad(stage_header(stage, size), (0, FRAME - HEADER)))
        fits = row is not None and HEADER + size <= FRAME
        if row is not None and fits:
            frame = frame.clone()
            frame[HEADER : HEADER + size] = row.detach().contiguous().view(torch.uint8)
        met = self.process_group if node is None else node
        frames = frame.new_empty(dist.get_world_size(met), FRAME)
        _all_gather(frames.flatten(), frame, group=met)
        headers = frames[:, :HEADER]
        if not headers.eq(frame[:HEADER]).all():
            raise_other_stage(headers, 0 if node is None else self.topology.node_of(self.ranks[0]).start)
        if row is None or not fits:
            return None
        return frames[:, HEADER : HEADER + size].clone().view(row.dtype)

    def gather_objects(self, stage: str, value: object) -> list[Any]:
        gathered: list[Any] = [None] * dist.get_world_size(self.process_group)
        with self.named(stage):
            if "cpu:" in dist.get_backend_config(self.process_group):
                self._meet(stage, torch.empty(0), 0)
            dist.all_gather_object(gathered, value, group=self.process_group)
        return gathered

    def peers(self, device: torch.device) -> Peers | str:
        """Return symmetric memory if a trial of it succeeds, else the reason as text; the same on all ranks."""
        if device.type != "cuda":
            return f"processes cannot read each other's memory on {device.type}"
        return self.memo(("symmetric memory",), lambda: self._try_symmetric(device))

    def _try_symmetric(self, device: torch.device) -> Peers | str:
        assert self.process_group is not None
        timeout = timeout_of(self.process_group)
        limit = min(TRIAL_WAIT, timeout / 2)
        try:
            if dist.get_world_size(self.process_group) < dist.get_world_size():
                # torch counts a process's rendezvous over all groups. If only some processes made one, the next
                # rendezvous of the default group would hang (pytorch #196082).
                with self.agreeing("construction"):
                    await_all("construction of a layer that borrows", limit)
            return make_symmetric(self, self.process_group, device, timeout, limit)
        except Exception as error:  # on all ranks, each with its own error
            return "; ".join(dict.fromkeys(self.gather_objects("construction", str(error))))

    @contextmanager
    def named(self, stage: str) -> Iterator[None]:
        """Add the stage and the rank to the message of an exception that is raised inside."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"stage {stage} failed on rank {self.ranks[0]}: {error} (most likely another rank failed first: see "
                "its error)"
            ) from error
