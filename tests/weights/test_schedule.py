"""Moves between placements: the wanted rows at the end, no expert lost on the way, bounds kept, nothing moved twice."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

import isoload
from isoload.weights.layout import Address, Move, keep_rows
from isoload.weights.schedule import plan_moves, spread_moves


def replay(current, wanted, chunks, size):
    """Carries the chunks out as the layer would, and looks after each that every expert has a row."""
    content = {Address(r, i): e for r, rows in enumerate(current) for i, e in enumerate(rows)}
    experts = {e for rows in wanted for e in rows if e >= 0}
    for chunk in chunks:
        assert 0 < len(chunk) <= size
        assert len({move.target for move in chunk}) == len(chunk)
        for source, target in chunk:
            local = any(content[a] == content[source] and a.rank == target.rank for a in content)
            assert source.rank == target.rank or not local, (
                "a row on the same rank is read where there is one"
            )
        content |= {target: content[source] for source, target in chunk}
        assert experts <= set(content.values()), "an expert was lost"
    for r, rows in enumerate(wanted):
        for i, expert in enumerate(rows):
            assert expert < 0 or content[r, i] == expert


def changed_rows(current, wanted):
    return sum(
        e >= 0 and (i >= len(before) or before[i] != e)
        for before, after in zip(current, wanted, strict=True)
        for i, e in enumerate(after)
    )


def busiest(moves):
    """Rows that the busiest rank sends or receives in these moves."""
    remote = [(source.rank, target.rank) for source, target in moves if source.rank != target.rank]
    ends = [Counter(ranks) for ranks in zip(*remote, strict=True)]
    return max((max(end.values()) for end in ends), default=0)


def deal(draw, ranks, rows, experts):
    """Every expert once, then replicas, no rank with one twice, some rows empty: [R][rows]."""
    while True:
        places = [(r, i) for r in range(ranks) for i in range(rows)]
        draw.shuffle(places)
        table = [[-1] * rows for _ in range(ranks)]
        for expert in range(experts):
            rank, row = places.pop()
            table[rank][row] = expert
        for rank, row in places:
            absent = sorted(set(range(experts)) - set(table[rank]))
            if absent and draw.random() < 0.7:
                table[rank][row] = draw.choice(absent)
        return table


def drawn_pairs(number):
    """Rows now and wanted, and a chunk's size, of 1 to 8 ranks; with replicas and empty rows, or permutations."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(number):
        ranks, rows = draw.randint(1, 8), draw.randint(1, 5)
        experts = ranks * rows if draw.random() < 0.2 else draw.randint(1, ranks * rows)
        current, wanted = (deal(draw, ranks, rows, experts) for _ in range(2))
        yield current, wanted, draw.choice([2, 3, ranks + 1, 2 * ranks, 10**6])


