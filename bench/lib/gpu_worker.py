"""Calls in a process of their own: after an error CUDA refuses all that follows there, and a kernel may hang."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

Attempt = Callable[..., tuple[Any, str]]  # what a call returned, or None, and what went wrong


class Worker:
    """An Attempt of `run` in one process; one that raises, dies or takes too long leaves the next a new process."""

    def __init__(self, run: Callable[..., Any], patience: float) -> None:
        self._run, self._patience = run, patience
        self._process: Any = None

    def __call__(self, *args: Any) -> tuple[Any, str]:
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._pipe, theirs = spawn.Pipe()
            self._process = spawn.Process(target=serve, args=(theirs, self._run), daemon=True)
            self._process.start()
            theirs.close()
        result, error = None, f"no answer within {self._patience:g} s"
        try:
            self._pipe.send(args)
            if self._pipe.poll(self._patience):
                result, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            error = f"the process ended with status {self._process.exitcode}"
        if error:
            self.close()
        return result, error

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def serve(pipe: Connection, run: Callable[..., Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it comes to the parent too, which says what was found
    with suppress(EOFError):
        while True:
            pipe.send(in_this_process(run)(*pipe.recv()))


def in_this_process(run: Callable[..., Any]) -> Attempt:
    """For tools that watch a process, as sanitizers do."""

    def attempt(*args: Any) -> tuple[Any, str]:
        try:
            return run(*args), ""
        except Exception as error:
            traceback.print_exc()
            return None, f"{type(error).__name__}: {error}".splitlines()[0]

    return attempt
