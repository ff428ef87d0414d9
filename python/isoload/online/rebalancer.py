"""Rebalancer: new placements while a model runs, and :func:`place_step`: the placement of one step of known routes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer

from isoload.analysis.judge import ExpertSize, Ints, Worth, even_imbalance, exact_imbalance, move_ms, pass_ms
from isoload.balancing.balancer import Balancer
from isoload.balancing.known_routes import KnownRoutes
from isoload.layer import MoE
from isoload.online.recorder import Recorder
from isoload.placement.placement import Placement
from isoload.placers import make_placer, place
from isoload.times.exchanges import assumed_experts
from isoload.times.experts import ExpertTime
from isoload.traces import Trace
from isoload.weights.shard import ShardWeights

TRAINING = 3.0  # products of a forward and its backward, in those of the forward


@dataclass(frozen=True)
class StepPlacement:
    """Placement for one step."""

    placement: Placement  # the new placement, or the present one if the new one does not pay
    worth: Worth  # modelled milliseconds saved in the step, and until its experts have arrived


def place_step(
    known: KnownRoutes,
    size: ExpertSize,
    *,
    moves: int | None = 8,
    policy: str = "exact",
    experts: ExpertTime | None = None,
    passes: float = TRAINING,
    **options: Any,
) -> StepPlacement:
    """Place the experts of a step by its own loads, starting from the routes' placement, if moving them pays.

    The result is the same on all ranks. Load a new placement with ``load_placement`` of every layer, and make new
    KnownRoutes with it.

    Args:
        known: routes of the step.
        size: of one expert, with the bytes of the optimizer's state for training; see ExpertSize.of in analysis.judge.
        moves: largest number of slots of a layer that get another expert. None: no limit.
        policy: divides the copies of an expert over its replicas.
        experts: times of a rank's experts. None: arithmetic from their size for an H100.
        passes: how often the step computes the experts, in forward passes.
        **options: of placer ``scenario``.
    """
    if not passes > 0:
        raise ValueError(f"passes must be above 0, got {passes}")
    before, loads = known.placement, known.loads.cpu()
    counts = loads.sum(2)[..., : before.num_routed]  # [micro-batches, L, E]
    shape = before.slots_per_rank, "scenario", before.spare_slots, before.num_shared
    after = place(counts, before.topology, *shape, before, moves=moves, **options)
    times = assumed_experts(*size) if experts is None else experts
    old, new = (sum(pass_ms(batch, way, policy, times) for batch in loads) for way in (before, after))
    worth = Worth(passes * (old - new), move_ms(before, after, size.num_bytes))
    return StepPlacement(after if worth.gain_ms > worth.move_ms else before, worth)


@dataclass(frozen=True)
class Rebalanced:
    """One decision, the same on all ranks."""

    placement: Placement  # the new placement, or the present one if the gain was too small
    before: float  # mean imbalance over the recorded batches and layers, in the present placement
    after: float  # the same in the new placement
    layers: tuple[int, ...]  # positions of layers whose slots change, in the order of the moves


class Rebalancer:
    """Records, plans in a thread, and moves experts. All ranks call :meth:`step` after each batch.

    Every ``every`` batches the loads of all ranks are gathered, once, and a thread computes a new placement. ``delay``
    batches later, the new placement is compared with the present one on the recorded batches. If the gain is large
    enough, ``layers_per_step`` layers adopt it after each batch, by ``MoE.load_placement``; a Balancer takes the new
    slots, and its engine moves the weights. All ranks do so in the same batch.

    Args:
        layers: all L of one Placement, each at its own position; MoE or Balancer.
        recorder: records the layers' counts, and with ``tokens`` the choices by which "scenario" keeps rows in their
            node. It is set on every layer here.
        every: batches between two plans.
        moves: largest number of slots of a layer that get another expert. None: no limit, which all placers but
            "scenario" need, because they start from scratch.
        least_gain: smallest decrease of the mean imbalance for which experts move.
        layers_per_step: layers that move after one batch.
        delay: batches during which the thread may plan; if it takes longer, the host waits for it.
        placer: a name in ``isoload.PLACERS`` that places by counts alone.
        split: how the layers split replicas, for the comparison: "exact", or "even" as engines do.
        optimizer: its state moves with the experts, see :meth:`isoload.MoE.load_placement`.
        **options: the placer's; ``pinned=True`` if a layer is made of Shards.
    """

    def __init__(
        self,
        layers: Sequence[MoE | Balancer],
        recorder: Recorder,
        every: int = 1000,
        moves: int | None = 8,
        least_gain: float = 0.01,
        layers_per_step: int = 1,
        *,
        delay: int = 8,
        placer: str = "scenario",
        split: str = "exact",
        optimizer: Optimizer | Literal["none"] | None = None,
        **options: Any,
    ) -> None:
        self.layers, self.recorder, self.optimizer = list(layers), recorder, optimizer
        self.balancers = [getattr(layer, "balancer", layer) for layer in layers]
        self.every, self.delay = every, delay
        self.least_gain, self.layers_per_step = least_gain, layers_per_step
        self.placer, self.split, self.options = placer, split, options
        if not layers:
            raise ValueError("layers must be at least one, got none")
        self.group = self.balancers[0].group
        # A rank with other options would move other experts, or gather alone.
        with self.group.agreeing("construction") as facts:
            self._starts_before = make_placer(placer, options).takes_before
            if not self._starts_before and moves is not None:
                raise ValueError(
                    f"moves must be None for placer {placer}, which places from scratch, got {moves}"
                )
            if self._starts_before:
                self.options = {"split": split, **({} if moves is None else {"moves": moves}), **options}
            self._check()
            for name in ("every", "delay", "layers_per_step", "least_gain", "placer", "split", "options"):
                facts[name] = getattr(self, name)
            facts["tokens of the recorder"] = recorder.tokens
        self.placement: Placement = self.balancers[0].placement
        self.batches = 0
        self.last: Rebalanced | None = None
        for balancer in self.balancers:
            balancer.recorder = recorder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="isoload-rebalancer")
        self._planned: Future[Rebalanced] | None = None
        self._due, self._closed = 0, False
        self._waiting: deque[int] = deque()  # layers that have not moved yet

    def step(self) -> int:
        """End a batch. All ranks call it after the batch; in training after refresh_replicas and zero_grad.

        Returns the number of layers that moved. A layer that could not move is tried again after the next batch. If
        placing or moving failed on one rank, all ranks raise ValueError.
        """
        if self._closed:
            raise ValueError(
                "step() must come before close(), after which nothing is recorded: make another one"
            )
        self.recorder.step()
        self.batches += 1
        if self._planned is not None and self.batches == self._due:
            planned, self._planned = self._planned, None
            # If a thread failed on one rank, no rank applies the plan.
            with self.group.agreeing("placing"):
                rebalance = planned.result()
            self.last, self.placement = rebalance, rebalance.placement
            self._waiting = deque(dict.fromkeys([*rebalance.layers, *self._waiting]))
        moved = 0
        while self._waiting and moved < self.layers_per_step:
            layer = self.layers[self._index[self._waiting[0]]]
            if isinstance(layer, MoE):
                layer.load_placement(self.placement, optimizer=self.optimizer)
            else:
                layer.load(self.placement)
            self._waiting.popleft()
            moved += 1
        if self.batches % self.every == 0:
            try:
                counts = self.recorder.counts(self.group)
                choices = self.recorder.choices(self.group) if self.recorder.tokens else torch.empty(0)
            finally:
                self.recorder.clear()  # a period that cannot be read must not spoil the next one
            if counts.any():
                ids = choices.numpy() if len(choices) else None
                self._planned = self._thread.submit(self._plan, counts.numpy(), ids, self.placement)
                self._due = self.batches + self.delay
        return moved

    def close(self) -> None:
        """End the thread, and stop recording."""
        self._closed = True
        self._thread.shutdown()
        for balancer in self.balancers:
            balancer.recorder = None

    def _plan(self, counts: Ints, choices: Ints | None, now: Placement) -> Rebalanced:
        counts = counts[counts.sum((1, 2)) > 0]
        new = self._place(counts, now, choices)
        judge = exact_imbalance if self.split == "exact" else even_imbalance
        before, after = (judge(placement, counts) for placement in (now, new))  # [batches, L]
        if before.mean() - after.mean() < self.least_gain:
            return Rebalanced(now, float(before.mean()), float(before.mean()), ())
        changed = (new.arrays[0] != now.arrays[0]).any(1) | (new.arrays[1] != now.arrays[1]).any(1)
        gain = before.mean(0) - after.mean(0)
        order = [int(layer) for layer in np.argsort(-gain, kind="stable") if changed[layer]]
        return Rebalanced(new, float(before.mean()), float(after.mean()), tuple(order))

    def _place(self, counts: Ints, now: Placement, choices: Ints | None = None) -> Placement:
        start = now if self._starts_before else None
        recorded: Any = counts
        if choices is not None:
            recorded = Trace(
                "recorded",
                counts.shape[2],
                0,
                counts,
                choices,
                layer_ids=now.layer_ids,
                identity=now.identity,
            )
        shape = now.slots_per_rank, self.placer, now.spare_slots, now.num_shared
        new = place(recorded, now.topology, *shape, before=start, **self.options)
        return replace(new, layer_ids=now.layer_ids, identity=now.identity) if start is None else new

    def _check(self) -> None:
        for name, least in (("every", 1), ("layers_per_step", 1), ("delay", 1), ("least_gain", 0)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.split not in ("exact", "even"):
            raise ValueError(f"split must be exact or even, got {self.split!r}")
        first: Placement = self.balancers[0].placement
        if any(b.placement is not first for b in self.balancers):
            raise ValueError("layers must share one Placement, got several")
        self._index = {b.layer: i for i, b in enumerate(self.balancers)}
        if sorted(b.layer for b in self.balancers) != list(range(first.num_layers)):
            raise ValueError(
                f"layers must be all {first.num_layers} of their Placement, each once, got positions "
                f"{[b.layer for b in self.balancers]}"
            )
        if (self.recorder.num_layers, self.recorder.num_experts) != (first.num_layers, first.num_routed):
            raise ValueError(
                f"recorder must be of {first.num_layers} layers and {first.num_routed} experts, got "
                f"{self.recorder.num_layers} and {self.recorder.num_experts}"
            )
        moving = -(-first.num_layers // self.layers_per_step)
        if self.every < self.delay + moving:
            raise ValueError(
                f"every must be at least delay + L / layers_per_step = {self.delay + moving}, so that one plan is "
                f"complete before the next begins, got {self.every}"
            )
        rank_weights = [w for layer in self.layers if isinstance(layer, MoE) for w in layer.weights]
        sharded = any(isinstance(weights, ShardWeights) for weights in rank_weights)
        if sharded and not self.options.get("pinned"):
            raise ValueError(
                "pinned must be True if a layer is made of Shards, whose homes stay, got False: a placement that "
                "moves them cannot be loaded"
            )
        try:  # tried once here: a placer that needs more than counts, or other sizes, would fail in the running model
            self._place(np.ones((1, first.num_layers, first.num_routed), dtype=np.int64), first)
        except ValueError as error:
            raise ValueError(f"placer {self.placer} cannot replace this placement: {error}") from None
