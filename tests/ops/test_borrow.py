"""borrow, borrow_backward: weights come from home byte for byte, gradients return home in one order of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from support.borrow_plans import SHAPES, draw_plan, draw_values

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ANY_DTYPE = (*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)


def draw_bytes(rng: np.random.Generator, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[rows, *shape] of random bits, half of the time at an address that is no multiple of 16."""
    start, size = int(rng.integers(2)), rows * int(np.prod(shape))
    stored = torch.from_numpy(rng.integers(0, 256, (1 + size) * dtype.itemsize, dtype=np.uint8))
    return stored.view(dtype)[start : start + size].view(rows, *shape)


def raw(stack: Tensor) -> Tensor:
    return stack.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("dtype", ANY_DTYPE, ids=str)
@pytest.mark.parametrize(("num_ranks", "spare_slots", "stacks"), [(1, 2, 1), (2, 1, 4), (5, 3, 2), (8, 2, 9)])
def test_borrow_equals_reference(dtype: torch.dtype, num_ranks: int, spare_slots: int, stacks: int) -> None:
    """Spare rows of empty slots keep the random bits they had."""
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    rng = np.random.default_rng(seed)
    plan = draw_plan(rng, num_ranks, spare_slots)
    shapes = [SHAPES[i] for i in rng.permutation(len(SHAPES))[:stacks]]
    weights = [[draw_bytes(rng, n, shape, dtype) for shape in shapes] for n in plan.homes]
    peers, before = ops.addresses(weights), [[raw(w).clone() for w in stacks] for stacks in weights]
    for rank in range(num_ranks):
        spare = [draw_bytes(rng, spare_slots, shape, dtype) for shape in shapes]
        expected = [pool.clone() for pool in spare]
        reference.borrow(*plan.args, weights, expected, num_ranks, rank)
        ops.borrow(*plan.args, peers, spare, num_ranks, rank, blocks=int(rng.integers(1, 40)))
        for mine, theirs in zip(spare, expected, strict=True):
            assert torch.equal(raw(mine), raw(theirs))
    for stacks_before, stacks_after in zip(before, weights, strict=True):
        for one, other in zip(stacks_before, stacks_after, strict=True):
            assert torch.equal(one, raw(other)), "the homes stay"


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_ranks", "spare_slots", "stacks"), [(1, 2, 1), (2, 1, 4), (5, 3, 2), (8, 2, 9)])
def test_borrow_backward_equals_reference(
    dtype: torch.dtype, num_ranks: int, spare_slots: int, stacks: int, rounds: bool
) -> None:
    """NaN lies in the pool rows of empty slots and must stay there. Totals may be of the pools' dtype."""
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    rng = np.random.default_rng(seed)
    plan = draw_plan(rng, num_ranks, spare_slots)
    exact = dtype if rounds else torch.promote_types(dtype, torch.float32)
    shapes = [SHAPES[i] for i in rng.permutation(len(SHAPES))[:stacks]]
    pools = [[draw_values(rng, spare_slots, shape, dtype) for shape in shapes] for _ in range(num_ranks)]
    for rank, of_rank in enumerate(pools):
        for pool in of_rank:
            pool[torch.tensor(plan.spare(rank)) < 0] = torch.nan
    peers = ops.addresses(pools)
    for rank, homes in enumerate(plan.homes):
        totals = [draw_values(rng, homes, shape, exact) for shape in shapes]
        expected = [total.clone() for total in totals]
        reference.borrow_backward(*plan.args, pools, expected, num_ranks, rank, spare_slots)
        blocks = int(rng.integers(1, 40))
        ops.borrow_backward(*plan.args, peers, totals, num_ranks, rank, spare_slots, dtype, blocks=blocks)
        for mine, theirs in zip(totals, expected, strict=True):
            assert torch.equal(mine, theirs) and not mine.isnan().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_round_as_torch_rounds(dtype: torch.dtype) -> None:
    """Every 16-bit pattern as the total, random ones as gradients: subnormals, overflow, infinities, NaN."""
    rng = np.random.default_rng(seed := np.random.SeedSequence().entropy)
    print("seed", seed)
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    grads = [torch.from_numpy(rng.integers(-(2**15), 2**15, (1, 2**16), np.int16)) for _ in range(3)]
    tiny = torch.from_numpy(rng.integers(0, 2**10, (1, 2**16), np.int16))  # fp16's subnormals
    for pools in (grads, [tiny] * 3):
        pools = [[pool.view(dtype)] for pool in pools]
        total, expected = every.clone()[None].view(dtype), every.clone()[None].view(dtype)
        slots, home = int32(0, 0, -1, 0, -1, 0), int32(0, 0).view(1, 2)
        ops.borrow_backward(slots, home, ops.addresses(pools), [total], 3, 0, 1, dtype)
        reference.borrow_backward(slots, home, pools, [expected], 3, 0, 1)
        assert torch.equal(total.isnan(), expected.isnan())
        numbers = total.isnan().logical_not()
        assert torch.equal(raw(total[numbers]), raw(expected[numbers]))


