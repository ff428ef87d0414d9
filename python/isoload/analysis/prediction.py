"""Loads [L, R, E] that a replay predicts for policies that fill ahead; policies that borrowed nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload.analysis.batches import Batches, Fold, SourceBatch
from isoload.balancing.planning import plan
from isoload.balancing.prediction import Last, fit
from isoload.checks import refuse_removed
from isoload.placement.placement import Placement
from isoload.policies import Policy
from isoload.policies.plan import Plan
from isoload.traces import Trace
from isoload.traces.record import Ints
from isoload.wording import not_one_of

FROM_CALIBRATION = ("linear", "popularity")
PREDICTIONS = ("perfect", "last", *FROM_CALIBRATION, "none")


def check_prediction(text: str) -> float | None:
    """Return the fraction of the choices that is predicted right, if the text is a number."""
    if text in PREDICTIONS:
        return None
    refuse_removed("predict", text)
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part <= 1:
        raise ValueError(not_one_of("predict", PREDICTIONS, text, " or a number in 0..1"))
    return part


class Forecast:
    """Predicted loads, batch after batch of one fold; without them a policy borrows nothing.

    predict: perfect: the loads themselves. last: those of the previous batch. linear: by
    :func:`isoload.balancing.prediction.fit` on the fold's calibration batches; the first layer's as last. popularity:
    each source's copies in the shares of the calibration batches. none: no loads. A number: each choice is kept with
    this probability, else drawn from the calibration batches' counts.
    """

    def __init__(self, predict: str, trace: Trace, batches: Batches, fold: Fold, seed: int) -> None:
        self.kept = check_prediction(predict)
        self.predict, self.seed, self.last = predict, seed, Last(trace.num_layers)
        if not fold.calibrate and (self.kept is not None or predict in FROM_CALIBRATION):
            raise ValueError(
                f"predict={predict} needs batches to calibrate on, a given placement leaves none"
            )
        self.popularity = batches.counts[list(fold.calibrate)].sum(0)
        self.linear = None
        if predict == "linear":
            self.linear = fit(calibration_tokens(predict, trace, batches, fold))

    def of(self, batch: SourceBatch, index: int, loads: Tensor, num_shared: int) -> Tensor:
        """Return [L, R, E] int32; the number of tokens that need the shared experts is known ahead."""
        num_routed = loads.shape[-1] - num_shared
        routed, predicted = loads[..., :num_routed], loads.clone()
        if self.kept is not None:
            predicted[..., :num_routed] = self._draw(batch, index, num_routed)
        elif self.predict == "popularity":
            predicted[..., :num_routed] = self._in_shares(routed)
        elif self.predict != "perfect":
            nothing = torch.zeros_like(routed[0])
            layers = (self._predict(layer, routed, batch) for layer in range(len(loads)))
            predicted[..., :num_routed] = torch.stack([nothing if x is None else x for x in layers])
        for layer in range(len(loads)):
            self.last.note(layer, routed[layer])
        return predicted

    def _predict(self, layer: int, routed: Tensor, batch: SourceBatch) -> Tensor | None:
        if self.predict == "none":
            return None
        predicted = None
        if self.linear is not None:
            predicted = self.linear.predict(layer, [routed[earlier] for earlier in range(layer - 1, -1, -1)])
        return self.last.predict(layer) if predicted is None else predicted

    def _in_shares(self, routed: Tensor) -> Tensor:
        popular = torch.from_numpy(self.popularity).double()
        shares = popular / popular.sum(-1, keepdim=True).clamp(min=1)
        return (routed.sum(-1, keepdim=True) * shares.unsqueeze(-2)).round().to(torch.int32)

    def _draw(self, batch: SourceBatch, index: int, num_routed: int) -> Tensor:
        stream = np.random.default_rng((self.seed, index))
        chosen = batch.topk_ids.numpy()
        mistaken = (stream.random(chosen.shape) >= (self.kept or 0)) & (chosen >= 0) & (chosen < num_routed)
        guessed = np.where(mistaken, self.wrong(chosen, stream), chosen)
        guesses = SourceBatch(torch.from_numpy(np.where(chosen < num_routed, guessed, -1)), batch.start)
        return guesses.loads(num_routed)

    def wrong(self, chosen: Ints, stream: np.random.Generator) -> Ints:
        """Return [L, T, K] int32 experts that replace mistaken choices [L, T, K], by their layer's popularity."""
        drawn = np.empty(chosen.shape, np.int32)
        for layer, copies in enumerate(self.popularity):
            ends = np.cumsum(copies)
            points = stream.integers(max(1, ends[-1]), size=chosen.shape[1:])
            drawn[layer] = np.searchsorted(ends, points, side="right").clip(max=len(copies) - 1)
        return drawn