@pytest.mark.parametrize("number", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_drawn_pairs(number):
    """Replayed: no expert is lost, final rows as wanted, cycles cut, and ranks bounded in every chunk."""
    for current, wanted, size in drawn_pairs(number):
        chunks = plan_moves(current, wanted, size)
        replay(current, wanted, chunks, size)
        moved, changed = sum(map(len, chunks)), changed_rows(current, wanted)
        assert changed <= moved <= changed + max(len(chunks) - 1, 0)
        for chunk in chunks:
            cycle = any(move.source == chunk[0].target for move in chunk[1:])
            assert cycle or busiest(chunk) <= -(-size // len(current))


FRESH = [(8, 36), (16, 18), (32, 9), (64, 5)]  # ranks, rows of each, for 256 experts


@pytest.mark.parametrize(("ranks", "rows"), FRESH)
def test_a_chunk_is_spread_over_ranks(ranks, rows):
    """Between fresh placements of other loads: near the busiest rank's own rows, which no order changes."""
    counts = torch.rand(2, 3, 256, generator=torch.Generator().manual_seed(ranks)) ** -0.7
    before, after = (isoload.place(load, isoload.Topology(ranks), rows, "eplb") for load in counts)
    time = own = 0
    for tables in zip(before.slot_to_expert, after.slot_to_expert, strict=True):
        current, new = (table.reshape(ranks, rows).tolist() for table in tables)
        wanted = [keep_rows(held, [], sorted(experts)) for held, experts in zip(current, new, strict=True)]
        chunks = plan_moves(current, wanted, ranks)
        replay(current, wanted, chunks, ranks)
        assert sum(map(len, chunks)) - changed_rows(current, wanted) <= len(chunks) / 20, "rows of cut cycles"
        time += sum(map(busiest, chunks))
        own += busiest([move for chunk in chunks for move in chunk])
    assert time <= 1.5 * own


def test_independent_moves_are_spread_over_ranks():
    moves = [Move(Address(0, i), Address(rank, i)) for rank in range(4) for i in range(3)]
    chunks = spread_moves(moves, 4, 4)
    assert sorted(move for chunk in chunks for move in chunk) == sorted(moves)
    assert [busiest(chunk) for chunk in chunks] == [1] * 9
    assert len(chunks[0]) == 4, "rows that stay on their rank bring no traffic"


SIZES = [2, 3, 5, 10**6]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_random_rows_with_replicas_and_empty_ones(ranks, size):
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(40):
        rows = draw.randint(1, 6)
        experts = draw.randint(1, ranks * rows)
        current, wanted = (deal(draw, ranks, rows, experts) for _ in range(2))
        chunks = plan_moves(current, wanted, size)
        replay(current, wanted, chunks, size)
        moved, changed = sum(map(len, chunks)), changed_rows(current, wanted)
        assert changed <= moved <= changed + max(len(chunks) - 1, 0)
        if moved > changed:
            assert size < 10**6, "only cut cycles take more moves"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_permutations_without_a_free_row(ranks, size):
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    draw = random.Random(seed)
    for _ in range(40):
        rows = draw.randint(1, 5)
        experts = list(range(ranks * rows))
        tables = []
        for _ in range(2):
            draw.shuffle(experts)
            tables.append([experts[r * rows : (r + 1) * rows] for r in range(ranks)])
        chunks = plan_moves(*tables, size)
        replay(*tables, chunks, size)
        cut = sum(-(-(n - size) // (size - 1)) for n in cycle_lengths(*tables) if n > size)
        # A cycle that meets a partly filled chunk is cut one time more at most.
        moved = sum(map(len, chunks)) - changed_rows(*tables)
        assert cut <= moved <= cut + sum(n > size for n in cycle_lengths(*tables))


def cycle_lengths(current, wanted):
    place = {e: (r, i) for r, rows in enumerate(wanted) for i, e in enumerate(rows)}
    following = {(r, i): place[e] for r, rows in enumerate(current) for i, e in enumerate(rows)}
    lengths = []
    while following:
        start = address = next(iter(following))
        length = 0
        while address in following:
            address, length = following.pop(address), length + 1
        if length > 1:
            lengths.append(length)
        assert address == start
    return lengths


def test_nothing_changes_nothing_moves():
    rows = [[0, 1, 2], [3, -1], []]
    assert plan_moves(rows, rows, 2) == []
    assert plan_moves([[0, 1, 2], [3, 4]], [[0, -1, 2], [3, 4, 1]], 2) == [
        [Move(Address(0, 1), Address(1, 2))]
    ]


def test_a_chain_unwinds_from_its_free_end():
    chunks = plan_moves([[0, 1], [2, -1]], [[-1, 0], [1, 2]], 2)
    assert chunks == [
        [Move(Address(1, 0), Address(1, 1)), Move(Address(0, 1), Address(1, 0))],
        [Move(Address(0, 0), Address(0, 1))],
    ]


def test_a_cycle_longer_than_a_chunk_is_cut_and_parks():
    chunks = plan_moves([[0], [1], [2], [3]], [[3], [0], [1], [2]], 2)
    assert [len(chunk) for chunk in chunks] == [2, 2, 2]
    assert chunks[0] == [Move(Address(1, 0), Address(0, 0)), Move(Address(0, 0), Address(1, 0))]


def test_an_expert_parked_on_a_rank_that_holds_it_already():
    """Two rows of a rank then hold it, and one row waits for it: only one of them must be read."""
    current = [[4, 1, 9, 8], [0, 7, 8, 9], [2, 8, 6, 9], [3, 8, 9], [], [5, 6, 8, 9]]
    wanted = [[0, 2, 8, 9], [3, 7, 8, 9], [6, 4, 8, 9], [1, 5, 9, 8], [], [9, 5, 8]]
    chunks = plan_moves(current, wanted, 6)
    replay(current, wanted, chunks, 6)
    assert sum(map(len, chunks)) <= changed_rows(current, wanted) + len(chunks) - 1


def test_rows_of_the_same_rank_are_read_before_they_are_overwritten():
    # both experts have copies elsewhere, so each row could be overwritten at once and fetched from rank 1
    chunks = plan_moves([[0, 1], [0, 1]], [[1, 0], [0, 1]], 2)
    assert chunks == [[Move(Address(0, 1), Address(0, 0)), Move(Address(0, 0), Address(0, 1))]]
    # row 0 of rank 0 waits, because row 2 wants its expert and another chunk will be full by then
    chunks = plan_moves([[0, 1, 2], [0, 1, 2, 3]], [[3, 2, 0], [0, 1, 2, 3]], 2)
    assert [move for chunk in chunks for move in chunk] == [
        Move(Address(0, 2), Address(0, 1)),
        Move(Address(0, 0), Address(0, 2)),
        Move(Address(1, 3), Address(0, 0)),
    ]


@pytest.mark.parametrize(
    ("before", "homes", "replicas", "after"),
    [
        ([4, 5, 6], [4, 6], [5], [4, 6, 5]),
        ([4, 5, 6], [5, 4], [], [4, 5]),
        ([4, 5, 6], [7, 5], [6], [7, 5, 6]),
        ([4], [9, 4], [8], [4, 9, 8]),
        ([4, -1, 6], [], [6, 4], [4, 6]),
        ([], [3, 1], [2], [3, 1, 2]),
        ([1, 2], [], [], []),
    ],
    ids=["replica behind homes", "all stay", "one new", "grows", "no homes", "fresh", "empties"],
)
def test_experts_keep_their_rows_where_they_can(before, homes, replicas, after):
    assert keep_rows(before, homes, replicas) == after
