"""What a replay predicts for policies that fill spare slots ahead: loads [L, R, E] of a batch before it is known."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isoload.counting import count
from isoload.predict import Last, Linear, fit
from isoload.replay.batches import Batches, CutBatches, SourceBatch
from isoload.replay.calibration import Fold
from isoload.trace import Trace
from isoload.trace.checks import Ints

PREDICTIONS = ("perfect", "last", "linear", "none")


def check_prediction(text: str) -> float | None:
    """The part of the choices that is predicted right, where that is given."""
    if text in PREDICTIONS:
        return None
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part <= 1:
        raise ValueError(f"predict must be one of {', '.join(PREDICTIONS)} or a number in 0..1, got {text!r}")
    return part


class Forecast:
    """Predicted loads, batch after batch of one fold.

    Args:
        predict: perfect: the loads themselves. last: those of the batch before; nothing for the first one. linear:
            by :func:`isoload.predict.fit` on the fold's calibration batches; the first layer's as last. none: nothing.
            A number: each choice is kept with this probability, else drawn from the calibration batches' counts.
        seed: of that draw, whose stream is ``np.random.default_rng((seed, batch))``.

    No loads at all make a policy borrow nothing.
    """

    def __init__(self, predict: str, trace: Trace, batches: Batches, fold: Fold, seed: int) -> None:
        self.kept = check_prediction(predict)
        self.predict, self.seed, self.last = predict, seed, Last(trace.num_layers)
        self.popularity = batches.counts[list(fold.calibrate)].sum(0)
        self.linear = fit_on(trace, batches, fold) if predict == "linear" else None

    def of(self, batch: SourceBatch, index: int, loads: Tensor, num_shared: int) -> Tensor:
        """[L, R, E] int32; how many tokens need the shared experts is known ahead."""
        num_routed = loads.shape[-1] - num_shared
        routed, found = loads[..., :num_routed], loads.clone()
        if self.kept is not None:
            found[..., :num_routed] = self._draw(batch, index, num_routed)
        elif self.predict != "perfect":
            layers = [self._predict(layer, routed) for layer in range(len(loads))]
            nothing = torch.zeros_like(routed[0])
            found[..., :num_routed] = torch.stack([nothing if x is None else x for x in layers])
        for layer in range(len(loads)):
            self.last.note(layer, routed[layer])
        return found

    def _predict(self, layer: int, routed: Tensor) -> Tensor | None:
        if self.predict == "none":
            return None
        made = None
        if self.linear is not None:
            made = self.linear.predict(layer, [routed[earlier] for earlier in range(layer - 1, -1, -1)])
        return self.last.predict(layer) if made is None else made

    def _draw(self, batch: SourceBatch, index: int, num_routed: int) -> Tensor:
        stream = np.random.default_rng((self.seed, index))
        chosen = batch.topk_ids.numpy()
        mistaken = (stream.random(chosen.shape) >= (self.kept or 0)) & (chosen >= 0) & (chosen < num_routed)
        guessed = np.where(mistaken, self._popular(chosen.shape, stream), chosen)
        guesses = SourceBatch(torch.from_numpy(np.where(chosen < num_routed, guessed, -1)), batch.start)
        layers, ranks = range(len(chosen)), range(batch.num_ranks)
        return torch.stack(
            [torch.stack([count(guesses.on_rank(layer, r), num_routed) for r in ranks]) for layer in layers]
        )

    def _popular(self, shape: tuple[int, ...], stream: np.random.Generator) -> Ints:
        """[L, T, K] experts, each drawn with the probability of its copies in its layer."""
        drawn = np.empty(shape, np.int32)
        for layer, copies in enumerate(self.popularity):
            ends = np.cumsum(copies)
            points = stream.integers(max(1, ends[-1]), size=shape[1:])
            drawn[layer] = np.searchsorted(ends, points, side="right").clip(max=len(copies) - 1)
        return drawn


def fit_on(trace: Trace, batches: Batches, fold: Fold) -> Linear:
    """Of the tokens of a fold's calibration batches."""
    if not isinstance(batches, CutBatches) or trace.topk_ids is None:
        raise ValueError(f"predict=linear needs per-token choices, trace {trace.name} has counts only")
    rows = [np.arange(batches.bounds[b], batches.bounds[b + 1]) for b in fold.calibrate]
    return fit(Trace(trace.name, trace.num_experts, topk_ids=trace.topk_ids[np.concatenate(rows)]))
