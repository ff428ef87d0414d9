"""A fuzzed plan against what every plan promises, recounted in plain loops, and against maximum flows."""

from __future__ import annotations

import numpy as np
import torch

import isoload
from isoload import POLICIES
from isoload.policies.plan import Plan
from support.fuzz_cases import FuzzCase
from support.oracles import flow_optimum

EXACT_PEAKS = ("exact", "joint")


def check_plans(case: FuzzCase) -> None:
    """The case's own tokens, planned and routed; then millions of copies, planned."""
    loads = case.loads()
    plan = make_plan(case, loads)
    check_plan(case, plan, loads)
    check_route(case, plan, loads)
    check_plan(case, make_plan(case, many := many_loads(case)), many)


def make_plan(case: FuzzCase, loads: np.ndarray) -> Plan:
    return isoload.plan(torch.from_numpy(loads), case.placement, case.layer, case.policy, **case.options)


def many_loads(case: FuzzCase) -> np.ndarray:
    """[R, E] int32 up to 2^24 copies; the shared experts' columns are alike."""
    rng = np.random.default_rng([case.seed, 1])
    routed, experts = case.placement.num_routed, case.placement.num_experts
    loads = rng.integers(0, rng.choice([2, 100, 2**18]), (case.num_ranks, experts), dtype=np.int32)
    loads[rng.random(loads.shape) < 0.3] = 0
    loads[:, routed:] = np.minimum(loads[:, :routed].sum(1, keepdims=True), 2**20)
    return loads


def check_plan(case: FuzzCase, plan: Plan, loads: np.ndarray) -> None:
    slots = plan.slot_to_expert.numpy()
    check_slots(case, plan, slots)
    bound = int(plan.bound)
    least = least_peak(case, plan, slots, loads)
    assert bound <= least, f"bound {bound} is above a plan of {least}"
    if plan.quota is None:
        assert plan.weights is not None and plan.peak is None
        return
    quota = plan.quota.numpy().astype(np.int64)
    met = plan.shared is None or plan.shared.is_met
    num = case.placement.num_experts if met else case.placement.num_routed
    wanted = loads.sum(0, dtype=np.int64)
    assert (quota >= 0).all() and not quota[slots < 0].any(), "quota of an empty slot"
    got = np.bincount(slots[slots >= 0], quota[slots >= 0], minlength=len(wanted))
    assert (got[:num] == wanted[:num]).all(), f"quotas {got.tolist()} of loads {wanted.tolist()}"
    first = first_slots(slots, case.num_ranks)
    assert not quota[~first].any(), "quota of a second slot of an expert on a rank"
    if plan.peak is None:
        return
    ticks = costs(case)
    peak = int((quota.reshape(case.num_ranks, -1).sum(1) * ticks).max())
    assert int(plan.peak) == peak, f"peak {int(plan.peak)}, counted {peak}"
    assert peak >= least, f"peak {peak} below the least {least}"
    unlimited = not case.options.get("tolerance") and case.options.get("budget") is None
    if case.policy in EXACT_PEAKS and unlimited:
        assert peak == bound == least, f"peak {peak}, bound {bound}, least {least}"


def check_slots(case: FuzzCase, plan: Plan, slots: np.ndarray) -> None:
    """Only spare slots of live ranks change, to routed experts that their rank does not hold."""
    placement, ranks = case.placement, case.num_ranks
    before, after = (s.reshape(ranks, -1) for s in (placement.slot_to_expert[case.layer].numpy(), slots))
    resident = placement.slots_per_rank - placement.spare_slots
    assert (before[:, :resident] == after[:, :resident]).all(), "a resident slot changed"
    spare = after[:, resident:]
    if not POLICIES[case.policy].borrows:
        assert (spare == -1).all(), "spare slots filled by a policy that does not borrow"
    assert spare.size == 0 or spare.max() < placement.num_routed, "a shared expert was borrowed"
    for rank in range(ranks):
        borrowed = [int(e) for e in spare[rank] if e >= 0]
        assert rank in case.topology.live_ranks or not borrowed, "a rank that is not alive borrowed"
        assert len(set(borrowed)) == len(borrowed) and not set(borrowed) & set(before[rank]), "borrowed twice"


def first_slots(slots: np.ndarray, ranks: int) -> np.ndarray:
    """[P] whether the slot is the lowest of its expert on its rank."""
    per_rank = slots.reshape(ranks, -1).tolist()
    return np.array([expert not in row[:j] for row in per_rank for j, expert in enumerate(row)])


def costs(case: FuzzCase) -> np.ndarray:
    """[R] of one copy: ticks where ranks differ, else 1."""
    speeds = case.topology.speeds
    return np.ones(case.num_ranks, int) if speeds is None else np.array([round(1024 / s) for s in speeds])


def least_peak(case: FuzzCase, plan: Plan, slots: np.ndarray, loads: np.ndarray) -> int:
    """By maximum flows over the plan's slots. Shared copies stay home, or go to any live rank if the policy moves them
    (one more replicated expert each)."""
    ticks, routed = costs(case), case.placement.num_routed
    if plan.shared is not None and plan.shared.rule == "home" and case.policy != "joint":
        live = case.topology.live_ranks
        fixed = np.zeros(case.num_ranks, dtype=np.int64)
        for source in range(case.num_ranks):
            home = source if source in live else live[source % len(live)]
            fixed[home] += int(loads[source, routed:].sum())
        slots = np.where(slots < routed, slots, -1)
        return flow_optimum(loads.sum(0, dtype=np.int64)[:routed], slots, case.num_ranks, fixed, ticks)
    return flow_optimum(loads.sum(0, dtype=np.int64), slots, case.num_ranks, None, ticks)


def check_route(case: FuzzCase, plan: Plan, loads: np.ndarray) -> None:
    """Every copy goes to a slot of its expert; slots get their quota."""
    slots, given = plan.slot_to_expert, torch.from_numpy(loads)
    total = torch.zeros(len(slots), dtype=torch.int64)
    for rank, ids in enumerate(case.full_ids()):
        routed = isoload.route(ids, given, plan, rank)
        assert torch.equal(routed < 0, ids < 0), "an absent copy was routed, or a copy dropped"
        assert torch.equal(slots[routed[ids >= 0]].long(), ids[ids >= 0]), (
            "a copy went to another expert's slot"
        )
        total += torch.bincount(routed[routed >= 0], minlength=len(slots))
    assert first_slots(slots.numpy(), case.num_ranks)[total.numpy() > 0].all(), (
        "a copy went where no weights lie"
    )
    if plan.quota is not None and (plan.shared is None or plan.shared.is_met):
        assert torch.equal(total, plan.quota.long()), f"routed {total.tolist()}, quota {plan.quota.tolist()}"
