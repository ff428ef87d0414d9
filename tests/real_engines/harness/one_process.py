"""SGLang's records and isoload's layers in one process that plays the part of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import EXPERTS, LAYER, K, skewed_counts
from sglang.srt.eplb import expert_location, lplb_solver
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from sglang.srt.layers.moe import topk as sglang_topk
from sglang.srt.runtime_context import get_context
from torch import Tensor

import isoload
from isoload import Balancer
from isoload.engines.settings import Settings
from isoload.engines.sglang import LAYERS, dispatch
from isoload.engines.sglang.layers import Layer
from isoload.engines.tables import replica_lists
from support.fake_ranks import OneRank

RANKS = 4
ORIGINAL = sglang_topk.resolve_routing_inputs


def published(**fields: Any) -> Any:
    """SGLang's configuration of a process, inside a with block."""
    return get_context().override_server_args(device="cpu", **fields)


def draw(tokens: int, seed: int = 0) -> Tensor:
    skew = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(7)).pow(4)
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(skew.expand(tokens, -1), K, generator=generator).int()


def info_of(placement: isoload.Placement, algorithm: str, layer: int = LAYER) -> Any:
    lists = replica_lists(placement)
    return ExpertLocationDispatchInfo(
        ep_dispatch_algorithm=algorithm,
        partial_logical_to_rank_dispatch_physical_map=None,
        partial_logical_to_all_physical_map=lists.logical_to_physical[layer],
        partial_logical_to_all_physical_map_num_valid=lists.num_replicas[layer],
        num_physical_experts=placement.num_slots,
        rank_invariant=True,
    )


def same_tokens(placement: isoload.Placement, layer: int = LAYER) -> Layer:
    return Layer(Balancer(placement, layer, tokens="same", shared_columns=False), None)


def own_tokens(placement: isoload.Placement, layer: int = LAYER, rank: int = 1, loads: str = "own") -> Layer:
    """Of one rank, without its peers."""
    how: Any = {"group": OneRank(rank, placement.topology), "loads": loads, "shared_columns": False}
    return Layer(Balancer(placement, layer, **how), None)


def resolved(info: Any, num_valid: Tensor | None = None) -> Any:
    return dispatch.resolve_routing_inputs(
        ORIGINAL,
        layer_id=LAYER,
        is_draft=False,
        num_token_non_padded=num_valid,
        expert_location_dispatch_info=info,
    )[1]


def peak(slots: Tensor, placement: isoload.Placement) -> int:
    return int(torch.bincount(slots.flatten().long() // placement.slots_per_rank, minlength=RANKS).max())


@pytest.fixture
def placement() -> isoload.Placement:
    return isoload.place(skewed_counts(), isoload.Topology(RANKS), EXPERTS // RANKS + 2)


@pytest.fixture
def attached() -> Iterator[None]:
    """The state of a process whose hooks are attached; none is. What a test gave to SGLang is taken away again."""
    LAYERS.start(Settings.read({}))
    yield
    LAYERS.start(Settings.read({}))
    expert_location.set_global_expert_location_metadata(None, allow_overwrite=True)
    lplb_solver.clear_global_lplb_solvers()
