"""Switch between isoload's and the engine's choice of replicas in a running engine; watchdog of rebalances.

ISOLOAD_SWITCH names a file that the first rank reads. A flag on the device selects the choice, so that captured graphs
read it too: both choices are computed. Between two passes all ranks adopt the first rank's value.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from isoload.files import open_regular
from isoload.online.metrics import Metrics

log = logging.getLogger("isoload")
AGREE_EVERY = 16  # forward passes between two broadcasts of the first rank's state
READ_EVERY = 1.0  # seconds between two readings of the file
LONGEST = 1000  # limit of the file, in bytes
REMOVED = {
    "shadow": "shadow was removed: restart with ISOLOAD_MODE=shadow",
    "on:layers=": "on:layers= was removed: use on or off, which apply to all layers",
}


class Switch:
    """The switch of one model on one rank; it is on until the file (``on`` or ``off``) has another state.

    device: where the engine routes. group: the ranks, over gloo; None: this rank alone.
    """

    def __init__(self, path: str, device: torch.device, group: dist.ProcessGroup | None, engine: str) -> None:
        self.path, self.group, self.engine = Path(path), group, engine
        self.rank = 0 if group is None else dist.get_rank(group)
        self.on = True  # the flag, on the host
        with torch.inference_mode(False):  # otherwise only inference mode could write it
            self.flag = torch.ones((), dtype=torch.bool, device=device)
        self._fault, self._next, self._passes = "", 0.0, 0

    @property
    def state(self) -> str:
        return "on" if self.on else "off"

    def choose(self, ours: Tensor, theirs: Tensor) -> Tensor:
        """Return [T, K], one of two choices of slots, in ours' dtype: no host wait, in a captured graph too."""
        return torch.where(self.flag, ours, theirs.to(ours.dtype))

    def step_ended(self) -> bool:
        """Count a forward pass, outside of any graph; return whether the state has changed, the same on all ranks."""
        self._passes += 1
        if self._passes % AGREE_EVERY:
            return False
        wanted = torch.tensor(self._read() if self.rank == 0 else self.on, dtype=torch.uint8)
        if self.group is not None:
            dist.broadcast(wanted, dist.get_global_rank(self.group, 0), group=self.group)
        if bool(wanted) == self.on:
            return False
        self.on = bool(wanted)
        self.flag.fill_(self.on)
        log.info(
            f"isoload {self.engine}: switched {self.state}, after pass {self._passes} on rank {self.rank}"
        )
        return True

    def leave(self) -> None:
        """Leave the choice to the engine, in captured graphs too; the file is not read any more."""
        self.flag.zero_()

    def _read(self) -> bool:
        """Return the file's state, or the current one if the file has none."""
        if time.monotonic() < self._next:
            return self.on
        self._next = time.monotonic() + READ_EVERY
        fault, on = "", self.on
        try:
            with open_regular(self.path) as file:  # a pipe would block the engine in its pass
                text = file.read(LONGEST).decode(errors="backslashreplace").strip()
            if text:  # otherwise the file is being written
                on = parse(text)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            fault = str(error)
            if fault != self._fault:  # once
                log.error(f"isoload {self.engine}: ISOLOAD_SWITCH {self.path}: {fault}; {self.state} stays")
        self._fault = fault
        return on


def parse(text: str) -> bool:
    """Return whether isoload chooses replicas."""
    for start, message in REMOVED.items():
        if text.startswith(start):
            raise ValueError(message)
    if text not in ("on", "off"):
        raise ValueError(f"state must be on or off, got {text!r:.80}")
    return text == "on"


class Rebalance(NamedTuple):
    """A rebalance in progress; times are those of time.monotonic()."""

    began: float
    since: float  # when it began or last made progress
    entered: float | None = None  # when the engine's present call began; None: between two passes
    left: float | None = None  # when a pass last ended without completing it
    passes: int = 0  # how many began, since

    def stalled(self, now: float) -> float:
        """Return the seconds without progress. Only passes count: no engine moves experts while it has no requests."""
        inside = 0.0 if self.entered is None else now - self.entered
        return max(inside, 0.0 if self.left is None else self.left - self.since)


class Watchdog:
    """Thread that checks at intervals whether a rebalance has stalled; 0 seconds: never.

    The engine's hooks call :meth:`enter`, :meth:`leave` and :meth:`progressed` in the thread that runs passes; a pass
    may block. They set ``worker`` to the engine's thread of rebalances.
    """

    def __init__(self, engine: str, seconds: float) -> None:
        self.engine, self.seconds = engine, seconds
        self.worker: threading.Thread | None = None
        self.metrics = Metrics()
        self._rebalance: Rebalance | None = None  # replaced, never changed: another thread reads it
        # Stall and thread that were logged, once each.
        self._named: tuple[float | None, threading.Thread | None] = None, None
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        """Record that the engine begins or continues a rebalance."""
        if self._thread is None and self.seconds:
            args = weakref.ref(self), self.seconds
            self._thread = threading.Thread(target=_watch, args=args, name="isoload-watchdog", daemon=True)
            self._thread.start()
        now = time.monotonic()
        rebalance = self._rebalance or Rebalance(now, now)
        self._rebalance = rebalance._replace(entered=now, passes=rebalance.passes + 1)

    def leave(self, pending: bool) -> None:
        """Record that the engine's call has returned, and count a complete rebalance that moved experts."""
        if (rebalance := self._rebalance) is None:
            return
        now = time.monotonic()
        self._rebalance = rebalance._replace(entered=None, left=now) if pending else None
        if not pending and rebalance.since > rebalance.began:
            self.metrics.add("rebalances_total")
            self.metrics.observe("rebalance_seconds", now - rebalance.began)

    def progressed(self) -> None:
        """Record that experts have arrived in at least one layer, and that the engine routes to them."""
        if (rebalance := self._rebalance) is not None:
            now = time.monotonic()
            self._rebalance = Rebalance(rebalance.began, now, None if rebalance.entered is None else now)

    def look(self) -> None:
        """Log an error for each new stall or ended thread, and set the metrics."""
        rebalance, worker, (stall, thread) = self._rebalance, self.worker, self._named
        age = 0.0 if rebalance is None else rebalance.stalled(time.monotonic())
        dead = worker is not None and not worker.is_alive()
        if rebalance is not None and age >= self.seconds and stall != rebalance.since:
            stall = rebalance.since
            log.error(
                f"isoload {self.engine}: EPLB has stalled: no layer's experts have arrived for {age:.0f} s "
                f"(passes: {rebalance.passes}). Copies go where experts last arrived"
            )
        if dead and thread is not worker:
            thread = worker
            log.error(f"isoload {self.engine}: EPLB's thread has ended: experts are not moved any more")
        self._named = stall, thread
        stalled = age if age >= self.seconds else 0.0
        self.metrics.set("rebalance_stalled_seconds", stalled)
        self.metrics.set("rebalance_thread_dead", float(dead))


def _watch(reference: weakref.ref[Watchdog], seconds: float) -> None:
    while True:
        time.sleep(seconds)
        if (watchdog := reference()) is None:
            return
        watchdog.look()
        del watchdog
