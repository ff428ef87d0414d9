"""A policy for each phase in vLLM's hooks, whose records are made up here: by the tokens that its ranks agree about."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer
from isoload.engines.settings import Settings
from isoload.engines.tables import replica_lists
from isoload.engines.vllm import MODELS, dispatch, layers
from isoload.engines.vllm.layers import Layer

EXPERTS, K, RANKS, SIZE = 16, 4, 2, 10
MOST = 32  # tokens of a rank's pass of decode
SKEW = torch.rand(1, EXPERTS, generator=torch.Generator().manual_seed(7)).pow(4) * 1000 + 1


def placed() -> isoload.Placement:
    return isoload.place(SKEW, isoload.Topology(RANKS), SIZE)


def draw(tokens: int) -> Tensor:
    return torch.multinomial(SKEW.expand(tokens, -1), K, generator=torch.Generator().manual_seed(0)).int()


def runner() -> SimpleNamespace:
    sequence = SimpleNamespace(is_sequence_parallel=False)
    return SimpleNamespace(do_naive_dispatch_combine=False, is_monolithic=False, moe_config=sequence)


class State(SimpleNamespace):
    """As EplbModelState."""


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """vLLM's forward context in a process of rank 0."""
    context = SimpleNamespace(dp_metadata=None)
    groups, forward = ModuleType("vllm.distributed.parallel_state"), ModuleType("vllm.forward_context")
    groups.get_ep_group = lambda: SimpleNamespace(world_size=RANKS, rank_in_group=0)  # type: ignore[attr-defined]
    groups.get_node_count = lambda: 1  # type: ignore[attr-defined]
    forward.get_forward_context = lambda: context  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state"):
        monkeypatch.setitem(sys.modules, name, groups)
    monkeypatch.setitem(sys.modules, "vllm.forward_context", forward)
    monkeypatch.setattr(layers, "most_decoded", lambda *_, **__: MOST)
    MODELS.start(Settings.read({"ISOLOAD_POLICY": "prefill=exact,decode=exact_active"}))
    yield context
    MODELS.start(Settings.read({}))


@pytest.mark.parametrize(
    ("rows", "across", "phase"),
    [
        (MOST, None, "decode"), (MOST + 1, None, "prefill"), (MOST, [MOST, MOST], "decode"),
        (1, [MOST + 1, 1], "prefill"), (40, [20, 20], "decode"),
    ],
)  # fmt: skip
def test_a_phase_is_the_fullest_ranks(
    context: SimpleNamespace, rows: int, across: list[int] | None, phase: str
) -> None:
    """By what vLLM's ranks have agreed about, whatever this one's rows, of which it may hold those of all."""
    lists = replica_lists(placed())
    state = State(
        physical_to_logical_map=lists.physical_to_logical, logical_to_physical_map=lists.logical_to_physical,
        model=SimpleNamespace(num_logical_experts=EXPERTS, moe_layers=[runner()]), model_name="model",
    )  # fmt: skip
    eplb = SimpleNamespace(num_redundant_experts=RANKS * SIZE - EXPERTS)
    parallel = SimpleNamespace(
        data_parallel_size=1, prefill_context_parallel_size=1, enable_elastic_ep=False, eplb_config=eplb
    )
    MODELS.add(state, parallel)
    if across is not None:
        context.dp_metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(across))
    ids, counted = draw(rows), torch.zeros(RANKS * SIZE, dtype=torch.int32)
    maps = state.logical_to_physical_map[0], torch.zeros(0), torch.tensor(True)
    slots = dispatch.map_and_record(lambda *_: None, ids, counted, *maps)
    policy = "exact" if phase == "prefill" else "exact_active"
    alone = Balancer(placed(), 0, policy, tokens="same", shared_columns=False)
    held = MODELS.of(state).by_id[0].balancer  # type: ignore[union-attr]
    assert held.policy.name == policy and torch.equal(slots, alone(ids))


def test_a_rank_of_its_own_tokens_that_vllm_says_no_phase_of_raises(context: SimpleNamespace) -> None:
    """It would route by its own count, and others by theirs."""
    layer = Layer(Balancer(placed(), 0, tokens="same"), None, runner(), "own")
    with pytest.raises(RuntimeError, match="vLLM must say how many tokens each rank has"):
        layer.phase(1)
