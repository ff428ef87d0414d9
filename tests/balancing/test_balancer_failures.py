"""Balancer: what fails on one rank stops all and changes nothing, and inference mode is no failure."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, CapturedBalancer, CollectiveGroup, LocalGroup
from support.processes import rank_outcomes, run_ranks
from support.small_batches import EXPERTS, LAYERS, draw_ids, make_placement, make_topology


def other_placement() -> isoload.Placement:
    counts = torch.randint(1, 900, (LAYERS, EXPERTS), generator=torch.Generator().manual_seed(8))
    return isoload.place(counts, make_topology(), slots_per_rank=6)


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize(
    ("policy", "min_tokens"), [("static", 0), ("grace", 0), ("exact", 0), ("exact", 1000)]
)
def test_loads_before_and_after_batches_in_inference_mode(policy: str, min_tokens: int, made: bool) -> None:
    """Regression: what was made in inference mode could be written nowhere else."""
    ids, group, new = draw_ids(9), LocalGroup(make_topology()), other_placement()
    for modes in itertools.product((False, True), repeat=3):
        with torch.inference_mode(made):
            balancer = Balancer(make_placement(), 1, policy, group, min_tokens=min_tokens)
        with torch.inference_mode(modes[0]):
            balancer(ids, num_tokens=300)
        with torch.inference_mode(modes[1]):
            balancer.load(new)
        with torch.inference_mode(modes[2]):
            slots = balancer(ids, num_tokens=300)
        wanted = Balancer(new, 1, "static" if min_tokens else policy, group)(ids)
        assert all(map(torch.equal, slots, wanted))


def refuse(_host: isoload.Placement, _layer: int) -> Tensor:
    raise OSError("no memory")


def load_on_one(rank: int, ranks: int) -> tuple[str, bool]:
    """Rank 1 cannot derive what a policy keeps."""
    topology = isoload.Topology(ranks)
    size = EXPERTS // ranks + 2
    first, second = (
        isoload.place(torch.arange(EXPERTS).roll(n).expand(1, -1), topology, slots_per_rank=size)
        for n in (0, 9)
    )
    balancer, rows = Balancer(first, 0, "static", CollectiveGroup(topology)), draw_ids(0)[rank]
    before, error = balancer(rows), ""
    if rank == 1:
        balancer.placed_on(torch.device("cpu")).memos["mine"] = (torch.zeros(1), refuse)
    try:
        balancer.load(second)
    except (ValueError, OSError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    return error, balancer.placement is first and torch.equal(balancer(rows), before)


def test_a_load_that_fails_on_one_rank_changes_none() -> None:
    told = "ValueError: rank 1 failed in stage placement, so all ranks stop; see the error of that rank: "
    assert run_ranks(load_on_one, 2, 2) == [(f"{told}OSError: no memory", True), ("OSError: no memory", True)]


def failing(rank: int, ranks: int, what: str) -> None:
    topology = isoload.Topology(ranks)
    placement = isoload.place(
        torch.arange(EXPERTS).expand(1, -1), topology, slots_per_rank=EXPERTS // ranks + 2
    )
    policy = "even" if (what, rank) == ("policy", 1) else "exact"
    balancer = Balancer(placement, 0, policy, CollectiveGroup(topology))
    rows = draw_ids(0)[rank]
    if what == "ids" and rank == 1:
        rows = rows + EXPERTS
    if what == "placement":
        counts = torch.arange(EXPERTS).roll(5 * rank).expand(1, -1)
        balancer.load(isoload.place(counts, topology, slots_per_rank=EXPERTS // ranks + 2))
    if what == "weights":
        weight = placement.replica_weight
        balancer.load(replace(placement, replica_weight=weight if rank == 0 else weight * 2))
    balancer(rows)


@pytest.mark.parametrize(
    ("what", "own", "others"),
    [
        ("ids", "ValueError: topk_ids must be in -1..31", "ValueError: rank 1 failed in stage count"),
        ("policy", "policy must be the same on all ranks", "policy must be the same on all ranks"),
        (
            "placement",
            "checksum of slot_to_expert must be the same",
            "checksum of slot_to_expert must be the same",
        ),
        (
            "weights",
            "checksum of replica_weight must be the same",
            "checksum of replica_weight must be the same",
        ),
    ],
)
def test_one_rank_that_differs_stops_all(what: str, own: str, others: str) -> None:
    outcomes = rank_outcomes(failing, 2, 2, what)
    assert own in str(outcomes[1].error) and others in str(outcomes[0].error), outcomes


def cannot(_call: Any) -> Any:
    raise OSError("no graph")


class Raising:
    """In the place of a Recorder."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add(self, *_given: Any) -> None:
        raise self.error


