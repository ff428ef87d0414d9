"""Every op once, nothing timed: the bits that a GPU gives against the CPU's, and a few calls for a profiler."""

from __future__ import annotations

import os
import unittest.mock
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import isoload
from lib import table
from lib.gpu_balancers import BALANCERS
from lib.gpu_jobs import JOBS, Job, outputs
from lib.gpu_layers import EXPERTS, Layer, make_layers
from lib.gpu_worker import Attempt

SIZES = [(16, 32, 128), (16, 32, 4100), (128, 128, 64), (192, 128, 64), (304, 352, 64)]  # every kernel
PROFILED = ("plan_exact", "count", "route")
Size = tuple[int, int, int]  # ranks, replicas, tokens


def bits(tensor: Tensor) -> Tensor:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8)


def difference(wanted: Sequence[Tensor], got: Sequence[Tensor]) -> str:
    """Where results first differ; nothing if they are the same bits."""
    for n, (a, b) in enumerate(zip(wanted, got, strict=True)):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return f"output {n} is {b.dtype} {list(b.shape)}, not {a.dtype} {list(a.shape)}"
        if not torch.equal(bits(a), bits(b)):
            at = (bits(a) != bits(b)).view(a.numel(), -1).any(1).nonzero().flatten()
            now, then = (x.flatten()[at[0].item()].item() for x in (b, a))
            return f"output {n}: {len(at)} of {a.numel()}, first [{at[0]}] = {now}, not {then}"
    return ""


def compare(job: Job, hosts: Sequence[Layer], theres: Sequence[Layer]) -> tuple[list[Tensor], str]:
    """What the last layer gives, and where any layer first differs from the CPU."""
    found = ""
    for i, (host, there) in enumerate(zip(hosts, theres, strict=True)):
        got = outputs(job.on(there)())
        where = difference(outputs(job.call(host)), got)
        found = found or (where and f"layer {i}, {where}")
    try:
        isoload.ops.check_device(got[0].device)
    except ValueError as error:
        found = found or str(error)
    return got, found


def starts(early: bool) -> Any:
    """A context in which kernels start before the one ahead has ended, or one after another."""
    return unittest.mock.patch.dict(os.environ, {} if early else {"ISOLOAD_PDL": "0"})


def checked(device: str) -> list[Job]:
    """Torch captures nothing without its caching allocator, and nothing on a CPU."""
    captures = device == "cuda" and "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ
    return [*JOBS, *(job for job in BALANCERS if captures or not job.captured)]


@lru_cache(maxsize=1)
def layer_of(device: str, seed: int, size: Size) -> tuple[Layer, Layer]:
    (host,) = make_layers(*size, seed, layers=1)
    return host, host.to(device)


def check_one(device: str, seed: int, spoil: str, size: Size, name: str, early: bool) -> dict[str, str]:
    """The checksum of what a job gives, and where it is wrong; that of `spoil` is made so."""
    (job,) = (job for job in checked(device) if job.name == name)
    host, there = layer_of(device, seed, size)
    with starts(early):
        got, wrong = compare(job, [host], [there])
    if name == spoil:
        others = [*got[:-1], got[-1].clone()]
        others[-1].view(-1)[-1] += 1
        wrong = difference(got, others)
    checksum = 0
    for result in got:
        checksum = zlib.crc32(bits(result).numpy(), checksum)
    return {"checksum": f"{checksum:08x}", "wrong": wrong}


def tried(attempt: Attempt, *task: Any) -> dict[str, Any]:
    """A row of the task; one that goes wrong is tried without early starts too, and says which is wrong."""
    row, error = attempt(*task, True)
    row = row or {"wrong": error}
    if row["wrong"]:
        again, error = attempt(*task, False)
        row["one_after_another"] = error or again["wrong"] or "right"
    return row


def check_all(attempt: Attempt, device: str, sizes: Sequence[Size] = tuple(SIZES)) -> bool:
    """One layer of several sizes through every op, on ``device`` and on the CPU; prints a checksum of each result,
    then what differs. Whether nothing does.

    On the CPU there is nothing to compare with: two builds agree if they print the same.
    """
    wrong: list[tuple[str, dict[str, Any]]] = []
    try:
        for size in sizes:
            for job in checked(device):
                row = tried(attempt, size, job.name)
                what = f"R={size[0]} E={EXPERTS}+{size[1]} T={size[2]} {job.name}"
                if row["wrong"]:
                    wrong.append((what, row))
                print(f"{what}: {'WRONG' if row['wrong'] else row['checksum']}", flush=True)
    finally:  # also when the time is up
        show_wrong(wrong)
    return not wrong


def show_wrong(rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    if rows:
        cells = [[what, row["wrong"], row["one_after_another"]] for what, row in rows]
        table.show("WRONG", "what | against the CPU | with ISOLOAD_PDL=0", cells)


def profile(size: Size, seed: int) -> None:
    """Each of PROFILED once, warm, between the calls that start and stop a profiler."""
    (layer,) = make_layers(*size, seed, layers=1)
    there = layer.to("cuda")
    chosen = [job for job in JOBS if job.name in PROFILED]
    for job in chosen:
        job.call(there)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for job in chosen:
        job.call(there)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
