"""Policies that borrowed no expert in a replay, and the options that kept them from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from isoload.balancing.planning import plan
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.policies.plan import Plan

STEPS = {"min_chunk": 1, "threshold": 100}  # of 1: how finely the value is sought at which a policy borrows


@dataclass
class IdleBorrowing:
    """Watches the plans of one policy until it borrows, and keeps the loads that are furthest above their mean.

    policy: as the replay's settings name it.
    """

    policy: str
    borrowed: bool = False
    excess: int = 0  # of the busiest rank over the mean, times R
    worst: tuple[Tensor, Placement, int, Policy] | None = None  # loads [R, E], of a layer

    def add(self, plans: Sequence[Plan], loads: Tensor, placement: Placement, policy: Policy) -> None:
        """Add the plans of a batch's layers, made of loads [L, R, E]."""
        if self.borrowed or not any(hasattr(policy, name) for name in STEPS):
            return
        for layer, made in enumerate(plans):
            if made.telemetry is None or made.peak is None or int(made.telemetry[0]):
                self.borrowed, self.worst = True, None
                return
            excess = int(made.peak) * placement.topology.num_ranks - int(loads[layer].sum())
            if excess > self.excess:
                self.excess, self.worst = excess, (loads[layer].clone(), placement, layer, policy)

    def note(self) -> str | None:
        """Return a sentence that names the options and the values at which the policy would borrow.

        The values are those at which the policy borrows for the loads with the largest excess, as its plans show. None:
        the policy has borrowed, or no value of these options makes it borrow, for example where ranks are even.
        """
        if self.worst is None:
            return None
        policy = self.worst[3]
        given = {name: getattr(policy, name) for name in STEPS if hasattr(policy, name)}
        lowest = {"min_chunk": 1, "threshold": 0.0}
        for names in ([name] for name in given), [list(given)]:
            for changed in names:
                values = {name: lowest[name] for name in changed}
                if self._borrows(values):
                    for name in changed:
                        values[name] = self._most(name, values, given[name])
                    return self._sentence({name: given[name] for name in changed}, values)
        return None

    def _sentence(self, given: dict[str, Any], values: dict[str, Any]) -> str:
        now = " and ".join(f"{name} is {_text(value)}" for name, value in given.items())
        then = " and ".join(f"at {name}={_text(value)} or less" for name, value in values.items())
        return f"{self.policy} borrowed no expert in any batch: {now}; it would borrow {then}."

    def _borrows(self, values: dict[str, Any]) -> bool:
        assert self.worst is not None
        loads, placement, layer, policy = self.worst
        made = plan(loads, placement, layer, replace(policy, **values))  # type: ignore[type-var]
        return made.telemetry is not None and bool(int(made.telemetry[0]))

    def _most(self, name: str, values: dict[str, Any], given: float) -> float:
        """Return the largest value of an option, below the given one, at which the policy borrows."""
        steps = STEPS[name]
        low, high = round(values[name] * steps), int(given * steps)
        while low < high:
            middle = (low + high + 1) // 2
            if self._borrows({**values, name: _value(middle, steps)}):
                low = middle
            else:
                high = middle - 1
        return _value(low, steps)


def _value(number: int, steps: int) -> float:
    """Return an option's value: whole where a step is 1."""
    return number if steps == 1 else number / steps


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