# What rank 1 gives in place of its ids, and how it ends there
SENT: dict[str, tuple[Callable[[Tensor], dict[str, Any]], str]] = {
    "numbers": (lambda ids: {"topk_ids": [1]}, "ValueError: topk_ids must be a tensor [T, K], got int"),
    "lists": (lambda ids: {"topk_ids": [ids.tolist()]}, "ValueError: topk_ids must be a tensor [T, K], got list"),
    "numpy": (lambda ids: {"topk_ids": [ids.numpy()]}, "ValueError: topk_ids must be a tensor [T, K], got ndarray"),
    "nothing": (lambda ids: {"topk_ids": None}, "TypeError: 'NoneType' object is not iterable"),
    "floats": (lambda ids: {"topk_ids": ids.float()}, "ValueError: topk_ids must be int32 or int64"),
    "two": (lambda ids: {"topk_ids": [ids] * 2}, "ValueError: topk_ids must have one tensor per owned rank (1), got 2"),
    "none": (lambda ids: {"topk_ids": []}, "ValueError: topk_ids must have one tensor per owned rank (1), got 0"),
    "a mask": (
        lambda ids: {"topk_ids": ids, "num_valid": torch.ones(len(ids), dtype=torch.bool)},
        "ValueError: num_valid must be an integer or a tensor [] of one, got [37] torch.bool",
    ),
    "tokens": (
        lambda ids: {"topk_ids": ids, "num_tokens": "many"}, "ValueError: num_tokens must be an integer, got 'many'"
    ),
    "no memory": (lambda ids: {"topk_ids": ids, "error": MemoryError("full")}, "MemoryError: full"),
    "an interrupt": (lambda ids: {"topk_ids": ids, "error": KeyboardInterrupt()}, "KeyboardInterrupt: "),
    "an exit": (lambda ids: {"topk_ids": ids, "error": SystemExit(3)}, "SystemExit: 3"),
}  # fmt: skip


