"""Switch between isoload's and the engine's choice of replicas in a running engine; watchdog of rebalances.

ISOLOAD_SWITCH names a file that the first rank reads. A flag on the device selects the choice, so that captured
graphs read it too: both choices are made. Between two passes all ranks take the first rank's value.
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

from isoload.checks import parse_layers
from isoload.files import open_regular
from isoload.online.metrics import Metrics

log = logging.getLogger("isoload")
AGREE_EVERY = 16  # forward passes between two words of the first rank
READ_EVERY = 1.0  # seconds between two readings of the file
STATES = ("off", "on", "shadow")
LONGEST = 1000  # bytes of the file


class Switch:
    """Of one model on one rank; "on" until the file says another.

    Args:
        path: of the file: ``on``, ``off``, ``shadow`` or ``on:layers=0-7,9``, by position. While it is not there, or
            says something else, all stays as it was.
        num_layers: L.
        device: where the engine routes.
        group: the ranks, over gloo; None: this one alone.
        engine: its name.
    """

    def __init__(
        self, path: str, num_layers: int, device: torch.device, group: dist.ProcessGroup | None, engine: str
    ) -> None:
        self.path, self.group, self.engine = Path(path), group, engine
        self.rank = 0 if group is None else dist.get_rank(group)
        # [1 + L] position in STATES, then whose choice stands
        self._code = torch.tensor(parse("on", num_layers))
        with torch.inference_mode(False):  # else only inference could write it
            self.flags = torch.ones(num_layers, dtype=torch.bool, device=device)
        self._layers = list(self.flags.unbind())  # views made once
        self.on = [True] * num_layers  # the flags, for the host
        self._fault, self._next, self._passes = "", 0.0, 0

    @property
    def state(self) -> str:
        return STATES[int(self._code[0])]

    def choose(self, layer: int, ours: Tensor, theirs: Tensor) -> Tensor:
        """[T, K] one of two choices of slots, of ours' dtype: no host wait, in a captured graph too."""
        return torch.where(self._layers[layer], ours, theirs.to(ours.dtype))

    def step_ended(self) -> bool:
        """A forward pass is over, on all ranks, outside of any graph: whether the state has changed, on all alike."""
        self._passes += 1
        if self._passes % AGREE_EVERY:
            return False
        wanted = self._code.clone()
        if self.rank == 0:
            wanted = torch.tensor(self._read())
        if self.group is not None:
            dist.broadcast(wanted, dist.get_global_rank(self.group, 0), group=self.group)
        if torch.equal(wanted, self._code):
            return False
        self._code = wanted
        self.flags.copy_(wanted[1:].bool())
        self.on = self._code[1:].bool().tolist()
        said = f"{self.state}, isoload's on {int(wanted[1:].sum())} of {len(self.flags)} layers"
        log.info(f"isoload {self.engine}: switched to {said}, after pass {self._passes} on rank {self.rank}")
        return True

    def leave(self) -> None:
        """The engine's choice stands in all layers, in captured graphs too; the file is read no more."""
        self.flags.zero_()

    def _read(self) -> list[int]:
        """What the file says; what it said before where it says nothing, or nothing that is a state."""
        before: list[int] = self._code.tolist()
        if time.monotonic() < self._next:
            return before
        self._next = time.monotonic() + READ_EVERY
        fault, found = "", before
        try:
            with open_regular(self.path) as file:  # a pipe would block the engine in its pass
                text = file.read(LONGEST).decode(errors="backslashreplace").strip()
            if text:  # else it is being written
                found = parse(text, len(self.flags))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            fault = str(error)
            if fault != self._fault:  # once
                log.error(f"isoload {self.engine}: ISOLOAD_SWITCH {self.path}: {fault}; {self.state} stays")
        self._fault = fault
        return found


