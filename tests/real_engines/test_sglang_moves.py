"""What happens when SGLang moves experts: plans follow what is committed, weights are compared, a stall is named."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_process import RANKS, draw, info_of, published, same_tokens
from ranks import EXPERTS, LAYER
from ranks import LAYERS as NUM_LAYERS
from sglang.srt.eplb import expert_location
from sglang.srt.eplb.expert_location_dispatch import _topk_ids_logical_to_physical_dynamic
from sglang.srt.utils.common import LazyValue
from torch import Tensor

import isoload
from isoload.engines.settings import Settings
from isoload.engines.sglang import LAYERS, dispatch
from isoload.engines.sglang import placement as sglang_placement


class Check:
    """In a WeightCheck's place."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def moved(self, tables: Tensor, layers: list[int] | None) -> None:
        self.calls.append((tables.clone(), layers))


@pytest.fixture
def served(attached: None, placement: isoload.Placement) -> Iterator[Any]:
    """A record of expert locations that SGLang has in use, and Balancers of its layers."""
    locations = SimpleNamespace(
        physical_to_logical_map_cpu=placement.slot_to_expert.long(), ep_size=RANKS, num_layers=NUM_LAYERS
    )
    LAYERS.place(locations.physical_to_logical_map_cpu, EXPERTS, placement.topology, torch.device("cpu"))
    LAYERS.by_id = {i: same_tokens(placement, i) for i in range(NUM_LAYERS)}
    expert_location.set_global_expert_location_metadata(locations, allow_overwrite=True)
    with published(ep_dispatch_algorithm="dynamic"):
        yield locations


def slots_of(placement: isoload.Placement, layer: int) -> Tensor:
    info = info_of(placement, "dynamic", layer)
    info.isoload_layer, info.isoload_num_valid = LAYERS.layer(layer), None
    return dispatch.map_dynamic(_topk_ids_logical_to_physical_dynamic, draw(30), info)


def test_no_plan_uses_a_half_moved_placement(served: Any, placement: isoload.Placement) -> None:
    """While weights travel, until a chunk's turn comes, and where it never does: by what is committed."""
    held, target = placement.slot_to_expert.long(), placement.slot_to_expert.flip(1).long()

    def plans_follow_what_is_committed() -> None:
        for layer in range(NUM_LAYERS):
            assert torch.equal(held[layer][slots_of(placement, layer).long()].int(), draw(30))

    def update(self: Any, other: Tensor, layers: list[int]) -> None:
        plans_follow_what_is_committed()
        self.physical_to_logical_map_cpu[layers] = other[layers]

    for chunk in ([2], [0]):
        sglang_placement.update_metadata(update, served, target, chunk)
        held[chunk] = target[chunk]
        plans_follow_what_is_committed()
    with pytest.raises(RuntimeError, match="a peer is gone"):
        sglang_placement.update_metadata(fail, served, target, [LAYER])
    plans_follow_what_is_committed()


def fail(*_: Any) -> None:
    raise RuntimeError("a peer is gone")


def test_the_layers_of_a_chunk_are_compared_where_the_balancers_have_them(
    served: Any, placement: isoload.Placement
) -> None:
    target, check = placement.slot_to_expert.flip(1).long(), Check()
    LAYERS.weights = check  # type: ignore[assignment]

    def update(self: Any, other: Tensor, layers: list[int]) -> None:
        self.physical_to_logical_map_cpu[layers] = other[layers]

    sglang_placement.update_metadata(update, served, target, [2])
    ((tables, layers),) = check.calls
    assert layers == [2] and torch.equal(tables[2], target[2]) and not torch.equal(tables[0], target[0])


@pytest.mark.parametrize("algorithm", ["dynamic", "lp"])
def test_detached_sglang_chooses_where_it_can(
    served: Any, placement: isoload.Placement, algorithm: str
) -> None:
    """Behind lp the only solvers are isoload's."""
    with published(ep_dispatch_algorithm=algorithm):
        text = LAYERS.detach()
    assert ("SGLang chooses replicas from now on" in text) == (algorithm == "dynamic")
    assert LAYERS.detached == (algorithm == "dynamic") and len(LAYERS.by_id) == NUM_LAYERS, "graphs read them"
    if algorithm == "dynamic":
        stock = _topk_ids_logical_to_physical_dynamic(draw(30), info_of(placement, "dynamic", LAYER))
        assert torch.equal(slots_of(placement, LAYER), stock)


def test_what_is_compared_is_what_sglang_moves(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(LAYERS, "announce", lambda: None)
    monkeypatch.setattr(LAYERS, "check_loaded", given.append)
    weights = {7: [torch.zeros(4, 2)], 3: [torch.ones(4, 2)]}
    model = SimpleNamespace(routed_experts_weights_of_layer=LazyValue(lambda: weights))
    for check, draft in ("0", False), ("1", True), ("1", False):
        LAYERS.settings = Settings.read({"ISOLOAD_CHECK_WEIGHTS": check})
        dispatch.initialize(lambda _: None, SimpleNamespace(is_draft_worker=draft, model=model))
    assert given == [weights]
    with pytest.raises(ValueError, match="ISOLOAD_CHECK_WEIGHTS needs a model with routed_experts_weights"):
        dispatch.initialize(lambda _: None, SimpleNamespace(is_draft_worker=False, model=object()))


def test_a_rebalance_in_chunks_is_watched_between_them(
    attached: None, caplog: pytest.LogCaptureFixture
) -> None:
    LAYERS.start(Settings.read({"ISOLOAD_STALLED_SECONDS": "1000"}))
    chunks: list[str] = []

    def rebalance(self: Any) -> Iterator[None]:
        for name in ("first", "second"):
            yield
            chunks.append(name)
            sglang_placement.update_metadata(lambda *_: None, None, None, [])

    going = sglang_placement.rebalance(rebalance, None)
    found = []
    for _ in going:
        now = LAYERS.watch._rebalance
        assert now is not None and now.entered is None and now.left is not None
        found.append(now.passes)
    assert chunks == ["first", "second"] and found == [1, 0] and LAYERS.watch._rebalance is None


def test_a_chunk_that_never_comes_is_named(attached: None, caplog: pytest.LogCaptureFixture) -> None:
    LAYERS.start(Settings.read({"ISOLOAD_STALLED_SECONDS": "1000"}))
    LAYERS.watch.seconds = 1e-6

    def rebalance(self: Any) -> Iterator[None]:
        while True:
            yield

    going = sglang_placement.rebalance(rebalance, None)
    with caplog.at_level(logging.ERROR, "isoload"):
        for _ in range(3):
            next(going)
        LAYERS.watch.look()
        LAYERS.watch.look()
    (record,) = caplog.records
    assert "isoload SGLang: EPLB has stalled" in record.getMessage()
    going.close()
    assert LAYERS.watch._rebalance is None, "SGLang has dropped it"
