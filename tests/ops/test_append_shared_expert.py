"""append_shared_expert: SGLang's layout for one shared expert, room for several, and constant weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from support.shared_copies import draw_copies


def test_worked_example() -> None:
    """Two routed slots per rank, three ranks: a rank's slots become three, the last one shared."""
    slots = torch.tensor([[0, 5], [3, -1], [-1, -1], [2, 4]])
    weights = torch.tensor([[0.5, 0.25], [1.0, 7.0], [7.0, 7.0], [0.125, 0.5]])
    ranks = torch.tensor([[2], [0], [1], [-1]], dtype=torch.int32)
    new_slots, new_weights = ops.append_shared_expert(slots, weights, ranks, 2, weight=0.4)
    assert new_slots.tolist() == [[0, 7, 8], [4, -1, 2], [-1, -1, -1], [3, 6, -1]]
    expected = [[0.5, 0.25, 0.4], [1, 0, 0.4], [0, 0, 0], [0.125, 0.5, 0]]
    assert torch.equal(new_weights, torch.tensor(expected))


@pytest.mark.parametrize("ranks", [1, 3, 16, 72])
@pytest.mark.parametrize("routed_per_rank", [1, 2, 18])
def test_one_shared_expert_is_sglangs_layout(ranks: int, routed_per_rank: int) -> None:
    """id + id // old, r * (old + 1) + old (SGLang PR 20089), in the dtype given."""
    slots, weights, shared = draw_copies(1, 50, 4, 1, ranks, routed_per_rank)
    shared.clamp_(min=0)
    for dtype in (torch.int32, torch.int64):
        new_slots, new_weights = ops.append_shared_expert(
            slots.to(dtype), weights, shared, routed_per_rank, weight=1 / 2.5
        )
        routed = torch.where(slots < 0, -1, slots + slots.div(routed_per_rank, rounding_mode="floor"))
        valid = (slots >= 0).any(1, keepdim=True)
        column = torch.where(valid, shared * (routed_per_rank + 1) + routed_per_rank, -1)
        assert new_slots.dtype == dtype and torch.equal(new_slots, torch.cat([routed, column], 1).to(dtype))
        gates = torch.where(slots < 0, 0, weights)
        assert torch.equal(new_weights, torch.cat([gates, valid * torch.tensor(1 / 2.5)], 1))


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.float32), (torch.int64, torch.float64)])
@pytest.mark.parametrize("num_shared", [0, 1, 3])
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 8), (1, 1), (63, 6), (5, 0)])
def test_equals_reference(
    tokens: int, top_k: int, num_shared: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    for ranks, routed_per_rank, size in ((1, 5, None), (7, 3, 3 + num_shared), (12, 4, 9)):
        slots, weights, shared = draw_copies(2, tokens, top_k, num_shared, ranks, routed_per_rank)
        slots, weights = slots.to(dtypes[0]), weights.to(dtypes[1])
        args = (slots, weights, shared, routed_per_rank, size, 0.3)
        mine, theirs = ops.append_shared_expert(*args), reference.append_shared_expert(*args)
        for one, other in zip(mine, theirs, strict=True):
            assert one.shape == (tokens, top_k + num_shared)
            assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("num_shared", [1, 2])
def test_logical_ids_of_shared_experts_follow_the_routed(num_shared: int) -> None:
    experts = torch.tensor([[4, 0], [-1, 2], [-1, -1]])
    zeros = torch.zeros(3, num_shared, dtype=torch.int32)
    ids, _ = ops.append_shared_expert(experts, torch.ones(3, 2), zeros, routed_per_rank=5)
    assert torch.equal(ids[:, :2], experts)
    assert ids[:, 2:].tolist() == [[5, 6][:num_shared]] * 2 + [[-1] * num_shared]


def test_an_absent_copy_weighs_nothing_whatever_its_weight() -> None:
    weights = torch.tensor([[float("nan"), 0.5]])
    ranks = torch.tensor([[0]], dtype=torch.int32)
    _, gates = ops.append_shared_expert(torch.tensor([[-1, 0]]), weights, ranks, 1)
    assert gates.tolist() == [[0, 0.5, 1]]


def test_gradient_reaches_the_routed_copies_only() -> None:
    slots = torch.tensor([[0, -1], [3, 2], [-1, -1]])
    ranks = torch.tensor([[1], [0], [1]], dtype=torch.int32)
    weights = torch.rand(3, 2, requires_grad=True)
    new_slots, gates = ops.append_shared_expert(slots, weights, ranks, 2)
    assert not new_slots.requires_grad
    (gates * torch.arange(1.0, 10.0).view(3, 3)).sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [[1, 0], [4, 5], [0, 0]]


def test_gradcheck() -> None:
    slots, weights, shared = draw_copies(4, 9, 3, 2, 4, 2)
    gates = weights.double().requires_grad_()

    def new_weights(x: Tensor) -> Tensor:
        return ops.append_shared_expert(slots, x, shared, 2, weight=0.7)[1]

    assert torch.autograd.gradcheck(new_weights, (gates,))
    assert torch.autograd.gradgradcheck(new_weights, (gates,))


SLOTS = torch.tensor([[0, 5], [3, -1]])
RANKS = torch.tensor([[2], [0]], dtype=torch.int32)


def test_traced_gradient_equals_eager() -> None:
    def gates(weights: Tensor) -> Tensor:
        return ops.append_shared_expert(SLOTS, weights, RANKS, 2, weight=0.4)[1].square()

    gradients = []
    for function in (gates, torch.compile(gates, backend="aot_eager", fullgraph=True)):
        weights = torch.full((2, 2), 0.75, requires_grad=True)
        function(weights).sum().backward()
        gradients.append(weights.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert gradients[0].tolist() == [[1.5, 1.5], [1.5, 0]]
