"""One layer of bench_dispatch: its stages timed where the layer calls them, its result and its copies checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import isoload
import isoload.balancing.balancer
import isoload.layer.moe
from isoload.placement.placed_layers import PlacedLayers
from isoload.transport import Received, Transport
from isoload.weights.borrowing import Borrowed
from isoload.weights.experts import ExpertWeights, SwiGLU
from lib.clocks import Timer
from lib.dispatch_setting import Setting

NEVER = 2**31  # tokens
STAGES = ("count", "gather", "plan", "route", "weights", "dispatch", "experts", "combine")
LEAST = torch.finfo(torch.float32).tiny
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of a token's largest possible element


@dataclass(frozen=True)
class Batch:
    """Rows [T, H], routed choices [T, K], gate weights [T, K] of every owned rank; tokens and copies of all ranks."""

    rows: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    num_tokens: int
    num_copies: int


@dataclass(frozen=True)
class Sample:
    """What one process took for one batch: milliseconds by stage; per owned rank, copies by slot and imports.

    experts is the owned rank that took most, experts in turn all of them; of the other stages the sum over the owned.
    """

    ms: dict[str, float]
    copies: list[Tensor]
    imports: list[int]
    error: float


@dataclass
class StageClock:
    """While entered, the functions by which a layer goes through its stages are timed, all ranks beginning together.

    They stay the layer's own, with its own arguments; only borrowed weights are waited for at once, not behind the
    stages that would hide them.
    """

    layer: isoload.MoE
    timer: Timer
    meet: Callable[[], None]
    ms: dict[str, list[float]] = field(default_factory=dict)
    received: list[Received] = field(default_factory=list)

    def __enter__(self) -> StageClock:
        called = self.calls()
        with ExitStack() as stack:
            for stage, owner, name in called:
                call = getattr(owner, name)
                if stage == "weights":
                    call = partial(_bring, call)
                stack.enter_context(patch.object(owner, name, self._clocked(stage, call)))
            self._wrapped = stack.pop_all()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._wrapped.close()

    def calls(self) -> list[tuple[str, Any, str]]:
        """What is timed: the stage, and where its function is looked up."""
        layer = self.layer
        called: list[tuple[str, Any, str]] = [
            ("count", isoload.balancing.balancer, "count_owned"),
            ("gather", layer.group, "gather_loads"),
            ("plan", isoload.policies.Policy, "plan"),
            ("route", layer.balancer, "route"),
            ("dispatch", layer.dispatcher, "dispatch"),
            ("experts", isoload.layer.moe, "run_experts"),
            ("experts", isoload.layer.moe, "run_sorted"),
            ("combine", layer.dispatcher, "combine"),
        ]
        if layer.borrowing is not None:
            called.append(("weights", layer.borrowing, "borrow"))
        return called

    def _clocked(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function, which binds where it is looked up in a class."""

        def clocked(*args: Any, **options: Any) -> Any:
            return self._timed(stage, call, *args, **options)

        return clocked

    def _timed(self, stage: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        self.meet()
        result, took = self.timer(partial(call, *args, **options))
        self.ms.setdefault(stage, []).append(took)
        if stage == "dispatch":
            self.received = result
        return result


def _bring(borrow: Callable[..., Borrowed | None], filled: PlacedLayers, **how: Any) -> Borrowed | None:
    borrowed = borrow(filled, **how)
    if borrowed is not None:
        borrowed.wait()
    return borrowed


class LayerBench:
    """A layer over a transport, and inputs for one batch after the other.

    An expert is a multiple of one expert, by a power of two of its own: so a process makes no weights but its ranks',
    and the dense layer's result costs one expert. Neither times nor bytes depend on the values.

    Args:
        setting: says sizes.
        placement: where the experts lie.
        transport: joins the ranks.
        device: of everything.
        timer: what times a call, see clocks.py.
        borrow: the backend of borrowed weights, see isoload.MoE.
        plans: whether batches are planned at all.
    """

    def __init__(
        self,
        setting: Setting,
        placement: isoload.Placement,
        transport: Transport,
        device: torch.device,
        timer: Timer,
        borrow: str | None = None,
        plans: bool = True,
    ) -> None:
        self.setting, self.placement, self.device, self.timer = setting, placement, device, timer
        draw = torch.Generator(device).manual_seed(0)
        sizes = 1, setting.hidden, setting.intermediate
        self.one = ExpertWeights.random(*sizes, generator=draw, dtype=setting.dtype, device=device)
        experts = placement.num_experts
        same = ExpertWeights(self.one.gate_up.expand(experts, -1, -1), self.one.down.expand(experts, -1, -1))
        how = {"borrow": borrow, "min_tokens": 0 if plans else NEVER}
        self.layer = isoload.MoE(_no_gate, same, transport, placement, policy="none", **how)
        chosen = torch.randint(0, 6, (experts,), generator=torch.Generator().manual_seed(1))
        self.factors = torch.tensor([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0])[chosen].to(device)  # [E]
        with torch.no_grad():
            for weights in self.layer.weights:
                homes = self.factors[list(weights.layout.homes)]
                weights.down.mul_(homes.view(-1, 1, 1).to(setting.dtype))
        self.layer.refresh_replicas()

    def make_batch(self, ids: Sequence[Tensor]) -> Batch:
        """Random rows and gate weights beside the choices [R] of all ranks."""
        rows, weights = [], []
        owned = self.layer.group.ranks
        for rank in owned:
            draw = torch.Generator(self.device).manual_seed(rank)
            tokens, top_k = ids[rank].shape
            row = torch.randn(tokens, self.setting.hidden, generator=draw, device=self.device)
            rows.append(row.to(self.setting.dtype))
            gate = torch.rand(tokens, top_k, generator=draw, device=self.device)
            weights.append(gate.softmax(-1))
        shared = sum(int((row >= 0).any(1).sum()) for row in ids) * self.placement.num_shared
        copies = sum(int((row >= 0).sum()) for row in ids) + shared
        own = [ids[rank].to(self.device) for rank in owned]
        return Batch(rows, own, weights, sum(map(len, ids)), copies)

    @torch.no_grad()
    def run(self, batch: Batch) -> Sample:
        """The batch twice: stage by stage, then as a whole."""
        layer, clock = self.layer, StageClock(self.layer, self.timer, self.meet)
        given = batch.rows, batch.ids, batch.weights, batch.num_tokens
        with clock:
            outputs = layer.compute(*given)
        self.meet()
        _, whole = self.timer(lambda: layer.compute(*given))
        ms = {stage: sum(clock.ms[stage]) for stage in STAGES if stage in clock.ms}
        ms |= {"experts": max(clock.ms["experts"]), "experts in turn": ms["experts"], "whole": whole}
        size = self.placement.slots_per_rank
        held = [got.slots[got.slots >= 0] for got in clock.received]
        copies = [slots.bincount(minlength=size).cpu() for slots in held]
        return Sample(ms, copies, self._imports(), self.error_of(batch, outputs))

    def meet(self) -> None:
        """All processes are here."""
        if not self.layer.group.owns_all:
            dist.barrier()

    def _imports(self) -> list[int]:
        """Experts that each owned rank borrowed for the last batch."""
        made, spare = self.layer.last_plan, self.placement.spare_slots
        if made is None or not spare:
            return [0] * len(self.layer.group.ranks)
        slots = made.slot_to_expert.view(self.placement.topology.num_ranks, -1)[:, -spare:]
        filled = (slots >= 0).sum(1).tolist()
        return [filled[rank] for rank in self.layer.group.ranks]

    def error_of(self, batch: Batch, outputs: Any) -> float:
        """The largest distance of the owned ranks' outputs from the dense layer, over what a token can reach."""
        shared, worst = self.factors[self.placement.num_routed :], [0.0]
        for rows, ids, weights, output in zip(batch.rows, batch.ids, batch.weights, outputs, strict=True):
            alone = (SwiGLU()(rows @ self.one.gate_up[0].T) @ self.one.down[0].T).float()  # [T, H]
            factors = torch.where(ids >= 0, weights * self.factors[ids.clamp(min=0)], 0)
            used = (ids >= 0).any(1)
            wanted = (factors.sum(1) + used * shared.sum()).unsqueeze(1) * alone
            reach = (factors.abs().sum(1) + used * shared.abs().sum()) * alone.abs().amax(1)
            off = (output.float() - wanted).abs().amax(1) / reach.clamp(min=LEAST)
            worst += off.tolist()
        return float(np.max(worst))  # NaN where there is one


def _no_gate(rows: Tensor) -> tuple[Tensor, Tensor]:
    raise AssertionError("choices are given")


def check(setting: Setting, copies: Tensor, quota: Tensor | None, total: int, error: float, who: str) -> None:
    """Raises RuntimeError unless slots [P] got all copies, as planned, and the result is the dense layer's."""
    if int(copies.sum()) != total:
        raise RuntimeError(f"{who} must compute all {total} copies, got {int(copies.sum())}")
    if quota is not None and not torch.equal(copies, quota.cpu().long()):
        raise RuntimeError(f"{who} must send every slot its quota, got others")
    check_error(setting, error, who)


def check_error(setting: Setting, error: float, who: str) -> None:
    """Raises RuntimeError unless a result is the dense layer's."""
    if not error <= TOLERANCE[setting.dtype]:
        raise RuntimeError(f"{who} must give the dense layer's result, got one that is off by {error:.3g}")
