"""What a replay predicts for policies that fill spare slots ahead: loads [L, R, E] of a batch before it is known."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from isoload.analysis.batches import Batches, SourceBatch
from isoload.predict import Last, PathTable, fit, tabulate
from isoload.replay.calibration import Fold
from isoload.traces import Trace
from isoload.traces.record import Ints
from isoload.wording import not_one_of

FROM_CALIBRATION = ("linear", "path", "popularity")
PREDICTIONS = ("perfect", "last", *FROM_CALIBRATION, "none")


def check_prediction(text: str) -> float | None:
    """The part of the choices that is predicted right, where that is given."""
    if text in PREDICTIONS:
        return None
    try:
        part = float(text)
    except ValueError:
        part = -1.0
    if not 0 <= part <= 1:
        raise ValueError(not_one_of("predict", PREDICTIONS, text, " or a number in 0..1"))
    return part


class Forecast:
    """Predicted loads, batch after batch of one fold.

    Args:
        predict: perfect: the loads themselves. last: those of the batch before; nothing for the first one. linear:
            by :func:`isoload.predict.fit` on the fold's calibration batches, path: by
            :func:`isoload.predict.tabulate`; the first layer's as last. popularity: each source's copies in the shares
            of the calibration batches. none: nothing. A number: each choice is kept with this probability, else drawn
            from the calibration batches' counts.
        seed: of that draw, whose stream is ``np.random.default_rng((seed, batch))``.

    No loads at all make a policy borrow nothing.
    """

    def __init__(self, predict: str, trace: Trace, batches: Batches, fold: Fold, seed: int) -> None:
        self.kept = check_prediction(predict)
        self.predict, self.seed, self.last = predict, seed, Last(trace.num_layers)
        if not fold.calibrate and (self.kept is not None or predict in FROM_CALIBRATION):
            raise ValueError(
                f"predict={predict} needs batches to calibrate on, a given placement leaves none"
            )
        self.popularity = batches.counts[list(fold.calibrate)].sum(0)
        seen = trace
        if predict in ("linear", "path"):
            if trace.topk_ids is None:
                raise ValueError(
                    f"predict={predict} needs per-token choices, trace {trace.name} has counts only"
                )
            tokens = np.concatenate([trace.topk_ids[batches.tokens(b)] for b in fold.calibrate])
            seen = Trace(trace.name, trace.num_experts, topk_ids=tokens)
        self.linear = fit(seen) if predict == "linear" else None
        self.path = tabulate(seen) if predict == "path" else None

    def of(self, batch: SourceBatch, index: int, loads: Tensor, num_shared: int) -> Tensor:
        """[L, R, E] int32; how many tokens need the shared experts is known ahead."""
        num_routed = loads.shape[-1] - num_shared
        routed, found = loads[..., :num_routed], loads.clone()
        if self.kept is not None:
            found[..., :num_routed] = self._draw(batch, index, num_routed)
        elif self.predict == "popularity":
            found[..., :num_routed] = self._in_shares(routed)
        elif self.predict != "perfect":
            layers = [self._predict(layer, routed, batch) for layer in range(len(loads))]
            nothing = torch.zeros_like(routed[0])
            found[..., :num_routed] = torch.stack([nothing if x is None else x for x in layers])
        for layer in range(len(loads)):
            self.last.note(layer, routed[layer])
        return found

    def _predict(self, layer: int, routed: Tensor, batch: SourceBatch) -> Tensor | None:
        if self.predict == "none":
            return None
        if self.path is not None and layer:
            return of_paths(self.path, layer, batch)
        made = None
        if self.linear is not None:
            made = self.linear.predict(layer, [routed[earlier] for earlier in range(layer - 1, -1, -1)])
        return self.last.predict(layer) if made is None else made

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
        """[L, T, K] int32 experts that take the place of mistaken choices [L, T, K]: by their layer's popularity."""
        drawn = np.empty(chosen.shape, np.int32)
        for layer, copies in enumerate(self.popularity):
            ends = np.cumsum(copies)
            points = stream.integers(max(1, ends[-1]), size=chosen.shape[1:])
            drawn[layer] = np.searchsorted(ends, points, side="right").clip(max=len(copies) - 1)
        return drawn


def of_paths(table: PathTable, layer: int, batch: SourceBatch) -> Tensor:
    """[R, E] int32 loads of a layer, each source's from the paths of its own tokens."""
    earlier = range(layer - 1, max(0, layer - table.depth) - 1, -1)
    rows = []
    for rank in range(batch.num_ranks):
        near = torch.stack([batch.on_rank(before, rank) for before in earlier], dim=1)
        rows.append(table.predict(layer, near, table.num_experts))
    return torch.stack(rows)
