"""route_shared: the rank of every shared copy on one rank; best_visited: how many could meet their token."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def route_shared(
    slots: Tensor,
    source_quota: Tensor,
    slots_per_rank: int,
    rank: int,
    num_shared: int = 1,
) -> Tensor:
    """[T, num_shared] int32 ranks; -1 for a token without a slot.

    Column j takes its part of the share: the cumulative share c becomes ``(c + j) // num_shared``, which over
    the columns adds up to c again.
    """
    visited = visited_ranks(slots, slots_per_rank)
    row = source_quota.tolist()
    assert sum(row) == num_shared * sum(map(bool, visited)), "the share is that of these tokens"
    columns = []
    for j in range(num_shared):
        line = [(sum(row[:d]) + j) // num_shared for d in range(len(row) + 1)]
        budget = [upto - before for before, upto in pairwise(line)]
        columns.append(_match(visited, budget, rank))
    received = [sum(column.count(d) for column in columns) for d in range(len(row))]
    assert received == row, "ranks get their share"
    return torch.tensor(columns, dtype=torch.int32).view(num_shared, len(visited)).t().contiguous()


def visited_ranks(slots: Tensor, slots_per_rank: int) -> list[set[int]]:
    """The ranks of every token's slots [T, K]; -1 = absent."""
    return [{p // slots_per_rank for p in token if p != -1} for token in slots.tolist()]


def _match(visited: list[set[int]], budget: list[int], home: int) -> list[int]:
    """One copy of every token. Ranks choose in turn: first the one with fewest free visitors to spare; of its
    visitors first those that visit fewest of the ranks after it, then the lowest."""
    chosen = [-1] * len(visited)
    free = [t for t, ranks in enumerate(visited) if ranks]
    todo = {d for d, copies in enumerate(budget) if copies > 0 and d != home}
    while todo:
        visitors = {d: [t for t in free if d in visited[t]] for d in todo}
        d = min(todo, key=lambda d: (len(visitors[d]) - budget[d], d))
        todo.remove(d)
        for t in sorted(visitors[d], key=lambda t: (len(visited[t] & todo), t))[: budget[d]]:
            chosen[t] = d
            budget[d] -= 1
        free = [t for t in free if chosen[t] == -1]
    others = [d for d in range(len(budget)) if d != home]
    places = [d for d in (home, *others) for _ in range(budget[d])]
    for t, d in zip(free, places, strict=True):
        chosen[t] = d
    return chosen


def best_visited(visited: list[set[int]], budget: list[int], home: int) -> int:
    """The most tokens that can go to a rank they visit besides home, if rank d takes budget[d] of them.

    The exact assignment that :func:`route_shared` comes near to: a maximum matching by augmenting paths.
    """
    held: list[list[int]] = [[] for _ in budget]  # the tokens of every rank

    def find_place(token: int, tried: set[int]) -> bool:
        for d in sorted(visited[token] - tried - {home}):
            if budget[d] == 0:
                continue
            tried.add(d)
            if len(held[d]) < budget[d]:
                held[d].append(token)
                return True
            for i, other in enumerate(held[d]):
                if find_place(other, tried):
                    held[d][i] = token
                    return True
        return False

    return sum(find_place(t, set()) for t in range(len(visited)))
