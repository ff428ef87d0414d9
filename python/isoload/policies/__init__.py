"""Online policies: one file per family, one protocol (base.py), one registry. published.py holds those of others."""

from isoload.placement.placed_layers import PlacedLayers
from isoload.policies.base import (
    POLICIES,
    Demand,
    Policy,
    Seeded,
    chosen_plan,
    make_policy,
    parse_policy,
    register_policy,
    sample_seed,
    sampled_plan,
)
from isoload.policies.borrowing import HedgePolicy, LibraPolicy, LlepPolicy, SpillCostPolicy
from isoload.policies.exact import (
    EvenPolicy,
    ExactActivePolicy,
    ExactPolicy,
    LpPolicy,
    NonePolicy,
    StaticPolicy,
)
from isoload.policies.grace import GracePolicy
from isoload.policies.published import DynamicPolicy, LpSampledPolicy, WaterfillSampledPolicy
from isoload.policies.published_borrowing import LibraPublishedPolicy, LlepPublishedPolicy
from isoload.policies.shared import JointPolicy, SharedLocalPolicy, WaterfillPolicy

for _policy in (
    NonePolicy,
    StaticPolicy,
    EvenPolicy,
    DynamicPolicy,
    ExactPolicy,
    ExactActivePolicy,
    LpPolicy,
    LpSampledPolicy,
    SharedLocalPolicy,
    WaterfillPolicy,
    WaterfillSampledPolicy,
    JointPolicy,
    LlepPolicy,
    LlepPublishedPolicy,
    SpillCostPolicy,
    LibraPolicy,
    LibraPublishedPolicy,
    HedgePolicy,
    GracePolicy,
):
    register_policy(_policy)

__all__ = [
    "POLICIES",
    "Demand",
    "PlacedLayers",
    "Policy",
    "Seeded",
    "StaticPolicy",
    "chosen_plan",
    "make_policy",
    "parse_policy",
    "register_policy",
    "sample_seed",
    "sampled_plan",
]
