"""Timing on a GPU: calls from Python, calls in a captured graph, and how many nodes the graph has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from ctypes import CDLL, byref, c_size_t, c_void_p

import numpy as np
import torch

from lib.clocks import Call, timed_on_cuda
from lib.harness import Timing


class Graph:
    """Calls captured one after the other."""

    def __init__(self, calls: Sequence[Call]) -> None:
        for call in calls:  # the first use of a kernel loads it, which no capture may do
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(self.graph):
            self.results = [call() for call in calls]  # kept: another call must not get their memory

    def replay(self) -> None:
        self.graph.replay()

    def num_nodes(self) -> int:
        nodes = c_size_t()
        status = CDLL("libcuda.so.1").cuGraphGetNodes(
            c_void_p(self.graph.raw_cuda_graph()), None, byref(nodes)
        )
        if status:
            raise RuntimeError(f"cuGraphGetNodes failed with {status}")
        return nodes.value


def spread(samples: list[float]) -> Timing:
    return Timing(float(np.median(samples)), float(np.percentile(samples, 99)))


def between_events(replay: Call, units: int, samples: int, replays: int) -> Timing:
    """Microseconds per unit: `replays` replays, `units` units each, between two events of the stream."""
    for _ in range(3):
        replay()
    torch.cuda.synchronize()

    def several() -> None:
        for _ in range(replays):
            replay()

    return spread([timed_on_cuda(several)[1] * 1e3 / (units * replays) for _ in range(samples)])


def behind_others(replay: Call, samples: int) -> Timing:
    """Microseconds of one replay that finds neither its code nor its data in a cache.

    A GEMM and a pass over twice the L2 cache run before the first event, long enough (about 100 us) for the host to
    have both events and the replay in the stream before the GPU comes to them.
    """
    matrix = torch.randn(4096, 4096, device="cuda").to(torch.bfloat16)
    others = torch.zeros(
        2 * torch.cuda.get_device_properties("cuda").L2_cache_size, dtype=torch.uint8, device="cuda"
    )
    found = []
    for _ in range(samples + 2):
        torch.mm(matrix, matrix)
        others.add_(1)
        found.append(timed_on_cuda(replay)[1] * 1e3)
    return spread(found[2:])


def from_python(calls: Sequence[Call], samples: int) -> Timing:
    """Microseconds per call until the device has done all of them, as Python's clock sees it."""
    found = []
    for _ in range(samples + 2):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for call in calls:
            call()
        torch.cuda.synchronize()
        found.append((time.perf_counter_ns() - start) / 1e3 / len(calls))
    return spread(found[2:])
