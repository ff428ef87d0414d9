"""LLEP's protocol over virtual ranks: plan and route, then every rank's part of the layer, one after the other.

Stage by stage and not by isoload.MoE, which refuses a token that names an expert twice, as the published form has it.
Rows reach their rank by indexing, outside of the clock: exchanges are counted, not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import isoload
from isoload import ops
from isoload.checks import values_readable
from isoload.ops import group_copies
from isoload.ops.counting import gather_copies
from isoload.weights.borrowing import NUM_BUFFERS
from isoload.weights.compute import count_copies, run_experts
from isoload.weights.experts import ExpertWeights, SwiGLU
from lib.clocks import peak_bytes, timer_on
from lib.llep_setting import TIMED, Setting

Tokens = tuple[Tensor, Tensor, Tensor]  # rows [N, H], local slots [N, K], gate weights [N, K]
Times = dict[str, list[float]]  # per rank, but for plan_ms
Sorted = tuple[ExpertWeights, Tensor, Tensor]  # weights, copies [C, H], ends [S]


@dataclass(frozen=True)
class Routed:
    """One plan on one batch: slots [R*T, K] of all tokens, how many experts move, and what planning took."""

    plan: isoload.policies.plan.Plan
    slots: Tensor
    moved: int
    plan_ms: float


class VirtualRanks:
    """The weights of all ranks, one spare pool that they take in turn, and one batch's rows.

    Args:
        setting: says sizes; settings that differ in routing and options only can be run on it.
        device: of everything.
    """

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.device, self.timer = device, timer_on(device)
        self.size = setting.shape.experts // setting.ranks
        self.num_ranks, self.spare_slots = setting.ranks, setting.spare_slots
        self.dense = setting.weights(setting.shape.experts, device)
        self.resident = [
            ExpertWeights(
                self.dense.gate_up[first : first + self.size], self.dense.down[first : first + self.size]
            )
            for first in range(0, setting.shape.experts, self.size)
        ]
        self.pool = setting.weights(setting.spare_slots, device)
        self.peers = ops.addresses([[w.gate_up, w.down] for w in self.resident])
        expert = torch.arange(setting.shape.experts, dtype=torch.int32, device=device)
        self.home = torch.stack([expert // self.size, expert % self.size], 1)
        self.rows, self.weights = setting.rows(setting.ranks * setting.tokens, device)

    def route(self, setting: Setting, name: str, ids: list[Tensor]) -> Routed:
        """The plan of one batch and where it sends every copy."""
        placed = setting.placement.layer(0, self.device)
        policy = setting.policy(name)
        loads = torch.stack([isoload.count(i, setting.shape.experts) for i in ids])
        made, plan_ms = self.timer(lambda: isoload.plan(loads, placed, None, policy))
        slots = [isoload.route(i, loads, made, rank) for rank, i in enumerate(ids)]
        return Routed(made, torch.cat(slots), imports(made), plan_ms)

    def receive(self, routed: Routed, rank: int) -> Tokens:
        """What dispatch brings: a row per token with copies here, their local slots and gate weights."""
        stride = self.size + self.spare_slots
        here = routed.slots // stride == rank
        tokens = here.any(1).nonzero().squeeze(1)
        local = torch.where(here, routed.slots % stride, -1)[tokens]
        return self.rows[tokens], local, self.weights[tokens].masked_fill(local < 0, 0)

    def borrow(self, routed: Routed, rank: int) -> None:
        """Brings the rank's borrowed experts into the pool: the backend ``pull``."""
        slots, spare = routed.plan.slot_to_expert, [self.pool.gate_up, self.pool.down]
        ops.borrow(slots, self.home, self.peers, spare, self.num_ranks, rank)

    def compute(self, routed: Routed, rank: int, received: Tokens) -> Tensor:
        """The rank's experts on its rows, as the layer runs them: resident stacks, then what is borrowed."""
        groups, held = self._groups(routed, rank, received)
        return run_experts(*received, groups, SwiGLU(), held)

    def sort_copies(self, routed: Routed, rank: int, received: Tokens) -> list[Sorted]:
        """The rank's copies in slot order, group by group, as its GEMMs take them."""
        (rows, slots, _), first, found = received, 0, []
        groups, held = self._groups(routed, rank, received)
        for group, number in zip(groups, held or [None] * len(groups), strict=True):
            grouping = group_copies(slots, first, group.num_slots, number)
            found.append((group, gather_copies(rows, grouping), grouping.ends))
            first += group.num_slots
        return found

    def _groups(
        self, routed: Routed, rank: int, received: Tokens
    ) -> tuple[list[ExpertWeights], list[int] | None]:
        """Stacks of weights and, where the host knows them, their copies."""
        groups = [self.resident[rank], *([self.pool] if routed.moved else [])]
        return groups, count_copies(received[1], groups) if values_readable(received[1]) else None


def multiply(copies: list[Sorted]) -> None:
    """The GEMMs and the activation between them, without what sorts copies before and adds them up behind."""
    for weights, rows, ends in copies:
        inner = SwiGLU()(F.grouped_mm(rows, weights.gate_up.transpose(1, 2), offs=ends))
        F.grouped_mm(inner, weights.down.transpose(1, 2), offs=ends)


