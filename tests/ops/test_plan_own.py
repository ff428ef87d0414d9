"""plan_own: a source splits its own copies near the least sum of squares, and many sources are level together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from reference.plan_own import ONE, base_of
from support.cases import Case, draw, instances

FAMILIES = (
    *("eplb", "random", "ring", "clique", "duplicates", "zero_loads", "one_expert", "no_replicas"),
    *("empty_slots", "empty_ranks", "spare_slots", "copies_128"),
)


def most(ranks: int) -> int:
    """Copies that a source may have."""
    return (2**31 - 1) // (ranks + 2)


def drawn_offset(rng: np.random.Generator, ranks: int) -> Tensor:
    """[R] whole and broken multiples of a copy, none for some."""
    return torch.from_numpy((rng.integers(0, 2**20 + 1, ranks) >> rng.integers(0, 21)).astype(np.int32))


def cases(seed: int, max_ranks: int = 128) -> Iterator[tuple[Case, Tensor, int, dict[str, Any]]]:
    """Cases with the counts of one source, and what else the op may be given."""
    for n, case in enumerate(instances(1, seed=seed, max_ranks=max_ranks, families=FAMILIES)):
        rng = np.random.default_rng([seed, n])
        ranks, how = case.num_ranks, {}
        if n % 3 == 1:
            how["fixed"] = torch.from_numpy(rng.integers(0, 50, ranks).astype(np.int32))
        if n % 4 == 1:
            how["ticks"] = torch.from_numpy(rng.integers(512, 2048, ranks).astype(np.int32))
        counts = torch.from_numpy(case.loads[n % ranks])
        counts = counts // (int(counts.sum(dtype=torch.int64)) // (most(ranks) // 2) + 1)
        yield case, counts, n % ranks, {"offset": drawn_offset(rng, ranks), "layer": n, **how}


def squares(case: Case, send: Tensor, counts: Tensor, source: int, how: dict[str, Any]) -> int:
    """What the op minimises, in 2^-64 squared copies."""
    base = base_of(counts, how["offset"], source, how.get("fixed"), how["layer"])
    copies = send.view(case.num_ranks, -1).sum(1).tolist()
    ticks = how["ticks"].tolist() if "ticks" in how else [1] * case.num_ranks
    return sum(t * (b + y * ONE) ** 2 for t, b, y in zip(ticks, base, copies, strict=True))


def test_every_copy_is_sent_to_a_slot_of_its_expert() -> None:
    for case, counts, source, how in cases(seed=100):
        send = ops.plan_own(counts, case.tables(), source=source, **how).numpy()
        assert send.dtype == np.int32 and (send >= 0).all(), case.name
        per_expert = np.zeros(case.num_experts + 1, dtype=np.int64)
        np.add.at(per_expert, case.slot_to_expert, send)
        assert np.array_equal(per_expert[:-1], counts.numpy()) and per_expert[-1] == 0, case.name


def test_reference_is_the_least_sum_of_all_splits() -> None:
    """Against every split of small problems."""
    slots = torch.tensor([0, 1, 2, 1, 0, 3, 2, 3, 0], dtype=torch.int32)  # three ranks
    case, rng = Case("small", slots.numpy(), np.zeros((3, 4), np.int32)), np.random.default_rng(1)
    held = [[p for p in range(9) if slots[p] == e] for e in range(4)]
    for n in range(12):
        counts = torch.from_numpy(rng.integers(0, 4, 4).astype(np.int32))
        how: dict[str, Any] = {"offset": drawn_offset(rng, 3), "layer": n}
        if n % 2:
            how["ticks"] = torch.from_numpy(rng.integers(512, 2048, 3).astype(np.int32))
        splits = [
            [cut for cut in product(range(c + 1), repeat=len(s)) if sum(cut) == c]
            for c, s in zip(counts.tolist(), held, strict=True)
        ]
        least = min(squares(case, spread(held, cut), counts, 1, how) for cut in product(*splits))
        found = reference.plan_own(counts, case.tables(), source=1, **how)
        assert squares(case, found, counts, 1, how) == least


def spread(held: list[list[int]], cuts: tuple[tuple[int, ...], ...]) -> Tensor:
    send = torch.zeros(9, dtype=torch.int32)
    for slots, cut in zip(held, cuts, strict=True):
        send[slots] = torch.tensor(cut, dtype=torch.int32)
    return send


def test_near_the_optimum() -> None:
    """The sum of squares above the optimum's, relative to what the loads leave over the mean."""
    gaps = []
    for case, counts, source, how in cases(seed=200, max_ranks=16):
        if int(counts.sum()) > 5000:
            continue  # the reference moves copies one by one
        best = squares(
            case, reference.plan_own(counts, case.tables(), source=source, **how), counts, source, how
        )
        found = squares(case, ops.plan_own(counts, case.tables(), source=source, **how), counts, source, how)
        assert found >= best, case.name
        gaps.append(found / best - 1)
    assert len(gaps) > 10 and np.mean(gaps) < 2e-3 and max(gaps) < 0.05, (np.mean(gaps), max(gaps))


