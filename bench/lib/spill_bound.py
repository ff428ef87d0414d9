"""A lower bound of the largest cost over all plans that borrow experts, proved by small MILPs in milliseconds.

A rank's cost is its copies plus `price` per import; every expert has one home, every live rank may borrow any number
of experts. (Fewer spare slots only raise the least cost, so the bound holds for them too.) Targets T are probed, and
each one that HiGHS finds infeasible is below the least cost.

What makes the probes small: if any plan keeps every rank at T, one does in which ranks with more than T copies only
give, down to T exactly, and the others only take. For take a plan that moves the fewest copies, and suppose rank h
gives y copies of expert e to rank s and borrows x copies of expert f. Send m = min(x, y) copies of f to s instead (or
leave them, if s is f's home) and keep m copies of e on h: no load changes. If m = y, s no longer borrows e and pays at
most for f in its place. If m = x < y, h saves its import of f, and takes min(price, y - x) more copies of e back; with
price copies less, or without e, s can pay for f. No cost passes T and fewer copies move: a contradiction. So whoever
gives borrows nothing, and gives no copy that T leaves room for.

A giver h then sends exactly d = L_h - T copies, in chunks of at most min(load of e, T - L_r - price, d) from e to r.
The MILP counts a giver's chunks per taker (n) and their copies (a), not which expert each chunk is of: n chunks carry
at most what its n largest experts do, and all its chunks at most the largest ones that its experts can be cut into.
That is a relaxation; on the bench's instances it has been as tight as a variable per expert and taker.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

OPTIMAL, INFEASIBLE = 0, 2  # scipy.optimize.milp's status


def least_cost_bound(
    homes: list[list[int]], price: int, level: int, exactness: float = 1e-3, seconds: float = 5.0
) -> int:
    """Largest cost that no plan is below.

    Args:
        homes: copies of every rank's own experts.
        price: copies that an import costs.
        level: the largest cost of a plan, at least the bound.
        exactness: the search ends when the bound is within this part of a target that is not refuted.
        seconds: of HiGHS per target; one that takes longer counts as not refuted.
    """
    refuted, open_target = -(-sum(map(sum, homes)) // len(homes)) - 1, level
    while open_target - refuted > max(1, exactness * refuted):
        target = (refuted + open_target) // 2
        if is_refuted(homes, price, target, seconds):
            refuted = target
        else:
            open_target = target
    return refuted + 1


def slots_bound(homes: list[list[int]], price: int, spare: int) -> int:
    """The same where spare slots are few: a rank with k imports ends with at most T - k * price copies, and with at
    most its own and those of the k largest experts of others; over all ranks that must be room for all copies."""
    copies, loads = sum(map(sum, homes)), [sum(held) for held in homes]
    others = [
        [0, *accumulate(sorted((n for held in homes if held is not own for n in held), reverse=True)[:spare])]
        for own in homes
    ]

    def is_refuted(target: int) -> bool:
        most = [
            max(min(target - k * price, load + more) for k, more in enumerate(borrowed))
            for load, borrowed in zip(loads, others, strict=True)
        ]
        return sum(most) < copies

    return bisect_left(range(max(loads) + 1), True, key=lambda target: not is_refuted(target))


def level_bound(
    homes: list[list[int]],
    spare: int,
    ranks_per_node: int | None = None,
    *,
    price: int = 0,
    level: int | None = None,
) -> float:
    """Largest cost that no plan is below, where an import costs `price` copies and a rank has `spare` slots.

    The linear relaxation: copies t[e, r] of expert e on rank r, imports y[e, r] in 0..1, t <= load * y away from home,
    at most `spare` imports of a rank, none beyond the node of the expert's home if there are nodes. Far above
    :func:`slots_bound`, for an expert leaves its home only once, whoever takes it. With the cost `level` of a plan an
    import carries at most level - price copies, for only plans that cost less could refute the bound.
    """
    ranks, loads = len(homes), [n for held in homes for n in held]
    home = [rank for rank, held in enumerate(homes) for _ in held]
    size = ranks_per_node or ranks
    pairs = [
        (e, r)
        for e, own in enumerate(home)
        for r in range(ranks)
        if loads[e] and r != own and r // size == own // size
    ]
    top = 2 * len(pairs)  # variables: copies of each pair, its import, the largest load
    cells: list[tuple[int, int, float]] = []
    high = [float(-sum(held)) for held in homes] + [float(spare)] * ranks + [float(n) for n in loads]
    largest = max(0, max(loads) if level is None else level - price)
    for i, (e, r) in enumerate(pairs):
        cells += [(r, i, 1), (home[e], i, -1), (ranks + r, len(pairs) + i, 1), (2 * ranks + e, i, 1)]
        cells += [(len(high), i, 1), (len(high), len(pairs) + i, -min(loads[e], largest))]
        cells.append((r, len(pairs) + i, price))
        high.append(0)
    cells += [(r, top, -1) for r in range(ranks)]
    rows, columns, values = zip(*cells, strict=True)
    goal = np.zeros(top + 1)
    goal[top] = 1
    found = milp(
        goal,
        constraints=LinearConstraint(
            coo_matrix((values, (rows, columns)), (len(high), top + 1)).tocsr(), -np.inf, high
        ),
        bounds=Bounds(0, np.repeat([np.inf, 1, np.inf], [len(pairs), len(pairs), 1])),
    )
    assert found.status == OPTIMAL, found.message
    return float(found.fun)


def is_refuted(homes: list[list[int]], price: int, target: int, seconds: float) -> bool:
    """Whether it is proved that no plan keeps every rank's cost at the target."""
    givers = [held for held in homes if sum(held) > target]
    rooms = [target - sum(held) - price for held in homes if sum(held) + price < target]
    if not givers:
        return False
    if sum(rooms) < sum(sum(held) - target for held in givers):
        return True
    model = Model(len(givers), len(rooms))
    for taker, room in enumerate(rooms):
        model.add({**model.chunks(None, taker, price), **model.copies(None, taker, 1)}, high=room + price)
    for giver, held in enumerate(givers):
        excess = sum(held) - target
        model.add(model.copies(giver, None, 1), low=excess, high=excess)
        sizes = cut(held, min(excess, max(rooms)))
        carried = list(accumulate(sizes))
        if carried[-1] < excess:
            return True
        fewest = int(np.searchsorted(carried, excess)) + 1
        model.add(model.chunks(giver, None, 1), low=fewest)
        model.at_most(giver, None, sizes[:fewest])
        for taker, room in enumerate(rooms):
            model.at_most(giver, taker, sorted((min(n, room, excess) for n in held), reverse=True))
    return model.is_infeasible(seconds)


