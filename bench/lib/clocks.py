"""What a call takes on the device where it runs: its time and its memory."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], Any]
Timer = Callable[[Call], tuple[Any, float]]
CPU = torch.device("cpu")


def timed(call: Call, clock: Callable[[], int]) -> tuple[Any, float]:
    """What a call returned, and its milliseconds by a clock in nanoseconds."""
    start = clock()
    result = call()
    return result, (clock() - start) / 1e6


def timed_on_cuda(call: Call) -> tuple[Any, float]:
    """What a call returned, and the milliseconds between events on the current stream, before and after it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    result = call()
    end.record()
    end.synchronize()
    return result, start.elapsed_time(end)


def timer_on(device: torch.device) -> Timer:
    """On CPU the CPU time of this process, so that sharing cores does not count; on CUDA events."""
    return timed_on_cuda if device.type == "cuda" else partial(timed, clock=time.process_time_ns)


def peak_bytes(call: Call, device: torch.device = CPU) -> int:
    """Most memory that a call held at a time beyond what was there before it."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = recorded.profiler.kineto_results.events()
    reports = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in reports), initial=0))


def medians(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """By key, over the samples that have it; rows and bytes as means, for they differ only between batches."""
    keys = dict.fromkeys(key for sample in samples for key in sample)
    counted = ("rows", "copies", "bytes", "sent")
    return {
        key: float((np.mean if key.endswith(counted) else np.median)([s[key] for s in samples if key in s]))
        for key in keys
    }
