"""Watchdog: names an engine's rebalance that stalls, and its thread of rebalances that ends, while the engine waits."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import NamedTuple

from isoload.online.metrics import Metrics

log = logging.getLogger("isoload")


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