def fail_before_the_gather(rank: int, captured: bool) -> list[str]:
    """What every failure of rank 1 raises here, and after each a batch as if nothing had been."""
    topology = isoload.Topology(2)
    placement = isoload.place(torch.arange(EXPERTS).expand(1, -1), topology, slots_per_rank=EXPERTS // 2 + 2)
    balancer = Balancer(placement, 0, "exact", CollectiveGroup(topology))
    call = CapturedBalancer(balancer, 37, 4, device="cpu", capture=cannot) if captured else balancer
    warnings.filterwarnings("ignore", ".*runs eagerly: its CUDA graph failed on rank 0: OSError: no graph")
    rows, said = draw_ids(0)[rank], []
    wanted = Balancer(placement, 0, "exact", LocalGroup(topology))(draw_ids(0)[:2])[rank]
    for make, _ in SENT.values():
        given = {"topk_ids": rows} if rank == 0 else make(rows)
        if captured and rank == 1 and "num_valid" in given:  # it has no such argument
            given = {"topk_ids": rows, "error": OSError()}
        balancer.recorder = Raising(given.pop("error")) if "error" in given else None  # type: ignore[assignment]
        try:
            call(**given)
        except BaseException as error:
            said.append(f"{type(error).__name__}: {error}")
        balancer.recorder = None
        assert torch.equal(balancer(rows), wanted)
    balancer.batch += rank
    with pytest.raises(ValueError, match=r"batch number must be the same on all ranks, got 2\d on rank 0"):
        balancer(rows)
    return said


@pytest.mark.parametrize("captured", [False, True])
def test_whatever_is_raised_before_the_gather_stops_all_and_the_next_batch_is_whole(captured: bool) -> None:
    """Regression: only ValueError was told; the others waited, or took another batch's loads."""
    first, second = run_ranks(fail_before_the_gather, 2, captured)
    told = "ValueError: rank 1 failed in stage count, so all ranks stop; see the error of that rank"
    assert first == [told] * len(SENT)
    for got, (what, (_, own)) in zip(second, SENT.items(), strict=True):
        own = (
            {"a mask": "OSError: ", "floats": "ValueError: topk_ids must be [T, 4] torch.int64"}.get(
                what, own
            )
            if captured
            else own
        )
        assert got.startswith(own), got


NOT_WHOLE: list[tuple[Any, str]] = [
    (True, "True"),
    (2.5, "2.5"),
    (torch.tensor(2.0), r"\[\] torch.float32"),
    (torch.tensor(True), r"\[\] torch.bool"),
    (torch.tensor([4, 2, 4, 4]), r"\[4\] torch.int64"),
    (torch.ones(37, dtype=torch.bool), r"\[37\] torch.bool"),
    ("7", "'7'"),
]


@pytest.mark.parametrize(("value", "shown"), NOT_WHOLE)
def test_num_valid_and_num_tokens_are_integers(value: Any, shown: str) -> None:
    """Regression: a mask of three rows kept one, a number per rank masked other rows."""
    balancer = Balancer(make_placement(), 1, "exact", tokens="same")
    with pytest.raises(
        ValueError,
        match=rf"num_valid must be an integer( or a tensor \[\] of one)?, got {shown}",
    ):
        balancer(draw_ids(0)[0], value)
    with pytest.raises(ValueError, match=f"num_tokens must be an integer, got {shown}"):
        balancer(draw_ids(0)[0], num_tokens=value)


@pytest.mark.parametrize("value", [9, np.int64(9), torch.tensor(9), torch.tensor(9, dtype=torch.int32)])
def test_num_valid_as_engines_give_it(value: Any) -> None:
    rows = draw_ids(0)[0]
    slots = Balancer(make_placement(), 1, "exact", tokens="same")(rows, value)
    assert ((slots >= 0) == (rows >= 0))[:9].all() and (slots[9:] == -1).all()


WRONG_COLUMNS: dict[str, Callable[[Tensor], Tensor]] = {
    "missing": lambda ids: ids[:, :-1],
    "another": lambda ids: torch.cat([ids[:, :-1], ids[:, :1]], dim=1),
    "masked": lambda ids: torch.cat([ids[:, :-1], torch.full_like(ids[:, :1], -1)], dim=1),
    "alone": lambda ids: ids[:, -1:],
}


def give_columns(rank: int, min_tokens: int) -> list[str]:
    """What wrong columns on rank 1 raise here, and after each a right batch."""
    topology, said = isoload.Topology(2), []
    placement = isoload.place(
        torch.arange(EXPERTS).expand(1, -1), topology, slots_per_rank=EXPERTS // 2 + 2, num_shared=1
    )
    balancer = Balancer(placement, 0, "joint", CollectiveGroup(topology), min_tokens=min_tokens)
    ids = draw_ids(0)[rank]
    ids = torch.cat([ids, torch.where((ids >= 0).any(1, keepdim=True), EXPERTS, -1)], dim=1)
    for change in WRONG_COLUMNS.values():
        try:
            balancer(change(ids) if rank else ids, num_tokens=74)
            said.append("")
        except ValueError as error:
            said.append(str(error))
        slots = balancer(ids, num_tokens=74)
        assert torch.equal(slots >= 0, ids >= 0)
    return said


@pytest.mark.parametrize("min_tokens", [0, 1000])
def test_wrong_shared_columns_are_refused_before_the_gather(min_tokens: int) -> None:
    """Regression: batches that are not planned took them, planned ones raised on one rank, after the gather."""
    others, own = run_ranks(give_columns, 2, min_tokens)
    told = "rank 1 failed in stage count, so all ranks stop; see the error of that rank"
    assert others == ["" if min_tokens else told] * len(WRONG_COLUMNS)
    rules = ["must end in the shared experts [32]"] * 3 + [
        "must be [T, K + 1] with the shared experts in the last"
    ]
    for got, rule in zip(own, rules, strict=True):
        assert rule in got, got


def test_a_failure_is_told_on_the_device_of_the_batches() -> None:
    """Regression: it was told on the host, where a GPU's group exchanges nothing."""
    balancer = Balancer(make_placement(), 1, "exact", LocalGroup(make_topology()))
    assert balancer._device() == torch.device("cpu")
    balancer.placed_on(torch.device("meta"))
    assert balancer._device() == torch.device("meta")
    balancer.load(other_placement())
    assert balancer._device() == torch.device("meta")
