"""The registry of policies: by name, with options."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

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
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    if not options:
        return _DEFAULTS[policy]
    known = [field.name for field in fields(_DEFAULTS[policy])]
    if unknown := [key for key in options if key not in known]:
        raise ValueError(
            f"option must be one of {', '.join(known) or '(none)'} for policy {policy}, got {unknown[0]!r}"
        )
    return POLICIES[policy](**options)


def parse_policy(text: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a policy written ``name`` or ``name:option=value:option=value``.

    Raises:
        ValueError: an unknown name or option, or a value that its option cannot be.
    """
    name, *given = text.split(":")
    make_policy(name, {})
    options: dict[str, Any] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"policy must be written name:option=value, got {text!r}")
        make_policy(name, {key: getattr(_DEFAULTS[name], key, None)})  # refuses an unknown option
        options[key] = _like(_DEFAULTS[name], key, value)
    make_policy(name, options)
    return name, options


def _like(policy: Policy, key: str, value: str) -> Any:
    """The value in the type of the option: its default's or, where that is None, the one beside None."""
    default = getattr(policy, key)
    kind = type(default)
    if default is None:
        kind = next(t for t in get_args(get_type_hints(type(policy))[key]) if t is not type(None))
    if kind is bool:
        if value not in ("True", "False"):
            raise ValueError(f"option {key} must be True or False, got {value!r}")
        return value == "True"
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"option {key} must be of type {kind.__name__}, got {value!r}") from None
