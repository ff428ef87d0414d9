"""Router traces of Megatron-Core, written by a stand-in for its RouterTracer: what comes back, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.traces import Trace, read_trace

STEPS, MICROBATCHES, TOKENS, EXPERTS, TOP_K = 3, 2, 5, 8, 2
LAYERS = (1, 2, 4)
Line = dict[str, Any]


def line(step: int, layer: int, rank: int, ids: Any, **more: Any) -> Line:
    """A line as RouterTracer._make_index_record writes it, keys in its order."""
    shape = {"num_tokens": len(ids), "topk": TOP_K}
    head = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
    return head | shape | more | {"top_indices": np.asarray(ids).tolist()}


def choices(seed: int, ranks: int = 2) -> Any:
    """[ranks, STEPS, MICROBATCHES, TOKENS, L, K]"""
    drawn = np.random.default_rng(seed).random((ranks, STEPS, MICROBATCHES, TOKENS, len(LAYERS), EXPERTS))
    return drawn.argsort(-1)[..., :TOP_K]


def lines(ids: Any, rank: int, calls: int = 1) -> Iterator[Line]:
    """Of one rank, in the order of its forward passes; calls: 2 where each is computed again."""
    for step, microbatches in enumerate(ids, 10):
        for chosen in microbatches:
            for _ in range(calls):
                for at, layer in enumerate(LAYERS):
                    yield line(step, layer, rank, chosen[:, at])


def write(
    folder: Path, ids: Any, change: Callable[[int, list[Line]], list[Line]] = lambda rank, all: all
) -> Path:
    folder.mkdir(exist_ok=True)
    for rank, own in enumerate(ids):
        text = "".join(json.dumps(each) + "\n" for each in change(rank, list(lines(own, rank))))
        (folder / f"router_trace_rank{rank}.jsonl").write_text(text)
    return folder


def in_order(ids: Any) -> Any:
    """[tokens, L, K] by step, then rank, then microbatch."""
    return ids.swapaxes(0, 1).reshape(-1, len(LAYERS), TOP_K)


def test_ranks_are_united(tmp_path: Path) -> None:
    ids = choices(0)
    trace = read_trace(write(tmp_path / "run", ids))
    np.testing.assert_array_equal(trace.topk_ids, in_order(ids))
    assert (trace.name, trace.num_experts, trace.top_k) == ("run", EXPERTS, TOP_K)
    assert trace.tokens_per_batch.tolist() == [2 * MICROBATCHES * TOKENS] * STEPS
    assert trace.seq_id.tolist() == np.arange(STEPS * 2 * MICROBATCHES).repeat(TOKENS).tolist()
    assert (trace.layer_ids, trace.identity.numbering) == ((0, 1, 2), "moe")
    assert trace.provenance["layers_in_files"] == list(LAYERS) and trace.provenance["ranks"] == [0, 1]
    assert trace.provenance["read as"] == "2 rank files of one recording"
    assert isoload.place(trace, isoload.Topology(2), 5, "scenario").layer_ids == (0, 1, 2)
    swapped = read_trace([tmp_path / "run" / f"router_trace_rank{rank}.jsonl" for rank in (1, 0)])
    np.testing.assert_array_equal(swapped.topk_ids, trace.topk_ids)


def test_training_and_inference_number_the_layers_alike(tmp_path: Path) -> None:
    """Training numbers from 0, inference from 1: both are positions among the MoE layers."""
    ids = choices(0)
    later = write(
        tmp_path / "b", ids, lambda rank, all: [each | {"layer": each["layer"] + 1} for each in all]
    )
    first, second = read_trace(write(tmp_path / "a", ids)), read_trace(later)
    assert first.layer_ids == second.layer_ids and (first.topk_ids == second.topk_ids).all()


def test_tensor_parallel_ranks_count_once(tmp_path: Path) -> None:
    ids = choices(1, ranks=4)
    ids[1], ids[3] = ids[0], ids[2]
    trace = read_trace(write(tmp_path / "run", ids))
    np.testing.assert_array_equal(trace.topk_ids, in_order(ids[::2]))
    assert trace.provenance["ranks_with_a_shared_view"] == [1, 3]


def test_microbatches_that_are_computed_again_count_once(tmp_path: Path) -> None:
    ids = choices(2)
    again = write(tmp_path / "run", ids, lambda rank, _: list(lines(ids[rank], rank, calls=2)))
    trace = read_trace(again)
    np.testing.assert_array_equal(trace.topk_ids, in_order(ids))
    assert trace.provenance["recomputed_records_dropped"] == 2 * STEPS * MICROBATCHES * len(LAYERS)


def test_mtp_layers_and_empty_microbatches(tmp_path: Path) -> None:
    ids = choices(3)

    def change(rank: int, all: list[Line]) -> list[Line]:
        mtp = line(10, 1, rank, ids[rank, 0, 0, :, 0]) | {"block": "mtp", "mtp_idx": 0}
        empty = [line(10, layer, rank, []) for layer in LAYERS]
        return [*all, mtp, *empty]

    trace = read_trace(write(tmp_path / "run", ids, change))
    np.testing.assert_array_equal(trace.topk_ids, in_order(ids))
    assert trace.provenance["mtp_records_dropped"] == 2


def test_steps_that_a_rank_lacks_at_the_end_are_dropped(tmp_path: Path) -> None:
    ids = choices(4)
    folder = write(tmp_path / "run", ids)
    torn = folder / "router_trace_rank1.jsonl"
    torn.write_text(torn.read_text()[:-20])
    trace = read_trace(folder)
    np.testing.assert_array_equal(trace.topk_ids, in_order(ids[:, :2]))
    assert trace.provenance["torn_lines_dropped"] == trace.provenance["incomplete_passes_dropped"] == 1


def test_experts_are_those_of_recorded_logits(tmp_path: Path) -> None:
    ids = choices(5)

    def with_logits(experts: int) -> Trace:
        shape = {"logit_shape": [TOKENS, experts]}
        return read_trace(write(tmp_path / "run", ids, lambda rank, all: [each | shape for each in all]))

    assert with_logits(EXPERTS + 4).num_experts == EXPERTS + 4
    with pytest.raises(ValueError, match=r"top_indices must be in 0\.\.6 \(logit_shape\), got 7"):
        with_logits(EXPERTS - 1)


def test_a_missing_rank_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", choices(6, ranks=3))
    (folder / "router_trace_rank1.jsonl").unlink()
    with pytest.raises(
        ValueError, match="the recording lacks the files of rank 1 of 3: add them, or --allow"
    ):
        read_trace(folder)
    with pytest.warns(
        UserWarning, match="lacks the files of rank 1 of 3; its loads are those of the remaining"
    ):
        trace = read_trace(folder, allow_missing_ranks=True)
    assert trace.provenance["ranks"] == [0, 2]


def test_recordings_lie_in_folders_of_their_own(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, choices(seed)) for seed, name in enumerate("ab", 7))
    trace = read_trace([first, second], same_layers=True)
    assert trace.num_batches == 2 * STEPS
    (second / "router_trace_rank0.jsonl").rename(first / "more.jsonl")
    message = "holds rank 0, as more.jsonl does: put the files of each recording into a folder of its own"
    with pytest.raises(ValueError, match=message):
        read_trace(first)


def edit(number: int, **changes: Any) -> Callable[[int, list[Line]], list[Line]]:
    """Rank 1's lines with some keys of one changed."""

    def change(rank: int, all: list[Line]) -> list[Line]:
        if rank == 1:
            all[number] |= changes
        return all

    return change


