"""Copies of a layer that records, runs over processes, has borrowed or is in a stack: deepcopy, EMA, torch.save."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import isoload
from isoload.policies import make_policy
from isoload.transport import CollectiveTransport, LocalTransport
from support import borrowed_layer
from support.processes import run_ranks
from support.small_layer import EXPERTS, make_setup


class Chosen(nn.Module):
    """A gate of one module, which pickle can name, for rows that know what they choose."""

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = rows.repeat(1, 2)[:, :EXPERTS].softmax(-1).topk(3)
        return ids, weights


def saved(layer: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(layer: nn.Module) -> Any:
    return AveragedModel(layer).module


def make_layer(
    policy: str = "exact", transport: Any = None, spare: int = 0, **how: Any
) -> tuple[Any, list[Any]]:
    setup = make_setup(4)
    counts = torch.rand(2, EXPERTS, generator=torch.Generator().manual_seed(1)) ** 3
    placement = isoload.place(counts, setup.topology, slots_per_rank=4 + spare, spare_slots=spare)
    transport = LocalTransport(setup.topology) if transport is None else transport
    return isoload.MoE(Chosen(), setup.dense, transport, placement, policy=policy, **how), setup.rows


OTHERS = (
    "shared_local",
    "waterfill",
    "waterfill_sampled",
    "joint",
    "llep_published",
)  # need other placements
ROUTED = [name for name in isoload.POLICIES if name not in OTHERS]
COPIES = {"deepcopy": copy.deepcopy, "average": averaged, "saved": saved}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("policy", ROUTED)
def test_a_copy_is_another_layer(duplicate: Any, policy: str) -> None:
    """After a batch of any policy; what draws goes on from the same batch."""
    borrows = make_policy(policy).borrows
    options = {"min_chunk": 1} if policy in ("llep", "spill_cost") else {}
    layer, rows = make_layer(policy, spare=2 if borrows else 0, **options)
    recorder = layer.balancer.recorder = isoload.Recorder(2, EXPERTS)
    layer(rows)
    recorded = recorder._now.clone()
    other = duplicate(layer)
    assert all(torch.equal(a, b) for a, b in zip(other(rows), layer(rows), strict=True))
    assert other.balancer.recorder is None and recorder._now.sum() == 2 * recorded.sum()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2.0)
    other.refresh_replicas()
    assert not any(torch.equal(a, b) for a, b in zip(layer(rows), other(rows), strict=True) if len(a))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_weights(use_buffers: bool) -> None:
    """Regression: storages were buffers, and AveragedModel copied the layer's over the average."""
    layer, rows = make_layer()
    average = AveragedModel(layer, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=use_buffers)
    wanted = [p.detach().clone() for p in layer.parameters()]
    for _ in range(3):
        average.update_parameters(layer)
        wanted = [w.lerp(p.detach(), 0.25) for w, p in zip(wanted, layer.parameters(), strict=True)]
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(1.0)
    assert all(map(torch.allclose, average.module.parameters(), wanted))
    with pytest.raises(ValueError, match=r"call refresh_replicas\(\) on all ranks"):
        average(rows)
    average.module.refresh_replicas()
    dense = average.module.full_state_dict()
    plain, _ = make_layer()
    plain.load_full_state_dict(dense)
    assert all(torch.equal(a, b) for a, b in zip(average(rows), plain(rows), strict=True))


def test_a_copy_is_in_no_stack() -> None:
    layer, rows = make_layer()
    stack = isoload.LibraStack([layer], None)
    other = copy.deepcopy(layer)
    assert layer.run_by is not None and other.run_by is None
    other(rows)  # with gradients, which a stack refuses
    stack.close()


def on_rank(rank: int, policy: str, backend: str | None) -> bool:
    setup = borrowed_layer.make_setup(3)
    how = {**borrowed_layer.LLEP, "borrow": backend} if backend else {"policy": policy}
    layer = setup.layer(CollectiveTransport(setup.placement.topology), **how)
    layer.balancer.recorder = isoload.Recorder(1, 16)
    rows = setup.rows[rank]
    layer(rows)
    for duplicate in (copy.deepcopy, averaged):
        other = duplicate(layer)
        assert other.group is layer.group and other.dispatcher is layer.dispatcher
        leaves = [rows.clone().requires_grad_() for _ in range(2)]
        ys = [own(x) for own, x in zip((layer, other), leaves, strict=True)]
        for y in ys:
            y.square().sum().backward()
        assert torch.equal(*ys) and torch.equal(leaves[0].grad, leaves[1].grad)
        for a, b in zip(layer.parameters(), other.parameters(), strict=True):
            assert a.data_ptr() != b.data_ptr() and torch.equal(a.grad, b.grad)
        layer.zero_grad()
    layer.gate = nn.Identity()  # the gate of tests is a function that pickle does not know
    with pytest.raises(
        TypeError, match=r"over processes cannot be pickled .* save its state_dict\(\) on every rank"
    ):
        saved(layer)
    layer.borrowing.backend.reads_peers = True  # as pull, over the symmetric memory of GPUs
    with pytest.raises(
        TypeError, match="whose weights other processes read in place, cannot be copied: load its"
    ):
        copy.deepcopy(layer)
    return True


@pytest.mark.parametrize(("policy", "backend"), [("exact", None), ("llep", "all_to_all")])
def test_copies_over_processes(policy: str, backend: str | None) -> None:
    assert run_ranks(on_rank, 3, policy, backend) == [True] * 3


def test_a_balanced_model_is_saved_whole() -> None:
    from support.hugging_face import balanced

    model, layers = balanced("qwen3", policy="exact")
    layers[0].balancer.recorder = isoload.Recorder(2, 8)
    ids = torch.randint(1, 64, (2, 9), generator=torch.Generator().manual_seed(5))
    for duplicate in (copy.deepcopy, saved):
        assert torch.equal(duplicate(model)(ids).logits, model(ids).logits)
