"""Layers of bench_stack, in a stack or alone: the stages of Libra's Table 2, timed where a batch goes through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import isoload
import isoload.balancing.balancer
import isoload.layer.moe
import isoload.layer.two_stage
from isoload.balancing import prediction
from isoload.transport import CollectiveTransport, LocalTransport
from isoload.transport import transport as gathered_tokens
from lib.clocks import Timer
from lib.dispatch_setting import Setting
from lib.dispatch_stages import Batch, LayerBench, StageClock, check_error

STAGES = ("gather", "predict", "plan", "fetch", "local", "dispatch", "remote", "combine")


@dataclass(frozen=True)
class Line:
    """Who plans; in a stack, planned or held, or alone; and who places the experts."""

    policy: str
    order: str
    placer: str = "trivial"

    @property
    def name(self) -> str:
        by = "" if self.placer == "trivial" else f"{self.placer}, "
        return f"{self.order}: {by}{self.policy}"


LINES = [
    Line("none", "alone"),
    Line("exact", "alone", "eplb"),
    *(Line(policy, order) for order in ("planned", "held") for policy in ("hedge", "libra")),
]


class Told(prediction.TokensPredictor):
    """Predicts what it is told, after the work of a lookahead: the next gate's product and its choice."""

    reads: prediction.base.Reads = "rows"

    def __init__(self, num_layers: int, experts: int, hidden: int, top_k: int, like: Tensor) -> None:
        self.num_layers, self.top_k = num_layers, top_k
        self.gate = like.new_ones(experts, hidden)
        self._told: list[list[Tensor]] = []

    def tell(self, guesses: Sequence[Sequence[Tensor]]) -> None:
        """[L][owned ranks] [T, K] guesses of a batch."""
        self._told = [list(of_ranks) for of_ranks in guesses]

    def choose(self, layer: int, tokens: Tensor) -> Tensor:
        (tokens @ self.gate.T).topk(self.top_k)
        return self._told[layer].pop(0)


