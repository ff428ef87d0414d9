"""The least peak that whole copies allow, found without isoload: by linear programming and by maximum flow.

Both read slot_to_expert themselves (isoload's tables are under test too). With loads in copies the optimum is

    max over rank sets S of  ceil((fixed(S) + copies of the experts held only inside S) / |S|)

because a split that fits under a level is a flow, and a flow fails only at a cut.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from scipy.optimize import LinearConstraint, linprog, milp
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import maximum_flow

# HiGHS's tolerances are absolute (1e-7): scaled to this total they stay far below one copy per rank.
LP_TOTAL = 2.0**20


def replicas(slot_to_expert: np.ndarray, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """(expert, rank) of every distinct pair, by expert."""
    ranks = np.arange(len(slot_to_expert)) // (len(slot_to_expert) // num_ranks)
    pairs = np.unique(np.stack([slot_to_expert, ranks])[:, slot_to_expert >= 0], axis=1)
    return pairs[0], pairs[1]


def cut_value(
    members: set[int],
    loads: np.ndarray,
    slot_to_expert: np.ndarray,
    num_ranks: int,
    fixed: np.ndarray | None = None,
) -> tuple[int, int]:
    """(copies that cannot leave the ranks ``members``, number of members): a lower bound, as a fraction."""
    expert, rank = replicas(slot_to_expert, num_ranks)
    outside = ~np.isin(rank, sorted(members))
    inside = np.setdiff1d(expert, expert[outside])
    copies = int(loads[inside].sum(dtype=np.int64))
    if fixed is not None:
        copies += int(fixed[sorted(members)].sum(dtype=np.int64))
    return copies, len(members)


def binding_ranks(
    loads: np.ndarray,
    slot_to_expert: np.ndarray,
    num_ranks: int,
    base: np.ndarray | None = None,
) -> tuple[set[int], float]:
    """The rank set that the LP's dual names, and the LP's optimum: minimise M, a rank's copies <= M."""
    expert, rank = replicas(slot_to_expert, num_ranks)
    used = loads[expert] > 0
    expert, rank = expert[used], rank[used]
    rows, expert_row = np.unique(expert, return_inverse=True)
    carried = np.zeros(num_ranks) if base is None else base.astype(np.float64)
    scale = max(1.0, (loads.sum(dtype=np.float64) + carried.sum()) / LP_TOTAL)
    n = len(expert)
    # Variables: x [n] copies per replica, M. On a rank sum(x) - M <= -base, of an expert
    # sum(x) = loads.
    under = coo_array(
        (
            np.concatenate([np.ones(n), -np.ones(num_ranks)]),
            (
                np.concatenate([rank, np.arange(num_ranks)]),
                np.concatenate([np.arange(n), np.full(num_ranks, n)]),
            ),
        ),
        shape=(num_ranks, n + 1),
    )
    equal = coo_array((np.ones(n), (expert_row, np.arange(n))), shape=(len(rows), n + 1))
    solved = linprog(
        np.append(np.zeros(n), 1.0),
        A_ub=under.tocsr(),
        b_ub=-carried / scale,
        A_eq=equal.tocsr() if n else None,
        b_eq=loads[rows] / scale if n else None,
        bounds=[(0, None)] * n + [(None, None)],  # a bound on M would take the ranks' prices when M is 0
        method="highs",
    )
    assert solved.status == 0, solved.message
    price = -solved.ineqlin.marginals
    return set(np.flatnonzero(price > price.max() / 2).tolist()), solved.fun * scale


