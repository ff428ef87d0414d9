"""share_alone: a source cuts its own copies without the others' counts, all of them, near enough to the quota."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import floor

import numpy as np
import pytest
import torch
from torch import Tensor

import reference
from isoload import ops
from support.cases import MAX_COPIES, Case, draw, instances

FAMILIES = (
    *("eplb", "random", "ring", "clique", "duplicates", "zero_loads", "one_expert", "no_replicas"),
    *("empty_slots", "empty_ranks", "spare_slots", "full_total", "copies_128"),
)


def share_all(case: Case, quota: Tensor) -> np.ndarray:
    """[R, P] int64: every source's row, each from its own counts only."""
    tables, loads = case.tables(), torch.from_numpy(case.loads)
    rows = [ops.share_alone(loads[s], quota, tables, s) for s in range(case.num_ranks)]
    assert all(row.dtype == torch.int32 and row.shape == quota.shape for row in rows)
    return torch.stack(rows).numpy().astype(np.int64)


def shared(seed: int, max_ranks: int = 128) -> Iterator[tuple[Case, Tensor]]:
    """Cases with the quota of exact, and with all copies on the lowest replica."""
    for case in instances(1, seed=seed, max_ranks=max_ranks, families=FAMILIES):
        quota = ops.plan_exact(torch.from_numpy(case.loads), case.tables()).quota
        yield case, quota
        lowest = np.zeros(len(quota), dtype=np.int32)
        first = {int(e): p for p, e in reversed(list(enumerate(case.slot_to_expert)))}
        for e, copies in enumerate(case.expert_loads()):
            if copies:
                lowest[first[e]] = copies
        yield case, torch.from_numpy(lowest)


def senders(case: Case) -> np.ndarray:
    """[P] how many sources have copies of the slot's expert."""
    return np.append((case.loads > 0).sum(0), 0)[case.slot_to_expert]


def test_every_source_sends_its_own_copies() -> None:
    for case, quota in shared(seed=100):
        sent = share_all(case, quota)
        assert (sent >= 0).all(), case.name
        per_expert = np.zeros((case.num_experts + 1, case.num_ranks), dtype=np.int64)
        np.add.at(per_expert, case.slot_to_expert, sent.T)
        assert np.array_equal(per_expert[:-1].T, case.loads), case.name
        assert not sent[:, quota.numpy() == 0].any(), f"{case.name}: a slot without quota receives copies"


def test_slots_receive_their_quota_within_the_bound() -> None:
    exact, far = 0, 0
    for case, quota in shared(seed=200):
        error = np.abs(share_all(case, quota).sum(0) - quota.numpy())
        bound = np.maximum(0, senders(case) - 1)
        assert (error <= bound).all(), case.name
        exact += int((error[bound == 0] == 0).sum())
        far += int((error > 1).sum())
    assert exact > 100 and far > 10, "too easy: nothing is at the bound, or nothing is off"


def test_a_plan_of_whole_experts_is_met_exactly() -> None:
    """plan_active gives every expert to one slot: all cuts lie at 0 or n, nothing is rounded."""
    for case in instances(1, seed=250, max_ranks=64, families=("eplb", "random", "split_256", "full_total")):
        quota = ops.plan_active(torch.from_numpy(case.loads), case.tables()).quota
        assert np.array_equal(share_all(case, quota).sum(0), quota.numpy()), case.name


def test_offsets_spread_so_that_roundings_cancel() -> None:
    """Sources of one copy each: with one offset for all, one replica would get all of them."""
    ranks, tables = 64, ops.replica_tables(torch.tensor([0, 0] + [-1] * 62, dtype=torch.int32), 64, 1)
    for first in (16, 31, 32, 50):
        quota = torch.zeros(64, dtype=torch.int32)
        quota[0], quota[1] = first, ranks - first
        counts = torch.ones(1, dtype=torch.int32)
        received = sum(ops.share_alone(counts, quota, tables, s) for s in range(ranks))
        assert (received - quota).abs().max() <= 2


def test_cuts_are_the_formula_in_rationals() -> None:
    """Against fractions, straight from the definition: floor(n * part / total + u)."""
    rng = np.random.default_rng(3)
    tables = ops.replica_tables(torch.arange(12, dtype=torch.int32) % 3, 4, 3)
    slots = [[p for p in range(12) if p % 3 == e] for e in range(3)]
    for top in (1, 5, 1000, 2**29 - 1):
        for source in range(4):
            quota = rng.integers(0, top + 1, 12).astype(np.int32)
            totals = [int(quota[s].sum(dtype=np.int64)) for s in slots]
            counts = np.array([rng.integers(0, n + 1) for n in totals], dtype=np.int32)
            row = ops.share_alone(torch.from_numpy(counts), torch.from_numpy(quota), tables, source)
            for e in range(3):
                u = Fraction((2**31 + source * 0x9E3779B9 + e * 0x5EB851EC) % 2**32, 2**32)
                part = np.cumsum(quota[slots[e]], dtype=np.int64).tolist()
                cuts = [floor(Fraction(int(counts[e]) * x, max(1, totals[e])) + u) for x in [0, *part]]
                if totals[e]:
                    assert row.numpy()[slots[e]].tolist() == np.diff(cuts).tolist(), (top, source, e)


def test_equals_reference() -> None:
    for case, quota in shared(seed=300, max_ranks=16):
        tables, loads = case.tables(), torch.from_numpy(case.loads)
        for s in range(case.num_ranks):
            mine = ops.share_alone(loads[s], quota, tables, s)
            assert torch.equal(mine, reference.share_alone(loads[s], quota, tables, s)), (case.name, s)


