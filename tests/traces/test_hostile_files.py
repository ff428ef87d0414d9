"""Files from anywhere: a Trace, or a ValueError that names the file, quickly and in bounded memory."""

import json
import os
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from isoload.traces import Trace, read_trace, write_trace
from isoload.traces.record import MAX_BYTES_NAME
from support.sample_traces import COUNTS, IDS, token_trace
from support.sglang_recording import Recording


def zipped(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)


def with_json(path, text):
    np.savez(path, counts=COUNTS)
    path.with_suffix(".json").write_text(text)


def ids_up_to(largest):
    return np.array([[[0, largest]]], dtype=np.int64)


def as_pipe(path):
    os.mkfifo(path)


def as_json_folder(path):
    np.savez(path, counts=COUNTS)
    path.with_suffix(".json").mkdir()


def labelled(path, *codes):
    """Labels of code points that are no characters: NumPy reads them, Python cannot."""
    np.savez(path, counts=COUNTS, cluster=np.array([[7], list(codes)], dtype=np.uint32).view("U1")[:, 0])


NPZ_ERRORS = {
    "t.npz: cluster must be text, got code point 0x110000": lambda p: labelled(p, 0x110000),
    "t.npz: cluster must be text, got code point 0xd800": lambda p: labelled(p, 0xD800),
    "t.npz: counts.npy must be an array in NumPy's format, got 5 other bytes": lambda p: zipped(
        p, counts=b"hello"
    ),
    "t.npz: counts.npy must be an array in NumPy's format, got 0 other bytes": lambda p: zipped(
        p, counts=b""
    ),
    "t.json: is nested too deep": lambda p: with_json(p, "[" * 100_000),
    "t.json: is not JSON ('utf-8' codec can't encode character": lambda p: with_json(
        p, r'{"name": "\ud800"}'
    ),
    "t.json: is no regular file": as_json_folder,
    "t.npz: is no regular file": as_pipe,
    "t.npz: about must be at most 16 MiB of bytes, got <U2 []": lambda p: np.savez(
        p, counts=COUNTS, about=np.array("{}")
    ),
    "t.npz: about: is not JSON (": lambda p: np.savez(p, counts=COUNTS, about=np.array(b"{")),
    "t.npz: must hold the arrays ['counts', 'seq_id'], got counts": lambda p: np.savez(
        p, counts=COUNTS, about=np.array(b'{"arrays": ["counts", "seq_id"]}')
    ),
    "t.npz: topk_ids must be below 65536, got 2147483646": lambda p: np.savez(
        p, topk_ids=ids_up_to(2**31 - 2)
    ),
    "t.npz: topk_ids must be below 65536, got 9223372036854775807": lambda p: np.savez(
        p, topk_ids=ids_up_to(2**63 - 1)
    ),
    "t.npz: topk_ids must be below 65536, got 65536": lambda p: np.savez(p, topk_ids=ids_up_to(2**16)),
    "t.npz: topk_ids must be in -1..4, got 0..2147483647": lambda p: (
        np.savez(p, topk_ids=ids_up_to(2**31 - 1)),
        p.with_suffix(".json").write_text('{"num_experts": 5}'),
    ),
    "t.npz: num_experts must be at most 65536, got 2147483647": lambda p: (
        np.savez(p, topk_ids=IDS),
        p.with_suffix(".json").write_text('{"num_experts": 2147483647}'),
    ),
    "t.npz: counts must add up to less than 2^53, got 1.84467e+19": lambda p: np.savez(
        p, counts=np.array([[[2**64 - 1, 0]]], dtype=np.uint64)
    ),
    "t.npz: tokens_per_batch must add up to less than 2^53, got 1.84467e+19": lambda p: np.savez(
        p, counts=COUNTS, tokens_per_batch=np.full(2, 2**63 - 1)
    ),
    "t.npz: layer_ids must be in 0..2^31-1, got [-1, 0, 1]": lambda p: with_json(
        p, '{"layer_ids": [-1, 0, 1]}'
    ),
    "t.json: layer_ids must be a list of integers, got [1, 2, 3, 4, 5, 6, ...]": lambda p: with_json(
        p, json.dumps({"layer_ids": [1, 2, 3, 4, 5, 6, 7, "x"]})
    ),
    "t.json: top_k must be an integer, got [[[[...]]]]": lambda p: with_json(p, '{"top_k": [[[[[[1]]]]]]}'),
}


@pytest.mark.parametrize("message", NPZ_ERRORS)
def test_refused_npz(tmp_path, message):
    NPZ_ERRORS[message](tmp_path / "t.npz")
    with pytest.raises(ValueError) as raised:
        read_trace(tmp_path / "t.npz")
    assert str(raised.value).startswith(f"{tmp_path}/{message}") and len(str(raised.value)) < 400


def test_unsigned_ids_are_read(tmp_path):
    """uint64 and int64 add up to floats in NumPy."""
    ids = IDS.astype(np.uint64)
    np.savez(tmp_path / "t.npz", topk_ids=ids, counts=Trace("t", 2, topk_ids=IDS).batch_counts(),
             tokens_per_batch=np.array([20], dtype=np.uint64))  # fmt: skip
    np.testing.assert_array_equal(read_trace(tmp_path / "t.npz").topk_ids, IDS)


def unfolding(path):
    header = b"\x93NUMPY\x01\x00v\x00{'descr': '|u1', 'fortran_order': False, 'shape': (1, 1, 1107296256), }"
    archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("counts.npy", "w", force_zip64=True) as file:
        file.write(header.ljust(127) + b"\n")
        for _ in range(1056):
            file.write(bytes(2**20))
    assert path.stat().st_size < 2**23


