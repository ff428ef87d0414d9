"""torch.distributed.pipelining: its forward for shapes, on uninitialised memory, is no batch; gradients are dense's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import isoload
from isoload.layer.routers import Gate, Router
from isoload.online import BalanceLog
from isoload.weights.experts import ExpertWeights
from support.processes import run_ranks
from support.sweeps import slow

STAGES, RANKS, PARTS, TOKENS, EXPERTS, HIDDEN, TOP_K = 2, 2, 4, 3, 8, 8, 2


class Stage(nn.Module):
    """A linear map and a layer with replicas, whose gate may be called outside of the layer."""

    outside = False

    def __init__(self, number: int, transport: Any, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.first = nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
        gate = Gate(Router(EXPERTS, TOP_K), nn.Parameter(torch.randn(EXPERTS, HIDDEN, dtype=torch.float64)))
        experts = ExpertWeights.random(EXPERTS, HIDDEN, 6, dtype=torch.float64)
        placement = isoload.place(torch.arange(EXPERTS)[None] + 1, isoload.Topology(RANKS), slots_per_rank=5)
        self.layer = isoload.MoE(gate, experts, transport, placement, **how)

    def forward(self, rows: Any) -> Any:
        if isinstance(rows, Tensor):
            inner = self.first(rows)
            return rows + (
                self.layer.compute(inner, *self.layer.gate(inner)) if self.outside else self.layer(inner)
            )
        return [row + y for row, y in zip(rows, self.layer([self.first(r) for r in rows]), strict=True)]


def rows_of(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(PARTS * TOKENS, HIDDEN, dtype=torch.float64, generator=generator)


def squares(y: Tensor, _target: Tensor) -> Tensor:
    return (y**2).sum()


def pipelined(
    rank: int, schedule: Any, how: dict[str, Any], outside: bool
) -> tuple[list[Tensor], int, Tensor, Tensor, float]:
    """Gradients, batches of the layer, its counts, the recorder's counts, and passes of the log."""
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with nan
    mesh = init_device_mesh("cpu", (STAGES, RANKS), mesh_dim_names=("stages", "experts"))
    number, position = mesh.get_coordinate() or [0, 0]
    transport = isoload.CollectiveTransport(isoload.Topology(RANKS), mesh["experts"].get_group())
    module = Stage(number, transport, **how)
    module.outside = outside
    recorder = isoload.Recorder(1, EXPERTS)
    module.layer.balancer.recorder, log = recorder, BalanceLog(module)
    stage = PipelineStage(module, number, STAGES, torch.device("cpu"), group=mesh["stages"].get_group())
    run = schedule(stage, PARTS, loss_fn=squares, scale_grads=False)
    rows = rows_of(position)
    if number == 0:
        run.step(rows)
    else:
        run.step(target=rows)
    recorder.step()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    counts = module.layer.expert_counts(exchange=True)
    return (
        gradients,
        module.layer.balancer.batch,
        counts,
        recorder.counts(module.layer.group)[0, 0],
        log._passes,
    )


def dense() -> list[Stage]:
    stages = [Stage(number, isoload.LocalTransport(isoload.Topology(RANKS))) for number in range(STAGES)]
    rows = [rows_of(rank) for rank in range(RANKS)]
    for stage in stages:
        rows = stage(rows)
    sum((y**2).sum() for y in rows).backward()
    return stages


@pytest.mark.parametrize("schedule", [Schedule1F1B, *slow(ScheduleGPipe)])
@pytest.mark.parametrize(("how", "outside"), [({}, False), ({}, True), *slow(({"loads": "own"}, False))])
def test_the_forward_for_shapes_is_no_batch(schedule: Any, how: dict[str, Any], outside: bool) -> None:
    stages, outcomes = dense(), run_ranks(pipelined, STAGES * RANKS, schedule, how, outside)
    for rank, (gradients, batches, counts, recorded, passes) in enumerate(outcomes):
        wanted = stages[rank // RANKS]
        assert batches == passes == PARTS
        assert torch.equal(counts, wanted.layer.expert_counts() if rank % RANKS == 0 else counts)
        assert torch.equal(counts, recorded) and int(counts.sum()) == RANKS * PARTS * TOKENS * TOP_K
        experts = list(wanted.layer.weights[rank % RANKS].parameters())
        for got, parameter in zip(gradients[-len(experts) :], experts, strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-12, atol=1e-12)
    for number, stage in enumerate(stages):
        others = [*stage.first.parameters(), *stage.layer.gate.parameters()]
        of_ranks = [outcomes[number * RANKS + i][0][: len(others)] for i in range(RANKS)]
        for parts, parameter in zip(zip(*of_ranks, strict=True), others, strict=True):
            torch.testing.assert_close(sum(parts), parameter.grad, rtol=1e-12, atol=1e-12)
