"""Parameters and replicas in one storage: they stay so, and stale values are noticed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from isoload.layer.moe import MoE
from isoload.transport import LocalTransport
from isoload.weights.experts import ExpertWeights
from isoload.weights.layout import Layout
from isoload.weights.storage import RankWeights
from support.small_layer import STACKS, make_setup


def make_layer(**how):
    setup = make_setup(4, bias=True, **how)
    return MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement, weight_rows=6), setup


def check_storage(layer, dtype=torch.float64):
    """Parameters show the first rows of the storages; what refresh writes is what replicas then hold."""
    for weights in layer.weights:
        for name in STACKS:
            home, stored = getattr(weights, name), getattr(weights, f"stored_{name}")
            assert home.dtype == stored.dtype == dtype and len(stored) == 6
            assert home.data_ptr() == stored.data_ptr() and len(home) == len(weights.layout.homes)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5)
    layer.refresh_replicas()
    home = {e: (w, i) for w in layer.weights for i, e in enumerate(w.layout.homes)}
    assert any(w.layout.replicas for w in layer.weights)
    for weights in layer.weights:
        for i, expert in enumerate(weights.layout.replicas):
            owner, row = home[expert]
            for stored, homes in zip(weights.stored_rows(), owner.home_rows(), strict=True):
                assert torch.equal(stored[len(weights.layout.homes) + i], homes[row])


def test_storage_is_shared():
    layer, _ = make_layer()
    check_storage(layer)
    names = {f"weights.{r}.{n}" for r in range(4) for n in STACKS}
    assert {n for n, _ in layer.named_parameters()} == names
    assert set(layer.state_dict()) == names | {f"weights.{r}.home_experts" for r in range(4)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_storage_moves_as_a_whole(dtype):
    layer, setup = make_layer()
    parameters = list(layer.parameters())
    layer.to(dtype)
    check_storage(layer, dtype)
    assert all(a is b for a, b in zip(layer.parameters(), parameters, strict=True))
    layer.double()
    check_storage(layer)
    assert all(torch.isfinite(y).all() for y in layer(setup.rows))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"]
)
def test_duplicates_share_their_own_storage(duplicate):
    layer, _ = make_layer()
    weights = layer.weights
    layer.weights = duplicate(weights)
    for old, new in zip(weights.parameters(), layer.weights.parameters(), strict=True):
        assert torch.equal(old, new) and (not old.numel() or old.data_ptr() != new.data_ptr())
    check_storage(layer)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_arrive_in_the_storage(assign):
    layer, setup = make_layer()
    state = layer.state_dict()
    state |= {name: torch.full_like(value, 0.25) for name, value in layer.named_parameters()}
    layer.load_state_dict(state, assign=assign)
    assert all((p == 0.25).all() for p in layer.parameters())
    check_storage(layer)


@pytest.mark.parametrize("change", ["step", "refresh"])
@pytest.mark.parametrize("copied", [False, True])
def test_a_backward_over_changed_weights_raises(change, copied):
    layer, setup = make_layer()
    if copied:
        layer.weights = copy.deepcopy(layer.weights)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    sum(y.sum() for y in layer(setup.rows)).backward()
    loss = sum((y**2).sum() for y in layer(setup.rows))
    if change == "step":
        optimizer.step()
    else:
        layer.refresh_replicas()
    with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
        loss.backward()


def test_copies_by_slot_end_where_those_of_the_rows_do():
    dense = ExpertWeights.random(4, 4, 4)
    held = RankWeights(Layout((0, 1), (3,), (0, 1, -1, 2, -1)), dense, num_rows=4, spare_slots=1)
    assert held.row_ends([2, 2, 2, 5, 6]) == [
        2,
        2,
        5,
        5,
        6,
    ]  # the fourth row holds no expert, the fifth is borrowed
    with pytest.raises(ValueError, match="slot 2 must have no copies, since it holds no expert, got ends"):
        held.row_ends([2, 2, 3, 5, 6])
    other = RankWeights(Layout((0, 1), (3,), (2, 0, 1)), dense, num_rows=3)
    assert other.row_ends([1, 2, 3]) is None
    assert RankWeights(Layout((), (), (-1,)), dense, num_rows=1, spare_slots=1).row_ends([3]) == [0, 3]