@dataclass
class StackClock(StageClock):
    """:class:`StageClock` of a layer, alone or in a stack. What is begun, then waited for, is timed twice."""

    stack: isoload.LibraStack | None = None

    def calls(self) -> list[tuple[str, Any, str]]:
        layer, two_stage = self.layer, isoload.layer.two_stage
        called: list[tuple[str, Any, str]] = [
            ("gather", isoload.balancing.balancer, "count_owned"),
            ("gather", layer.group, "gather_loads"),
            ("plan", isoload.policies.Policy, "plan"),
            ("plan", layer.balancer, "route"),
            ("plan", two_stage, "route"),
            ("dispatch", layer.dispatcher, "dispatch"),
            ("started", layer.dispatcher, "start_dispatch"),
            ("started", two_stage, "start_gather_tokens"),
            *(("dispatch", gathered_tokens, name) for name in ("number_rows", "pack_rows", "take_part")),
            ("experts", isoload.layer.moe, "run_experts"),
            ("experts", isoload.layer.moe, "run_sorted"),
            ("combine", layer.dispatcher, "combine"),
        ]
        if self.stack is not None and self.stack.predictor_inputs is not None:
            called += [("predict", self.stack.predictor_inputs, "count"), ("fetch", self.stack, "_fetch")]
        return called

    def _timed(self, stage: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if stage == "started":
            return partial(self._timed, "dispatch", super()._timed("dispatch", call, *args, **options))
        if stage == "experts":  # those of the copies that stay come first
            done = len(self.ms.get("local", ()))
            stage = "local" if self.stack is not None and done < len(self.layer.group.ranks) else "remote"
        return super()._timed(stage, _brought(call) if stage == "fetch" else call, *args, **options)


def _brought(fetch: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        borrowed = fetch(*args)
        if borrowed is not None:
            borrowed.wait()
        return borrowed

    return call


class StackBench:
    """L layers of one setting and line, over virtual ranks or the processes that there are.

    Args:
        setting, line: sizes; who plans.
        placement: of one layer, which all have.
        num_layers: L.
        device, timer: of everything; what times a call.
        local: whether all ranks are in this process.
    """

    def __init__(
        self,
        setting: Setting,
        line: Line,
        placement: isoload.Placement,
        num_layers: int,
        device: torch.device,
        timer: Timer,
        local: bool,
    ) -> None:
        make = LocalTransport if local else CollectiveTransport
        most = setting.tokens if line.order == "held" else None
        transport = make(setting.topology, max_tokens_per_rank=most)
        how = placement, transport, device, timer
        self.parts = [LayerBench(setting, *how, plans=line.policy != "none") for _ in range(num_layers)]
        self.layers = [part.layer for part in self.parts]
        self.placement, self.group, self.line, self.timer = placement, transport.group, line, timer
        self.stack: isoload.LibraStack | None = None
        self.told, self.setting = None, setting
        for layer in self.layers:
            layer.policy = isoload.policies.make_policy(line.policy)
        if line.order != "alone":
            shape = setting.shape
            like = torch.zeros(0, dtype=setting.dtype, device=device)
            self.told = Told(num_layers, shape.experts, setting.hidden, shape.top_k, like)
            self.stack = isoload.LibraStack(self.layers, self.told, local=line.order)

    @torch.no_grad()
    def run(
        self, batch: Sequence[Batch], guesses: Sequence[Sequence[Tensor]], by_stage: bool
    ) -> dict[str, Any]:
        """Milliseconds of a layer, a mean over the layers: by stage, or of the whole; and the imbalance.

        Args:
            batch: of every layer its rows and choices.
            guesses: [L][owned ranks] what is predicted of them.
            by_stage: one stage after the other, all ranks beginning together; or all as it comes, nothing timed within.
        """
        if self.told is not None:
            self.told.tell(guesses)
        calls = [
            partial(layer.compute, given.rows, given.ids, given.weights, given.num_tokens)
            for layer, given in zip(self.layers, batch, strict=True)
        ]
        if by_stage:
            outputs, ms = self._by_stage(calls)
        else:
            self.parts[0].meet()
            outputs, took = self.timer(lambda: [call() for call in calls])
            ms = {"whole": took}
        for part, given, output in zip(self.parts, batch, outputs, strict=True):
            errors = self.group.gather_objects("bench", part.error_of(given, output))
            check_error(self.setting, max(errors), f"{self.line.name} of {self.setting.shape.name}")
        ratios = [self._imbalance(*of) for of in zip(self.layers, batch, strict=True)]
        ms = {stage: took / len(self.parts) for stage, took in ms.items()}
        return {"ms": ms, "imbalance": sum(ratios) / len(ratios)}

    def _by_stage(self, calls: Sequence[Callable[[], Any]]) -> tuple[list[Any], dict[str, float]]:
        """What the layers' calls return, and their milliseconds by stage, all layers' together."""
        ms, outputs = dict.fromkeys(STAGES, 0.0), []
        for part, call in zip(self.parts, calls, strict=True):
            with StackClock(part.layer, self.timer, part.meet, stack=self.stack) as clock:
                outputs.append(call())
            for stage, times in clock.ms.items():  # a rank's experts run beside those of the others
                ms[stage] += max(times) if stage in ("local", "remote") else sum(times)
        return outputs, ms

    def _imbalance(self, layer: isoload.MoE, batch: Batch) -> float:
        """Copies of the busiest rank over the mean; without a plan those of every expert's home."""
        ranks = self.setting.ranks
        if (made := layer.last_plan) is not None:
            assert made.quota is not None
            loads = made.quota.view(ranks, -1).sum(1)
        else:
            homes = self.placement.home_slot[0].to(batch.ids[0].device) // self.placement.slots_per_rank
            own = torch.cat([homes[ids].flatten() for ids in batch.ids]).bincount(minlength=ranks).cpu()
            loads = torch.stack(self.group.gather_objects("bench", own)).sum(0)
        return float(loads.max() * ranks / loads.sum())