def cut(held: list[int], largest: int) -> list[int]:
    """Chunk sizes, descending, if every expert is cut into as large chunks as possible."""
    sizes = [size for n in held for size in [largest] * (n // largest) + [n % largest]]
    return sorted((size for size in sizes if size), reverse=True)


class Model:
    """A MILP over chunks n (integers) and copies a, both [givers, takers], none negative."""

    def __init__(self, givers: int, takers: int) -> None:
        self.index = np.arange(2 * givers * takers).reshape(2, givers, takers)
        self.rows: list[dict[int, float]] = []
        self.low: list[float] = []
        self.high: list[float] = []

    def chunks(self, giver: int | None, taker: int | None, factor: float) -> dict[int, float]:
        """Terms of a row: all chunks of a giver or of a taker (None = of all), times a factor."""
        return self._terms(0, giver, taker, factor)

    def copies(self, giver: int | None, taker: int | None, factor: float) -> dict[int, float]:
        return self._terms(1, giver, taker, factor)

    def _terms(self, kind: int, giver: int | None, taker: int | None, factor: float) -> dict[int, float]:
        rows = slice(None) if giver is None else slice(giver, giver + 1)
        columns = slice(None) if taker is None else slice(taker, taker + 1)
        return dict.fromkeys(self.index[kind, rows, columns].ravel().tolist(), factor)

    def add(self, terms: dict[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append(terms)
        self.low.append(low)
        self.high.append(high)

    def at_most(self, giver: int, taker: int | None, sizes: list[int]) -> None:
        """N chunks carry at most the N first sizes (descending): a line for every corner of that concave sum."""
        before = 0
        for count, size in enumerate(sizes):
            terms = {**self.copies(giver, taker, 1), **self.chunks(giver, taker, -size)}
            self.add(terms, high=before - size * count)
            before += size

    def is_infeasible(self, seconds: float) -> bool:
        cells = [
            (row, column, value) for row, terms in enumerate(self.rows) for column, value in terms.items()
        ]
        rows, columns, values = zip(*cells, strict=True)
        shape = (len(self.rows), self.index.size)
        found = milp(
            np.zeros(self.index.size),
            constraints=LinearConstraint(
                coo_matrix((values, (rows, columns)), shape).tocsr(), self.low, self.high
            ),
            integrality=np.repeat([1, 0], self.index.size // 2),
            bounds=Bounds(0, np.inf),
            options={"time_limit": seconds},
        )
        return bool(found.status == INFEASIBLE)
