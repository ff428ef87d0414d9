"""Options of policies and placers: read from text, and refused when the policy is made, not when a batch comes."""

from __future__ import annotations

from types import NoneType
from typing import Any

import pytest
import torch

import isoload
from isoload.analysis.prediction import check_prediction
from isoload.checks import REMOVED, types_of
from isoload.placers import PLACERS, make_placer, parse_placer
from isoload.policies import POLICIES, make_policy, parse_policy

MAKERS: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "policy": (POLICIES, make_policy, parse_policy),
    "placer": (PLACERS, make_placer, parse_placer),
}
OTHERS: list[Any] = ["nonsense", None, 0.5, 3, True, torch.ones(2), [1]]


def fits(value: Any, kind: Any) -> bool:
    if not isinstance(kind, type):
        return isinstance(value, str) and value == kind
    numbers = {int: (int,), float: (int, float)}
    return type(value) in numbers.get(kind, (kind,)) or (kind is NoneType and value is None)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_option_refuses_what_is_not_of_its_type(kind: str) -> None:
    classes, make, _ = MAKERS[kind]
    tried = 0
    for name, made in classes.items():
        for option, types in types_of(made).items():
            for value in OTHERS:
                if any(fits(value, of) for of in types):
                    continue
                with pytest.raises(ValueError, match=rf"^{option} must be (of type|one of) .*, got "):
                    make(name, {option: value})
                tried += 1
    assert tried > 30


@pytest.mark.parametrize("kind", MAKERS)
def test_every_number_must_be_finite(kind: str) -> None:
    classes, make, _ = MAKERS[kind]
    options = [
        (name, option)
        for name, of in classes.items()
        for option, types in types_of(of).items()
        if float in types
    ]
    for name, option in options:
        for value in (float("nan"), float("inf"), float("-inf")):
            with pytest.raises(ValueError, match=rf"^{option} must be finite, got {value}"):
                make(name, {option: value})
    assert options


def test_a_layer_without_freedom_refuses_what_its_others_would() -> None:
    """Regression: exact:objective=nonsense raised at the first layer that had replicas, in its first batch."""
    topology = isoload.Topology(2)
    placement = isoload.place(torch.ones(1, 4), topology)
    with pytest.raises(ValueError, match="^objective must be one of spread, local, got 'nonsense'$"):
        isoload.Balancer(placement, 0, "exact", isoload.LocalGroup(topology), objective="nonsense")


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("policy", "exact", {}),
        ("policy", "exact:tolerance=1:budget=3", {"tolerance": 1.0, "budget": 3}),
        ("policy", "exact:budget=None:objective=local", {"budget": None, "objective": "local"}),
        ("policy", "grace:locality=False", {"locality": False}),
        ("policy", "waterfill:routed=exact", {"routed": "exact"}),
        ("placer", "scenario:pinned=True", {"pinned": True}),
        ("placer", "craft:replicas=8", {"replicas": 8}),
        ("placer", "craft:replicas=knee", {"replicas": "knee"}),
    ],
)
def test_text(kind: str, text: str, wanted: dict[str, Any]) -> None:
    name, options = MAKERS[kind][2](text)
    assert options == wanted and name in MAKERS[kind][0]
    assert [type(value) for value in options.values()] == [type(value) for value in wanted.values()]


@pytest.mark.parametrize("removed", REMOVED)
def test_a_removed_name_is_refused_with_what_to_use(removed: str) -> None:
    kind, name = removed.split()
    refuse = check_prediction if kind == "predict" else MAKERS[kind][2]
    with pytest.raises(ValueError, match=f"^{removed} was removed: use {REMOVED[removed]}$"):
        refuse(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact:budget", "policy must be written name:option=value, got 'exact:budget'"),
        ("exact:speed=1", "option must be one of tolerance, budget, objective for policy exact, got 'speed'"),
        ("exact:objective=x", "option objective must be one of spread, local, got 'x'"),
        ("exact:budget=x", "option budget must be of type int, None, got 'x'"),
        ("fast:budget=1", "policy must be one of none, static"),
        ("exact:budget=1:budget=2", "option budget must be given once, got 'exact:budget=1:budget=2'"),
    ],
)
def test_text_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_policy(text)
    assert str(caught.value).startswith(message)
