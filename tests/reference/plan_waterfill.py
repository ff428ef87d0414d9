"""plan_waterfill: pour the copies of the shared experts over the ranks' routed loads.

1. level: the lowest peak under which all shared copies fit.
2. keep: every rank keeps what fits; a rank that cannot keep all is a giver, one with room left a taker.
3. visit: a giver's tokens visit takers for their routed experts; copies that go there travel for nothing.
   Takers that must get some take it first, then givers spread what is left, both in proportion to that; then
   make it a maximum flow by shortest augmenting paths.
4. rest: what is left goes inside its node, then anywhere.

Everything is integral, and ties go to the lowest rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor

from isoload.ops.results import WaterfillSplit

MAX_COPIES = 2**31 - 1
MOST = MAX_COPIES // 1024  # that a way or a place counts for in a start: of all ranks together less than 2^31


def plan_waterfill(
    copies: Tensor,
    tokens: Tensor,
    per_token: int = 1,
    ranks_per_node: int | None = None,
    *,
    ticks: Tensor | None = None,
    limits: Tensor | None = None,
) -> WaterfillSplit:
    """The share of isoload.ops.plan_waterfill, which documents the arguments, move by move the same."""
    if copies.dim() == 3:
        layers = [
            plan_waterfill(c, t, per_token, ranks_per_node, ticks=ticks, limits=limits)
            for c, t in zip(copies, tokens, strict=True)
        ]
        return WaterfillSplit(*(torch.stack(field) for field in zip(*layers, strict=True)))

    ranks = len(copies)
    pool = Pool(
        copies.tolist(),
        tokens.tolist(),
        per_token,
        ranks_per_node or ranks,
        [1] * ranks if ticks is None else ticks.tolist(),
        [MAX_COPIES] * ranks if limits is None else limits.tolist(),
    )
    level = pool.level()
    pool.keep(level)
    pool.visit()
    pool.pour(pool.per_node)
    pool.pour(ranks)

    received = [sum(column) for column in zip(*pool.share, strict=True)]
    peak = max(t * (b + n) for t, b, n in zip(pool.ticks, pool.base, received, strict=True))
    assert [sum(row) for row in pool.share] == pool.own, "every shared copy has one place"
    assert all(n >= 0 for row in pool.share for n in row), "nothing is negative"
    assert all(n <= most for n, most in zip(received, pool.limits, strict=True)), "limits hold"
    assert peak == level, "no share has a lower peak"
    return WaterfillSplit(
        torch.tensor(pool.share, dtype=torch.int32), torch.tensor(peak), torch.tensor(level)
    )


class Pool:
    """One layer. Per rank: ``base`` routed copies, ``own`` shared copies, ``excess`` of those without a place,
    ``room``: places without a copy."""

    def __init__(
        self,
        copies: list[list[int]],
        tokens: list[int],
        per_token: int,
        per_node: int,
        ticks: list[int],
        limits: list[int],
    ) -> None:
        self.copies, self.tokens, self.per_token, self.per_node = copies, tokens, per_token, per_node
        self.ticks, self.limits = ticks, limits
        self.ranks = range(len(tokens))
        self.base: list[int] = [sum(column) for column in zip(*copies, strict=True)]
        self.own = [per_token * n for n in tokens]
        self.excess, self.room = [0] * len(tokens), [0] * len(tokens)
        self.share = [[0] * len(tokens) for _ in self.ranks]
        self.quarters = 3  # of the copies, how many count as visits

    # 1. level

    def level(self) -> int:
        """The least level under which the routed and the shared copies of all ranks fit."""
        shared = sum(self.own)
        assert sum(self.limits) >= shared, "limits hold all shared copies"
        low = max(t * b for t, b in zip(self.ticks, self.base, strict=True))
        high = max(self.ticks) * (max(self.base) + shared)
        enough = range(low, max(low, high) + 1)
        return enough[bisect_left(enough, shared, key=lambda p: sum(self.capacity(r, p) for r in self.ranks))]

    def capacity(self, rank: int, level: int) -> int:
        return min(self.limits[rank], level // self.ticks[rank] - self.base[rank])

    # 2. keep

    def keep(self, level: int) -> None:
        for r in self.ranks:
            capacity = self.capacity(r, level)
            kept = self.share[r][r] = min(self.own[r], capacity)
            self.excess[r] = self.own[r] - kept
            self.room[r] = min(capacity - kept, sum(self.own))  # more is never used
        self.givers = [r for r in self.ranks if self.excess[r] > 0]
        self.takers = [r for r in self.ranks if self.room[r] > 0]

    # 3. visit

    def visits(self, giver: int, taker: int) -> int:
        """How many copies have a token that visits the taker anyway, estimated from counts."""
        return self.per_token * min(self.tokens[giver], self.quarters * self.copies[giver][taker] // 4)

    def visit(self) -> None:
        spare = max(0, sum(min(room, MOST) for room in self.room) - sum(self.excess))
        for self.quarters in (3, 4):
            for taker in self.in_need(spare):
                wishes = {(s, taker): self.wish(s, taker, self.excess[s]) for s in self.givers}
                self.spread(self.room[taker] - spare, wishes)
            for giver in self.givers:
                wishes = {(giver, d): self.wish(giver, d, self.room[d]) for d in self.takers}
                self.spread(self.excess[giver], wishes)
            while levels := self.levels():
                self.augment(levels)

    def in_need(self, spare: int) -> list[int]:
        """Takers with more room than stays free when all excess has a place: what they must get. First those whose
        givers have the least choice of copies for one that is needed."""
        choice = {
            d: sum(self.wish(s, d, self.excess[s]) for s in self.givers) * 256 // (self.room[d] - spare)
            for d in self.takers
            if self.room[d] > spare
        }
        return sorted(choice, key=lambda d: (min(choice[d], MAX_COPIES - 1), d))

    def wish(self, giver: int, taker: int, most: int) -> int:
        return min(self.unused(giver, taker), most, MOST)

    def spread(self, copies: int, wishes: dict[tuple[int, int], int]) -> None:
        """Copies from givers to takers in proportion to the wishes: rounded down, and what that leaves, one each to
        the first."""
        total = sum(wishes.values())
        copies = min(copies, total)
        parts = {way: wish * int((copies << 32) / total) >> 32 for way, wish in wishes.items() if wish}
        left = copies - sum(parts.values())
        for way, part in parts.items():
            one = left > 0 and part < wishes[way]
            self.send(*way, part + one)
            left -= one
        assert left == 0, "rounding loses nothing"

    def send(self, giver: int, taker: int, copies: int) -> None:
        self.share[giver][taker] += copies
        self.excess[giver] -= copies
        self.room[taker] -= copies

    def unused(self, giver: int, taker: int) -> int:
        return self.visits(giver, taker) - self.share[giver][taker]

    def levels(self) -> list[tuple[list[int], list[int]]]:
        """(givers, takers) by the length of their path. Level 0: takers with room, and the givers that may send
        them more. Level k: takers that givers of level k - 1 can take copies back from, and the givers that may
        send those more. The last level is the first with a giver that has excess; [] if there is none."""
        levels: list[tuple[list[int], list[int]]] = []
        givers, takers = set(self.givers), set(self.takers)
        here = [d for d in self.takers if self.room[d] > 0]
        while here:
            able = [s for s in self.givers if s in givers and any(self.unused(s, d) > 0 for d in here)]
            levels.append((able, here))
            if any(self.excess[s] > 0 for s in able):
                return levels
            givers.difference_update(able)
            takers.difference_update(here)
            here = [d for d in self.takers if d in takers and any(self.share[s][d] > 0 for s in able)]
        return []

    def augment(self, levels: list[tuple[list[int], list[int]]]) -> None:
        """One path from the lowest giver with excess down the levels, the widest hop each time. A giver sends
        more to a taker; that one returns as much to a giver of the next level, which has to send it on."""
        givers, takers = levels.pop()
        giver = next(s for s in givers if self.excess[s] > 0)
        width, path = self.excess[giver], [giver]
        while True:
            more = {
                d: self.unused(giver, d) if levels else min(self.unused(giver, d), self.room[d])
                for d in takers
            }
            taker = widest(takers, more.__getitem__)
            width = min(width, more[taker])
            path.append(taker)
            if not levels:
                break
            givers, takers = levels.pop()
            back = {s: self.share[s][taker] for s in givers}
            giver = widest(givers, back.__getitem__)
            width = min(width, back[giver])
            path.append(giver)
        for i in range(0, len(path), 2):
            self.send(path[i], path[i + 1], width)
            if i + 2 < len(path):
                self.send(path[i + 2], path[i + 1], -width)

    # 4. rest

    def pour(self, size: int) -> None:
        """In every group of ``size`` ranks, excess to room, both in rank order, as far as both last."""
        for first in range(0, len(self.ranks), size):
            for giver in self.ranks[first : first + size]:
                for taker in self.ranks[first : first + size]:
                    self.send(giver, taker, min(self.excess[giver], self.room[taker]))


def widest(ranks: list[int], width: Callable[[int], int]) -> int:
    """The rank with the largest width, the lowest of equal ones."""
    return min(ranks, key=lambda r: (-width(r), r))
