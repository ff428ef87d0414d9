"""Fuzzed Balancers in and out of inference mode, with wrong shared columns, and with whatever one rank may raise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoload import Balancer, CollectiveGroup, LocalGroup, Placement
from support.fuzz_cases import FuzzCase
from support.processes import run_ranks

ERRORS = (
    ValueError,
    TypeError,
    OSError,
    MemoryError,
    RuntimeError,
    StopIteration,
    KeyboardInterrupt,
    SystemExit,
)


def rng_of(case: FuzzCase) -> np.random.Generator:
    return np.random.default_rng([case.seed, 3])


def make(case: FuzzCase, group: Any, placement: Placement | None = None) -> Balancer:
    """Some plan nothing, as batches below min_tokens do."""
    placement, least = placement or case.placement, 10**6 if case.seed % 3 == 0 else 0
    how = {"min_tokens": least, **case.options}
    return Balancer(placement, case.layer, case.policy, group, **how)


def run(balancer: Balancer, ids: list[Tensor]) -> list[Tensor]:
    slots = balancer(ids, num_tokens=1000)
    assert isinstance(slots, list)
    return slots


def check_routed(balancer: Balancer, case: FuzzCase, slots: list[Tensor], ids: list[Tensor]) -> None:
    """Every copy in a slot of its expert, borrowed ones included."""
    held = balancer.placement.slot_to_expert[case.layer]
    held = held if balancer.last_plan is None else balancer.last_plan.slot_to_expert
    for routed, chosen in zip(slots, ids, strict=True):
        assert torch.equal(routed < 0, chosen < 0), "an absent copy was routed, or a copy dropped"
        assert torch.equal(held[routed[chosen >= 0]].long(), chosen[chosen >= 0]), "another expert's slot"


def check_inference(case: FuzzCase) -> None:
    """Construction, batches and loads each in or out of inference mode: the same slots as never in it."""
    modes, ids = rng_of(case).random(5) < 0.5, case.full_ids()
    with torch.inference_mode(bool(modes[0])):
        balancer = make(case, LocalGroup(case.topology))
    plain = make(case, LocalGroup(case.topology))
    for mode, placement in ((1, case.placement), (3, case.after), (4, case.after)):
        if placement is not balancer.placement:
            with torch.inference_mode(bool(modes[2])):
                balancer.load(placement)
            plain.load(placement)
        with torch.inference_mode(bool(modes[mode])):
            slots = run(balancer, ids)
        check_routed(balancer, case, slots, ids)
        assert all(map(torch.equal, slots, run(plain, ids))), f"slots depend on the modes {modes.tolist()}"


def spoilt(case: FuzzCase, ids: Tensor) -> Tensor:
    """[T, K + n] with one wrong entry in the shared columns, or without one of them."""
    rng, width = rng_of(case), case.placement.num_shared
    if rng.random() < 0.3:
        return ids[:, :-1]
    row, column = int(rng.integers(len(ids))), ids.shape[1] - 1 - int(rng.integers(width))
    others = [e for e in range(-1, case.placement.num_experts) if e != int(ids[row, column])]
    wrong = ids.clone()
    wrong[row, column] = int(rng.choice(others))
    return wrong


def check_columns(case: FuzzCase) -> None:
    """Wrong shared columns of a rank are refused, planned or not, and the next batch is whole."""
    ids, balancer = case.full_ids(), make(case, LocalGroup(case.topology))
    given = [rank for rank, rows in enumerate(ids) if (rows >= 0).any()]
    if case.placement.num_shared and given:
        victim = int(rng_of(case).choice(given))
        wrong = [spoilt(case, rows) if rank == victim else rows for rank, rows in enumerate(ids)]
        try:
            run(balancer, wrong)
        except ValueError as error:
            assert "topk_ids must" in str(error), error
        else:
            raise AssertionError(f"wrong columns of rank {victim} were taken: {wrong[victim].tolist()}")
    check_routed(balancer, case, run(balancer, ids), ids)


def check_failures(case: FuzzCase) -> None:
    """One rank raises before the gather, in each of five batches: all stop, and the batch after each is whole."""
    run_ranks(fail_on_rank, case.num_ranks, case, timeout=20.0, group_timeout=5.0)


def fail_on_rank(rank: int, case: FuzzCase) -> None:
    rng, balancer, ids = rng_of(case), make(case, CollectiveGroup(case.topology)), case.full_ids()
    planned = balancer.plans(1000)
    for _ in range(5):
        victim, error = int(rng.integers(case.num_ranks)), ERRORS[rng.integers(len(ERRORS))]("drawn")
        try:
            balancer(Raising(error) if rank == victim else ids[rank], num_tokens=1000)  # type: ignore[arg-type]
        except BaseException as seen:
            told = f"rank {victim} failed in stage count, so all ranks stop; see the error of that rank"
            assert seen is error if rank == victim else planned and str(seen) == told, seen
        else:
            assert rank != victim and not planned, f"rank {rank} heard nothing of rank {victim}"
        slots = balancer([ids[rank]], num_tokens=1000)
        assert isinstance(slots, list)
        check_routed(balancer, case, slots, [ids[rank]])


class Raising:
    """In the place of ids."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __iter__(self) -> Any:
        raise self.error
