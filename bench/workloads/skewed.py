"""Workloads whose popularity of experts follows a distribution: Zipf, drifting, log-normal, with a given peak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import exp, fsum, inf, log, sqrt
from typing import ClassVar

import numpy as np

from workloads.base import Use, Workload
from workloads.dealing import limit_shares

SCALE = 1 << 40  # weight of the most popular expert: integers decide, not the last bits of a platform's exp


@dataclass(frozen=True, kw_only=True)
class SkewedWorkload(Workload):
    """Base of the workloads in which an expert's share may exceed what tokens can send it, one copy each.

    Options: clip, hold the shares above 1/K at 1/K and the others in proportion, instead of refusing them.
    """

    knobs: ClassVar[tuple[str, ...]]  # names of the options that skew

    clip: bool = False

    def log_popularity(self, step: int) -> list[float]:
        """[E] logarithm of what the shares of a step are in proportion to."""
        raise NotImplementedError

    def check(self) -> None:
        for name in self.knobs:
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be a finite number of at least 0, got {getattr(self, name)}")
        self.weights(0)

    def weights(self, step: int) -> list[int]:
        weights = integer_weights(self.log_popularity(step))
        if max(weights) * self.top_k > sum(weights) and not self.clip:
            asked = ", ".join(f"{name}={getattr(self, name)}" for name in self.knobs)
            raise ValueError(
                f"{asked} must give no expert above 1/top_k = {1 / self.top_k:g} of the copies, "
                f"got {max(weights) / sum(weights):.6g} at step {step}; clip=True holds it there"
            )
        return limit_shares(weights, self.top_k)


@dataclass(frozen=True, kw_only=True)
class Zipf(SkewedWorkload):
    """The i-th most popular expert has a load in proportion to ``i ** -exponent``; which it is, the seed draws.

    Options: exponent; clip.
    """

    name = "zipf"
    knobs: ClassVar[tuple[str, ...]] = ("exponent",)
    exponent: float = 0.8

    def log_popularity(self, step: int) -> list[float]:
        place = self.stream(Use.POPULARITY).permutation(self.num_experts).tolist()
        return [-self.exponent * log(i + 1) for i in place]


@dataclass(frozen=True, kw_only=True)
class Drift(Zipf):
    """Zipf popularity p that is another every step: in proportion to ``p * exp(drift * z)``.

    z is drawn for every expert and step, with mean 0 and variance 1 over the experts. The workload ``zipf`` of
    the same seed and exponent has the loads of p itself: what a placement is made from before the drift.

    Options: exponent; drift; clip.
    """

    name = "drift"
    knobs = ("exponent", "drift")
    drift: float = 0.5

    def log_popularity(self, step: int) -> list[float]:
        z = standard_normals(self.stream(Use.DRIFT, step), self.num_experts)
        return [p + self.drift * x for p, x in zip(super().log_popularity(step), z, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Lognormal(SkewedWorkload):
    """Popularity is log-normal: its logarithm, drawn from the seed, has variance sigma ** 2 over the experts.

    Options: sigma; clip.
    """

    name = "lognormal"
    knobs = ("sigma",)
    sigma: float = 1.0

    def log_popularity(self, step: int) -> list[float]:
        z = standard_normals(self.stream(Use.POPULARITY), self.num_experts)
        return [self.sigma * x for x in z]


@dataclass(frozen=True, kw_only=True)
class MaxVio(Workload):
    """Log-normal popularity with a given max / mean expert load - 1, to one copy (MoonEP's measure of imbalance).

    Options: maxvio, 0..E/K - 1.
    """

    name = "maxvio"
    maxvio: float = 1.0

    def check(self) -> None:
        most = self.num_experts / self.top_k - 1
        if not 0 <= self.maxvio <= most:
            raise ValueError(f"maxvio must be in 0..{most:g} = num_experts / top_k - 1, got {self.maxvio}")

    def weights(self, step: int) -> list[int]:
        return limit_shares(integer_weights([self._sigma * x for x in self._z]), self.top_k)

    @cached_property
    def _z(self) -> list[float]:
        return standard_normals(self.stream(Use.POPULARITY), self.num_experts)

    @cached_property
    def _sigma(self) -> float:
        """By bisection: the mean over the maximum falls strictly as sigma grows, from 1 to 1/E."""
        top, target = max(self._z), self.num_experts / (1 + self.maxvio)

        def too_flat(sigma: float) -> bool:
            return fsum(exp(sigma * (x - top)) for x in self._z) > target

        low, high = 0.0, 1.0
        while too_flat(high):
            low, high = high, 2 * high
        for _ in range(53):
            middle = (low + high) / 2
            low, high = (middle, high) if too_flat(middle) else (low, middle)
        return high


def standard_normals(stream: np.random.Generator, num: int) -> list[float]:
    """Normal numbers, shifted and scaled to mean 0 and variance 1 exactly; of one number, 0."""
    drawn = stream.standard_normal(num).tolist()
    mean = fsum(drawn) / num
    spread = sqrt(fsum((x - mean) ** 2 for x in drawn) / num)
    return [(x - mean) / spread if spread else 0.0 for x in drawn]


def integer_weights(logs: list[float]) -> list[int]:
    """[E] integers in proportion to exp(logs), the largest SCALE; none is 0, so that every expert can get copies."""
    top = max(logs)
    return [max(1, round(SCALE * exp(x - top))) for x in logs]