def lp_optimum(
    loads: np.ndarray, slot_to_expert: np.ndarray, num_ranks: int, fixed: np.ndarray | None = None
) -> int:
    """ceil of the LP's optimum, loads [E] summed over sources.

    The float objective is not rounded: the LP's dual names the binding rank set, whose bound is evaluated in
    integers and must agree with the objective.
    """
    binding, objective = binding_ranks(loads, slot_to_expert, num_ranks, fixed)
    copies, size = cut_value(binding, loads, slot_to_expert, num_ranks, fixed)
    assert abs(copies / size - objective) <= 1e-6 * max(1.0, objective), (copies, size, objective)
    return -(-copies // size)


def lp_value(
    loads: np.ndarray, slot_to_expert: np.ndarray, num_ranks: int, base: np.ndarray | None = None
) -> float:
    """The LP's optimum, real-valued: the mean load of the binding ranks; base [R] float64."""
    binding, objective = binding_ranks(loads, slot_to_expert, num_ranks, base)
    ranks = sorted(binding)
    copies: float = cut_value(binding, loads, slot_to_expert, num_ranks)[0]
    copies += 0.0 if base is None else float(base[ranks].sum())
    value = copies / len(ranks)
    assert abs(value - objective) <= 1e-9 * max(1.0, objective), (value, objective)
    return value


def flow_optimum(
    loads: np.ndarray,
    slot_to_expert: np.ndarray,
    num_ranks: int,
    fixed: np.ndarray | None = None,
    ticks: np.ndarray | None = None,
) -> int:
    """The least peak cost by bisection over maximum flows; loads [E] summed, ticks [R] cost of one copy.

    Totals must stay below 2^31 copies: SciPy's flows are int32.
    """
    base = np.zeros(num_ranks, dtype=np.int64) if fixed is None else fixed.astype(np.int64)
    cost = np.ones(num_ranks, dtype=np.int64) if ticks is None else ticks.astype(np.int64)
    expert, rank = replicas(slot_to_expert, num_ranks)
    experts, total, n = len(loads), int(loads.sum(dtype=np.int64)), len(expert)
    # Nodes: experts, ranks, sink, source; edges row by row: expert -> rank, rank -> sink, source -> expert.
    sink, source = experts + num_ranks, experts + num_ranks + 1
    heads = np.concatenate([experts + rank, np.full(num_ranks, sink), np.arange(experts)])
    degrees = np.concatenate([np.bincount(expert, minlength=experts), np.ones(num_ranks, int), [0, experts]])
    capacity = np.concatenate([loads[expert], np.zeros(num_ranks, int), loads]).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(degrees)])
    graph = csr_array(
        (capacity, heads.astype(np.int32), starts.astype(np.int32)), shape=(source + 1, source + 1)
    )

    def fits(level: int) -> bool:
        room = level // cost - base
        graph.data[n : n + num_ranks] = np.clip(room, 0, total)
        return bool((room >= 0).all()) and maximum_flow(graph, source, sink).flow_value == total

    low, high = 0, (total + int(base.max())) * int(cost.max())
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def cut_optimum(
    loads: np.ndarray, slot_to_expert: np.ndarray, num_ranks: int, fixed: np.ndarray | None = None
) -> int:
    """The formula above over all 2^R rank sets; for a few ranks."""
    best = 0
    for size in range(1, num_ranks + 1):
        for members in combinations(range(num_ranks), size):
            copies, _ = cut_value(set(members), loads, slot_to_expert, num_ranks, fixed)
            best = max(best, -(-copies // size))
    return best


def pour_optimum(
    base: np.ndarray,
    own: np.ndarray,
    group: int,
    ticks: np.ndarray | None = None,
    limits: np.ndarray | None = None,
) -> int:
    """The least peak cost when source s may send its own[s] copies to the ranks of its group of ``group`` ranks.

    base [R] copies that stay. One variable per allowed (source, rank): an LP rounded up, or with ticks a MIP,
    since a cost that is no multiple of a tick cannot be reached.
    """
    ranks = len(base)
    source, rank = pairs_within(ranks, group)
    n = len(source)
    cost = np.ones(ranks) if ticks is None else ticks.astype(np.float64)
    under = csr_array(
        (
            np.concatenate([cost[rank], -np.ones(ranks)]),
            (np.concatenate([rank, np.arange(ranks)]), np.concatenate([np.arange(n), np.full(ranks, n)])),
        ),
        shape=(ranks, n + 1),
    )
    rows = [LinearConstraint(under, ub=-cost * base)]
    rows.append(LinearConstraint(_sums(source, ranks, n + 1), own, own))
    if limits is not None:
        rows.append(LinearConstraint(_sums(rank, ranks, n + 1), ub=limits))
    whole = np.append(np.full(n, ticks is not None), False)
    solved = milp(
        np.append(np.zeros(n), 1.0), constraints=rows, integrality=whole, options={"mip_rel_gap": 0}
    )
    assert solved.status == 0, solved.message
    return int(np.ceil(solved.fun - 1e-6 * max(1.0, solved.fun)))


def least_moves(own: np.ndarray, capacity: np.ndarray, group: int) -> int:
    """The fewest copies that leave home if rank d takes capacity[d] at most: a transportation, so integral."""
    ranks = len(own)
    source, rank = pairs_within(ranks, group)
    n = len(source)
    rows = [
        LinearConstraint(_sums(source, ranks, n), own, own),
        LinearConstraint(_sums(rank, ranks, n), ub=capacity),
    ]
    solved = milp((source != rank).astype(np.float64), constraints=rows)
    assert solved.status == 0, solved.message
    return round(solved.fun)


def pairs_within(ranks: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """All (source, rank) of one group."""
    source, rank = np.indices((ranks, ranks)).reshape(2, -1)
    same = source // group == rank // group
    return source[same], rank[same]


def _sums(members: np.ndarray, rows: int, columns: int) -> csr_array:
    """Row r adds the variables i with members[i] == r."""
    n = len(members)
    return csr_array((np.ones(n), (members, np.arange(n))), shape=(rows, columns))


def most_flow(excess: np.ndarray, capacity: np.ndarray, room: np.ndarray) -> int:
    """The maximum flow from sources with excess [R] over capacity [R, R] to ranks with room [R]."""
    ranks = len(excess)
    source, sink = 2 * ranks, 2 * ranks + 1
    graph = np.zeros((sink + 1, sink + 1), dtype=np.int32)
    graph[source, :ranks] = excess
    graph[:ranks, ranks:source] = capacity
    graph[ranks:source, sink] = room
    return int(maximum_flow(csr_array(graph), source, sink).flow_value)
