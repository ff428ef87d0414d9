"""R forked processes in one gloo group: a report of each, or the name of the rank that failed, ended or stalled."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist

from isoload.cli.options import RankError

Body = Callable[[int, Callable[[], None]], Any]


def run_ranks(body: Body, num_ranks: int, stall_seconds: float) -> list[Any]:
    """Return the results of ``body(rank, alive)`` on every rank; RankError names the rank that is the cause of a
    failure.

    body calls ``alive()`` at least every stall_seconds. All processes have ended when this function ends, by an
    exception too; only this process handles Ctrl-C. Call it in the main thread, where Python handles signals.
    """
    processes: list[ForkProcess] = []
    readers: list[Connection] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _interrupts_held():
                for rank in range(num_ranks):
                    # One pipe at a time: a child must not inherit another's writing end, which would hide that
                    # process's exit.
                    reader, writer = get_context("fork").Pipe(duplex=False)
                    readers.append(reader)
                    how = (body, rank, num_ranks, f"{folder}/store", stall_seconds, readers, writer)
                    process = get_context("fork").Process(target=_run_rank, args=how, daemon=True)
                    process.start()
                    processes.append(process)
                    writer.close()
            return _collect(readers, processes, stall_seconds)
        finally:
            with _interrupts_held():
                for process in processes:
                    process.kill()
                for process in processes:
                    process.join()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block."""
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if signals:
        raise KeyboardInterrupt


def _run_rank(
    body: Body,
    rank: int,
    num_ranks: int,
    store: str,
    stall_seconds: float,
    readers: list[Connection],
    writer: Connection,
) -> None:
    """Run one process. Its messages: ("alive", None), then ("report", ...) or ("error", text)."""
    # A terminal sends Ctrl-C to all processes; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for reader in readers:
        reader.close()  # so that writing fails once the parent has ended
    method, patience = f"file://{store}", timedelta(seconds=stall_seconds)
    try:
        try:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", method, patience, rank=rank, world_size=num_ranks)
            message = "report", body(rank, lambda: writer.send(("alive", None)))
            dist.barrier()  # no rank closes connections that a slower one still uses
        except BrokenPipeError:
            raise
        except Exception as error:
            message = "error", f"{type(error).__name__}: {error}"
        writer.send(message)
    except BrokenPipeError:
        os._exit(1)


def _collect(readers: list[Connection], processes: list[ForkProcess], stall_seconds: float) -> list[Any]:
    """Return the reports. A stalled rank makes exchanges of all other ranks time out after stall_seconds; the added
    time lets them report that, so that the remaining rank is the one at fault.
    """
    patience = stall_seconds + max(5.0, stall_seconds / 4)
    reports: dict[int, Any] = {}
    errors: dict[int, str] = {}
    heard = dict.fromkeys(range(len(readers)), time.monotonic())  # of every rank that still runs
    while heard:
        left = patience + min(heard.values()) - time.monotonic()
        ready = wait([readers[rank] for rank in heard], max(0.0, left))
        if not ready:
            silent = [str(rank) for rank in heard if heard[rank] + patience <= time.monotonic() + 0.01]
            who = f"ranks {', '.join(silent)}" if len(silent) > 1 else f"rank {silent[0]}"
            raise RankError(f"{who} stalled: no batch ended within {stall_seconds:g} s")
        for rank in [rank for rank in heard if readers[rank] in ready]:
            try:
                kind, value = readers[rank].recv()
            except EOFError:
                processes[rank].join()
                code = processes[rank].exitcode
                raise RankError(f"rank {rank} ended without a report, with exit code {code}") from None
            heard[rank] = time.monotonic()
            if kind != "alive":
                (reports if kind == "report" else errors)[rank] = value
                del heard[rank]
    for rank, error in errors.items():  # the first error: later ones follow from it
        raise RankError(f"rank {rank} failed: {error}")
    return [reports[rank] for rank in range(len(readers))]
