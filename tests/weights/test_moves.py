"""Moves are carried out as plain loops say, and their gradients return in one order, over one process and several."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoload
from isoload.transport import CollectiveGroup, Group, LocalGroup
from isoload.weights.layout import Address, Move, RankMoves, Stacks, add_back, move_rows, start_moves
from support.processes import run_ranks
from support.sweeps import slow

SHAPES = [((3, 5), torch.bfloat16), ((1,), torch.float64), ((7,), torch.uint8), ((2, 2), torch.float32)]


def draw_stacks(seed: int, rows: list[int], dtype: torch.dtype | None = None) -> Stacks:
    """[R][W] stacks [rows, ...] of every rank, of odd sizes and dtypes; values whose sum depends on its order."""
    random = torch.Generator().manual_seed(seed)
    stacks = []
    for count in rows:
        wide = [torch.randn(count, *shape, generator=random, dtype=torch.float64) * 90 for shape, _ in SHAPES]
        whole = [w.int() if kind == torch.uint8 else w for w, (_, kind) in zip(wide, SHAPES, strict=True)]
        stacks.append([w.to(dtype or kind) for w, (_, kind) in zip(whole, SHAPES, strict=True)])
    return stacks


def draw_moves(rng: np.random.Generator, rows: list[int]) -> list[Move]:
    """From any row to any other, within a rank included; no row is a target twice."""
    places = [Address(rank, row) for rank, count in enumerate(rows) for row in range(count)]
    targets = [places[i] for i in rng.permutation(len(places))[: rng.integers(len(places) + 1)]]
    return [Move(places[rng.integers(len(places))], target) for target in targets]


def moved(moves: list[Move], sources: Stacks, targets: Stacks) -> Stacks:
    result = [[stack.clone() for stack in own] for own in targets]
    for source, target in moves:
        for w in range(len(SHAPES)):
            result[target.rank][w][target.row] = sources[source.rank][w][source.row]
    return result


def added(moves: list[Move], grads: Stacks, totals: Stacks) -> Stacks:
    """In float32 or wider, by the rank that a gradient comes from, then in order of the list; rounded at the end."""
    exact = [[t.to(torch.promote_types(t.dtype, torch.float32)) for t in own] for own in totals]
    for rank in range(len(grads)):
        for source, target in moves:
            if target.rank == rank:
                for sums, grad in zip(exact[source.rank], grads[rank], strict=True):
                    sums[source.row] += grad[target.row]
    return [[e.to(t.dtype) for e, t in zip(*pair, strict=True)] for pair in zip(exact, totals, strict=True)]


def assert_equal(got: Stacks, want: Stacks) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def draw_rows(rng: np.random.Generator, ranks: int) -> list[int]:
    """Rows of every rank, none on some."""
    return [int(count) for count in rng.integers(0, 5, ranks)]


def run(group: Group, seed: int) -> list[Stacks]:
    """Between other stacks, within the same ones, and the gradients; of the owned ranks."""
    rng = np.random.default_rng(seed)
    rows = draw_rows(rng, group.topology.num_ranks)
    moves = draw_moves(rng, rows)

    def own(stacks: Stacks) -> Stacks:
        return [stacks[rank] for rank in group.ranks]

    targets, both = own(draw_stacks(1, rows)), own(draw_stacks(0, rows))
    move_rows(group, "between", moves, own(draw_stacks(0, rows)), targets)
    move_rows(group, "within", moves, both, both)
    totals = own(draw_stacks(3, rows, torch.bfloat16 if seed % 2 else torch.float32))
    add_back(group, "back", moves, own(draw_stacks(2, rows, torch.bfloat16)), totals)
    return [targets, both, totals]


def wanted(ranks: int, seed: int) -> list[Stacks]:
    """The same in plain loops, of all ranks."""
    rng = np.random.default_rng(seed)
    rows = draw_rows(rng, ranks)
    moves = draw_moves(rng, rows)
    sources = draw_stacks(0, rows)
    totals = draw_stacks(3, rows, torch.bfloat16 if seed % 2 else torch.float32)
    return [
        moved(moves, sources, draw_stacks(1, rows)),
        moved(moves, sources, sources),
        added(moves, draw_stacks(2, rows, torch.bfloat16), totals),
    ]


@pytest.mark.parametrize("number", [7, *slow(30)])
@pytest.mark.parametrize("ranks", [1, 3, *slow(2, 8)])
def test_virtual_ranks(ranks: int, number: int) -> None:
    for seed in range(number):
        for got, want in zip(
            run(LocalGroup(isoload.Topology(ranks)), seed), wanted(ranks, seed), strict=True
        ):
            assert_equal(got, want)


def on_rank(rank: int, ranks: int) -> list[list[Stacks]]:
    group = CollectiveGroup(isoload.Topology(ranks))
    return [run(group, seed) for seed in range(8)]


@pytest.mark.parametrize("ranks", [3, *slow(2)])
def test_processes(ranks: int) -> None:
    for rank, found in enumerate(run_ranks(on_rank, ranks, ranks)):
        for seed, got in enumerate(found):
            for mine, want in zip(got, wanted(ranks, seed), strict=True):
                assert_equal(mine, [want[rank]])


def test_sources_need_not_be_contiguous() -> None:
    group = LocalGroup(isoload.Topology(2))
    wide = torch.arange(24.0).view(4, 6)
    targets = [[torch.zeros(2, 4)] for _ in range(2)]
    moves = [Move(Address(0, 5), Address(1, 1)), Move(Address(1, 0), Address(0, 0))]
    move_rows(group, "across", moves, [[wide.t()], [wide.t()]], targets)
    assert targets[1][0].tolist() == [[0] * 4, wide[:, 5].tolist()]
    assert targets[0][0].tolist() == [wide[:, 0].tolist(), [0] * 4]


def test_what_stays_on_its_rank_does_not_travel() -> None:
    group = LocalGroup(isoload.Topology(2))
    stacks = [[torch.arange(3.0).view(3, 1)] for _ in range(2)]
    swapped = [Move(Address(1, 0), Address(1, 2)), Move(Address(1, 2), Address(1, 0))]
    wait = start_moves(group, "within", swapped, stacks, stacks)
    assert stacks[1][0].flatten().tolist() == [0, 1, 2], "written when it is waited for"
    wait()
    assert stacks[1][0].flatten().tolist() == [2, 1, 0] and stacks[0][0].flatten().tolist() == [0, 1, 2]
    move_rows(group, "nothing", [], stacks, stacks)
    add_back(group, "back", swapped, stacks, stacks)
    assert not group.traffic.bytes


def test_a_ranks_part_of_the_moves() -> None:
    moves = [
        Move(Address(0, 1), Address(2, 0)),
        Move(Address(1, 3), Address(0, 2)),
        Move(Address(0, 0), Address(1, 1)),
        Move(Address(0, 4), Address(2, 1)),
        Move(Address(0, 5), Address(0, 6)),
    ]
    part = RankMoves.from_moves(moves, 0, 3)
    assert (part.leaving, part.sent) == ([0, 1, 4], [0, 1, 2])
    assert (part.arriving, part.got) == ([2], [0, 1, 0])
    assert (part.copied, part.filled) == ([5], [6])
    assert RankMoves.from_moves(moves, 2, 3).arriving == [0, 1]
