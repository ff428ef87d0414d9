"""W0-W7: the eight kinds of imbalance that Megatron-LM's token-imbalance benchmark (pull request 7488) distinguishes.

The generators are our own: each meets its options to the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral

from workloads.base import Use, Workload, at_least
from workloads.dealing import apportion


@dataclass(frozen=True, kw_only=True)
class Balanced(Workload):
    """W0: every expert has the same load, to one copy."""

    name = "balanced"

    def weights(self, step: int) -> list[int]:
        return [1] * self.num_experts


@dataclass(frozen=True, kw_only=True)
class HotWorkload(Workload):
    """Base of the workloads with a hot set: n experts with `heat` times the mean load each, the others equal.

    The hot set has ``heat * n / E`` of all copies, to half a copy, unless heat is 1 and nothing sets it apart.
    Where it is all experts of a rank and R divides E, heat is that rank's imbalance.

    Options: heat, 1..E/max(K, n): a token sends an expert one copy at most. Default: 2, or the most possible.
    """

    heat: float | None = None

    def hot_set(self, step: int) -> Sequence[int]:
        """The hot experts of a step; none = all equal."""
        raise NotImplementedError

    @property
    def largest_hot_set(self) -> int:
        """n of the fullest step."""
        raise NotImplementedError

    @property
    def most_heat(self) -> Fraction:
        return Fraction(self.num_experts, max(self.top_k, self.largest_hot_set))

    def check(self) -> None:
        if self.heat is not None and not 1 <= self.heat <= float(self.most_heat):
            raise ValueError(
                f"heat must be in 1..{float(self.most_heat):g}, which is num_experts={self.num_experts} over the "
                f"larger of top_k={self.top_k} and {self.largest_hot_set} hot experts, got {self.heat}"
            )

    def weights(self, step: int) -> list[int]:
        heat = min(Fraction(2 if self.heat is None else self.heat), self.most_heat)
        hot, experts = set(self.hot_set(step)), self.num_experts
        if len(hot) in (0, experts):
            return [1] * experts
        # Hot : cold = heat : (E - heat * n) / (E - n), times what makes both integers.
        high = heat.numerator * (experts - len(hot))
        low = heat.denominator * experts - heat.numerator * len(hot)
        return [high if e in hot else low for e in range(experts)]


@dataclass(frozen=True, kw_only=True)
class HotExperts(HotWorkload):
    """W1: hot experts anywhere, drawn from the seed.

    Options: heat; num_hot, default: as many as a rank has experts.
    """

    name = "hot_experts"
    num_hot: int | None = None

    @property
    def largest_hot_set(self) -> int:
        return self.experts_per_rank if self.num_hot is None else self.num_hot

    def check(self) -> None:
        if (
            not isinstance(self.largest_hot_set, Integral)
            or not 1 <= self.largest_hot_set <= self.num_experts
        ):
            raise ValueError(f"num_hot must be in 1..num_experts={self.num_experts}, got {self.num_hot}")
        super().check()

    def hot_set(self, step: int) -> Sequence[int]:
        order: list[int] = self.stream(Use.POPULARITY).permutation(self.num_experts).tolist()
        return order[: self.largest_hot_set]


@dataclass(frozen=True, kw_only=True)
class HotRank(HotWorkload):
    """W2: all experts of one rank are hot.

    Options: heat; rank.
    """

    name = "hot_rank"
    rank: int = 0

    @property
    def largest_hot_set(self) -> int:
        return len(self.experts_of(self.rank))

    def check(self) -> None:
        self.check_rank(self.rank)
        super().check()

    def hot_set(self, step: int) -> Sequence[int]:
        return self.experts_of(self.rank)


@dataclass(frozen=True, kw_only=True)
class Spread(HotExperts):
    """W3: hot experts at equal distances, so that no rank has more than its part of them.

    Options: heat; num_hot, default: as many as a rank has experts.
    """

    name = "spread"

    def hot_set(self, step: int) -> Sequence[int]:
        return [i * self.num_experts // self.largest_hot_set for i in range(self.largest_hot_set)]


@dataclass(frozen=True, kw_only=True)
class RaggedSource(Balanced):
    """W4: equal experts, unequal sources: one rank has no tokens, one has twice the mean, the others stand on
    equal steps between. Which rank stands where is drawn anew every step. ``tokens_per_rank`` is the mean."""

    name = "ragged_source"

    def check(self) -> None:
        if self.num_ranks < 2:
            raise ValueError(f"num_ranks must be at least 2 for ragged_source, got {self.num_ranks}")
        if len(set(super().tokens(0))) > 1:
            raise ValueError(
                f"tokens_per_rank must be one number for ragged_source, got {self.tokens_per_rank}"
            )

    def tokens(self, step: int) -> list[int]:
        stairs: list[int] = self.stream(Use.SOURCES, step).permutation(self.num_ranks).tolist()
        tokens: list[int] = apportion(stairs, sum(super().tokens(step))).tolist()
        return tokens


@dataclass(frozen=True, kw_only=True)
class ZeroExpertRank(Workload):
    """W5: the experts of one rank have no load, all others have the same.

    Options: rank.
    """

    name = "zero_expert_rank"
    rank: int = 0

    def check(self) -> None:
        self.check_rank(self.rank)
        if (others := self.num_experts - len(self.experts_of(self.rank))) < self.top_k:
            raise ValueError(f"top_k must be at most the {others} experts of other ranks, got {self.top_k}")

    def weights(self, step: int) -> list[int]:
        idle = self.experts_of(self.rank)
        return [int(e not in idle) for e in range(self.num_experts)]


@dataclass(frozen=True, kw_only=True)
class RotatingHotspot(HotRank):
    """W6: the hot rank moves on, to the next rank with experts, after every `period` steps.

    Options: heat; rank, the first hot one; period.
    """

    name = "rotating_hotspot"
    period: int = 1

    @property
    def largest_hot_set(self) -> int:
        return self.experts_per_rank

    def check(self) -> None:
        at_least("period", self.period, 1)
        super().check()

    def hot_set(self, step: int) -> Sequence[int]:
        return self.experts_of((self.rank + step // self.period) % self.ranks_with_experts)


@dataclass(frozen=True, kw_only=True)
class Burst(HotRank):
    """W7: balanced, but for the last `length` of every `period` steps, when one rank is hot.

    Options: heat; rank; period; length.
    """

    name = "burst"
    period: int = 8
    length: int = 1

    def check(self) -> None:
        at_least("period", self.period, 1)
        at_least("length", self.length, 1)
        if self.length > self.period:
            raise ValueError(f"length must be at most period={self.period}, got {self.length}")
        super().check()

    def hot_set(self, step: int) -> Sequence[int]:
        return self.experts_of(self.rank) if step % self.period >= self.period - self.length else ()