def calibration_tokens(predict: str, trace: Trace, batches: Batches, fold: Fold) -> Trace:
    if trace.topk_ids is None:
        raise ValueError(f"predict={predict} needs per-token choices, trace {trace.name} has counts only")
    tokens = np.concatenate([trace.topk_ids[batches.tokens(b)] for b in fold.calibrate])
    return Trace(trace.name, trace.num_experts, topk_ids=tokens)


STEPS = {"min_chunk": 1, "threshold": 100}  # of 1: resolution of the value at which a policy borrows


@dataclass
class IdleBorrowing:
    """Observes the plans of one policy until it borrows, and keeps the loads that are furthest above their mean."""

    policy: str  # as the replay's settings name it
    borrowed: bool = False
    excess: int = 0  # of the busiest rank over the mean, times R
    worst: tuple[Tensor, Placement, int, Policy] | None = None  # loads [R, E], of a layer

    def add(self, plans: Sequence[Plan], loads: Tensor, placement: Placement, policy: Policy) -> None:
        if self.borrowed or not any(hasattr(policy, name) for name in STEPS):
            return
        for layer, layer_plan in enumerate(plans):
            if layer_plan.telemetry is None or layer_plan.peak is None or int(layer_plan.telemetry[0]):
                self.borrowed, self.worst = True, None
                return
            excess = int(layer_plan.peak) * placement.topology.num_ranks - int(loads[layer].sum())
            if excess > self.excess:
                self.excess, self.worst = excess, (loads[layer].clone(), placement, layer, policy)

    def note(self) -> str | None:
        """Return the values at which the policy would borrow, in a sentence; None: it has borrowed, or none helps."""
        if self.worst is None:
            return None
        policy = self.worst[3]
        options = {name: getattr(policy, name) for name in STEPS if hasattr(policy, name)}
        lowest = {"min_chunk": 1, "threshold": 0.0}
        for names in ([name] for name in options), [list(options)]:
            for changed in names:
                values = {name: lowest[name] for name in changed}
                if self._borrows(values):
                    for name in changed:
                        values[name] = self._most(name, values, options[name])
                    return self._sentence({name: options[name] for name in changed}, values)
        return None

    def _sentence(self, options: dict[str, Any], values: dict[str, Any]) -> str:
        now = " and ".join(f"{name} is {_text(value)}" for name, value in options.items())
        then = " and ".join(f"at {name}={_text(value)} or less" for name, value in values.items())
        return f"{self.policy} borrowed no expert in any batch: {now}; it would borrow {then}."

    def _borrows(self, values: dict[str, Any]) -> bool:
        assert self.worst is not None
        loads, placement, layer, policy = self.worst
        layer_plan = plan(loads, placement, layer, replace(policy, **values))  # type: ignore[type-var]
        return layer_plan.telemetry is not None and bool(int(layer_plan.telemetry[0]))

    def _most(self, name: str, values: dict[str, Any], value: float) -> float:
        """Return the largest value of an option, below the given one, at which the policy borrows."""
        steps = STEPS[name]
        low, high = round(values[name] * steps), int(value * steps)
        while low < high:
            middle = (low + high + 1) // 2
            if self._borrows({**values, name: _value(middle, steps)}):
                low = middle
            else:
                high = middle - 1
        return _value(low, steps)


def _value(number: int, steps: int) -> float:
    return number if steps == 1 else number / steps


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
