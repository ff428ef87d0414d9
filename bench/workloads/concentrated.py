"""Workload ``concentrated``: the imbalance of LLEP's experiments, a share of the tokens into a few experts."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from isoload.traces import Ints
from workloads.base import Workload, at_least
from workloads.dealing import deal, even_copies


@dataclass(frozen=True, kw_only=True)
class Concentrated(Workload):
    """A share of the tokens is hot: these go to experts 0..num_hot-1 with as many copies as they can, evenly.
    All other copies go evenly to the other experts.

    With distinct experts a hot token sends ``min(K, num_hot)`` copies to the hot experts; so one hot expert gets
    at most 1/K of all copies. ``repeat=True`` is the form of LLEP's published benchmark: all K copies of a hot
    token go there, several to one expert if num_hot < K. The layer rejects such tokens, planners do not.

    Options: share, of the tokens, to half a token; num_hot, 1..E-K; repeat.
    """

    name = "concentrated"
    share: float = 0.8
    num_hot: int = 4
    repeat: bool = False

    def check(self) -> None:
        at_least("num_hot", self.num_hot, 1)
        if self.num_hot > self.num_experts - self.top_k:
            raise ValueError(
                f"num_hot must leave the other tokens top_k={self.top_k} of num_experts={self.num_experts}, "
                f"got {self.num_hot}"
            )
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be in 0..1, got {self.share}")

    def expert_loads(self, step: int) -> Ints:
        at_least("step", step, 0)
        num_tokens = sum(self.tokens(step))
        hot = self._hot_tokens(num_tokens) * self._hot_copies
        others = num_tokens * self.top_k - hot
        return np.concatenate(
            [even_copies(self.num_hot, hot), even_copies(self.num_experts - self.num_hot, others)]
        )

    def draw(self, step: int, num_tokens: int, stream: np.random.Generator) -> Ints:
        hot_tokens, k = self._hot_tokens(num_tokens), self._hot_copies
        if self.repeat:
            hot: Ints = np.arange(hot_tokens * k, dtype=np.int64).reshape(hot_tokens, k) % self.num_hot
        else:
            hot = deal(even_copies(self.num_hot, hot_tokens * k), hot_tokens, k, stream)
        # The other experts are dealt out in two parts, the second from where the first stopped.
        num_others, beside = self.num_experts - self.num_hot, hot_tokens * (self.top_k - k)
        cold = (num_tokens - hot_tokens) * self.top_k
        first = deal(even_copies(num_others, beside), hot_tokens, self.top_k - k, stream)
        second = deal(even_copies(num_others, cold, beside), num_tokens - hot_tokens, self.top_k, stream)
        mixed = np.concatenate([hot, self.num_hot + first], axis=1)
        return stream.permutation(np.concatenate([mixed, self.num_hot + second]))

    @property
    def _hot_copies(self) -> int:
        """Copies that one hot token sends to the hot experts."""
        return self.top_k if self.repeat else min(self.top_k, self.num_hot)

    def _hot_tokens(self, num_tokens: int) -> int:
        return int(Fraction(self.share) * num_tokens + Fraction(1, 2))
