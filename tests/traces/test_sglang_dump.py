"""SGLang recorder dumps: what is read equals the choices the dump was made from."""

import numpy as np
import pytest
import torch

from isoload.traces import read_trace
from support.sglang_recording import (
    DENSE,
    EXPERTS,
    LAYERS,
    MOE,
    RANKS,
    SLOTS,
    TOP_K,
    Recording,
    expert_counts,
    without,
)


@pytest.fixture
def recording(tmp_path):
    return Recording(seed=11, folder=tmp_path)


# stat


@pytest.mark.parametrize("seed", range(3))
def test_stat(tmp_path, seed):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 9, (10, LAYERS, EXPERTS))
    counts[:, DENSE] = 0
    counts[[2, 8, 9]] = 0  # never filled
    counts[:, MOE[0], 3] = 0  # an expert that no token chose stays
    path = tmp_path / "recorder.pt"
    dump = {"rank": 0, "logical_count": torch.from_numpy(counts).int()}
    torch.save({**dump, "average_utilization_rate_over_window": None}, path)
    trace = read_trace(path)
    np.testing.assert_array_equal(trace.counts, counts[[0, 1, 3, 4, 5, 6, 7]][:, MOE])
    assert (trace.num_experts, trace.top_k, trace.layer_ids) == (EXPERTS, 0, tuple(MOE))
    assert (trace.name, trace.provenance["mode"]) == (path.stem, "stat")
    assert trace.provenance["empty_steps_dropped"] == 3


def test_stat_summed_over_steps(tmp_path):
    counts = np.arange(1, LAYERS * EXPERTS + 1).reshape(LAYERS, EXPERTS)
    torch.save({"logical_count": torch.from_numpy(counts)}, tmp_path / "total.pt")
    np.testing.assert_array_equal(read_trace(tmp_path / "total.pt").counts, counts[None])


# per_pass


@pytest.mark.parametrize("view", ["own_tokens", "own_slots", "everything"])
def test_per_pass(recording, view):
    paths = recording.save(getattr(recording, view))
    for source in (recording.folder, paths, paths[::-1]):
        trace = read_trace(source)
        np.testing.assert_array_equal(trace.counts, recording.true_counts())  # pass 11 is idle everywhere
        assert (trace.num_experts, trace.layer_ids, trace.has_tokens) == (EXPERTS, tuple(MOE), False)
        assert trace.provenance["ranks_with_a_shared_view"] == ([1, 2] if view == "everything" else [])
    assert trace.provenance["mode"] == "per_pass"


def test_two_attention_groups(recording):
    """Ranks 0 and 2 share their tokens, rank 1 has others."""
    paths = recording.save(lambda p, rank: recording.own_tokens(p, 0 if rank == 2 else rank))
    truth = [sum(expert_counts(recording.choices[p, rank]) for rank in (0, 1)) for p in (7, 8, 9)]
    trace = read_trace(paths)
    np.testing.assert_array_equal(trace.counts, truth)
    assert trace.provenance["ranks_with_a_shared_view"] == [2]


def test_experts_that_moved_between_ranks_files(recording):
    """Every file is converted by its own map."""
    other = recording.rng.permutation(SLOTS)

    def relabel(rank, dump):
        if rank == 1:
            dump["last_physical_to_logical_map"] = dump["last_physical_to_logical_map"][:, other]
            for record in dump["records"]:
                record["global_physical_count"] = record["global_physical_count"][:, other]
        return dump

    trace = read_trace(recording.save(recording.own_tokens, relabel))
    np.testing.assert_array_equal(trace.counts, recording.true_counts())


def test_passes_cut_off_at_the_ends(recording):
    trace = read_trace(recording.save(recording.own_tokens, without((7, 2), (11, 0))))
    np.testing.assert_array_equal(trace.counts, recording.true_counts((8, 9)))
    assert trace.provenance["incomplete_passes_dropped"] == 2


# per_token


@pytest.mark.parametrize("seed", range(3))
def test_per_token(tmp_path, seed):
    recording = Recording(seed, tmp_path)
    trace = read_trace(recording.save())
    expected, seq_id, tokens_per_batch, sequences = [], [], [], 0
    for forward_pass in (7, 8, 9):
        for rank in range(RANKS):
            ids = recording.choices[forward_pass, rank]
            lengths = recording.seq_lens(len(ids)) if forward_pass == 7 else [len(ids)]
            owner = np.repeat(np.arange(sequences, sequences + len(lengths)), lengths)
            sequences += len(lengths)
            keep = [token for token in range(len(ids)) if token % 5 != 4]
            expected.append(ids[keep][:, MOE, :TOP_K])
            seq_id.append(owner[keep])
        tokens_per_batch.append(sum(len(part) for part in expected[-RANKS:]))
    np.testing.assert_array_equal(trace.topk_ids, np.concatenate(expected))
    np.testing.assert_array_equal(trace.seq_id, np.concatenate(seq_id))
    np.testing.assert_array_equal(trace.tokens_per_batch, tokens_per_batch)
    assert (trace.num_experts, trace.top_k, trace.layer_ids) == (EXPERTS, TOP_K, tuple(MOE))
    assert trace.counts is None and trace.provenance["mode"] == "per_token"
    np.testing.assert_array_equal(trace.batch_counts(), recording.true_counts())


def test_a_padded_prefill_is_one_sequence(recording):
    def lengthen(rank, dump):
        dump["records"][0]["extend_seq_lens"] = [3, 99]
        return dump

    trace = read_trace(recording.save(change=lengthen))
    first = len(recording.choices[7, 0][np.arange(len(recording.choices[7, 0])) % 5 != 4])
    assert (trace.seq_id[:first] == trace.seq_id[0]).all()
