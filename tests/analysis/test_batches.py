"""Batches: how tokens are cut, drawn and laid on source ranks."""

import numpy as np
import pytest

from isoload.analysis.batches import draw_topk_ids, make_batches, source_ranks
from isoload.traces import Trace


def token_trace(tokens, layers=2, k=2, num_experts=6, seed=0, **fields):
    rng = np.random.default_rng(seed)
    ids = rng.permuted(np.tile(np.arange(num_experts), (tokens, layers, 1)), axis=-1)[..., :k]
    ids[rng.random(ids.shape) < 0.1] = -1
    return Trace("tokens", num_experts, topk_ids=ids, **fields)


def count_trace(counts, top_k, **fields):
    return Trace("counts", counts.shape[-1], top_k, counts=counts, **fields)


def sizes(batches):
    return list(batches.num_tokens)


# Source ranks


def test_contiguous_tokens_fill_the_ranks_in_order():
    assert source_ranks(8, 4, "contiguous").tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert source_ranks(2, 4, "contiguous").tolist() == [1, 3]
    assert source_ranks(0, 4, "contiguous").tolist() == []


def test_round_robin_deals_sequences_by_first_appearance():
    assert source_ranks(5, 3, "round-robin").tolist() == [0, 1, 2, 0, 1]
    seq_id = np.array([7, 7, 3, 9, 3, 1, 7])
    assert source_ranks(7, 3, "round-robin", seq_id).tolist() == [0, 0, 1, 2, 1, 0, 0]


def test_contiguous_sequences_go_where_their_middle_falls():
    # Of 12 tokens on 3 ranks, stretches of 4: middles at 3, 6.5 (after 6) and 9.5 (after 7).
    seq_id = np.array([5] * 6 + [2] + [8] * 5)
    assert source_ranks(12, 3, "contiguous", seq_id).tolist() == [0] * 6 + [1] + [2] * 5


@pytest.mark.parametrize("assign", ["contiguous", "round-robin"])
@pytest.mark.parametrize("num_ranks", [1, 2, 7, 16])
def test_sequences_stay_whole_and_ranks_nearly_equal(assign, num_ranks):
    rng = np.random.default_rng(num_ranks)
    seq_id = rng.permutation(np.repeat(rng.permutation(90), rng.integers(1, 6, 90)))
    ranks = source_ranks(len(seq_id), num_ranks, assign, seq_id)
    assert all(len(set(ranks[seq_id == s])) == 1 for s in set(seq_id))
    tokens = np.bincount(ranks, minlength=num_ranks)
    if assign == "contiguous":
        longest = np.bincount(seq_id).max()
        assert abs(tokens - len(seq_id) / num_ranks).max() <= longest
    else:
        held = [len(set(seq_id[ranks == r])) for r in range(num_ranks)]
        assert max(held) - min(held) <= 1


def test_source_batch_groups_tokens_and_keeps_their_order():
    trace = token_trace(9, seq_id=np.array([0, 1, 2] * 3))
    batch = make_batches(trace).source_batch(0, 4, "round-robin")
    assert batch.start == (0, 3, 6, 9, 9)
    assert batch.num_tokens == 9 and batch.num_ranks == 4
    assert batch.sources().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for layer in range(2):
        for rank in range(3):
            got = batch.on_rank(layer, rank)
            assert got.is_contiguous()
            np.testing.assert_array_equal(got.numpy(), trace.topk_ids[rank::3, layer])
        assert batch.on_rank(layer, 3).shape == (0, 2)


# Cut batches


def test_own_batches_are_kept():
    trace = token_trace(10, tokens_per_batch=np.array([4, 0, 6]), cluster=("a", "b", "a"))
    batches = make_batches(trace)
    assert not batches.drawn
    assert sizes(batches) == [4, 0, 6] and batches.clusters == ("a", "b", "a")
    for b, part in enumerate((slice(0, 4), slice(4, 4), slice(4, 10))):
        for layer in range(2):
            ids = trace.topk_ids[part, layer]
            assert batches.counts[b, layer].tolist() == [(ids == e).sum() for e in range(6)]


@pytest.mark.parametrize(("tokens", "size", "expected"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 5, [3])])
def test_tokens_are_cut_every_n(tokens, size, expected):
    assert sizes(make_batches(token_trace(tokens), size)) == expected


def test_tokens_without_batches_are_cut_every_1024():
    assert sizes(make_batches(token_trace(2100))) == [1024, 1024, 52]


def test_a_batch_never_spans_two_clusters():
    trace = token_trace(20, tokens_per_batch=np.full(5, 4), cluster=("a", "a", "b", "b", "a"))
    batches = make_batches(trace, 5)
    assert sizes(batches) == [5, 3, 5, 3, 4]
    assert batches.clusters == ("a", "a", "b", "b", "a")


def test_counts_of_other_tokens_do_not_cut_the_tokens():
    counts = np.full((3, 2, 6), 50)
    trace = token_trace(10, counts=counts, tokens_per_batch=np.full(3, 200), cluster=("a", "b", "c"))
    batches = make_batches(trace)
    assert sizes(batches) == [10] and batches.clusters is None


# Drawn batches


