"""Policies for bench_balance: the published five-step affine scaling, rounded and as it draws, under short names.

Re-implemented (`isoload.policies.published.affine_scaling`), so labelled: `affine5_sampled` is what SGLang's `lp`
dispatch does with its solver's fractions, every copy drawn on its own; `affine5` rounds the same fractions to quotas,
which shows what the five steps cost alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from isoload.policies import register_policy
from isoload.policies.lp import LpPolicy, Method
from isoload.policies.published.lp_sampled import LpSampledPolicy


@register_policy
@dataclass(frozen=True)
class Affine5(LpPolicy):
    """Five steps, rounded to quotas by largest remainder."""

    name = "affine5"
    method: Method = "affine"


@register_policy
@dataclass(frozen=True)
class Affine5Sampled(LpSampledPolicy):
    """Five steps, then a draw for every copy."""

    name = "affine5_sampled"
    method: Method = "affine"
