"""Online policies: one file each, one protocol (base.py), one registry. published/: forms of others, to compare."""

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
from isoload.policies.even import EvenPolicy
from isoload.policies.exact import ExactPolicy
from isoload.policies.exact_active import ExactActivePolicy
from isoload.policies.grace import GracePolicy
from isoload.policies.hedge import HedgePolicy
from isoload.policies.joint import JointPolicy
from isoload.policies.libra import LibraPolicy
from isoload.policies.llep import LlepPolicy
from isoload.policies.lp import LpPolicy
from isoload.policies.none import NonePolicy
from isoload.policies.published.dynamic import DynamicPolicy
from isoload.policies.published.grace_sampled import GraceSampledPolicy
from isoload.policies.published.libra_published import LibraPublishedPolicy
from isoload.policies.published.llep_published import LlepPublishedPolicy
from isoload.policies.published.lp_affine import LpAffinePolicy
from isoload.policies.published.lp_sampled import LpSampledPolicy
from isoload.policies.published.waterfill_sampled import WaterfillSampledPolicy
from isoload.policies.shared_local import SharedLocalPolicy
from isoload.policies.spill_cost import SpillCostPolicy
from isoload.policies.static import StaticPolicy
from isoload.policies.waterfill import WaterfillPolicy

for _policy in (
    NonePolicy,
    StaticPolicy,
    EvenPolicy,
    DynamicPolicy,
    ExactPolicy,
    ExactActivePolicy,
    LpPolicy,
    LpAffinePolicy,
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
    GraceSampledPolicy,
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
