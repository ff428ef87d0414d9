"""vLLM's hooks over 2 and 4 processes with tokens of their own: what an all-to-all would be given, counted over all."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import isoload
from isoload.engines.layers import EXCHANGE_EVERY
from isoload.engines.settings import Settings
from isoload.engines.tables import replica_lists
from isoload.engines.vllm import MODELS, dispatch
from isoload.online import switch
from isoload.online.switch import AGREE_EVERY
from support.oracles import flow_optimum
from support.processes import rank_outcomes, run_ranks

EXPERTS, K, LAYERS = 16, 4, 2
WITHOUT_AND_WITH_TARGETS = slice(EXCHANGE_EVERY), slice(EXCHANGE_EVERY, None)  # steps
CASES = ("full", "padded", "one rank empty", "all empty", "few")


class State(SimpleNamespace):
    """As EplbModelState."""


def draw(case: str, rank: int) -> tuple[Tensor, int]:
    """(logical ids [T, K], rows that are no padding) of a rank."""
    tokens = {"full": 100, "padded": 64, "one rank empty": 45 * (rank != 0), "all empty": 0, "few": 3}[case]
    generator = torch.Generator().manual_seed(100 * CASES.index(case) + rank)
    skew = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(7)).pow(6)
    ids = torch.empty(0, K, dtype=torch.int32)
    if tokens:
        ids = torch.multinomial(skew.expand(tokens, -1), K, generator=generator).int()
    return ids, tokens // 2 + rank if case == "padded" else tokens


def placed(ranks: int, seed: int) -> isoload.Placement:
    loads = torch.rand(LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed)).pow(4) * 1000
    return isoload.place(loads, isoload.Topology(ranks), EXPERTS // ranks + 2)


def add_model(
    rank: int,
    ranks: int,
    table: Tensor | None = None,
    loads: str = "gathered",
    micro_batches: bool = False,
    **variables: str,
) -> Any:
    """A model of a process whose hooks are in place; vLLM's groups stand on this test's."""
    module = ModuleType("vllm.distributed.parallel_state")
    group = SimpleNamespace(world_size=ranks, rank_in_group=rank, device_group=dist.group.WORLD)
    module.get_ep_group, module.get_node_count = lambda: group, lambda: 1  # type: ignore[attr-defined]
    sys.modules.update(dict.fromkeys(("vllm", "vllm.distributed", "vllm.distributed.parallel_state"), module))
    lists = replica_lists(placed(ranks, 0))
    config = SimpleNamespace(is_sequence_parallel=False)
    runner = SimpleNamespace(do_naive_dispatch_combine=False, is_monolithic=False, moe_config=config)
    state = State(
        physical_to_logical_map=lists.physical_to_logical if table is None else table,
        logical_to_physical_map=lists.logical_to_physical,
        model=SimpleNamespace(num_logical_experts=EXPERTS, moe_layers=[runner] * LAYERS, expert_weights=[]),
        model_name="model",
        rebalanced=False,
    )
    parallel = SimpleNamespace(
        data_parallel_size=ranks, tensor_parallel_size=1, prefill_context_parallel_size=1,
        enable_elastic_ep=False, use_ubatching=micro_batches,
        eplb_config=SimpleNamespace(num_redundant_experts=state.physical_to_logical_map.shape[1] - EXPERTS),
    )  # fmt: skip
    MODELS.start(Settings.read({"ISOLOAD_LOADS": loads} | variables))
    MODELS.add(state, parallel)
    return state


def route(state: Any, ids: Tensor, valid: int) -> tuple[Tensor, Tensor]:
    """(slots, recorded loads) of layer 1."""
    loads = torch.zeros(state.physical_to_logical_map.shape[1], dtype=torch.int32)
    given = state.logical_to_physical_map[1], torch.zeros(0), torch.tensor(True)
    slots = dispatch.map_and_record(lambda rows, *_: rows, ids, loads, *given, torch.tensor(valid))
    return slots, loads


def serve(rank: int, ranks: int) -> dict[str, Any]:
    state = add_model(rank, ranks)
    found: dict[str, Any] = {}
    for case in (*CASES, "rebalanced"):
        if case == "rebalanced":
            dispatch.on_layer_committed(lambda *_: None, state, placed(ranks, 1).slot_to_expert.long())
        ids, valid = draw("full" if case == "rebalanced" else case, rank)
        slots, loads = route(state, ids, valid)
        found[case] = ids[:valid], slots[:valid], loads
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_copies_of_all_ranks_are_as_level_as_can_be(ranks: int) -> None:
    outcome = run_ranks(serve, ranks, ranks)
    for case in (*CASES, "rebalanced"):
        table = placed(ranks, int(case == "rebalanced")).slot_to_expert[1]
        counts, per_slot = torch.zeros(EXPERTS, dtype=torch.int64), torch.zeros(len(table), dtype=torch.int64)
        for ids, slots, loads in (of_rank[case] for of_rank in outcome):
            assert torch.equal(table[slots.long()], ids)
            counts += torch.bincount(ids.flatten().long(), minlength=EXPERTS)
            own = torch.bincount(slots.flatten().long(), minlength=len(table))
            assert torch.equal(loads, own.int()), "recorded"
            per_slot += own
        peak = int(per_slot.view(ranks, -1).sum(1).max())
        assert peak == flow_optimum(counts.numpy(), table.numpy(), ranks), case


def differ(rank: int, ranks: int) -> None:
    """The second rank's experts lie elsewhere."""
    table = placed(ranks, 0).slot_to_expert.long()
    add_model(rank, ranks, table.flip(1) if rank else table)


