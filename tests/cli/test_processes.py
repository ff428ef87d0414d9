"""The demo's processes: reports, and the name of the rank that fails, ends or stalls; none outlives the call."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from isoload.cli.processes import RankError, run_ranks


def summing(rank, alive):
    total = torch.tensor([rank + 1])
    for _ in range(3):
        dist.all_reduce(total)
        alive()
    return int(total), os.getpid()


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_reports_come_by_rank():
    reports = run_ranks(summing, 3, 30.0)
    assert [total for total, _ in reports] == [54] * 3
    assert all(gone(pid) for _, pid in reports)


def at_rank_1(act, folder):
    """A body in which rank 1 acts before its second exchange; every rank leaves its pid."""

    def body(rank, alive):
        (folder / f"{rank}").write_text(str(os.getpid()))
        dist.barrier()
        alive()
        if rank == 1:
            act()
        return summing(rank, alive)

    return body


def fail():
    raise OSError("disk full")


def sleep():
    time.sleep(60)


WAYS = {
    "fails": (fail, "^rank 1 failed: OSError: disk full$"),
    "ends": (
        lambda: os.kill(os.getpid(), signal.SIGKILL),
        "^rank 1 ended without a report, with exit code -9$",
    ),
    "stops": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "^rank 1 stalled: no batch ended within 1 s$"),
    "sleeps": (sleep, "^rank 1 stalled: no batch ended within 1 s$"),
}


@pytest.mark.parametrize(
    "way", ["fails", *(pytest.param(way, marks=pytest.mark.slow) for way in ("ends", "stops", "sleeps"))]
)
def test_the_rank_at_fault_is_named_and_nobody_stays(way, tmp_path):
    act, message = WAYS[way]
    start = time.monotonic()
    with pytest.raises(RankError, match=message):
        run_ranks(at_rank_1(act, tmp_path), 3, 1.0)
    assert time.monotonic() - start < 30
    assert all(gone(int((tmp_path / f"{rank}").read_text())) for rank in range(3))


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named():
    def body(rank, alive):
        return summing(rank, alive)

    def stopped(*_, **how):
        if how["rank"] == 2:
            sleep()
        return join(*_, **how)

    join = dist.init_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", stopped)
        with pytest.raises(RankError, match="^rank 2 stalled"):
            run_ranks(body, 3, 1.0)


@pytest.mark.slow
def test_ranks_that_all_stall_are_all_named():
    with pytest.raises(RankError, match="^ranks 0, 1 stalled: no batch ended within 1 s$"):
        run_ranks(lambda rank, alive: sleep(), 2, 1.0)
