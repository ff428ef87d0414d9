"""Every mix of parts is one line: any routed policy under the shared ones, any split over borrowed slots."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload.balancing import planning
from isoload.placement.placed_layers import MEMOS, own_layers, refreshing
from isoload.policies import POLICIES, StaticPolicy, make_policy
from isoload.policies.exact import ExactPolicy, LpPolicy

RANKS, EXPERTS, K, TOKENS = 4, 16, 3, 23
TOPOLOGY = isoload.Topology(RANKS, ranks_per_node=2)
SHARED = ("shared_local", "waterfill", "joint", "waterfill_sampled")
# llep_published is the published planner as it is: for placements without shared experts.
ROUTED = [
    name for name in POLICIES if name not in (*SHARED, "llep_published") and not make_policy(name).samples
]
BORROWING = ("llep", "spill_cost")
RULES = {"llep": {"min_chunk": 1, "threshold": 1.0}, "spill_cost": {"min_chunk": 1, "expert_bytes": 1.0}}


def place(spare: int = 0, num_shared: int = 0, replicas: int = 1) -> isoload.Placement:
    counts = np.random.default_rng(5).zipf(1.6, (1, EXPERTS)).clip(max=500)
    size = EXPERTS // RANKS + replicas + spare + num_shared
    placer = "eplb" if replicas else "trivial"
    return isoload.place(counts, TOPOLOGY, size, placer, spare_slots=spare, num_shared=num_shared)


def draw_ids(seed: int, num_shared: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(EXPERTS, generator=generator) ** 4 + 1e-3
    ids = [torch.multinomial(weights.expand(TOKENS, -1), K, generator=generator) for _ in range(RANKS)]
    shared = torch.arange(EXPERTS, EXPERTS + num_shared).expand(TOKENS, -1)
    return [torch.cat([rows, shared], dim=1) for rows in ids]


def check(
    placement: isoload.Placement, ids: list[Tensor], policy: isoload.policies.Policy
) -> isoload.policies.plan.Plan:
    """The plan keeps its promises, and all ranks' routes realise it."""
    loads = torch.stack([isoload.count(rows, placement.num_experts) for rows in ids])
    plan = isoload.plan(loads, placement, 0, policy)
    assert isoload.policies.plan.plan_errors(plan, loads) == []
    slots = [isoload.route(rows, loads, plan, rank) for rank, rows in enumerate(ids)]
    for rows, routed in zip(ids, slots, strict=True):
        assert torch.equal(plan.slot_to_expert[routed], rows.int())
    if plan.peak is not None:
        assert torch.equal(isoload.count(torch.cat(slots), placement.num_slots), plan.quota)
        shares = isoload.share(loads, plan)
        for rank, routed in enumerate(slots):
            assert torch.equal(isoload.count(routed, placement.num_slots), shares[rank])
    return plan


@pytest.mark.parametrize(
    ("shared", "routed"), [*product(["shared_local", "waterfill", "waterfill_sampled"], ROUTED)]
)
def test_shared_experts_after_any_routed_policy(shared: str, routed: str) -> None:
    borrows = make_policy(routed).borrows
    spare, replicas = (2, 0) if borrows else (0, 1)
    inner = make_policy(routed, RULES.get(routed, {})) if routed in RULES else routed
    policy = make_policy(shared, {"routed": inner})
    assert policy.borrows == borrows
    plan = check(place(spare, 1, replicas), draw_ids(1, 1), policy)
    assert plan.policy is policy
    assert (plan.placed.unfilled is None) != borrows


@pytest.mark.parametrize(("fill", "split_by"), [*product(BORROWING, [*ROUTED, "joint", "waterfill"])])
def test_any_split_over_borrowed_slots(fill: str, split_by: str) -> None:
    num_shared = int(split_by in SHARED)
    placement, ids = place(2, num_shared, 0), draw_ids(2, num_shared)
    if make_policy(split_by).borrows:
        with pytest.raises(ValueError, match="does not borrow"):
            make_policy(fill, {"split_by": split_by})
        return
    plan = check(placement, ids, make_policy(fill, {"split_by": split_by, **RULES[fill]}))
    borrowed = (plan.slot_to_expert != placement.slot_to_expert[0]).sum()
    assert borrowed > 0
    if split_by in ("exact", "joint"):
        assert torch.equal(plan.peak, plan.bound)


def test_a_policy_object_is_an_option() -> None:
    loads = torch.stack([isoload.count(rows, EXPERTS + 1) for rows in draw_ids(3, 1)])
    named = isoload.plan(loads, place(0, 1), 0, "waterfill", routed="lp")
    given = isoload.plan(loads, place(0, 1), 0, "waterfill", routed=LpPolicy(precision="float64"))
    assert (
        isoload.policies.plan.plan_errors(named, loads)
        == isoload.policies.plan.plan_errors(given, loads)
        == []
    )
    loose = isoload.plan(loads, place(0, 1), 0, "waterfill", routed=ExactPolicy(tolerance=10.0))
    tight = isoload.plan(loads, place(0, 1), 0, "waterfill", routed="exact")
    assert loose.peak >= tight.peak


