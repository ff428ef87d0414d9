"""ProgramState under torch.distributed.checkpoint: other ranks, placements and wrappers go on like the dense model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import isoload
from isoload.layer import ProgramState
from support.processes import rank_outcomes, run_ranks
from support.sweeps import slow
from support.training import (
    PARTS,
    Model,
    adamw,
    dense_states,
    distance,
    experts_of,
    own_parts,
    parallel,
    reduce_others,
    refresh,
    whole_states,
    words,
)

STEPS = 2  # of each run


def make(ranks: int, policy: str, sharded: bool, seed: int) -> tuple[Model, torch.optim.Optimizer]:
    model = parallel(ranks, policy, seed=seed)
    for module in (*model.blocks, model) if sharded else ():
        fully_shard(module, ignored_params=experts_of(model))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model, adamw(model)


def train(model: Model, optimizer: torch.optim.Optimizer, rank: int, ranks: int, first: int) -> None:
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        for part in own_parts(rank, ranks):
            (model(words(step, part)) / PARTS).backward()
        reduce_others(model)
        optimizer.step()
        refresh(model)


def run(rank: int, ranks: int, number: int, policy: str, sharded: bool, how: str, folder: str) -> Any:
    """Load what the run before saved, train, save; the seed of the placement is the run's number."""
    model, optimizer = make(ranks, policy, sharded, seed=number if policy != "none" else 0)
    program = ProgramState(model, optimizer)
    if number:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        dcp.load({"program": program}, checkpoint_id=f"{folder}/{number - 1}")
    train(model, optimizer, rank, ranks, number * STEPS)
    if how == "async":
        saving = dcp.async_save(
            {"program": program},
            checkpoint_id=f"{folder}/{number}",
            process_group=dist.new_group(backend="gloo"),
        )
        states = whole_states(model)
        train(model, optimizer, rank, ranks, 50)  # does not reach the checkpoint
        saving.result()
        return states
    dcp.save({"program": program}, checkpoint_id=f"{folder}/{number}")
    return whole_states(model)


CASES = (
    ("none", False, "async"),
    ("llep", True, "sync"),
    ("none", True, "async"),
    ("exact", True, "async"),
)


@pytest.mark.parametrize(
    ("policy", "sharded", "how"),
    [
        ("exact", False, "sync"),
        *slow(
            ("none", False, "async"),
            ("llep", True, "sync"),
            ("none", True, "async"),
            ("exact", True, "async"),
        ),
    ],
)
def test_saved_by_four_loaded_by_two_and_by_four(
    policy: str, sharded: bool, how: str, tmp_path: Path
) -> None:
    for number, ranks in enumerate((4, 2, 4)):
        states = run_ranks(run, ranks, ranks, number, policy, sharded, how, str(tmp_path))
        wanted = dense_states(adamw, (number + 1) * STEPS)
        assert max(distance(state, wanted) for state in states) < 1e-11


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def before_the_first_step(rank: int, folder: str) -> None:
    """State that does not exist yet is neither made by a save nor found after a load."""
    model, optimizer = make(2, "exact", False, seed=1)
    frozen = model.head.bias.requires_grad_(False)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    dcp.save({"program": ProgramState(model, optimizer)}, checkpoint_id=folder)
    assert not optimizer.state and schedule.last_epoch == 0
    train_frozen(model, optimizer, rank)
    assert optimizer.state
    dcp.load({"program": ProgramState(model, optimizer)}, checkpoint_id=folder)
    assert not optimizer.state and frozen not in optimizer.state
    assert distance(whole_states(model), dense_states(adamw, 0)) == 0.0


def train_frozen(model: Model, optimizer: torch.optim.Optimizer, rank: int) -> None:
    model(words(0, rank)).backward()
    optimizer.step()
    refresh(model)


def test_state_that_no_step_has_created(tmp_path: Path) -> None:
    run_ranks(before_the_first_step, 2, str(tmp_path))


def from_one_process(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model = parallel(2, "llep", seed=3)
    optimizer = momentum(model)
    dcp.load({"program": ProgramState(model, optimizer)}, checkpoint_id=folder)
    train(model, optimizer, rank, 2, STEPS)
    return whole_states(model)


def test_two_processes_go_on_from_virtual_ranks(tmp_path: Path) -> None:
    model = virtual()
    optimizer = momentum(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(PARTS):
            (model(words(step, part)) / PARTS).backward()
        optimizer.step()
        refresh(model)
    dcp.save({"program": ProgramState(model, optimizer)}, checkpoint_id=tmp_path, no_dist=True)
    other = virtual()
    dcp.load({"program": ProgramState(other, None)}, checkpoint_id=tmp_path, no_dist=True)
    assert distance(whole_states(other), whole_states(model)) == 0.0
    wanted = dense_states(momentum, 2 * STEPS)
    for states in run_ranks(from_one_process, 2, str(tmp_path)):
        assert distance(states, wanted) < 1e-11


def virtual() -> Model:
    """The model with one virtual rank: a rank takes the rows of its own batch."""
    placement = isoload.place(torch.ones(2, 8), isoload.Topology(1), 8, placer="trivial")
    transport = isoload.LocalTransport(1)
    return Model(lambda i, gate, experts: isoload.MoE(gate, experts, transport, placement, i, "exact"))


def unlike(rank: int, what: str, folder: str) -> None:
    model, optimizer = make(2, "exact", False, seed=1)
    dcp.save({"program": ProgramState(model, optimizer)}, checkpoint_id=folder)
    if what == "optimizer":
        dcp.save({"program": ProgramState(model)}, checkpoint_id=folder)
    if what == "groups":
        half = len(list(model.parameters())) // 2
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": parameters[:half]}, {"params": parameters[half:]}])
    if what == "dtype":
        model = model.float()
    if what == "strange":
        optimizer = torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(1))])
    if what == "none":
        model = torch.nn.Linear(1, 1)
    dcp.load({"program": ProgramState(model, optimizer)}, checkpoint_id=folder)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("groups", "optimizer must have the parameter groups [["),
        ("optimizer", "Missing key in checkpoint state_dict: program.optimizer."),  # by torch
        ("dtype", "blocks.0.moe must have {'experts': 8, 'gate_up': [[24, 8], 'torch.float64']"),
        ("strange", "optimizer must hold only Parameters of the model, got another of shape [1]"),
        ("none", "model must have isoload layers (isoload.MoE, isoload.balance), got none"),
    ],
)
def test_another_program_is_refused(what: str, message: str, tmp_path: Path) -> None:
    for outcome in rank_outcomes(unlike, 2, what, str(tmp_path), group_timeout=10.0):
        assert message in str(outcome.error)
