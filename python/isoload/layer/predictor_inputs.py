"""PredictorInputs collects the inputs of a stack's predictor in every layer and predicts the next layer's loads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from isoload import ops
from isoload.balancing.planning import Gathered
from isoload.balancing.prediction import Last, Linear, LoadsPredictor, Lookahead, Predictor, TokensPredictor
from isoload.layer.compiled import between_graphs
from isoload.layer.moe import Chosen

MOST = 2**31 - 1  # copies of a batch; predictions are clamped below


def watched(rows: Tensor) -> Tensor:
    """Return a tensor on the same memory with a version count, which inference-mode tensors do not have."""
    with torch.inference_mode(False), torch.no_grad():
        view: Tensor = torch.empty(0, dtype=rows.dtype, device=rows.device).set_(rows.detach())  # type: ignore[call-overload]
        return view


class Residuals:
    """Hooks that store the inputs of the norms before a stack's layers."""

    def __init__(self, norms: Sequence[nn.Module]) -> None:
        self._of, self._given = -1, list[Tensor]()
        self._hooks = [
            norm.register_forward_pre_hook(partial(self._note, i), with_kwargs=True)
            for i, norm in enumerate(norms)
        ]

    @between_graphs("the layer reads the inputs that a hook stores, which works only between two graphs")
    def _note(self, layer: int, _norm: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if layer != self._of:
            self._of, self._given = layer, []
        rows: Tensor = args[0] if args else next(iter(kwargs.values()))
        self._given.append(rows.detach().flatten(0, -2))

    def take(self, layer: int, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the last inputs [T, H] of a layer's norm for every owned rank, and drop them."""
        sizes, parts, count = [len(row) for row in rows], list[Tensor](), 0
        left = self._given if layer == self._of else []
        while left and count < sum(sizes):
            parts.insert(0, left.pop())
            count += len(parts[0])
        self.drop()
        if count != sum(sizes):
            raise ValueError(
                f"norms must be called right before a layer, on its {sum(sizes)} rows, got {count}"
            )
        return list(torch.cat(parts).split(sizes)) if parts else list(rows)

    def drop(self) -> None:
        self._of, self._given = -1, []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class PredictorInputs:
    """A predictor with its inputs from the layers of a stack; the first layer is predicted from the previous batch. All
    ranks make the same calls. Shared experts have the last columns of choices and loads.
    """

    def __init__(self, predictor: Predictor, num_routed: int, num_shared: int) -> None:
        self.predictor, self.num_routed, self.num_shared = predictor, num_routed, num_shared
        self._last = predictor if isinstance(predictor, Last) else Last(1)
        self._keep = max(1, *map(predictor.depth_of, range(predictor.num_layers)))
        self._loads: list[Tensor] = []  # [R, E] of this batch's layers so far, the latest first
        self._choices: list[list[Tensor]] = []  # [T, K] of every owned rank, the latest layer first
        # A user's predictor may return different loads on different ranks.
        self.may_differ = not isinstance(predictor, Last | Linear | TokensPredictor)
        norms = predictor.norms if isinstance(predictor, Lookahead) else None
        self._residuals = None if norms is None else Residuals(norms)  # type: ignore[arg-type]

    def restart(self) -> None:
        self._loads, self._choices = [], []

    def close(self) -> None:
        if self._residuals is not None:
            self._residuals.close()

    def count(self, layer: int, chosen: Chosen) -> list[Tensor] | None:
        """Return the predicted counts [E] int32 of the next layer per owned rank, to be gathered; None: no counts."""
        predictor, target = self.predictor, (layer + 1) % self.predictor.num_layers
        travels = isinstance(predictor, TokensPredictor) and self._reaches(target, len(self._choices))
        counts: list[Tensor] = []
        if chosen.call.failure is None:
            ids = [choices.narrow(1, 0, choices.shape[1] - self.num_shared) for choices in chosen.ids]
            self._choices = [ids, *self._choices][: self._keep]
            with chosen.call:
                counts = self._count(layer, chosen.rows) if travels else []
        return (counts or [torch.zeros(self.num_routed, dtype=torch.int32)]) if travels else None

    def _reaches(self, target: int, before: int) -> bool:
        return target != 0 and before + 1 >= self.predictor.depth_of(target)

    def _count(self, layer: int, rows: list[Tensor]) -> list[Tensor]:
        predictor, target = self.predictor, (layer + 1) % self.predictor.num_layers
        assert isinstance(predictor, TokensPredictor)
        if predictor.reads == "choices":
            tokens = [torch.stack(near, dim=1) for near in zip(*self._choices, strict=True)]
        elif predictor.reads == "residual":
            assert self._residuals is not None
            tokens = self._residuals.take(layer, rows)
        else:
            tokens = list(map(watched, rows))
        mine = tokens if predictor.reads == "rows" else []  # the layer's own; others are copies
        versions = [tensor._version for tensor in mine]
        guesses = [predictor.choose(target, tensor) for tensor in tokens]
        if versions != [tensor._version for tensor in mine]:
            raise ValueError(
                f"{type(predictor).__name__}.choose must not write to its tokens, which are the layer's own rows: "
                "clone them first, got rows that changed"
            )
        if self._residuals is not None:
            self._residuals.drop()  # the predictor's own calls of norms were stored
        padding = [(ids < 0).all(1, keepdim=True) for ids in self._choices[0]]
        return [
            ops.count(guess.masked_fill(absent, -1), self.num_routed).counts
            for guess, absent in zip(guesses, padding, strict=True)
        ]

    def predict(self, layer: int, gathered: Gathered) -> Tensor | None:
        """Return the loads [R, E] int32 of the next layer, with shared experts; None without a prediction."""
        if not gathered.planned:
            self.restart()
            return None
        target, loads = (layer + 1) % self.predictor.num_layers, gathered.loads.narrow(1, 0, self.num_routed)
        reached = self._reaches(target, len(self._loads))
        self._loads = [loads, *self._loads][: self._keep]
        predictor, guess = self.predictor, gathered.more
        if layer < self._last.num_layers:
            self._last.note(layer, loads)
        if isinstance(predictor, LoadsPredictor) and predictor is not self._last:
            predictor.note(layer, loads)
        if target == 0:
            guess = self._last.predict(0)
        elif isinstance(predictor, LoadsPredictor):
            guess = predictor.predict(target, self._loads) if reached else None
        if guess is None:
            return None
        if guess.shape != loads.shape or guess.dtype != torch.int32:
            raise ValueError(
                f"predict must return {list(loads.shape)} torch.int32, got {list(guess.shape)} {guess.dtype}"
            )
        shared = gathered.loads.narrow(1, self.num_routed, self.num_shared)  # known: every token uses them
        whole = torch.cat([guess, shared], dim=1)
        return whole.clamp(0, MOST // whole.numel())