def move_differently(rank: int, ranks: int) -> None:
    state = add_model(rank, ranks)
    dispatch.on_layer_committed(lambda *_: None, state, placed(ranks, 1 + rank).slot_to_expert.long())


@pytest.mark.parametrize("body", [differ, move_differently])
def test_ranks_that_disagree_where_experts_lie_all_raise(body: Any) -> None:
    for outcome in rank_outcomes(body, 2, 2):
        assert outcome.error is not None and "must be the same on all ranks" in outcome.error


def route_after_a_disagreement(rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    state = add_model(rank, ranks)
    with pytest.raises(ValueError, match="must be the same on all ranks"):
        dispatch.on_layer_committed(lambda *_: None, state, placed(ranks, 1 + rank).slot_to_expert.long())
    ids, valid = draw("full", rank)
    return ids, route(state, ids, valid)[0]


def test_a_placement_that_ranks_disagree_about_is_used_by_none() -> None:
    table = placed(2, 0).slot_to_expert[1]
    for ids, slots in run_ranks(route_after_a_disagreement, 2, 2):
        assert torch.equal(table[slots.long()], ids)


def draw_step(step: int, rank: int) -> list[Tensor]:
    """Two micro-batches on the last of three ranks, one on the second, none on the first; a domain for each rank."""
    skew = torch.rand(3, EXPERTS, generator=torch.Generator().manual_seed(7)).pow(4)[rank]
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.multinomial(skew.expand(40, -1), K, generator=generator).int() for _ in range(rank)]


def serve_own(rank: int, ranks: int) -> dict[str, Any]:
    """Micro-batches of a step at once, in threads that do not wait for each other."""
    state = add_model(rank, ranks, loads="", micro_batches=True)
    holder, found = SimpleNamespace(model_states={"model": state}), []
    if rank == 0:
        dispatch.step(lambda *_, **__: None, holder, is_profile=True)
    with ThreadPoolExecutor(2) as threads:
        for step in range(2 * EXCHANGE_EVERY):
            batches = draw_step(step, rank)
            found.append(list(threads.map(lambda ids: route(state, ids, len(ids)), batches)))
            dispatch.step(lambda *_, **__: None, holder, is_dummy=not batches)
    counts = MODELS.layers(state).by_id[1].balancer.own_counts  # type: ignore[union-attr]
    assert counts is not None
    return {"found": found, "offset": counts.offset[0]}