def over_bound(loads: np.ndarray, tables: Any, split: Callable[..., Tensor]) -> float:
    """Mean peak of all sources' splits over the proved bound of all loads; loads [B, R, E]."""
    ranks, none = tables.num_ranks, torch.zeros(tables.num_ranks, dtype=torch.int32)
    found = []
    for n, batch in enumerate(torch.from_numpy(loads)):
        sent = [split(batch[s], tables, none, s, layer=n) for s in range(ranks)]
        peak = torch.stack(sent).sum(0).view(ranks, -1).sum(1).max()
        found.append(int(peak) / int(ops.plan_exact(batch, tables).bound))
    return float(np.mean(found))


def decode_loads(tokens: int) -> tuple[np.ndarray, Any]:
    """[B, R, E] of 16 alike ranks, and tables of 64 experts with 16 replicas of the most popular."""
    rng = np.random.default_rng(5)
    wished = 1 / np.arange(1, 65) ** 0.8
    slots = np.concatenate([np.arange(64), np.arange(16)]).reshape(5, 16).T
    slots[:, 4] = np.roll(slots[:, 4], 5)
    tables = ops.replica_tables(torch.from_numpy(slots.ravel().astype(np.int32)), 16, 64)
    draws = rng.multinomial(tokens * 4, wished / wished.sum(), (8, 16))
    return draws.astype(np.int32), tables


@pytest.mark.parametrize("tokens", [4, 16, 64])
def test_peak_over_all_sources_is_that_of_the_optimum(tokens: int) -> None:
    loads, tables = decode_loads(tokens)
    assert abs(over_bound(loads, tables, ops.plan_own) - over_bound(loads, tables, reference.plan_own)) < 0.01


def test_rotation_keeps_sources_from_rounding_alike() -> None:
    loads, tables = decode_loads(4)

    def alike(counts: Tensor, tables: Any, offset: Tensor, source: int, layer: int) -> Tensor:
        return ops.plan_own(counts, tables, offset, 0, layer=0)

    assert over_bound(loads, tables, ops.plan_own) < over_bound(loads, tables, alike) - 0.03


def test_an_offset_counts_as_copies_that_are_there() -> None:
    """A quarter of the source's copies on rank 0, or 60."""
    tables = ops.replica_tables(torch.tensor([0, 0, 0], dtype=torch.int32), 3, 1)
    quarter = torch.tensor([2**18, 0, 0], dtype=torch.int32)
    assert ops.plan_own(torch.tensor([300], dtype=torch.int32), tables, quarter, 0).tolist() == [50, 125, 125]
    fixed = torch.tensor([0, 60, 0], dtype=torch.int32)
    none = torch.zeros(3, dtype=torch.int32)
    sent = ops.plan_own(torch.tensor([300], dtype=torch.int32), tables, none, 0, fixed=fixed)
    assert sent.tolist() == [120, 60, 120]


def test_slower_ranks_take_less() -> None:
    tables = ops.replica_tables(torch.tensor([0, 0], dtype=torch.int32), 2, 1)
    none, ticks = torch.zeros(2, dtype=torch.int32), torch.tensor([1024, 3072], dtype=torch.int32)
    assert ops.plan_own(torch.tensor([400], dtype=torch.int32), tables, none, 0, ticks=ticks).tolist() == [
        300,
        100,
    ]


