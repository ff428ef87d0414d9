"""Every op once, nothing timed: the bits that a GPU gives against the CPU's, and a few calls for a profiler."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

import isoload
from gpu_balancers import check_balancer, make_balancer, make_captured
from gpu_jobs import JOBS, Job, outputs
from gpu_layers import EXPERTS, Layer, make_layers

SIZES = [(16, 32, 128), (16, 32, 4100), (128, 128, 64), (192, 128, 64), (304, 352, 64)]  # every kernel
PROFILED = ("plan_exact", "count", "route")


def same_bits(job: Job, hosts: Sequence[Layer], theres: Sequence[Layer]) -> list[Tensor]:
    """Raises unless every layer's result is the CPU's; returns that of the last."""
    got: list[Tensor] = []
    for i, (host, there) in enumerate(zip(hosts, theres, strict=True)):
        wanted, got = outputs(job, host), outputs(job, there)
        if not all(torch.equal(a, b.cpu()) for a, b in zip(wanted, got, strict=True)):
            raise SystemExit(f"{job.name} differs from the CPU on layer {i}")
    isoload.check_device(got[0].device)
    return got


def check_all(device: str, seed: int) -> None:
    """One layer of several sizes through every op, on ``device`` and on the CPU; prints a checksum of each result.

    On the CPU there is nothing to compare with: two builds agree if they print the same.
    """
    for ranks, replicas, tokens in SIZES:
        (host,) = make_layers(ranks, replicas, tokens, seed, layers=1)
        there = host.to(device)
        found = {job.name: same_bits(job, [host], [there]) for job in JOBS}
        found["balancer"] = [check_balancer(host, there, make_balancer(there))]
        if device == "cuda":
            found["balancer, captured"] = [check_balancer(host, there, make_captured(there))]
        for name, results in found.items():
            checksum = 0
            for result in results:
                checksum = zlib.crc32(result.cpu().contiguous().view(-1).view(torch.uint8).numpy(), checksum)
            print(f"R={ranks} E={EXPERTS}+{replicas} T={tokens} {name}: {checksum:08x}", flush=True)


def profile(ranks: int, replicas: int, tokens: int, seed: int) -> None:
    """Each of PROFILED once, warm, between the calls that start and stop a profiler."""
    (layer,) = make_layers(ranks, replicas, tokens, seed, layers=1)
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
