"""R forked processes in one gloo group, for tests: what each returned, or how it ended."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def start_autograd() -> None:
    """To be called before any tensor is fake, so that forked processes can run autograd too.

    The first backward of a process starts a thread for each device but the CPU, after which none of its forks can.
    Without a GPU there is no such device, until a FakeTensorMode adds one to a CUDA build of torch.
    """
    torch.ones((), requires_grad=True).mul(2).backward()


@dataclass(frozen=True)
class Outcome:
    """How a rank's process ended: with a value, or with the text of its exception or signal."""

    rank: int
    value: Any = None
    error: str | None = None


def run_ranks(body: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[Any]:
    """What ``body(rank, *args)`` returned on every rank; an AssertionError shows all ranks that failed."""
    outcomes = rank_outcomes(body, num_ranks, *args, **options)
    failed = [f"--- rank {o.rank} of {num_ranks}: {o.error}" for o in outcomes if o.error is not None]
    assert not failed, "\n".join(failed)
    return [o.value for o in outcomes]


def rank_outcomes(
    body: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
) -> list[Outcome]:
    """Runs ``body(rank, *args)`` on R forked ranks of one group; after ``timeout`` seconds all are killed.

    Forked, so that a body may be any function and torch is imported once. The parent must hold no process group.
    """

    context = get_context("fork")
    folder = tempfile.mkdtemp()
    processes, readers = [], []
    try:
        for rank in range(num_ranks):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(body, rank, num_ranks, args, folder, group_timeout, writer), daemon=True
            )
            process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        return _collect(processes, readers, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()
        shutil.rmtree(folder)


def run_program(code: str, folder: Path) -> tuple[int, str]:
    """Runs a program in a folder: its status, and what it said. Forked: a new interpreter would import torch again."""
    import torch._dynamo  # noqa: F401  # as in rank_outcomes

    with tempfile.TemporaryFile("w+") as said:
        if (child := os.fork()) == 0:
            sys.stdout = sys.stderr = said
            status = 0
            try:
                os.chdir(folder)
                exec(compile(code, "example", "exec"), {"__name__": "__main__"})
            except BaseException as error:
                if status := int(not isinstance(error, SystemExit) or bool(error.code)):
                    traceback.print_exc()
            finally:
                said.flush()
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        return status, said.read()


def die() -> None:
    """Ends this process as the kernel would end it: no exception, no cleaning up."""
    os.kill(os.getpid(), signal.SIGKILL)


def _child(
    body: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    folder: str,
    group_timeout: float,
    writer: Connection,
) -> None:
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(os.path.join(folder, "store"), num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=group_timeout),
        )
        outcome = Outcome(rank, value=body(rank, *args))
        with suppress(RuntimeError):  # a peer may have failed; none may close its sockets under a slower one
            dist.barrier()
    except BaseException:
        outcome = Outcome(rank, error=traceback.format_exc())
    # plain bytes: multiprocessing would share a tensor's memory, which ends with this process
    writer.send_bytes(pickle.dumps(outcome))
    os._exit(0)


def _collect(processes: list[Any], readers: list[Connection], deadline: float) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(readers):
        waiting = {reader: rank for rank, reader in enumerate(readers) if rank not in outcomes}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in waiting.values():
                outcomes[rank] = Outcome(rank, error="did not end in time and was killed")
        for reader in ready:
            rank = waiting[reader]
            try:
                outcomes[rank] = pickle.loads(reader.recv_bytes())
            except EOFError:
                processes[rank].join()
                outcomes[rank] = Outcome(rank, error=f"ended with exit code {processes[rank].exitcode}")
    return [outcomes[rank] for rank in range(len(readers))]
