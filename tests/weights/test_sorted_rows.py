"""run_sorted: what run_experts computes for rows of one copy each that lie by slot, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from isoload.weights.compute import run_experts, run_sorted
from isoload.weights.experts import BorrowedWeights, ClampedGLU, ExpertWeights, SwiGLU

HIDDEN, INNER = 16, 24


def stacks(
    sizes: tuple[int, ...], dtype: torch.dtype, bias: bool, draw: torch.Generator
) -> list[ExpertWeights]:
    made = [ExpertWeights.random(n, HIDDEN, INNER, bias=bias, generator=draw, dtype=dtype) for n in sizes]
    for group in made:
        for stack in group.stacks().values():
            stack.requires_grad_()
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ((3,), [2, 0, 3]),
        ((2, 2), [1, 0, 2, 4]),
        ((2, 1), [3, 1, 0]),
        ((1, 3), [0, 2, 0, 1]),
        ((2, 2), [0] * 4),
    ],
)
def test_run_experts_on_the_same_rows(
    sizes: tuple[int, ...], counts: list[int], bias: bool, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(sum(counts))
    groups = stacks(sizes, dtype, bias, draw)
    activation = ClampedGLU() if bias else SwiGLU()
    number = sum(counts)
    slots = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).unsqueeze(1)
    found = []
    for by_slot in (True, False):
        draw.manual_seed(7)
        rows = torch.randn(number, HIDDEN, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        weights = torch.rand(number, 1, generator=draw).requires_grad_()
        leaves = [rows, weights, *(stack for group in groups for stack in group.stacks().values())]
        for leaf in leaves:
            leaf.grad = None
        if by_slot:
            ends = [*torch.tensor(counts).cumsum(0).tolist(), number, number]  # a pool that nothing came to
            y = run_sorted(rows, weights, ends, groups, activation)
        else:
            y = run_experts(rows, slots, weights, groups, activation)
        y.float().square().sum().backward()
        found.append([y, *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(found[0][0], found[1][0])


def test_borrowed_weights_are_waited_for_where_they_are_used() -> None:
    draw, waited = torch.Generator().manual_seed(1), []
    resident, pool = (ExpertWeights.random(2, HIDDEN, INNER, generator=draw) for _ in "ab")
    borrowed = BorrowedWeights(pool.gate_up, pool.down, wait=lambda: waited.append(1))
    rows, weights = torch.randn(5, HIDDEN), torch.rand(5, 1)
    run_sorted(rows, weights, [2, 5, 5, 5], [resident, borrowed], SwiGLU())
    assert not waited
    y = run_sorted(rows, weights, [1, 1, 2, 5], [resident, borrowed], SwiGLU())
    slots = torch.tensor([[0], [2], [3], [3], [3]])
    assert waited and torch.equal(y, run_experts(rows, slots, weights, [resident, borrowed], SwiGLU()))


@pytest.mark.parametrize(
    ("ends", "weights", "message"),
    [
        ([1, 2], (3, 1), r"ends must ascend to the 3 rows over 2 slots, got \[1, 2\]"),
        ([2, 1], (3, 1), r"ends must ascend to the 3 rows over 2 slots, got \[2, 1\]"),
        ([3], (3, 1), r"ends must ascend to the 3 rows over 2 slots, got \[3\]"),
        ([1, 2, 3], (3, 1), r"ends must ascend to the 3 rows over 2 slots, got \[1, 2, 3\]"),
        ([1, 3], (3, 2), r"weights must be \[3, 1\] torch.float32, got \[3, 2\] torch.float32"),
    ],
)
def test_what_is_refused(ends: list[int], weights: tuple[int, ...], message: str) -> None:
    group = ExpertWeights.random(2, HIDDEN, INNER)
    with pytest.raises(ValueError, match=message):
        run_sorted(torch.zeros(3, HIDDEN), torch.ones(weights), ends, [group], SwiGLU())
