"""Routes of router replay: the shapes that engines return, the layers they mean, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoload.traces import Trace, read_routes, read_trace, write_trace
from isoload.traces.identity import Identity

TOKENS, LAYERS, K, EXPERTS = 40, 6, 4, 32
CONFIG = {"num_hidden_layers": 6, "first_k_dense_replace": 3, "n_routed_experts": 64}


def moe_ids(layers: int = 3, tokens: int = TOKENS, k: int = K) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(layers)
    return rng.permuted(np.tile(np.arange(1, EXPERTS), (tokens, layers, 1)), axis=-1)[..., :k]


def hidden_ids(k: int = K) -> np.ndarray[Any, Any]:
    """A row for every hidden layer; 0, 1 and 2 are dense."""
    return np.concatenate([np.zeros((TOKENS, 3, k), dtype=int), moe_ids(k=k)], axis=1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("known", [{}, {"first_moe_layer": 3}, {"config": CONFIG}])
def test_rows_of_hidden_layers(dtype: Any, known: dict[str, Any]) -> None:
    trace = read_routes(hidden_ids().astype(dtype), **known)
    assert trace.layer_ids == (3, 4, 5) == trace.identity.moe_layers and trace.identity.numbering == "model"
    assert trace.topk_ids is not None and trace.seq_id is None
    np.testing.assert_array_equal(trace.topk_ids, moe_ids())
    assert trace.num_experts == (64 if "config" in known else EXPERTS)


@pytest.mark.parametrize("known", [{"first_moe_layer": 3}, {"config": CONFIG}])
def test_rows_of_moe_layers_alone(known: dict[str, Any]) -> None:
    trace = read_routes(moe_ids(), **known)
    assert trace.layer_ids == (3, 4, 5) and trace.identity == Identity("model", (3, 4, 5))


def test_layers_that_nobody_stated_have_no_numbers_of_the_model() -> None:
    assert read_routes(moe_ids()).identity == Identity("order")


def test_a_config_from_a_file_and_dense_layers_in_between(tmp_path: Path) -> None:
    ids = moe_ids(6)
    ids[:, 2] = 0
    config = {"num_hidden_layers": 6, "mlp_only_layers": [2], "num_experts": 40}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    trace = read_routes(ids, config=tmp_path / "config.json")
    assert trace.layer_ids == (0, 1, 3, 4, 5) and trace.num_experts == 40
    assert read_routes(ids).layer_ids == (0, 1, 3, 4, 5)


def test_a_single_choice_of_expert_0_is_no_dense_layer() -> None:
    ids = hidden_ids(k=1)
    assert read_routes(ids).num_layers == 6
    assert read_routes(ids, first_moe_layer=3).layer_ids == (3, 4, 5)
    ids[:, 4] = 0
    assert read_routes(ids, first_moe_layer=3).num_layers == 3


def test_requests_and_sequences() -> None:
    ids = hidden_ids().astype(np.int16)
    parts = [torch.from_numpy(ids[:13]), ids[13:13], ids[13:]]
    trace = read_routes(parts, first_moe_layer=3)
    assert trace.seq_id is not None
    np.testing.assert_array_equal(trace.seq_id, [0] * 13 + [2] * 27)
    whole = read_routes(ids, first_moe_layer=3, sequence_lengths=[13, 0, 27])
    np.testing.assert_array_equal(whole.seq_id, trace.seq_id)
    np.testing.assert_array_equal(whole.topk_ids, trace.topk_ids)


@pytest.mark.parametrize("missing", ["first", "last"])
def test_tokens_without_routes_are_masked(missing: Any) -> None:
    ids = hidden_ids()
    trace = read_routes([ids[:10], ids[10:]], sequence_lengths=[14, 30], missing=missing)
    assert trace.topk_ids is not None and trace.layer_ids == (3, 4, 5)
    masked = np.flatnonzero((trace.topk_ids < 0).all((1, 2)))
    np.testing.assert_array_equal(masked, range(4) if missing == "first" else range(10, 14))


@pytest.mark.parametrize("padding_row", [[7, 7, 7, 7], [0, 0, 0, 0], [255] * 4, [3, 5, 5, 1]])
def test_padding_rows(padding_row: list[int]) -> None:
    ids = hidden_ids()
    ids[5] = padding_row if padding_row != [0] * 4 else 0
    ids[5, :3] = 0
    with pytest.raises(ValueError, match=r"token 5, layer 3\).*padding='repeat' masks them"):
        read_routes(ids.astype(np.uint8), first_moe_layer=3)
    trace = read_routes(ids.astype(np.uint8), first_moe_layer=3, padding="repeat")
    assert trace.topk_ids is not None and trace.provenance["rows_masked_as_padding"] == 3
    assert (trace.topk_ids[5] == -1).all() and (np.delete(trace.topk_ids, 5, 0) > 0).all()


def test_padding_rows_of_all_layers() -> None:
    """Also of dense layers, which then hold an id in these rows."""
    ids = hidden_ids()
    ids[5], ids[6] = 7, 0
    every: list[dict[str, Any]] = [{}, {"first_moe_layer": 3}, {"config": CONFIG}]
    for known in every:
        trace = read_routes(ids, padding="repeat", **known)
        assert trace.layer_ids == (3, 4, 5) and trace.topk_ids is not None
        np.testing.assert_array_equal(np.flatnonzero((trace.topk_ids < 0).any((1, 2))), [5, 6])


def test_masked_rows_need_no_option() -> None:
    ids = hidden_ids()
    ids[7:9] = -1
    trace = read_routes(ids)
    assert trace.layer_ids == (3, 4, 5) and trace.topk_ids is not None and (trace.topk_ids[7:9] == -1).all()


def repeating() -> np.ndarray[Any, Any]:
    ids = hidden_ids()
    ids[2, 4] = [9, 9, 1, 2]
    return ids


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "first_moe_layer must come without config": (hidden_ids(), {"first_moe_layer": 3, "config": CONFIG}),
    "padding must be one of repeat, got 'zero'": (hidden_ids(), {"padding": "zero"}),
    "missing must be one of first, last, got 'prompt'": (hidden_ids(), {"missing": "prompt"}),
    r"a row, got \[9, 9, 1, 2\] \(token 2, layer 4\)": (repeating(), {}),
    r"routes must be in -1..15, got \[.*\] \(token 0, layer 3\)": (hidden_ids(), {"num_experts": 16}),
    "at least one request, got an empty list": ([], {}),
    r"same layers and K in all requests, got \[\(3, 4\), \(6, 4\)\]": ([hidden_ids(), moe_ids()], {}),
    "missing needs sequence_lengths, got 'last' without": ([hidden_ids()], {"missing": "last"}),
    "missing needs a list of requests": (hidden_ids(), {"missing": "last", "sequence_lengths": [40]}),
    "sequence_lengths must not be negative, got -1": (hidden_ids(), {"sequence_lengths": [41, -1]}),
    "at least one token, layer and choice": (hidden_ids()[:0], {}),
    "add up to the 40 tokens of the routes, got 39": (hidden_ids(), {"sequence_lengths": [20, 19]}),
    r"one length per request \(1\), got 2": ([hidden_ids()], {"sequence_lengths": [20, 20]}),
    "request 0 has 40 rows for 41 tokens: pass missing=": ([hidden_ids()], {"sequence_lengths": [41]}),
    "request 0 has 40 rows for 39 tokens$": ([hidden_ids()], {"sequence_lengths": [39], "missing": "first"}),
    r"got \[40, 6\] int64": (hidden_ids()[..., 0], {}),
    r"got \[40, 6, 4\] float64": (hidden_ids() * 1.0, {}),
    "routes must be in -1..65535, got 4294967296": (hidden_ids() + 2**32, {}),
    "only zeros, as in dense layers": (hidden_ids()[:, :3], {}),
    "each of the model's 6 layers or 3 MoE layers, got 5": (hidden_ids()[:, 1:], {"config": CONFIG}),
    "first_moe_layer must be in 0..4095, got -1": (hidden_ids(), {"first_moe_layer": -1}),
    "row 2 has only zeros, although the model has MoE layers 2..5": (hidden_ids(), {"first_moe_layer": 2}),
    "row 0 has only zeros, although the model has MoE layers 4..9": (hidden_ids(), {"first_moe_layer": 4}),
    "row 2 names experts, although the model has MoE layers 3..5": (
        np.concatenate([hidden_ids()[:, :2], moe_ids(4)], axis=1),
        {"config": CONFIG},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message: str) -> None:
    routes, options = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        read_routes(routes, **options)


def test_files_with_a_row_for_every_hidden_layer(tmp_path: Path) -> None:
    """Dense layers are dropped, also where the file states layers or has counts; others keep their numbers."""
    path = tmp_path / "routes.npz"
    np.savez(path, topk_ids=hidden_ids().astype(np.uint8))
    trace = read_trace(path)
    assert trace.layer_ids == (3, 4, 5) and trace.identity.numbering == "model"
    assert trace.provenance["dense_layers_dropped"] == [0, 1, 2]
    counts = np.ones((1, 6, EXPERTS), dtype=int)
    (tmp_path / "routes.json").write_text('{"layer_ids": [10, 11, 12, 13, 14, 15]}')
    np.savez(path, topk_ids=hidden_ids(), counts=counts)
    assert read_trace(path).layer_ids == (13, 14, 15)
    assert read_trace(path).batch_counts().shape == (1, 3, EXPERTS)


def test_a_masked_layer_of_a_trace_stays(tmp_path: Path) -> None:
    ids = moe_ids()
    ids[:, 1] = -1
    write_trace(Trace("t", EXPERTS, topk_ids=ids), tmp_path / "t.npz")
    assert read_trace(tmp_path / "t.npz").num_layers == 3