def test_with_own_counts_ranks_meet_only_between_steps() -> None:
    """With none, one and two micro-batches each: any exchange in a pass would wait for ever."""
    ranks = 3
    outcome, table = run_ranks(serve_own, ranks, ranks), placed(ranks, 0).slot_to_expert[1]
    peaks, bounds = [], []
    for step in range(2 * EXCHANGE_EVERY):
        counts, per_slot = torch.zeros(EXPERTS, dtype=torch.int64), torch.zeros(len(table), dtype=torch.int64)
        for rank in range(ranks):
            batches = draw_step(step, rank)
            for ids, (slots, loads) in zip(batches, outcome[rank]["found"][step], strict=True):
                assert torch.equal(table[slots.long()], ids)
                own = torch.bincount(slots.flatten().long(), minlength=len(table))
                assert torch.equal(loads, own.int()), "recorded"
                counts += torch.bincount(ids.flatten().long(), minlength=EXPERTS)
                per_slot += own
        peaks.append(int(per_slot.view(ranks, -1).sum(1).max()))
        bounds.append(flow_optimum(counts.numpy(), table.numpy(), ranks))
    before, after = (sum(peaks[part]) / sum(bounds[part]) for part in WITHOUT_AND_WITH_TARGETS)
    assert after < 1.01 < before
    assert any(of_rank["offset"].any() for of_rank in outcome), "targets came"


def first_replica(ids: Tensor, loads: Tensor, maps: Tensor, *_: Any) -> Tensor:
    """vLLM's choice, here."""
    return maps[ids.long(), 0].to(ids.dtype)


STATES = ("off", "maybe", "on", "off")  # of the first rank's file, each for AGREE_EVERY passes and a half


def switched(rank: int, ranks: int, folder: str) -> list[tuple[bool, str]]:
    """By pass whether layer 1 had vLLM's slots, and the state afterwards. Ranks pad differently."""
    switch.READ_EVERY = 0.0
    path = Path(folder, f"switch{rank}")
    state = add_model(rank, ranks, ISOLOAD_SWITCH=str(path))
    layers = MODELS.layers(state)
    assert layers is not None and layers.switch is not None
    holder, passes = SimpleNamespace(model_states={"model": state}), []
    for number in range(AGREE_EVERY * 6):
        if number % (AGREE_EVERY * 3 // 2) == 0:
            path.write_text(STATES[number // (AGREE_EVERY * 3 // 2)] if rank == 0 else "maybe")
        ids = draw("padded", rank)[0]
        loads = torch.zeros(len(placed(ranks, 0).slot_to_expert[1]), dtype=torch.int32)
        maps = state.logical_to_physical_map[1]
        slots = dispatch.map_and_record(
            first_replica, ids, loads, maps, torch.zeros(0), torch.tensor(True), torch.tensor(40 + rank)
        )
        counted = torch.bincount(slots[: 40 + rank].flatten().long(), minlength=len(loads))
        assert torch.equal(loads, counted.int()), "recorded for vLLM, whoever chose"
        theirs = torch.equal(slots, first_replica(ids, loads, maps))
        dispatch.step(lambda *_, **__: None, holder)
        passes.append((theirs, layers.switch.state))
    return passes


def test_a_switch_turns_all_ranks_behind_the_same_step(tmp_path: Path) -> None:
    """The first rank's file is read late, the other's has no state."""
    first, second = run_ranks(switched, 2, 2, str(tmp_path))
    assert first == second
    before = ["on", *(state for _, state in first)]
    assert [theirs for theirs, _ in first] == [state == "off" for state in before[:-1]]
    turns = [number for number, (_, state) in enumerate(first) if state != before[number]]
    assert turns == [AGREE_EVERY - 1, 4 * AGREE_EVERY - 1, 5 * AGREE_EVERY - 1]
