"""Rules that kernels find broken: a bit each, raised when asked, once; on the CPU ops raise at once and leave none.

test_cuda_on_simt.py runs `noted` over the kernels without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import isoload
from isoload import ops
from isoload.ops import library
from isoload.ops.library import RULES

SLOTS = torch.tensor([0, 1, 1, 2], dtype=torch.int32)  # experts 0..2 on two ranks; expert 3 has no replica
NO_OFFSET = torch.zeros(2, dtype=torch.int32)
LOADS = torch.tensor([[2, 3, 1, 0], [0, 1, 0, 0]], dtype=torch.int32)
QUOTA = torch.tensor([2, 2, 2, 1], dtype=torch.int32)
IDS = torch.tensor([[0, 1], [0, 1], [1, 2]])  # the first rank's
ROW = torch.tensor([2, 2, 1, 1], dtype=torch.int32)
BAD_IDS = (torch.tensor([[0, -2]]), torch.tensor([[0, 4]], dtype=torch.int32), torch.tensor([[2**32, 1]]))
NEGATIVE = torch.full((2, 2), -1, dtype=torch.int32)
TWO = torch.tensor([3, 4], dtype=torch.int32)
WEIGHTS = torch.tensor([1.0, 0, 0, 1])


def plan_without_replica(d: str) -> None:
    loads = LOADS.clone()
    loads[0, 3] = 5
    ops.plan_exact(loads.to(d), tables(d))


def split_for_a_rank_negative(d: str) -> None:
    """Nothing is left but zeros, and -1 in place of peak and bound."""
    split = ops.plan_exact(-LOADS.to(d), tables(d), rank=1)
    assert not split.quota.any() and not split.telemetry.any() and not split.send_counts.any()
    assert split.peak.item() == split.bound.item() == -1


def joint_negative(d: str) -> None:
    """As plan_exact; the shared copies go nowhere either."""
    loads = torch.nn.functional.pad(LOADS, (0, 1), value=-1)
    made = ops.plan_joint(loads.to(d), tables(d), 1, 1, 0)
    assert not any(field.any() for field in (made.quota, made.telemetry, made.send_counts, made.share))
    assert made.peak.item() == made.bound.item() == -1


def tables(d: str) -> isoload.ops.tables.ReplicaTables:
    return ops.replica_tables(SLOTS.to(d), 2, 4)


def count_of_many(d: str) -> Tensor:
    return ops.count(BAD_IDS[0].to(d), 2000).counts


def route(d: str, ids: Tensor, row: Tensor = ROW) -> Tensor:
    """The ids become bad once they are counted."""
    counted = ops.count(IDS[: len(ids), : ids.shape[1]].to(d), 4)
    return ops.route(counted._replace(ids=ids.to(d)), row.to(d), tables(d))


def balance_own_bad(d: str, ids: Tensor, offset: Tensor) -> None:
    """No copy of an id that is none has a slot."""
    slots, _ = ops.balance_own(ids.to(d), tables(d), offset.to(d), 0)
    assert (slots[((ids < 0) | (ids >= 4)).to(d)] < 0).all()


def shared_sampled(d: str) -> Tensor:
    return ops.route_shared_sampled(IDS.to(d) + 2, TWO.to(d), None, 2, 0, "static")


def append(d: str) -> object:
    ranks = TWO[:1].expand(3, 1).to(d)
    return ops.append_shared_expert(IDS.to(d) - 2, torch.ones(3, 2, device=d), ranks, 2)


def fill_slots(d: str, planner: Callable[..., object] = ops.plan_fill) -> object:
    home = torch.tensor([0, 1, 4], dtype=torch.int32, device=d)
    slots = torch.tensor([0, 1, -1, -1, 2, -1], dtype=torch.int32, device=d)
    return planner(-LOADS[:, :3].to(d), slots, home, 2, 1)


def borrow(d: str, backward: bool) -> None:
    """Rank 0 borrows an expert that does not exist."""
    slots = torch.tensor([0, 7, 1, -1], dtype=torch.int32, device=d)
    home, stack = torch.tensor([[0, 0], [1, 0]], dtype=torch.int32, device=d), torch.ones(1, 3, device=d)
    peers = ops.addresses([[stack], [stack]])
    if backward:
        ops.borrow_backward(slots, home, peers, [stack.clone()], 2, 0, 1, torch.float32)
    else:
        ops.borrow(slots, home, peers, [stack.clone()], 2, 0)


# name: what is called on a device, the rules that it breaks
BROKEN: dict[str, tuple[Callable[[str], object], list[int]]] = {
    **{f"count {i}": (lambda d, bad=bad: ops.count(bad.to(d), 4), [0]) for i, bad in enumerate(BAD_IDS)},
    "count of many": (count_of_many, [0]),
    "count shared": (lambda d: ops.count(torch.tensor([[0, 4], [1, 2]]).to(d), 4, 1), [0]),
    "plan_exact": (plan_without_replica, [1]),
    "plan_exact for a rank": (split_for_a_rank_negative, [1]),
    "plan_joint": (joint_negative, [1]),
    "plan_active": (lambda d: ops.plan_active(-LOADS.to(d), tables(d)), [2]),
    "plan_waterfill": (lambda d: ops.plan_waterfill(NEGATIVE.to(d), TWO.to(d)), [3]),
    "share": (lambda d: ops.share(LOADS.to(d), QUOTA.to(d) + 1, tables(d), 1), [4]),
    "plan_own": (lambda d: ops.plan_own(-LOADS[0].to(d), tables(d), NO_OFFSET.to(d), 0), [19]),
    **{
        f"balance_own {i}": (lambda d, bad=bad: balance_own_bad(d, bad, NO_OFFSET), [20])
        for i, bad in enumerate(BAD_IDS)
    },
    "balance_own offset": (lambda d: balance_own_bad(d, IDS, NO_OFFSET - 1), [21]),
    "balance_own without replica": (lambda d: balance_own_bad(d, IDS + 1, NO_OFFSET), [21]),
    "balance_own of many": (lambda d: balance_own_bad(d, (IDS + 1).repeat(1400, 1), NO_OFFSET), [6, 21]),
    "balance_same": (lambda d: ops.balance_same(BAD_IDS[0].to(d), tables(d)), [0, 5]),
    **{f"route {i}": (lambda d, bad=bad: route(d, bad), [5]) for i, bad in enumerate(BAD_IDS)},
    "route share": (lambda d: route(d, IDS, ROW * 0), [6]),
    "route both": (lambda d: route(d, IDS + 2, ROW - 1), [5, 6]),
    "route_sampled": (lambda d: ops.route_sampled(BAD_IDS[0].to(d), WEIGHTS.to(d), tables(d), 1), [7]),
    "route_sampled weights": (lambda d: ops.route_sampled(IDS.to(d), WEIGHTS.to(d), tables(d), 1), [8]),
    "route_shared": (lambda d: ops.route_shared(IDS.to(d) + 2, TWO.to(d), 2, 0), [9]),
    "route_shared_sampled": (shared_sampled, [10]),
    "append": (append, [11]),
    "plan_lp": (lambda d: ops.plan_lp(-LOADS.to(d), tables(d)), [12]),
    "round_split": (lambda d: ops.round_split(QUOTA.float().to(d), -LOADS.to(d), tables(d)), [13]),
    "plan_fill": (fill_slots, [14]),
    "borrow": (lambda d: borrow(d, False), [15]),
    "borrow_backward": (lambda d: borrow(d, True), [16]),
    "top_up": (lambda d: fill_slots(d, ops.top_up), [17]),
    "group_copies": (lambda d: ops.group_copies(IDS.to(d), 0, 3, 5), [18]),
}  # fmt: skip


def noting_device() -> str | None:
    """Where values are looked at by kernels: a GPU, or the CPU with the library of simt_build.py."""
    if torch.cuda.is_available():
        return "cuda"
    try:
        ops.count(BAD_IDS[0], 4)
    except ValueError:
        return None
    ops.device_errors("cpu")
    return "cpu"


NOTING = noting_device()


def noting(test: Callable[..., None]) -> Callable[..., None]:
    """Selected by -m cuda; the library of simt_build.py runs it without a GPU."""
    return pytest.mark.cuda(pytest.mark.skipif(NOTING is None, reason="no CUDA device")(test))


@noting
@pytest.mark.parametrize("name", BROKEN)
def test_noted(name: str) -> None:
    call, rules = BROKEN[name]
    assert NOTING is not None and ops.device_errors(NOTING) == 0
    call(NOTING)
    with pytest.raises(ValueError) as raised:
        isoload.ops.check_device(NOTING)
    assert str(raised.value).split(" (found on ")[0] == "; ".join(RULES[i] for i in rules)
    isoload.ops.check_device(NOTING)  # said once


@noting
def test_noted_of_several_ops_and_nothing_of_legal_ones() -> None:
    d = str(NOTING)
    route(d, IDS)
    ops.count(torch.full((5, 2), -1, device=d), 4)
    assert ops.device_errors(d) == 0
    BROKEN["share"][0](d)
    BROKEN["count 0"][0](d)
    assert ops.device_errors(d) == 1 << 0 | 1 << 4
    assert ops.device_errors(d) == 0


@pytest.mark.skipif(NOTING == "cpu", reason="the kernels stand in the place of the CPU's ops")
@pytest.mark.parametrize("name", BROKEN)
def test_the_cpu_raises_at_once(name: str) -> None:
    with pytest.raises(ValueError, match="must"):
        BROKEN[name][0]("cpu")
    assert ops.device_errors("cpu") == 0
    isoload.ops.check_device("cpu")


def test_every_rule_is_tested_and_names_its_op() -> None:
    assert {rule for _, rules in BROKEN.values() for rule in rules} == set(range(len(RULES)))
    assert all(rule.partition(":")[0] in ops.__all__ for rule in RULES)


def test_tables_are_checked_before_a_kernel_follows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ISOLOAD_CHECK=1 ops that read tables on a GPU run on the host first; here the CPU stands for it."""
    monkeypatch.setattr(library, "device_to_check", lambda args: torch.device("cpu"))
    calls: list[str] = []

    class Op:
        def __init__(self, name: str) -> None:
            self.op = getattr(torch.ops.isoload, name).default
            self._schema, self.name = self.op._schema, name

        def __call__(self, *args: object) -> object:
            calls.append(self.name)
            return self.op(*args)

    library.call_on_any(Op("share"), LOADS, QUOTA, tables("cpu").data, 1, 0, True)
    library.call_on_any(Op("replica_tables"), SLOTS, 2, 4, tables("cpu").data)  # writes them
    library.call_on_any(Op("count"), IDS, 4, 0)
    assert calls == ["share", "share", "replica_tables", "count"]


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.isoload.device_errors.default, (torch.empty(3),))