def broadcast(path):
    torch.save({"logical_count": torch.zeros(1, dtype=torch.int64).expand(1056, 2**17, 1)}, path)


@pytest.mark.parametrize("write", [broadcast, pytest.param(unfolding, marks=pytest.mark.slow)])
def test_a_small_file_that_unfolds_to_a_gigabyte(tmp_path, write):
    """Refused before memory is taken."""
    path = tmp_path / "bomb"
    write(path)
    tracemalloc.start()  # sees NumPy's memory, where both would unfold
    try:
        with pytest.raises(ValueError) as raised:
            read_trace(path)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 2**22
    assert str(raised.value) == (
        f"{path}: unfolds to 1056 MiB, above the limit of 1024 MiB: ISOLOAD_MAX_TRACE_BYTES or "
        "read_trace(max_bytes=...) sets another"
    )


def test_the_limit_can_be_set(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    write_trace(token_trace(), path)
    for given, allowed in ((1, False), (10**6, True)):
        monkeypatch.delenv(MAX_BYTES_NAME, raising=False)
        for how in ("argument", "environment"):
            if how == "environment":
                monkeypatch.setenv(MAX_BYTES_NAME, str(given))
            limit = {"max_bytes": given} if how == "argument" else {}
            if allowed:
                assert read_trace(path, **limit).has_tokens
            else:
                with pytest.raises(ValueError, match="unfolds to 0 MiB, above the limit of .* MiB"):
                    read_trace(path, **limit)
    monkeypatch.setenv(MAX_BYTES_NAME, "1")
    assert read_trace(path, max_bytes=10**6).has_tokens  # the argument comes first


def test_arrays_that_are_not_read_do_not_count(tmp_path):
    np.savez(tmp_path / "t.npz", counts=COUNTS, other=np.zeros(10**5))
    assert read_trace(tmp_path / "t.npz", max_bytes=10**4).provenance["arrays_not_read"] == ["other"]


@pytest.mark.parametrize("value", ["0", "-1", "many", "1e9", ""])
def test_a_limit_that_is_none(tmp_path, monkeypatch, value):
    monkeypatch.setenv(MAX_BYTES_NAME, value)
    with pytest.raises(
        ValueError, match=f"ISOLOAD_MAX_TRACE_BYTES must be a positive integer, got '{value}'"
    ):
        read_trace(tmp_path / "t.npz")
    with pytest.raises(ValueError, match="max_bytes must be a positive integer, got 0"):
        read_trace(tmp_path / "t.npz", max_bytes=0)


def test_counting_many_empty_batches_is_refused():
    """2^17 batches of one token are 2^17 * 65536 counts."""
    sizes = np.zeros(2**17, dtype=np.int64)
    sizes[0] = 20
    trace = Trace("t", 2**16, topk_ids=IDS, tokens_per_batch=sizes)
    with pytest.raises(
        ValueError, match="counts of topk_ids: unfolds to 196608 MiB, above the limit of 1024 MiB"
    ):
        trace.batch_counts()


def stat(tensor):
    return lambda path: torch.save({"logical_count": tensor}, path)


ONES = torch.ones(2, 3, 4, dtype=torch.int64)
DENSE = "logical_count must be a dense tensor with its values, got "
PT_ERRORS = {
    DENSE + "torch.sparse_coo": stat(ONES.to_sparse()),
    DENSE + "torch.sparse_csr": lambda p: stat(torch.ones(2, 3, dtype=torch.int64).to_sparse_csr())(p),
    DENSE + "meta": stat(ONES.to("meta")),
    DENSE + "nested": lambda p: stat(torch.nested.nested_tensor([torch.ones(2, dtype=torch.int64)] * 2))(p),
    "logical_count must be an integer tensor, got torch.complex64": stat(
        torch.ones(1, 1, 1).to(torch.complex64)
    ),
    "logical_count must be an integer tensor, got torch.uint64": stat(ONES.to(torch.uint64)),
    "is no SGLang recorder dump, its keys are ((((...),),),)": lambda p: torch.save({((((1,),),),): 1}, p),
}


@pytest.mark.parametrize("message", PT_ERRORS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls nested and CSR tensors prototypes
def test_refused_pt(tmp_path, message):
    PT_ERRORS[message](tmp_path / "t.pt")
    with pytest.raises(ValueError) as raised:
        read_trace(tmp_path / "t.pt")
    assert str(raised.value).startswith(f"{tmp_path}/t.pt: {message}")


def laughs():
    """8^40 leaves in 40 short lists."""
    value = ["a"]
    for _ in range(40):
        value = [value] * 8
    return value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("forward_pass_id", laughs(), "forward_pass_id of a record must be an integer, got [[[[...]"),
        ("gatherer_key", laughs(), "gatherer_key of a record must be a string, got [[[[...]"),
        ("gatherer_key", 7, "gatherer_key of a record must be a string, got 7"),
        (
            "last_physical_to_logical_map",
            2**62,
            "must name at most 12 experts, one per slot, got id 46116860184",
        ),
    ],
)
def test_refused_records(tmp_path, key, value, message):
    def change(rank, dump):
        if key in dump:
            dump[key][0, 0] = value
        else:
            dump["records"][0][key] = value
        return dump

    Recording(11, tmp_path).save(change=change)
    with pytest.raises(ValueError) as raised:
        read_trace(tmp_path)
    assert message in str(raised.value) and len(str(raised.value)) < 400
