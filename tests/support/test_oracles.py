"""The oracles agree with problems solved by hand and with one another."""

import numpy as np
import pytest

from support.cases import FAMILIES, instances
from support.oracles import cut_optimum, flow_optimum, lp_optimum


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


# Two slots per rank. Each line: slots, loads, fixed, optimum and the rank set that proves it.
BY_HAND = {
    "pair": (array(0, 1, 0, 2), array(10, 3, 0), None, 7),  # all: 13 / 2
    "one side full": (array(0, 1, 0, 2), array(10, 30, 0), None, 30),  # {0}: expert 1 cannot leave
    "fixed": (array(0, 1, 0, 2), array(10, 3, 0), array(0, 40), 40),  # {1}
    "cut of two": (array(0, 1, 0, 1, 2, -1), array(9, 6, 1), None, 8),  # {0, 1}: 15 / 2, all: 16 / 3
    "duplicate": (array(0, 0, 1, -1), array(9, 1), None, 9),  # {0}: both slots of expert 0
    "nothing": (array(0, 1, 0, 1), array(0, 0), None, 0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name: str) -> None:
    slots, loads, fixed, optimum = BY_HAND[name]
    ranks = len(slots) // 2
    assert lp_optimum(loads, slots, ranks, fixed) == optimum
    assert flow_optimum(loads, slots, ranks, fixed) == optimum
    assert cut_optimum(loads, slots, ranks, fixed) == optimum


def test_ticks_by_hand() -> None:
    """10 copies on two ranks at 1 and 3 ticks: 8 * 1 and 2 * 3, the least peak is 8 (7 would hold 7 + 2)."""
    assert flow_optimum(array(10), array(0, 0), 2, ticks=array(1, 3)) == 8
    assert flow_optimum(array(10), array(0, 0), 2, array(1, 0), array(1, 3)) == 9  # 8 + 1, 2 * 3


@pytest.mark.parametrize("family", FAMILIES)
def test_oracles_agree(family: str) -> None:
    rng = np.random.default_rng(7)
    for case in instances(1, seed=900, max_ranks=16, families=(family,)):
        loads = case.expert_loads()
        fixed = rng.integers(0, 1 + (2**31 - 1 - case.total) // (4 * case.num_ranks), case.num_ranks) // 1000
        for base in (None, fixed):
            by_flow = flow_optimum(loads, case.slot_to_expert, case.num_ranks, base)
            assert lp_optimum(loads, case.slot_to_expert, case.num_ranks, base) == by_flow, case.name
            if case.num_ranks <= 8:
                assert cut_optimum(loads, case.slot_to_expert, case.num_ranks, base) == by_flow, case.name