def imports(plan: isoload.policies.plan.Plan) -> int:
    """Experts that a plan moves."""
    return int(plan.telemetry[0]) if plan.policy.borrows and plan.telemetry is not None else 0


@torch.no_grad()
def run_once(ranks: VirtualRanks, setting: Setting, name: str, ids: list[Tensor]) -> Times:
    """Milliseconds of one batch: of the plan and, per rank, of borrowing, of the experts and of their GEMMs alone."""
    routed, timer = ranks.route(setting, name, ids), ranks.timer
    times: Times = {"plan_ms": [routed.plan_ms], "borrow_ms": [], "busiest_ms": [], "gemms_ms": []}
    for rank in range(setting.ranks):
        got = ranks.receive(routed, rank)
        borrow_ms = timer(partial(ranks.borrow, routed, rank))[1] if routed.moved else 0.0
        times["borrow_ms"].append(borrow_ms)
        times["busiest_ms"].append(timer(partial(ranks.compute, routed, rank, got))[1])
        copies = ranks.sort_copies(routed, rank, got)
        times["gemms_ms"].append(timer(partial(multiply, copies))[1])
    return times


def over_rounds(samples: Sequence[Times]) -> dict[str, np.ndarray]:
    """Every rank's medians."""
    return {key: np.median([sample[key] for sample in samples], axis=0) for key in samples[0]}


@torch.no_grad()
def count_traffic(ranks: VirtualRanks, setting: Setting, name: str, ids: list[Tensor]) -> dict[str, Any]:
    """What does not need a clock: copies, rows, bytes, moved experts, and the busiest rank's memory.

    Rows that leave their rank carry H elements, K slots and K gate weights there and H elements back.
    """
    routed, tokens = ranks.route(setting, name, ids), setting.tokens
    stride, total = ranks.size + ranks.spare_slots, routed.slots.numel()
    rank = torch.arange(setting.ranks, device=ranks.device)
    to_rank = (routed.slots // stride).unsqueeze(1) == rank.unsqueeze(1)  # [R*T, R, K]
    reaches = to_rank.any(2)  # [R*T, R]
    own = torch.arange(len(reaches), device=ranks.device) // tokens
    received, left = reaches.sum(0), int(reaches.sum()) - int(reaches.gather(1, own[:, None]).sum())
    copies = to_rank.sum((0, 2))
    row_bytes = 2 * setting.hidden * setting.scale.dtype.itemsize + 8 * setting.shape.top_k
    busiest, moved = int(copies.argmax()), routed.moved
    got = ranks.receive(routed, busiest)
    ranks.borrow(routed, busiest)
    telemetry = routed.plan.telemetry
    return {
        "peak_copies": int(copies.max()),
        "copies_ratio": int(copies.max()) / -(-total // setting.ranks),
        "busiest_rows": int(received.max()),
        "rows_left": left,
        "row_bytes": left * row_bytes,
        "moved": moved,
        "most_exports": int(telemetry[2]) if moved and telemetry is not None else 0,
        "weight_bytes": moved * setting.expert_bytes,
        "pool_bytes": 0 if name == "EP" else NUM_BUFFERS * setting.spare_slots * setting.expert_bytes,
        "peak_bytes": peak_bytes(lambda: ranks.compute(routed, busiest, got), ranks.device)
        + sum(part.nbytes for part in got),
    }


def bench_cell(
    ranks: VirtualRanks, setting: Setting, names: Sequence[str], rounds: int, timed: Sequence[str] = TIMED
) -> list[dict[str, Any]]:
    """A row per policy. Those that are timed and the ideal alternate; a rank's time is its median over the rounds."""
    even = replace(setting, share=None)
    ids, even_ids = setting.topk_ids(ranks.device), even.topk_ids(ranks.device)
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        try:
            found[name] = count_traffic(ranks, setting, name, ids)
        except torch.OutOfMemoryError:
            found[name] = {"out_of_memory": True}
    fit = [name for name in names if name in timed and "out_of_memory" not in found[name]]
    samples: dict[str, list[Times]] = {name: [] for name in ("ideal", *fit)}
    for _ in range(rounds):
        samples["ideal"].append(run_once(ranks, even, "EP", even_ids))
        for name in fit:
            samples[name].append(run_once(ranks, setting, name, ids))
    ideal = {key: float(values.max()) for key, values in over_rounds(samples["ideal"]).items()}
    for name in fit:
        of_rank = over_rounds(samples[name])
        found[name] |= {key: float(values.max()) for key, values in of_rank.items()}
        found[name] |= {"ideal_ms": ideal["busiest_ms"], "ideal_gemms_ms": ideal["gemms_ms"]}
        found[name]["ratio"] = found[name]["busiest_ms"] / ideal["busiest_ms"]
        found[name]["gemms_ratio"] = found[name]["gemms_ms"] / ideal["gemms_ms"]
        found[name]["over_mean"] = found[name]["busiest_ms"] / float(of_rank["busiest_ms"].mean())
    return [setting.facts() | {"policy": name} | row for name, row in found.items()]