def int32(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


# Two ranks of two slots and two spare slots. Experts 0, 1 at home on rank 0, 2 on rank 1; 3 has no home.
SLOTS = int32(0, 1, 2, -1, 2, -1, -1, 1)
HOME = int32([0, 1], [0, 0], [1, 0], [-1, -1])


def test_worked_example() -> None:
    weights = [[torch.tensor([[10.0, 11], [20, 21]])], [torch.tensor([[30.0, 31]])]]
    peers = ops.addresses(weights)
    for rank, expected in enumerate(([[30, 31], [7, 7]], [[7, 7], [10, 11]])):
        pool = torch.full((2, 2), 7.0)
        ops.borrow(SLOTS, HOME, peers, [pool], 2, rank)
        assert pool.tolist() == expected
    gradients = [[torch.tensor([[1.0, 2], [3, 4]])], [torch.tensor([[5.0, 6], [7, 8]])]]
    peers = ops.addresses(gradients)
    for rank, expected in enumerate(([[107, 108], [100, 100]], [[101, 102]])):
        total = torch.full((2 - rank, 2), 100.0)
        ops.borrow_backward(SLOTS, HOME, peers, [total], 2, rank, 2, torch.float32)
        assert total.tolist() == expected


def test_backward_equals_reference_in_the_order_of_ranks_then_slots() -> None:
    """Five gradients of one expert, from five ranks or five slots; in float32 2^24 + 1 is 2^24, 2^24 + 2 is not."""
    big, one, slots, home = 2.0**24, 1.0, int32(0, 0, 0, 0, 0), int32([0, 0])
    orders = {(big, one, one, -big, one): 1, (one, one, big, -big, one): 3, (one, big, -big, one, one): 2}
    for values, expected in orders.items():
        pools = [[torch.tensor([[value]])] for value in values]
        peers, total = ops.addresses(pools), torch.zeros(1, 1)
        ops.borrow_backward(slots, home, peers, [total], 5, 0, 1, torch.float32)
        assert total.item() == expected
        one_rank, total = torch.tensor(values).view(5, 1), torch.zeros(1, 1)
        ops.borrow_backward(slots, home, ops.addresses([[one_rank]]), [total], 1, 0, 5, torch.float32)
        assert total.item() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_gradient_equals_reference(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(1, -1)
    pool, total = bits.view(dtype), torch.zeros(1, 2**16)
    args = int32(0, 0), int32([0, 0]), ops.addresses([[pool]]), [total], 1, 0, 1, dtype
    ops.borrow_backward(*args)
    assert torch.equal(total.isnan(), pool.isnan())
    assert torch.equal(total.nan_to_num(5, None, None), pool.float().nan_to_num(5, None, None))


def test_autograd_finds_overwritten_rows() -> None:
    rows = torch.ones(2, 2, requires_grad=True)
    for write in (
        lambda pool: ops.borrow(SLOTS, HOME, PEERS, [pool], 2, 0),
        lambda pool: ops.borrow_backward(SLOTS, HOME, PEERS, [pool], 2, 0, 2, torch.float32),
    ):
        pool = torch.ones(2, 2)
        loss = (rows * pool).sum()
        write(pool)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        ops.borrow(SLOTS, HOME, PEERS, [pool := torch.zeros(2, 2)], 2, 0)
        assert pool.tolist() == [[1, 1], [0, 0]]


def test_no_spare_slots_and_no_homes_equal_reference() -> None:
    empty, nothing = torch.empty(0, 3), ops.addresses([[torch.empty(0, 3)]] * 2)
    ops.borrow(int32(0, 1), int32([0, 0], [1, 0]), nothing, [empty], 2, 1)
    ops.borrow_backward(int32(0, 1), int32([0, 0], [1, 0]), nothing, [empty], 2, 1, 0, torch.float32)
    assert nothing.tolist() == [[0], [0]]


def test_addresses() -> None:
    stacks = [
        [torch.zeros(2, 3), torch.zeros(2, 5).bfloat16()],
        [torch.zeros(1, 3), torch.zeros(0, 5).bfloat16()],
    ]
    table = ops.addresses(stacks)
    assert table.dtype == torch.int64
    assert table.tolist() == [[stack.data_ptr() for stack in of_rank] for of_rank in stacks]


BAD_STACKS: dict[str, tuple[list[list[Tensor]], str]] = {
    "no rank": ([], "stacks_per_rank must hold at least one rank with one stack, got none"),
    "no stack": ([[]], "stacks_per_rank must hold at least one rank with one stack, got none"),
    "ragged": ([[torch.zeros(1)], []], "stacks_per_rank must be 1 of every rank, got 0 of rank 1"),
    "strides": (
        [[torch.zeros(2, 2)], [torch.zeros(2, 2).t()]],
        "stacks_per_rank must be contiguous, got other strides in stack 0 of rank 1",
    ),
    "shape": (
        [[torch.zeros(2, 2)], [torch.zeros(2, 3)]],
        r"stacks_per_rank must have equal rows on every rank, torch.float32 \[2\] in stack 0, got torch.float32 \[3\]",
    ),
    "dtype": ([[torch.zeros(2, 2)], [torch.zeros(2, 2).half()]], r"got torch.float16 \[2\] of rank 1"),
}


@pytest.mark.parametrize("name", BAD_STACKS)
def test_addresses_refuses(name: str) -> None:
    stacks, message = BAD_STACKS[name]
    with pytest.raises(ValueError, match=message):
        ops.addresses(stacks)


HELD = [[torch.ones(2, 2)], [torch.ones(2, 2)]]  # keeps what PEERS points to
PEERS = ops.addresses(HELD)


# Of both ops, "stacks" being spare or totals.


def test_traced_equals_eager() -> None:
    def borrowed(pool: Tensor) -> Tensor:
        ops.borrow(SLOTS, HOME, PEERS, [pool], 2, 0)
        ops.borrow_backward(SLOTS, HOME, PEERS, [pool], 2, 0, 2, torch.float32)
        return pool * 2

    results = []
    for function in (borrowed, torch.compile(borrowed, backend="aot_eager", fullgraph=True)):
        pool = torch.full((2, 2), 5.0)
        results.append((function(pool).tolist(), pool.tolist()))
    assert results[0] == results[1] == ([[4, 4], [10, 10]], [[2, 2], [5, 5]])
