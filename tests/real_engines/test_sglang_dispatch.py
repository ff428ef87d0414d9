"""`lp` and Waterfill on SGLang's own classes over gloo: what its dispatcher would be given, counted over all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import sglang.srt.managers.scheduler  # noqa: F401  # once, before ranks are forked
import torch
from deepseek_config import make_config
from ranks import CASES, EXPERTS, LAYER, K, lose_last_rank, serve, serve_phases, serve_spare
from torch import Tensor

import isoload
from support.processes import rank_outcomes, run_ranks

os.environ["HF_HUB_OFFLINE"] = "1"
MODES: dict[str, tuple[str, bool, dict[str, str]]] = {
    "lp": ("lp", False, {}),
    "joint": ("lp", True, {"ISOLOAD_POLICY": "joint"}),  # what it would be without the variable, too
    "waterfill": ("static", True, {}),
    "own": ("dynamic", False, {}),
    "lp of own": ("lp", False, {"ISOLOAD_LOADS": "own"}),
    "own, waterfill": ("dynamic", True, {}),
}
WITH_SHARED = [mode for mode, (_, waterfill, _) in MODES.items() if waterfill]
AGAIN = ("renewed", "rebalanced")
RUNS = [(mode, ranks) for ranks in (2, 4) for mode in MODES]


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_config(tmp_path_factory.mktemp("deepseek"))


_served: dict[tuple[str, int], list[dict[str, Any]]] = {}


@pytest.fixture(params=RUNS, ids=lambda run: f"{run[0]}-{run[1]} ranks")
def served(request: pytest.FixtureRequest, config: Path) -> tuple[str, list[dict[str, Any]]]:
    """(mode, what every rank found)"""
    mode, ranks = request.param
    if request.param not in _served:
        _served[request.param] = run_ranks(serve, ranks, ranks, *MODES[mode], config, timeout=120.0)
    return mode, _served[request.param]


def rank_loads(slots: list[Tensor], ranks: int, per_rank: int) -> Tensor:
    copies = torch.cat([rows[rows >= 0] for rows in slots]).long()
    return torch.bincount(copies // per_rank, minlength=ranks)


def routed_slots(rows: Tensor, mode: str, per_rank: int) -> Tensor:
    """[T, K] numbered without shared slots, undone by hand."""
    if mode not in WITH_SHARED:
        return rows
    routed = rows[:, :-1]
    return torch.where(routed < 0, -1, routed // (per_rank + 1) * per_rank + routed % (per_rank + 1))


@pytest.mark.parametrize("case", [*CASES, *AGAIN])
def test_every_copy_reaches_its_expert(served: tuple[str, list[dict[str, Any]]], case: str) -> None:
    mode, ranks = served
    for found in (of_rank[case] for of_rank in ranks):
        ids, valid = found["ids"], found["valid"]
        slots = routed_slots(found["slots"], mode, len(found["table"]) // len(ranks))
        assert slots.shape == ids.shape and slots.dtype == ids.dtype
        assert torch.equal(found["table"][slots[:valid].long()].int(), ids[:valid])
        assert (slots[valid:] == -1).all()


@pytest.mark.parametrize("case", [*CASES, *AGAIN])
def test_the_busiest_rank_is_as_planned(served: tuple[str, list[dict[str, Any]]], case: str) -> None:
    """Counted over all ranks: behind lp every slot has its quota, and no plan is better."""
    mode, ranks = served
    per_rank = len(ranks[0][case]["table"]) // len(ranks)
    slots = [of_rank[case]["slots"] for of_rank in ranks]
    shared = mode in WITH_SHARED
    size = per_rank + shared
    loads = rank_loads(slots, len(ranks), size)
    tokens = sum(of_rank[case]["valid"] for of_rank in ranks)
    assert int(loads.sum()) == tokens * (K + shared)
    if mode.endswith("waterfill"):  # the level to which shared copies fill the ranks, by trying all
        routed = rank_loads([routed_slots(rows, mode, per_rank) for rows in slots], len(ranks), per_rank)
        level = next(n for n in range(10**6) if int((n - routed).clamp(min=0).sum()) >= tokens)
        assert int(loads.max()) == max(level, int(routed.max()))
        return
    if mode.endswith("own"):
        table, counts = (
            ranks[0][case]["table"],
            [isoload.count(of_rank[case]["ids"][: of_rank[case]["valid"]], EXPERTS) for of_rank in ranks],
        )
        placed = isoload.Placement(table.int().unsqueeze(0), isoload.Topology(len(ranks)), EXPERTS)
        assert int(loads.max()) <= 1.03 * int(isoload.plan(torch.stack(counts), placed, 0).bound) + 2
        return
    quota, peak, bound = ranks[0][case]["plan"]
    assert all(torch.equal(of_rank[case]["plan"][0], quota) for of_rank in ranks), "all ranks plan alike"
    copies = torch.cat([rows[rows >= 0] for rows in slots]).long()
    assert torch.equal(torch.bincount(copies, minlength=len(ranks) * size), quota.long())
    assert int(loads.max()) == peak <= 1.001 * bound
    if mode == "joint" and case == "full":
        assert peak == -(-tokens * (K + 1) // len(ranks)), "shared copies level all ranks"


@pytest.mark.parametrize("case", [*CASES, *AGAIN])
def test_layout_of_waterfill(served: tuple[str, list[dict[str, Any]]], case: str) -> None:
    """As SGLang's expand_topk_with_shared_expert lays it out; only the shared column's rank is free."""
    mode, ranks = served
    if mode not in WITH_SHARED:
        assert all(of_rank[case]["slots"].shape[1] == K for of_rank in ranks)
        return
    for found in (of_rank[case] for of_rank in ranks):
        slots, weights, valid = found["slots"], found["weights"], found["valid"]
        per_rank = len(found["table"]) // len(ranks)
        assert slots.shape == weights.shape == (len(found["ids"]), K + 1)
        shared = slots[:, -1]
        assert (shared[:valid] % (per_rank + 1) == per_rank).all() and (shared[valid:] == -1).all()
        assert (slots[:, :-1] % (per_rank + 1) != per_rank)[slots[:, :-1] >= 0].all()
        assert torch.equal(weights[:valid, :-1], found["given"][:valid])
        assert torch.allclose(weights[:valid, -1], torch.tensor(1 / 2.5)) and not weights[valid:].any()


def test_own_counts_exchange_nothing_in_a_pass(served: tuple[str, list[dict[str, Any]]]) -> None:
    """Waterfill's gather is of the layers' shared copies."""
    mode, ranks = served
    for of_rank in ranks:
        assert ("gather" in of_rank["exchanged"]) == (mode not in ("own", "lp of own"))
        assert "exchange" not in of_rank["exchanged"], "before the end of a pass"


def test_a_rebalance_moves_no_memory(served: tuple[str, list[dict[str, Any]]]) -> None:
    mode, ranks = served
    assert all(of_rank["pointers kept"] for of_rank in ranks)
    tables = [(of_rank["full"]["table"], of_rank["rebalanced"]["table"]) for of_rank in ranks]
    assert all(not torch.equal(old, new) for old, new in tables), "experts have moved"
    assert len(tables[0][0]) == EXPERTS + 2 * len(ranks)


def test_ranks_in_different_phases_choose_one_policy(config: Path) -> None:
    """By what SGLang's own schedulers agree about, a rank without tokens too."""
    passes = zip(*run_ranks(serve_phases, 2, 2, config, timeout=120.0), strict=True)
    for ranks, policy in zip(passes, ("joint", "exact_active", "joint"), strict=True):
        assert [of["policy"] for of in ranks] == [policy] * 2
        slots = torch.cat([of["slots"].flatten() for of in ranks]).long()
        assert len(slots) and torch.equal(
            torch.bincount(slots, minlength=len(ranks[0]["plan"])), ranks[0]["plan"].long()
        )