def without(number: int) -> Callable[[int, list[Line]], list[Line]]:
    return lambda rank, all: all[:number] + all[number + 1 :] if rank == 1 else all


ERRORS = [
    (edit(1, stage="post"), "rank1.jsonl: line 2: stage must be pre_dispatch, got {"),
    (edit(1, rank=3), "rank1.jsonl: line 2: rank must be that of the lines before, got 3"),
    (edit(1, step=-1), "rank1.jsonl: line 2: step must be an integer from 0 on, got -1"),
    (edit(1, layer=True), "rank1.jsonl: line 2: layer must be an integer from 0 on, got True"),
    (edit(1, num_tokens=4), "line 2: top_indices must be [4, 2] (num_tokens, topk), got [5, 2]"),
    (edit(1, top_indices=[[0, 2**16]] * 5), "line 2: top_indices must be below 65536, got 65536"),
    (edit(1, top_indices=[[0, 1.5]] * 5), "line 2: top_indices must be integers from -1 on, layer 0 has 1.5"),
    (edit(1, top_indices=[[3, 3]] * 5), "topk_ids"),
    (
        without(4),
        "rank1.jsonl: step 10 must have the same tokens in every layer, layer 1 has [[5, 2], [5, 2]], "
        "layer 2 has [[5, 2]]",
    ),
    (edit(1, logit_shape=[5, 2**17]), "line 2: logit_shape must end with 1..65536 experts, got [5, 131072]"),
    (
        lambda rank, all: [each for each in all if (each["step"], each["layer"]) != (11, 4) or rank == 0],
        "rank1.jsonl: step 11 must have the layers of the first step, 1..2, 4, got 1..2",
    ),
    (
        lambda rank, all: [each for each in all if each["layer"] != 4 or rank == 0],
        "rank1.jsonl: must have the layers of router_trace_rank0.jsonl, 1..2, 4, got 1..2: files do not state the "
        "pipeline stage, so record with one stage",
    ),
    (lambda rank, all: [each | {"block": "mtp"} for each in all], "rank0.jsonl: holds no step of the decoder's layers"),
    (
        lambda rank, all: [each for each in all if each["step"] != 11 or rank == 0],
        "forward pass 11 has no record of ranks [1]",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), ERRORS, ids=[text[-40:] for _, text in ERRORS])
