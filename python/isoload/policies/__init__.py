"""Online policies: one file each, one protocol (base.py), one registry."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from isoload.policies.base import Policy, Split
from isoload.policies.even import DynamicPolicy, EvenPolicy
from isoload.policies.exact import ExactPolicy
from isoload.policies.none import NonePolicy
from isoload.policies.static import StaticPolicy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (NonePolicy, StaticPolicy, EvenPolicy, DynamicPolicy, ExactPolicy)
}


_DEFAULTS = {name: policy() for name, policy in POLICIES.items()}
_OPTIONS = {name: [f.name for f in fields(policy)] for name, policy in POLICIES.items()}


def make_policy(policy: str | Policy, options: dict[str, Any]) -> Policy:
    """A policy by name and options; a ready-made one passes through (and takes no options)."""
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options must be set on the policy itself, got {', '.join(options)}")
        return policy
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not options:
        return _DEFAULTS[policy]
    known = _OPTIONS[policy]
    if unknown := [key for key in options if key not in known]:
        raise ValueError(
            f"option must be one of {', '.join(known) or '(none)'} for policy {policy}, got {unknown[0]!r}"
        )
    return POLICIES[policy](**options)


__all__ = ["POLICIES", "Policy", "Split", "make_policy"]
