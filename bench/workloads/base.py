"""The protocol of a workload: a frozen dataclass whose fields after the shape are its options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from numbers import Integral
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from isoload.traces import Ints
from workloads.dealing import apportion, deal

MAX_COPIES = 2**31 - 1  # of a batch, as everywhere in isoload


class Use(IntEnum):
    """What random numbers are for; each use and step has a stream of its own."""

    POPULARITY = 0
    DRIFT = 1
    TOKENS = 2
    SOURCES = 3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Routing of one MoE layer, step by step; the same integers for the same fields and step, on any platform.

    A workload guarantees its copies per expert (:meth:`expert_loads`), not only their mean: the tokens of a step
    meet them exactly. It is without a placement. Where one names a rank's experts, they lie in order,
    ``ceil(E / R)`` per rank, as the placer ``trivial`` puts them without replicas.

    Args:
        num_ranks: R source ranks.
        num_experts: E routed experts.
        top_k: K distinct experts per token, at most E.
        tokens_per_rank: T, or T_r of every source rank; 0 is allowed. Kept as [R].
        seed: of everything that is drawn.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """

    name: ClassVar[str]

    num_ranks: int
    num_experts: int
    top_k: int
    tokens_per_rank: int | Sequence[int]
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_ranks", 1), ("num_experts", 1), ("top_k", 1), ("seed", 0)):
            at_least(name, getattr(self, name), least)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k must be at most num_experts={self.num_experts}, got {self.top_k}")
        object.__setattr__(self, "tokens_per_rank", self._tokens_of_each_rank())
        self.check()

    def check(self) -> None:
        """Refuses options that the shape makes impossible."""

    def weights(self, step: int) -> list[int]:
        """[E] what the experts' loads of a step are in proportion to; at most 1/K of the sum each."""
        raise NotImplementedError

    def tokens(self, step: int) -> list[int]:
        """[R] tokens of every source rank in a step."""
        assert isinstance(self.tokens_per_rank, tuple)
        return list(self.tokens_per_rank)

    def expert_loads(self, step: int) -> Ints:
        """[E] int64 copies that the step's tokens send to every expert, summed over the source ranks."""
        at_least("step", step, 0)
        return apportion(self.weights(step), sum(self.tokens(step)) * self.top_k)

    def topk_ids(self, step: int) -> list[Tensor]:
        """R tensors [T_r, K] int64: the logical experts of every source rank's tokens in a step."""
        at_least("step", step, 0)
        tokens = self.tokens(step)
        drawn = self.draw(step, sum(tokens), self.stream(Use.TOKENS, step))
        return list(torch.from_numpy(drawn).split(tokens))

    def draw(self, step: int, num_tokens: int, stream: np.random.Generator) -> Ints:
        """[T, K] all tokens of a step, in random order."""
        return deal(self.expert_loads(step), num_tokens, self.top_k, stream)

    def stream(self, use: Use, step: int = 0) -> np.random.Generator:
        # The seed comes last: it alone may take more than one 32-bit word.
        return np.random.default_rng((use, step, self.seed))

    @property
    def experts_per_rank(self) -> int:
        """Of experts in order; the last ranks may have fewer."""
        return -(-self.num_experts // self.num_ranks)

    @property
    def ranks_with_experts(self) -> int:
        """How many; they are the first ones."""
        return -(-self.num_experts // self.experts_per_rank)

    def experts_of(self, rank: int) -> range:
        """The experts of a rank if all lie in order."""
        low, size = rank * self.experts_per_rank, self.experts_per_rank
        return range(min(low, self.num_experts), min(low + size, self.num_experts))

    def check_rank(self, rank: int) -> None:
        if not isinstance(rank, Integral) or not 0 <= rank < self.ranks_with_experts:
            raise ValueError(
                f"rank must be in 0..{self.ranks_with_experts - 1}, the ranks that hold experts if these lie in "
                f"order, {self.experts_per_rank} on each, got {rank}"
            )

    def _tokens_of_each_rank(self) -> tuple[int, ...]:
        given = self.tokens_per_rank
        tokens = tuple(given) if isinstance(given, Iterable) else (given,) * self.num_ranks
        for number in tokens:
            at_least("tokens_per_rank", number, 0)
        if len(tokens) != self.num_ranks:
            raise ValueError(
                f"tokens_per_rank must be one number or one per rank ({self.num_ranks}), got {len(tokens)} of them"
            )
        if (copies := sum(tokens) * self.top_k) > MAX_COPIES:
            raise ValueError(f"tokens_per_rank must give a batch at most {MAX_COPIES} copies, got {copies}")
        return tuple(int(number) for number in tokens)


def at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value}")
