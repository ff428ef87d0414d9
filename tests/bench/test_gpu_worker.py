"""A job that ends its process, or hangs, costs itself alone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
from lib.gpu_worker import Worker

seen: list[str] = []


def work(job: str) -> tuple[int, list[str]]:
    seen.append(job)
    if job == "raise":
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand more")
    if job == "abort":
        os._exit(7)
    if job == "hang":
        time.sleep(60)
    return os.getpid(), list(seen)


def test_the_next_job_has_a_new_process() -> None:
    worker = Worker(work, patience=30)
    (first, _), (again, had) = (worker(job)[0] for job in "ab")
    assert first == again != os.getpid() and had == ["a", "b"]
    for job, error in [
        ("raise", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("abort", "the process ended with status 7"),
        ("hang", "no answer within 0.2 s"),
    ]:
        worker._patience = 0.2 if job == "hang" else 30
        assert worker(job) == (None, error)
        worker._patience = 30
        (process, had), error = worker("c")
        assert had == ["c"] and process not in (first, os.getpid()) and not error
        first = process
    worker.close()
