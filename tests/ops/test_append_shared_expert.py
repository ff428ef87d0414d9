"""append_shared_expert: SGLang's layout for one shared expert, room for several, and constant weights."""

from __future__ import annotations

from typing import Any

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


def test_inputs_stay_as_they_are_and_need_not_be_contiguous() -> None:
    slots, weights, shared = draw_copies(3, 20, 4, 2, 5, 3)
    before = slots.clone(), weights.clone(), shared.clone()
    plain = ops.append_shared_expert(slots, weights, shared, 3)
    turned = [x.t().contiguous().t() for x in (slots, weights, shared)]
    for one, other in zip(plain, ops.append_shared_expert(*turned, 3), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(x, y) for x, y in zip(before, (slots, weights, shared), strict=True))


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
WEIGHTS = torch.ones(2, 2)
RANKS = torch.tensor([[2], [0]], dtype=torch.int32)
BIG = 2**30

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "slots dtype": ({"slots": SLOTS.float()}, "slots must be int32 or int64, got float32"),
    "slots 1-d": ({"slots": SLOTS[0]}, r"slots must be \[T, K\], got \[2\]"),
    "slot low": ({"slots": SLOTS - 2}, "slots must be in -1..2\\^31-1, got -2"),
    "slot high": ({"slots": SLOTS + 2**31}, "slots must be in -1..2\\^31-1, got 2147483648"),
    "weights dtype": ({"weights": WEIGHTS.half()}, "weights must be float32 or float64, got another dtype"),
    "weights ids": ({"weights": SLOTS}, "weights must be float32 or float64, got int64"),
    "weights shape": ({"weights": WEIGHTS[:1]}, r"weights must have shape \[2, 2\], got \[1, 2\]"),
    "ranks dtype": ({"ranks": RANKS.long()}, "ranks must be int32, got int64"),
    "ranks 1-d": ({"ranks": RANKS[:, 0]}, r"ranks must be \[2, n\], got \[2\]"),
    "ranks rows": ({"ranks": RANKS[:1]}, r"ranks must be \[2, n\], got \[1, 1\]"),
    "rank low": ({"ranks": RANKS - 2}, "ranks must be -1 or more, got -2"),
    "no routed": ({"routed_per_rank": 0}, "routed_per_rank must be in 1..2147483646, got 0"),
    "slots_per_rank low": (
        {"slots_per_rank": 2},
        r"slots_per_rank must be in 3..2\^31-1 \(routed_per_rank \+ 1 shared\), got 2",
    ),
    "slots_per_rank high": (
        {"slots_per_rank": 2**31},
        r"slots_per_rank must be in 3..2\^31-1 .*, got 2147483648",
    ),
    "routed too large": (
        {"slots_per_rank": BIG},
        "slots_per_rank must leave every slot below 2\\^31, got 1073741824, which makes slot 2147483649",
    ),
    "shared too large": (
        {"slots": SLOTS % 2, "slots_per_rank": BIG},
        "slots_per_rank must leave every slot below 2\\^31, got 1073741824, which makes slot 2147483650",
    ),
    "many copies": (
        {
            "slots": torch.empty(2**21, 0, dtype=torch.int64),
            "weights": torch.empty(2**21, 0),
            "ranks": RANKS[:1].expand(2**21, 1024),
        },
        r"slots and ranks must have fewer than 2\^31 copies together, got 2147483648",
    ),
    "weight nan": ({"weight": float("nan")}, "weight must be a finite float32, got nan"),
    "weight of 64 bits": ({"weight": 1e300}, r"weight must be a finite float32, got 1e\+300"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    changed, message = REFUSED[name]
    args = {"slots": SLOTS, "weights": WEIGHTS, "ranks": RANKS, "routed_per_rank": 2}
    with pytest.raises(ValueError, match=message):
        ops.append_shared_expert(**{**args, **changed})


def test_opcheck() -> None:
    op = torch.ops.isoload.append_shared_expert.default
    torch.library.opcheck(op, (SLOTS, WEIGHTS, RANKS, 2, None, 0.4))
    torch.library.opcheck(op, (SLOTS.int(), WEIGHTS.double(), RANKS.expand(2, 2), 2, 5, 1.0))
    # With a gradient, opcheck's last util adds up integer and float outputs in place and fails by itself.
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")
    trained = WEIGHTS.clone().requires_grad_()
    torch.library.opcheck(op, (SLOTS, trained, RANKS, 2, None, 0.4), test_utils=utils)


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
