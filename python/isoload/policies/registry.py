"""The registry of policies: by name, with options."""

from __future__ import annotations

from typing import Any

from isoload.options import make, parse
from isoload.policies.base import Policy

POLICIES: dict[str, type[Policy]] = {}
_DEFAULTS: dict[str, Policy] = {}


def register_policy(policy: type[Policy]) -> type[Policy]:
    """Makes a policy known by its name; one of your own, too, where this may stand as a decorator.

    Raises:
        ValueError: the name is taken.
    """
    if policy.name in POLICIES:
        raise ValueError(f"name must be a new one, policy {policy.name} exists")
    POLICIES[policy.name], _DEFAULTS[policy.name] = policy, policy()
    return policy


def make_policy(policy: str | Policy, options: dict[str, Any] | None = None) -> Policy:
    """A policy by name and options; a ready-made one passes through (and takes no options)."""
    if isinstance(policy, Policy):
        if options:
            raise ValueError(f"options must be set on the policy itself, got {', '.join(options)}")
        return policy
    if not options and policy in POLICIES:
        return _DEFAULTS[policy]
    return make("policy", POLICIES, policy, options or {})


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a policy written ``name`` or ``name:option=value:option=value``."""
    return parse("policy", POLICIES, text)