def test_what_the_reader_refuses(tmp_path: Path, change: Any, message: str) -> None:
    folder = write(tmp_path / "run", choices(8), change)
    with pytest.raises(ValueError) as raised:
        read_trace(folder)
    assert message in str(raised.value)


def test_damaged_lines_and_sizes_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", choices(9))
    path = folder / "router_trace_rank1.jsonl"
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="above the limit of"):
        read_trace(folder, max_bytes=len(whole))
    path.write_bytes(whole.replace(b'"layer": 2', b'"layer": 2\xff', 1))
    with pytest.raises(ValueError, match=r"rank1.jsonl: line 2: is not text"):
        read_trace(folder)
    path.write_bytes(whole[:300].replace(b"[[", b"[", 1) + b"}\n" + whole)
    with pytest.raises(ValueError, match=r"rank1.jsonl: line 1: "):
        read_trace(folder)


def writer() -> Any:
    """Megatron-Core's router_trace.py, which imports torch alone; the test is skipped where it is absent."""
    found = importlib.util.find_spec("megatron")
    folders = list(found.submodule_search_locations or []) if found else []
    path = next(
        iter(Path(folder, "core/transformer/moe/router_trace.py") for folder in folders), Path("none")
    )
    if not path.exists():
        pytest.skip("needs megatron-core from 0.19 on")
    spec = importlib.util.spec_from_file_location("router_trace", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_megatron_core_writes_is_read(tmp_path: Path) -> None:
    """Its hook is called with the maps of a router, over a training run of two ranks."""
    made, ids = writer(), choices(10)
    router = type("Router", (), {"topk": TOP_K})()
    for rank, steps in enumerate(ids):
        tracer = made.RouterTracer(str(tmp_path), STEPS + 1, rank, training_mode=True)
        for step, microbatches in enumerate(steps, 1):
            for chosen in torch.from_numpy(microbatches):
                for at, layer in enumerate(LAYERS):
                    map_ = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter(1, chosen[:, at], True)
                    name = made._parse_router_module_name(f"decoder.layers.{layer}.mlp.router")
                    tracer._record(router, (), (None, map_), name)
            tracer.advance_step(step)
        tracer.flush()
    trace = read_trace(tmp_path)
    np.testing.assert_array_equal(trace.topk_ids, np.sort(in_order(ids), -1))
    assert trace.provenance["layers_in_files"] == list(LAYERS)
