"""UltraEP's published rule, in plain Python from its description, to compare fills with: bisection of a level.

At a level, ranks above it export, the most loaded first, their largest experts first, always to the rank with most
room below the level that has a spare slot; a level at which that removes every excess is feasible.
"""

from __future__ import annotations

from support.level_cases import LevelCase


def exported(case: LevelCase, level: int) -> list[int] | None:
    """[R] loads after the export at a level, or None if a rank stays above it."""
    home = (case.home // case.size).tolist()
    load, left = case.plain().tolist(), case.loads.tolist()
    held = [set(row.tolist()) for row in case.slots.reshape(case.num_ranks, -1)]
    free = [case.spare * (case.alive is None or bool(case.alive[r])) for r in range(case.num_ranks)]
    for source in sorted(range(case.num_ranks), key=lambda r: (-load[r], r)):
        own = sorted((e for e, r in enumerate(home) if r == source), key=lambda e: (-left[e], e))
        for e in own:
            while load[source] > level and left[e] > 0:
                ranks = [r for r in range(case.num_ranks) if free[r] and e not in held[r] and load[r] < level]
                if not ranks:
                    break
                to = max(ranks, key=lambda r: (-load[r], -r))
                copies = min(load[source] - level, left[e], level - load[to])
                load[source], load[to], left[e] = load[source] - copies, load[to] + copies, left[e] - copies
                held[to].add(e)
                free[to] -= 1
        if load[source] > level:
            return None
    return load


def least_level(case: LevelCase) -> int:
    """The level at which the bisection ends: the largest load of UltraEP's plan."""
    high, low = int(case.plain().max()), -(-int(case.plain().sum()) // case.live())
    while low < high:
        middle = (low + high) // 2
        if exported(case, middle) is None:
            low = middle + 1
        else:
            high = middle
    return high
