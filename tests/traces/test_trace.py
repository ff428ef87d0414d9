"""Trace: its rules field by field, its views, and the traces there are."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isoload.traces import Trace, count_batches, read_trace, trace_errors
from isoload.traces.record import model_top_k, with_top_k
from support.sample_traces import ARRAYS, COUNTS, IDS, token_trace

SHIPPED = Path(__file__).parents[2] / "examples" / "traces" / "gptoss20b_decode.npz"
FOLDER = os.environ.get("ISOLOAD_TRACES")


def test_defaults_and_dtypes():
    trace = Trace("t", 7, topk_ids=np.array([[[0, 6]], [[-1, 2]]], dtype=np.int8))
    assert (trace.top_k, trace.layer_ids, trace.num_layers, trace.num_batches) == (2, (0,), 1, 1)
    assert trace.has_tokens and trace.topk_ids.dtype == np.int32 and trace.topk_ids.flags.c_contiguous
    trace = Trace("t", 2, counts=np.ones((4, 3, 2), dtype=np.uint8))
    assert (trace.top_k, trace.layer_ids, trace.num_batches) == (0, (0, 1, 2), 4)
    assert not trace.has_tokens and trace.counts.dtype == np.int64
    assert trace.batch_counts() is trace.counts


@pytest.mark.parametrize("sizes", [[37], [1, 0, 35, 1], [0, 37, 0], [5] * 7 + [2]])
def test_count_batches_against_loops(sizes):
    ids = token_trace(seed=len(sizes)).topk_ids
    expected = np.zeros((len(sizes), 3, 5), dtype=int)
    token = 0
    for b, size in enumerate(sizes):
        for _ in range(size):
            for layer in range(3):
                for expert in ids[token, layer]:
                    expected[b, layer, expert] += expert >= 0
            token += 1
    np.testing.assert_array_equal(count_batches(ids, sizes, 5), expected)
    trace = token_trace(seed=len(sizes), tokens_per_batch=np.array(sizes))
    assert trace.num_batches == len(sizes)
    np.testing.assert_array_equal(trace.batch_counts(), expected)


def test_counts_and_tokens_of_different_runs():
    trace = token_trace(
        counts=np.full((2, 3, 5), 10), tokens_per_batch=np.array([25, 30]), cluster=("a", "b")
    )
    assert trace.num_batches == 2
    assert trace.batch_counts().sum() == 300


def test_select_layers():
    trace = token_trace(layer_ids=(3, 5, 9), counts=np.arange(30).reshape(2, 3, 5))
    picked = trace.select_layers([2, 0])
    assert picked.layer_ids == (9, 3)
    np.testing.assert_array_equal(picked.topk_ids, trace.topk_ids[:, [2, 0]])
    np.testing.assert_array_equal(picked.counts, trace.counts[:, [2, 0]])
    for layers in ([], [3], [-1]):
        with pytest.raises(ValueError, match=r"layers must be some of 0\.\.2, got \["):
            trace.select_layers(layers)


WRONG = {
    "counts or topk_ids must be given, got neither": {},
    "counts must be a NumPy array of integers, got float64": {"counts": COUNTS / 2},
    "counts must be a NumPy array of integers, got list": {"counts": [[[1]]]},
    "counts must be [batches, L, E] and not empty, got shape [3, 5]": {"counts": COUNTS[0]},
    "topk_ids must be [tokens, L, K] and not empty, got shape [0, 3, 2]": {"topk_ids": IDS[:0]},
    "num_experts must be at least 1, got 0": {"topk_ids": IDS, "num_experts": 0},
    "counts must have shape [any, 3, 6], got [2, 3, 5]": {"counts": COUNTS, "num_experts": 6},
    "top_k must be in 0..5 (num_experts), got 6": {"counts": COUNTS, "top_k": 6},
    "topk_ids must have shape [any, 3, 3], got [20, 3, 2]": {"topk_ids": IDS, "top_k": 3},
    "topk_ids must have shape [any, 3, 2], got [20, 2, 2]": {"counts": COUNTS, "topk_ids": IDS[:, :2]},
    "layer_ids must be distinct, got [1, 2, 1]": {"counts": COUNTS, "layer_ids": (1, 2, 1)},
    "counts must have shape [any, 2, 5], got [2, 3, 5]": {"counts": COUNTS, "layer_ids": (1, 2)},
    "tokens_per_batch must have shape [2], got [3]": {"counts": COUNTS, "tokens_per_batch": np.ones(3, int)},
    "cluster must have shape [2], got [1]": {"counts": COUNTS, "cluster": ("a",)},
    "seq_id must come with topk_ids, got none": {"counts": COUNTS, "seq_id": np.arange(5)},
    "seq_id must have shape [20], got [5]": {"topk_ids": IDS, "seq_id": np.arange(5)},
    "counts must not be negative, got -4": {"counts": -COUNTS},
    "tokens_per_batch must not be negative, got -2": {
        "topk_ids": IDS,
        "tokens_per_batch": np.array([22, -2]),
    },
    "topk_ids must be in -1..4, got 0..5": {"topk_ids": IDS * 5},
    "topk_ids must be in -1..4, got -2..0": {"topk_ids": IDS * -2},
    "topk_ids must not name an expert twice, got [3, 3] (token 0, layer 0): "
    "read_routes(topk_ids, padding='repeat') of isoload.traces masks padding rows": {"topk_ids": IDS * 0 + 3},
    "counts must sum to at most tokens_per_batch * top_k = 18, got 20 (batch 1, layer 0)": {
        "counts": COUNTS,
        "tokens_per_batch": np.array([10, 9]),
        "top_k": 2,
    },
    "tokens_per_batch must sum to the 20 tokens of topk_ids, got 21": {
        "topk_ids": IDS,
        "tokens_per_batch": np.array([20, 1]),
    },
    "counts must be those of topk_ids, got others in batch 0": {
        "counts": COUNTS,
        "topk_ids": IDS,
        "tokens_per_batch": np.array([10, 10]),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_trace_errors(message):
    with pytest.raises(ValueError) as raised:
        Trace(**{"name": "t", "num_experts": 5, **WRONG[message]})
    assert str(raised.value) == message


def test_masked_copies_may_repeat():
    assert trace_errors(Trace("t", 3, topk_ids=np.array([[[-1, -1, 2]]]))) == []


def test_the_shipped_trace():
    trace = read_trace(SHIPPED)
    assert (trace.num_experts, trace.top_k, trace.num_layers, trace.num_batches) == (32, 4, 24, 14)
    with np.load(SHIPPED) as archive:
        ids, counts = archive["topk_ids"].astype(int), archive["counts"]
    assert ids.shape == (7168, 24, 4)
    for b in range(14):
        for layer in range(24):
            seen = np.bincount(ids[512 * b : 512 * (b + 1), layer].ravel(), minlength=32)
            np.testing.assert_array_equal(counts[b, layer], seen)
    np.testing.assert_array_equal(trace.seq_id, np.tile(np.arange(64), 112))
    assert SHIPPED.stat().st_size < 500_000
    assert trace.provenance["license"] == "Apache-2.0"
    assert len(trace.provenance["source_commit"]) == 40


@pytest.mark.skipif(not FOLDER, reason="ISOLOAD_TRACES names no folder of traces")
def test_a_folder_of_traces():
    files = sorted(Path(FOLDER).glob("*.npz"))
    assert files
    for path in files:
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in ARRAYS if name in archive.files}
        if "counts" not in arrays and "topk_ids" not in arrays:
            with pytest.raises(ValueError, match="holds neither counts nor topk_ids"):
                read_trace(path)
            continue
        trace = read_trace(path)
        for name, array in arrays.items():
            np.testing.assert_array_equal(getattr(trace, name), array, err_msg=f"{path.name} {name}")


@pytest.mark.parametrize(
    ("model", "experts", "top_k"),
    [
        ("openai/gpt-oss-20b: 24 MoE layers, 32 experts, top-4", 32, 4),
        ("deepseek-ai/DeepSeek-V3-0324", 256, 8),
        ("DeepSeek V2 Lite", 64, 6),
        ("Qwen/Qwen3-30B-A3B", 128, 8),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", 512, 10),
        ("mistralai/Mixtral-8x7B-v0.1", 8, 2),
        ("allenai/OLMoE-1B-7B-0924", 64, 8),
        ("GLM-5.2", 256, 8),
        ("moonshotai/Kimi-K2-Instruct", 384, 8),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 128, 0),
        ("some model", 64, 0),
    ],
)
def test_k_by_a_models_name(model, experts, top_k):
    """Of the experts that the name's models have, and no others."""
    assert model_top_k(model, experts) == top_k
    counts = np.ones((1, 1, experts), dtype=np.int64)
    trace = Trace("loads", experts, counts=counts, provenance={"model": model})
    assert with_top_k(trace).top_k == top_k
    assert with_top_k(replace(trace, top_k=3)).top_k == 3, "the record comes first"
    assert with_top_k(trace, "5").top_k == 5, "then what is given"