def test_drawn_tokens_have_distinct_experts_and_the_right_shares():
    rng = np.random.default_rng(11)
    counts = rng.zipf(1.5, 24).clip(0, 100)
    counts[[3, 20]] = 0, counts.sum() // 4  # never, and nearly in every token
    tokens, k = 40_000, 4
    ids = draw_topk_ids(counts, tokens, k, np.random.default_rng(0))
    assert ids.shape == (tokens, k) and ids.dtype == np.int32
    assert (np.diff(np.sort(ids), axis=1) > 0).all()
    expected = k * counts / counts.sum()
    seen = np.bincount(ids.ravel(), minlength=24) / tokens
    assert seen[3] == 0 and expected[20] > 0.7
    assert (abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / tokens) + 1e-12).all()


def test_an_expert_with_one_kth_of_the_copies_is_in_every_token():
    ids = draw_topk_ids(np.array([10, 3, 0, 7, 10]), 500, 3, np.random.default_rng(1))
    assert ((ids == 0).sum(1) == 1).all() and ((ids == 4).sum(1) == 1).all()
    assert sorted(set(ids.ravel().tolist())) == [0, 1, 3, 4]


def test_pairs_are_drawn_together_as_often_as_independence_says_nearly():
    # A fixed order of experts would never draw neighbours together.
    ids = draw_topk_ids(np.full(12, 5), 20_000, 2, np.random.default_rng(2))
    pairs = np.zeros((12, 12))
    np.add.at(pairs, (ids.min(1), ids.max(1)), 1)
    seen = pairs[np.triu_indices(12, 1)] / 20_000
    assert abs(seen - 1 / 66).max() < 0.005


def test_huge_counts_do_not_overflow():
    counts = np.array([2**31, 2**31, 2**31 + 7, 5])
    assert set(np.unique(draw_topk_ids(counts, 5000, 2, np.random.default_rng(0)))) <= {0, 1, 2, 3}


def test_a_layer_without_copies_draws_absent_ones():
    assert (draw_topk_ids(np.zeros(5, dtype=np.int64), 7, 2, np.random.default_rng(0)) == -1).all()


def test_drawn_batches_follow_the_seed_and_nothing_else():
    counts = np.random.default_rng(5).integers(0, 40, (3, 4, 8))
    trace = count_trace(counts, 2, layer_ids=(3, 4, 5, 9))
    batches = make_batches(trace, 64, seed=1)
    assert batches.drawn

    def drawn(trace, seed, batch=1):
        return make_batches(trace, 64, seed).source_batch(batch, 4, "contiguous").topk_ids

    first = drawn(trace, 1)
    assert first.shape == (4, 64, 2)
    assert (first == drawn(trace, 1)).all()
    assert (first != drawn(trace, 2)).any() and (first != drawn(trace, 1, 2)).any()
    assert (first[[1, 3]] == drawn(trace.select_layers([1, 3]), 1)).all()
    assert (batches.counts == counts).all()


def test_drawn_batches_are_as_large_as_the_trace_says():
    counts = np.zeros((3, 2, 4), dtype=np.int64)
    counts[0], counts[1], counts[2, 1] = 10, 100_000, 3
    assert make_batches(count_trace(counts, 2)).num_tokens == (20, 4096, 6)
    assert make_batches(count_trace(counts, 2), 17).num_tokens == (17, 17, 17)
    own = count_trace(counts, 2, tokens_per_batch=np.array([31, 300_000, 8]))
    assert make_batches(own).num_tokens == (31, 4096, 8)
    batch = make_batches(count_trace(counts, 2)).source_batch(2, 4, "contiguous")
    assert (batch.topk_ids[0] == -1).all() and (batch.topk_ids[1] >= 0).all()
    assert np.diff(batch.start).tolist() == [1, 2, 1, 2]


def test_without_k_copies_are_drawn_one_by_one():
    counts = np.array([[[30, 10, 0, 0]], [[1, 1, 1, 1]]])
    batches = make_batches(count_trace(counts, 0, tokens_per_batch=np.array([7, 7])))
    assert batches.num_tokens == (40, 4)
    assert batches.source_batch(0, 2, "contiguous").topk_ids.shape == (1, 40, 1)


def test_a_part_is_the_trace_of_some_batches():
    trace = token_trace(9, tokens_per_batch=np.array([2, 3, 4]), seq_id=np.arange(9))
    part = make_batches(trace).part([2, 0])
    rows = [5, 6, 7, 8, 0, 1]
    assert part.topk_ids.tolist() == trace.topk_ids[rows].tolist() and part.seq_id.tolist() == rows
    assert part.tokens_per_batch.tolist() == [4, 2] and part.layer_ids == trace.layer_ids
    assert np.array_equal(part.counts, trace.batch_counts()[[2, 0]])
    counts = np.arange(24).reshape(3, 2, 4)
    drawn = make_batches(count_trace(counts, 1, tokens_per_batch=np.array([30, 60, 90]))).part([1])
    assert drawn.topk_ids is None and np.array_equal(drawn.counts, counts[[1]])
    assert drawn.tokens_per_batch.tolist() == [60]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_batches(token_trace(9), 0), "batch_tokens must be at least 1, got 0"),
        (lambda: make_batches(token_trace(9), seed=-2), "seed must be at least 0, got -2"),
        (
            lambda: draw_topk_ids(np.array([5, 1, 1]), 4, 2, np.random.default_rng(0)),
            "counts must be of 2 distinct experts per token, so none above 7/2, got 5",
        ),
        (lambda: source_ranks(4, 2, "random"), "assign must be one of contiguous, round-robin, got 'random'"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()
