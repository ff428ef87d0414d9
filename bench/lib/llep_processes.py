"""LLEP's protocol with one process per rank and the real layer: forward, backward and borrowing, distinct experts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import isoload
from isoload.cli.processes import run_ranks
from isoload.transport import CollectiveTransport
from isoload.weights.borrowing import NUM_BUFFERS
from isoload.weights.experts import ExpertWeights
from lib.clocks import CPU, medians, peak_bytes, timer_on
from lib.llep_setting import TIMED, Setting
from lib.llep_virtual import imports

LIMIT = timedelta(minutes=5)
FORWARD = ("gather", "dispatch row counts", "dispatch", "combine")
BACKWARD = ("combine backward", "dispatch backward")
SUMMED = ("sent", "forward_bytes", "backward_bytes")  # over ranks; of all else the most that a rank took

Sample = dict[str, float]


class RankBench:
    """The layer of one rank, and inputs for one setting after the other.

    Every expert has the same weights, so that a rank makes its own only; neither times nor bytes depend on them.
    """

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.device, self.timer = device, timer_on(device)
        self.transport = CollectiveTransport(isoload.Topology(setting.ranks, setting.ranks))
        one, experts = setting.weights(1, device), setting.shape.experts
        dense = ExpertWeights(one.gate_up.expand(experts, -1, -1), one.down.expand(experts, -1, -1))
        self.layer = isoload.MoE(self.gate, dense, self.transport, setting.placement, policy="none")

    def gate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.ids, self.weights

    def take(self, setting: Setting, name: str) -> Tensor:
        """Sets what the gate answers and who plans; returns the rows [T, H]."""
        self.ids = setting.topk_ids(self.device)[dist.get_rank()]
        rows, self.weights = setting.rows(setting.tokens, self.device)
        self.layer.policy = setting.policy(name)
        return rows.requires_grad_()

    def peak(self, setting: Setting, name: str) -> Sample:
        rows = self.take(setting, name)
        with torch.no_grad():
            forward = peak_bytes(lambda: self.layer(rows), self.device)
        return {
            "forward_peak_bytes": forward,
            "training_peak_bytes": peak_bytes(
                lambda: self.layer(rows).square().sum().backward(), self.device
            ),
        }

    def run(self, setting: Setting, name: str) -> Sample:
        """One forward and backward, with as many borrowing batches between as a deeper model has layers: so backward
        brings the weights again."""
        rows, layer, sent = self.take(setting, name), self.layer, self.transport.group
        layer.zero_grad()
        dist.barrier()
        sent.reset_traffic()
        output, forward_ms = self.timer(lambda: layer(rows))
        counted = {
            "rows_sent": int(sent.traffic.rows.sum()),
            "forward_bytes": sum(sent.traffic.bytes[stage] for stage in FORWARD),
        }
        with torch.no_grad():
            for _ in range(NUM_BUFFERS):
                layer(rows)
        dist.barrier()
        sent.reset_traffic()
        _, backward_ms = self.timer(lambda: output.square().sum().backward())
        made = layer.last_plan
        assert made is not None
        weight_bytes = imports(made) * setting.expert_bytes
        return {
            "forward_ms": forward_ms,
            "backward_ms": backward_ms,
            "borrow_ms": self.borrow(made),
            **counted,
            "backward_bytes": sum(sent.traffic.bytes[stage] for stage in BACKWARD),
            "moved": imports(made),
            "borrow_weight_bytes": weight_bytes,
            "again_weight_bytes": weight_bytes,
            "returned_weight_bytes": weight_bytes,
        }

    def borrow(self, made: isoload.policies.plan.Plan) -> float:
        """Bringing the weights alone, nothing beside it."""
        if not imports(made) or self.layer.borrowing is None:
            return 0.0
        borrowing = self.layer.borrowing
        dist.barrier()

        def bring() -> None:
            borrowed = borrowing.borrow(made)
            assert borrowed is not None
            borrowed.wait()

        return self.timer(bring)[1]


def run_rank(
    settings: Sequence[Setting], device: torch.device, rounds: int, alive: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """The body of a process of the default group: the same rows on every rank. Settings differ in routing only."""
    bench = RankBench(settings[0], device)
    backend = bench.layer.borrowing.backend.name if bench.layer.borrowing else ""
    rows = []
    for setting in settings:
        samples = {name: [bench.peak(setting, name)] for name in TIMED}
        for _ in range(rounds):
            for name in TIMED:
                samples[name].append(bench.run(setting, name))
                alive()
        for name in TIMED:
            of_ranks: list[Any] = [None] * setting.ranks
            dist.all_gather_object(of_ranks, medians(samples[name]))
            row = {k: (sum if k.endswith(SUMMED) else max)(s[k] for s in of_ranks) for k in of_ranks[0]}
            rows.append({"kind": "processes", **setting.facts(), "borrow": backend, "policy": name, **row})
    return rows


def bench_forked(settings: Sequence[Setting], rounds: int) -> list[dict[str, Any]]:
    """Gloo processes on this machine's CPU, as many as the settings have ranks."""

    def body(rank: int, alive: Callable[[], None]) -> list[dict[str, Any]]:
        return run_rank(settings, CPU, rounds, alive)

    rows: list[dict[str, Any]] = run_ranks(body, settings[0].ranks, LIMIT.total_seconds())[0]
    return rows


def join_torchrun() -> torch.device:
    """This process's device, in torchrun's group: a GPU each over NCCL; GPUs shared, or none, over gloo."""
    gpus, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local % gpus) if gpus else CPU
    shared = int(os.environ["LOCAL_WORLD_SIZE"]) > gpus
    if gpus:
        torch.cuda.set_device(device)
    if gpus and shared:  # read when the first symmetric memory is made
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    dist.init_process_group("gloo" if shared else "nccl", timeout=LIMIT)
    return device
