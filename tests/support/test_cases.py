"""The case list is itself under test: every name occurs, and every problem is what its name claims."""

import numpy as np
import pytest

from support.cases import FAMILIES, MANY_RANKS, MAX_COPIES, draw, instances
from support.oracles import flow_optimum

SIZES = {1, 2, 3, 7, 8, 12, 16, 31, 32, 48, 64, 65, 72, 96, 127, 128, 200, 300}
NAMES = {
    *("eplb", "random", "chain", "ring", "clique", "duplicates", "one_rank", "zero_loads", "sparse_loads"),
    *("one_expert", "no_replicas", "split_256", "split_512", "copies_128", "empty_slots", "empty_ranks"),
    *("spare_slots", "full_total"),
}


def test_every_family_and_size_occurs() -> None:
    assert set(FAMILIES) == NAMES
    assert set(MANY_RANKS) == SIZES
    drawn = {case.name.split("#")[0] for case in instances(1, seed=0, every=1)}
    assert drawn == {f"{family}-R{ranks}" for family in NAMES for ranks in FAMILIES[family].ranks}


@pytest.mark.parametrize("family", FAMILIES)
def test_cases_are_what_their_names_claim(family: str) -> None:
    for case in instances(1, seed=41, families=(family,)):
        assert FAMILIES[family].claim(case), case.name
        assert case.slot_to_expert.dtype == np.int32 and case.loads.dtype == np.int32
        assert len(case.slot_to_expert) == case.num_ranks * case.slots_per_rank
        assert case.slot_to_expert.min() >= -1 and case.slot_to_expert.max() < case.num_experts
        assert case.loads.min() >= 0 and case.total <= MAX_COPIES
        covered = np.array([len(ranks) > 0 for ranks in case.rank_sets()])
        assert not case.expert_loads()[~covered].any(), f"{case.name}: load without a replica"


def test_a_seed_names_one_problem() -> None:
    once, again, other = draw("random", 16, 3), draw("random", 16, 3), draw("random", 16, 4)
    assert np.array_equal(once.slot_to_expert, again.slot_to_expert)
    assert np.array_equal(once.loads, again.loads)
    assert once.name == again.name != other.name
    assert once.loads.shape != other.loads.shape or not np.array_equal(once.loads, other.loads)


@pytest.mark.parametrize("family", ["eplb", "random", "chain", "ring", "clique", "full_total"])
def test_problems_are_not_trivial(family: str) -> None:
    """Equal parts over the replicas are not the optimum, and neither is total / R always reached."""
    split, bound_by_cut = 0, 0
    for case in instances(3, seed=5, max_ranks=16, families=(family,), every=1):
        loads = case.expert_loads()
        even = np.zeros(case.num_ranks)
        for e, ranks in enumerate(case.rank_sets()):
            even[sorted(ranks)] += loads[e] / max(1, len(ranks))
        best = flow_optimum(loads, case.slot_to_expert, case.num_ranks)
        split += np.ceil(even.max()) > best
        bound_by_cut += best > -(-case.total // case.num_ranks)
    assert split >= 3 and bound_by_cut >= 3