def test_past_quotas_say_proportions() -> None:
    """Of batches before: more copies now, none of some experts then, which are cut level."""
    unseen = 0
    for case, quota in shared(seed=350, max_ranks=16):
        tables, now = case.tables(), torch.from_numpy(case.loads.astype(np.int64))
        past = torch.where(torch.arange(len(quota)) % 3 == 0, 0, quota // 5).to(torch.int32)
        past[(case.slot_to_expert < 0)] = 0
        counts = torch.where(now < 2**20, now * 3 + 1, now).to(torch.int32)
        held = np.unique(case.slot_to_expert[case.slot_to_expert >= 0])
        counts[:, np.setdiff1d(np.arange(case.num_experts), held)] = 0
        for s in range(case.num_ranks):
            row = ops.share_alone(counts[s], past, tables, s, past=True)
            assert torch.equal(row, reference.share_alone(counts[s], past, tables, s, past=True)), case.name
            for e in held:
                slots = np.flatnonzero(case.slot_to_expert == e)
                mine, n = row[slots].tolist(), int(counts[s, e])
                assert sum(mine) == n, "every copy is sent"
                ranks = len({p // case.slots_per_rank for p in slots})
                if not past[slots].any() and ranks == len(slots):
                    unseen += len(slots) > 1
                    assert max(mine) - min(mine) <= 2 and max(mine) - n / ranks <= 1
                whole = int(past[slots].sum(dtype=torch.int64))
                if whole:
                    part = [n * int(q) / whole for q in past[slots]]
                    assert all(abs(m - p) < 1 for m, p in zip(mine, part, strict=True)), case.name
    assert unseen > 50


def test_recent_counts_halve_in_eight_batches() -> None:
    tables = ops.replica_tables(SLOTS, 4, 4)
    mine, theirs = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
    none = torch.zeros(4, dtype=torch.int32)
    for batch in range(3):
        counts = COUNTS * (batch + 1)
        ops.share_alone(counts, QUOTA, tables, 1, past=True, recent=mine)
        ops.plan_own(counts, tables, none, 1, recent=theirs)
        assert torch.equal(mine, theirs), "as plan_own keeps them"
    for _ in range(8):
        ops.share_alone(none, QUOTA, tables, 1, past=True, recent=mine)
    assert torch.allclose(mine.double(), theirs.double() / 2, rtol=1e-3)
    layers = torch.zeros(3, 4, dtype=torch.int64)
    of_layers = ops.replica_tables(SLOTS.expand(3, 8).contiguous(), 4, 4)
    counts = torch.stack([COUNTS, 2 * COUNTS, 0 * COUNTS])
    ops.share_alone(counts, QUOTA.expand(3, 8), of_layers, 1, past=True, recent=layers)
    assert torch.equal(layers, counts.long() << 16)


def test_route_takes_the_row_as_any_other() -> None:
    case = draw("eplb", 8, 5)
    loads, tables = torch.from_numpy(case.loads), case.tables()
    quota = ops.plan_exact(loads.sum(0, dtype=torch.int32), tables).quota
    for source in range(8):
        ids = torch.repeat_interleave(torch.arange(case.num_experts), loads[source])
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(source))]
        row = ops.share_alone(loads[source], quota, tables, source)
        slots = ops.route(ops.count(ids.view(-1, 1), tables.num_experts), row, tables)
        assert torch.equal(slots.flatten().bincount(minlength=len(quota)), row.long())


def test_layers_at_once_equal_one_by_one() -> None:
    cases = [draw("split_256", 8, seed) for seed in range(3)]
    tables = ops.replica_tables(torch.from_numpy(np.stack([c.slot_to_expert for c in cases])), 8, 256)
    loads = torch.from_numpy(np.stack([case.loads for case in cases]))
    quota = ops.plan_exact(loads, tables).quota
    together = ops.share_alone(loads[:, 5], quota, tables, 5)
    assert torch.equal(together, reference.share_alone(loads[:, 5], quota, tables, 5))
    for i in range(3):
        assert torch.equal(together[i], ops.share_alone(loads[i, 5], quota[i], tables[i], 5))


def test_all_copies_of_the_largest_batch() -> None:
    """Products near 2^62: one source has all 2^31 - 1 copies and meets the quota exactly; two share them."""
    tables = ops.replica_tables(torch.tensor([0, 0, 0], dtype=torch.int32), 3, 1)
    quota = torch.tensor([2**30, 2**30 - 2, 1], dtype=torch.int32)
    for source in range(3):
        whole = ops.share_alone(torch.tensor([MAX_COPIES], dtype=torch.int32), quota, tables, source)
        assert torch.equal(whole, quota)
        part = torch.tensor([MAX_COPIES - 12345], dtype=torch.int32)
        mine = ops.share_alone(part, quota, tables, source)
        assert torch.equal(mine, reference.share_alone(part, quota, tables, source))


SLOTS = torch.tensor([0, 1, 1, 2, 2, 0, 3, 3], dtype=torch.int32)  # 4 experts on 4 ranks
COUNTS = torch.tensor([1, 2, 1, 4], dtype=torch.int32)
QUOTA = torch.tensor([1, 2, 2, 1, 3, 3, 4, 0], dtype=torch.int32)


def test_the_op_itself_refuses_sources_that_no_group_has() -> None:
    tables = ops.replica_tables(SLOTS, 4, 4)
    with pytest.raises(RuntimeError, match=r"source must be in 0\.\.1023, got 1024"):
        torch.ops.isoload.share_alone.default(COUNTS, QUOTA, tables.data, 1024, False, None)