def test_layers_at_once() -> None:
    drawn = [draw("eplb", 8, seed) for seed in (3, 3, 3)]
    rng = np.random.default_rng(0)
    slots = torch.from_numpy(np.stack([case.slot_to_expert for case in drawn]))
    tables = ops.replica_tables(slots, 8, drawn[0].num_experts)
    counts = torch.from_numpy(np.stack([case.loads[n] for n, case in enumerate(drawn)]))
    offset = torch.stack([drawn_offset(rng, 8) for _ in drawn])
    fixed = torch.from_numpy(rng.integers(0, 9, (3, 8)).astype(np.int32))
    whole = ops.plan_own(counts, tables, offset, 2, fixed=fixed, layer=4)
    for i in range(3):
        one = ops.plan_own(counts[i], tables[i], offset[i], 2, fixed=fixed[i], layer=4 + i)
        assert torch.equal(whole[i], one)


def test_most_copies() -> None:
    tables = ops.replica_tables(torch.tensor([0, 1, 0, 2], dtype=torch.int32), 2, 3)
    full = torch.tensor([2**20, 2**20], dtype=torch.int32)
    counts = torch.tensor([most(2), 0, 0], dtype=torch.int32)
    sent = ops.plan_own(counts, tables, full, 0).tolist()
    assert sent[0] + sent[2] == most(2) and abs(sent[0] - sent[2]) <= 1
    aside = torch.tensor([2**20, 0], dtype=torch.int32)
    assert ops.plan_own(counts, tables, aside, 0).tolist() in ([0, 0, most(2), 0], [1, 0, most(2) - 1, 0])


@pytest.mark.parametrize("ranks", [3, 16, 128, 1024])
def test_most_copies_on_many_ranks_that_carry_as_much(ranks: int) -> None:
    tables = ops.replica_tables(torch.zeros(ranks, dtype=torch.int32), ranks, 1)
    counts, full = (
        torch.tensor([most(ranks)], dtype=torch.int32),
        torch.full((ranks,), 2**20, dtype=torch.int32),
    )
    sent = ops.plan_own(counts, tables, full, 0)
    assert int(sent.sum()) == most(ranks) and int(sent.max()) - int(sent.min()) <= 1


def test_recent_counts_decay_by_half_in_eight_batches() -> None:
    tables = ops.replica_tables(torch.tensor([0, 1, 2, 0], dtype=torch.int32), 4, 3)
    recent = torch.zeros(3, dtype=torch.int64)
    ops.plan_own(COUNTS * 1000, tables, NONE, 0, recent=recent)
    assert recent.tolist() == [n * 1000 << 16 for n in COUNTS.tolist()]
    for _ in range(8):
        ops.plan_own(COUNTS * 0, tables, NONE, 0, recent=recent)
    assert torch.allclose(recent / (COUNTS.long() * 1000 << 16), torch.tensor(0.5), atol=1e-4)


def test_what_was_sent_is_noted_by_rank() -> None:
    """Of many layers at once, too; by plain sums of the split itself."""
    for case, counts, source, how in cases(seed=102, max_ranks=32):
        ranks = case.num_ranks
        fixed = how.get("fixed", torch.zeros(ranks, dtype=torch.int32)).long()
        sent, was = torch.zeros(2, 3, ranks, dtype=torch.int64), torch.zeros(2, 2, ranks, dtype=torch.int64)
        tables = ops.replica_tables(
            torch.from_numpy(case.slot_to_expert).expand(2, -1).contiguous(), ranks, case.num_experts
        )
        twice = {
            k: v if k == "ticks" or not isinstance(v, Tensor) else v.expand(2, -1) for k, v in how.items()
        }
        for batch in range(2):
            both = torch.stack([counts, counts // (batch + 2)])
            split = ops.plan_own(both, tables, source=source, **twice, sent=sent)
            assert torch.equal(split, ops.plan_own(both, tables, source=source, **twice)), case.name
            to = split.view(2, ranks, -1).sum(-1)
            joined = torch.stack([to, fixed.expand(2, -1)], 1) << 16
            was += joined - (was * 5439 >> 16)
            assert torch.equal(sent[:, :2], was) and torch.equal(sent[:, 2], to + fixed), case.name


NONE = torch.zeros(4, dtype=torch.int32)
COUNTS = torch.tensor([3, 1, 2], dtype=torch.int32)


@pytest.mark.parametrize("ranks", [3, 16, 128, 1024])
def test_refuses_one_copy_more(ranks: int) -> None:
    tables = ops.replica_tables(torch.zeros(ranks, dtype=torch.int32), ranks, 1)
    counts, none = torch.tensor([most(ranks) + 1], dtype=torch.int32), torch.zeros(ranks, dtype=torch.int32)
    with pytest.raises(ValueError, match="must sum to at most"):
        ops.plan_own(counts, tables, none, 0)