@pytest.mark.parametrize("policy", BORROWING)
def test_a_fill_from_a_prediction_is_split_by_the_true_loads(policy: str) -> None:
    """The fill's own quota is of other loads: the exact split over its slots stands in."""
    placement = place(2, 0, 0)
    predicted, true = (
        torch.stack([isoload.count(rows, EXPERTS) for rows in draw_ids(seed)]) for seed in (7, 8)
    )
    filled = planning.fill(predicted.sum(0, dtype=torch.int32), placement, 0, policy, **RULES[policy])
    plan = isoload.plan(true, placement, 0, policy, filled=filled, **RULES[policy])
    assert isoload.policies.plan.plan_errors(plan, true) == []
    assert torch.equal(plan.slot_to_expert, filled.slot_to_expert)
    assert torch.equal(plan.peak, plan.bound)
    same = isoload.plan(true, placement, 0, policy, **RULES[policy])
    assert torch.equal(
        planning.fill(true, placement, 0, policy, **RULES[policy]).slot_to_expert, same.slot_to_expert
    )
    with pytest.raises(
        ValueError, match="filled must be of the placement and layer that are planned, 0, got None"
    ):
        isoload.plan(
            true, placement, 0, policy, filled=planning.fill(true.unsqueeze(0), placement, None, policy)
        )


def test_seeds_of_static_cost_time_and_no_memory() -> None:
    placed = place().layer(0, "cpu")
    for seed in range(3 * MEMOS):
        StaticPolicy(seed).slots(placed)
    assert len(placed.memos) == MEMOS
    assert StaticPolicy(3 * MEMOS - 1).slots(placed) is StaticPolicy(3 * MEMOS - 1).slots(placed)


def test_what_policies_keep_is_refreshed_in_place() -> None:
    own = own_layers(place().layer(0, "cpu"))
    kept = StaticPolicy().slots(own)
    address = kept.data_ptr()
    other = isoload.place(
        np.random.default_rng(9).zipf(1.6, (1, EXPERTS)).clip(max=500), TOPOLOGY, EXPERTS // RANKS + 1
    )
    write = refreshing(own, other.layer(0, "cpu"))
    assert torch.equal(StaticPolicy().slots(own), StaticPolicy().slots(place().layer(0, "cpu")))
    fresh = write()
    assert StaticPolicy().slots(fresh).data_ptr() == address
    assert torch.equal(StaticPolicy().slots(fresh), StaticPolicy().slots(other.layer(0, "cpu")))
    assert fresh.slot_to_expert.data_ptr() == own.slot_to_expert.data_ptr()


@pytest.mark.parametrize("routed", ["waterfill", "joint", "shared_local"])
def test_refuses_shared_policies_as_routed(routed: str) -> None:
    with pytest.raises(ValueError, match=f"routed must be a policy of routed experts, got '{routed}'"):
        make_policy("waterfill", {"routed": routed})


SPEEDS, DEAD = {"speeds": (1.0, 1.0, 1.0, 0.5)}, {"alive": (True, True, True, False)}
UNFIT: dict[str, tuple[str, dict[str, object], dict[str, object], dict[str, int], str]] = {
    **{
        f"{policy} {name}": (policy, {}, topology, {"spare_slots": 1}, message.format(policy))
        for policy in ("llep", "spill_cost", "libra", "hedge")
        for name, topology, message in (
            ("speeds", SPEEDS, "speeds must be None for policy {}, which counts copies"),
        )
    },
    **{
        f"{policy} shared": (policy, {}, {}, {}, f"placement must have shared experts for policy {policy}, got")
        for policy in SHARED
    },
    "slots": ("hedge", {"slots": 3}, {}, {"spare_slots": 2}, r"slots must be at most spare_slots \(2\) for policy"),
    "split": ("llep", {"split_by": "joint"}, {}, {"spare_slots": 1}, "must have shared experts for policy joint"),
    "routed": ("waterfill", {"routed": "llep"}, {}, {"num_shared": 1}, "spare_slots must be at least 1 for"),
    "drawn": ("waterfill_sampled", {}, DEAD, {"num_shared": 1}, "topology must have all ranks alive for policy"),
    "two": ("waterfill_sampled", {}, {}, {"num_shared": 2}, "num_shared must be at most 1 for policy"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_a_policy_refuses_a_placement_before_any_batch(name: str) -> None:
    policy, options, ranks, slots, message = UNFIT[name]
    topology = isoload.Topology(RANKS, ranks_per_node=2, **ranks)  # type: ignore[arg-type]
    placement = isoload.place(np.ones((1, EXPERTS)), topology, slots_per_rank=9, **slots)
    group = isoload.transport.LocalGroup(topology)
    with pytest.raises(ValueError, match=message):
        isoload.Balancer(placement, 0, policy, group, **options)
    balancer = isoload.Balancer(placement, 0, "exact", group)
    with pytest.raises(ValueError, match=message):
        balancer.policy = make_policy(policy, options)
    with pytest.raises(ValueError, match=message):
        isoload.plan(
            torch.ones(RANKS, placement.num_experts, dtype=torch.int32), placement, 0, policy, **options
        )


@pytest.mark.parametrize("policy", ["static", "dynamic", "lp_sampled", "waterfill_sampled"])
def test_seeds_are_whole_numbers(policy: str) -> None:
    for seed, rule in ((-1, "at least 0"), (0.5, "of type int")):
        with pytest.raises(ValueError, match=f"seed must be {rule}, got {seed}"):
            make_policy(policy, {"seed": seed})
    if policy != "static":
        with pytest.raises(ValueError, match="step must be at least 0, got -3"):
            make_policy(policy, {"step": -3})
