"""Beside: a second stream of a GPU, for what the host enqueues while the first one computes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from isoload.transport import Group


def runs_apart(device: torch.device) -> bool:
    """Whether a device has streams: on the CPU nothing runs beside what the host computes."""
    return device.type == "cuda"


class Beside:
    """A context whose kernels run on a side stream, after those that the current stream had when this was made.

    On leaving, the current stream waits for them: only work that is enqueued in between runs at the same time. The
    caller keeps alive until then what they read. What they make belongs to the side stream, which uses its memory again
    behind the next fork alone, and so behind all uses before. Forks and joins are events: a CUDA graph captures them.

    Args:
        group: keeps a side stream for each stream that layers run on.
        device: without streams the context does nothing.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.apart = runs_apart(device)
        self._entered: AbstractContextManager[object] = nullcontext()
        if self.apart:
            self._main = torch.cuda.current_stream(device)
            self._side = group.memo(("beside", self._main), lambda: torch.cuda.Stream(device))
            self._side.wait_stream(self._main)

    def __enter__(self) -> None:
        if self.apart:
            self._entered = torch.cuda.stream(self._side)
        self._entered.__enter__()

    def __exit__(self, *error: object) -> None:
        self._entered.__exit__(*error)  # type: ignore[arg-type]
        if self.apart:
            self._main.wait_stream(self._side)