def test_ranks_that_do_not_agree_on_a_phase_all_raise(config: Path) -> None:
    for outcome in rank_outcomes(serve_phases, 2, 2, config, False, timeout=120.0):
        assert (
            outcome.error is not None and "checksum of policy must be the same on all ranks" in outcome.error
        )


def test_a_rank_that_is_gone_gets_no_copy(config: Path) -> None:
    """Behind --elastic-ep-backend, on SGLang's own state, placer and maps: no wait for it, no memory moved."""
    ranks, per_rank = 4, EXPERTS // 4 + 2
    for found in run_ranks(lose_last_rank, ranks, ranks, config, timeout=120.0)[:-1]:
        for case in ("before", "half", "gone", "back"):
            ids, slots, table = found[case]
            on_last = slots >= (ranks - 1) * per_rank
            assert torch.equal(table[slots.long()].int(), ids), case
            if case == "half":
                only_there = set(range(EXPERTS)) - set(table[: (ranks - 1) * per_rank].tolist())
                assert set() < set(ids[on_last].tolist()) <= only_there
                said = f"layer {LAYER} has no copy left of experts {sorted(only_there)}: ranks [{ranks - 1}] are gone"
                assert f"isoload: {said}" in found["said"]
            else:
                assert bool(on_last.any()) == (case != "gone")
        assert not found["gone"][2][(ranks - 1) * per_rank :].any(), "SGLang's map: expert 0 where nothing is"
        assert (found["gone"][0] == 0).any(), "which is asked for"
        assert found["kept"] and found["way"] == "loads own: nothing is exchanged, because ranks may leave"


@pytest.mark.parametrize("ranks", [2, 4])
def test_experts_travel_behind_lp_also_where_a_rank_has_no_token(ranks: int, config: Path) -> None:
    """SGLang's empty_topk_output calls the solver of a rank without tokens, which fills its slots as the others do."""
    served = run_ranks(serve_spare, ranks, ranks, config, timeout=120.0)
    for batches in zip(*served, strict=True):
        table, peak = batches[0]["table"], batches[0]["peak"]
        assert all(torch.equal(batch["table"], table) and batch["peak"] == peak for batch in batches)
        assert all(batch["weights"] == batch["experts"] for batch in batches), "the weights have arrived"
        for batch in batches:
            assert torch.equal(table[batch["slots"].long()], batch["ids"])
        loads = rank_loads([batch["slots"] for batch in batches], ranks, len(table) // ranks)
        assert int(loads.max()) == peak
    assert any(not len(batch["ids"]) and batch["moves"] for of in served for batch in of), "idle, and filled"
    assert not any(batch["moves"] for of in served for batch in of if not batch["prefill"])