def parse(text: str, num_layers: int) -> list[int]:
    """[1 + L] position in STATES, then 1 for each layer whose replicas isoload chooses."""
    state, _, layers = text.partition(":layers=")
    if state not in STATES or (layers and state != "on") or (not layers and text != state):
        raise ValueError(f"state must be on, off, shadow or on:layers=0-7, got {text!r:.80}")
    chosen = set(parse_layers(layers, num_layers) if layers else range(num_layers if state == "on" else 0))
    return [STATES.index(state), *(int(layer in chosen) for layer in range(num_layers))]


class Rebalance(NamedTuple):
    """One under way.

    began    times are those of time.monotonic()
    since    when it began or last made progress
    entered  since when the engine's code is at it and has not returned; None: between two passes
    left     when last a pass ended and it was not over; None: none has
    passes   how many began, since
    """

    began: float
    since: float
    entered: float | None = None
    left: float | None = None
    passes: int = 0

    def stalled(self, now: float) -> float:
        """Seconds without progress. Only passes count: no engine moves experts while it has no requests."""
        inside = 0.0 if self.entered is None else now - self.entered
        return max(inside, 0.0 if self.left is None else self.left - self.since)


class Watchdog:
    """Looks from a thread of its own, once in so many seconds, since the engine's may never come back; 0: never.

    The engine's hooks call :meth:`enter`, :meth:`leave` and :meth:`progressed` in the thread that runs passes, and keep
    ``worker``, the engine's thread of rebalances, if it has one.
    """

    def __init__(self, engine: str, seconds: float) -> None:
        self.engine, self.seconds = engine, seconds
        self.worker: threading.Thread | None = None
        self.metrics = Metrics()
        self._now: Rebalance | None = None  # replaced, never changed: another thread reads it
        self._named: tuple[float | None, threading.Thread | None] = None, None  # stall and thread, once each
        self._thread: threading.Thread | None = None

    def enter(self) -> None:
        """The engine goes to where it begins or continues a rebalance."""
        if self._thread is None and self.seconds:
            given = weakref.ref(self), self.seconds
            self._thread = threading.Thread(target=_watch, args=given, name="isoload-watchdog", daemon=True)
            self._thread.start()
        now = time.monotonic()
        of = self._now or Rebalance(now, now)
        self._now = of._replace(entered=now, passes=of.passes + 1)

    def leave(self, pending: bool) -> None:
        """It has returned; pending: a rebalance is not over. One that has moved experts is counted at its end."""
        if (of := self._now) is None:
            return
        now = time.monotonic()
        self._now = of._replace(entered=None, left=now) if pending else None
        if not pending and of.since > of.began:
            self.metrics.add("rebalances_total")
            self.metrics.observe("rebalance_seconds", now - of.began)

    def progressed(self) -> None:
        """Experts have arrived in a layer or more, and the engine routes to them."""
        if (of := self._now) is not None:
            now = time.monotonic()
            self._now = Rebalance(of.began, now, None if of.entered is None else now)

    def look(self) -> None:
        """An error line for what is new, the metrics for what is."""
        of, worker, (stall, thread) = self._now, self.worker, self._named
        age = 0.0 if of is None else of.stalled(time.monotonic())
        dead = worker is not None and not worker.is_alive()
        if of is not None and age >= self.seconds and stall != of.since:
            stall = of.since
            log.error(
                f"isoload {self.engine}: EPLB has stalled: no layer's experts have arrived for {age:.0f} s "
                f"(passes: {of.passes}). Copies go where experts last arrived"
            )
        if dead and thread is not worker:
            thread = worker
            log.error(f"isoload {self.engine}: EPLB's thread has ended: experts stay where they are")
        self._named = stall, thread
        stalled = age if age >= self.seconds else 0.0
        self.metrics.set("rebalance_stalled_seconds", stalled)
        self.metrics.set("rebalance_thread_dead", float(dead))


def _watch(given: weakref.ref[Watchdog], seconds: float) -> None:
    """Until the watchdog is dropped."""
    while True:
        time.sleep(seconds)
        if (watchdog := given()) is None:
            return
        watchdog.look()
        del watchdog
