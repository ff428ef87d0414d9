"""Traces, and the files that they are read from and written to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isoload.trace.archives import check_bytes, is_npz, read_members
from isoload.trace.archives import max_bytes as byte_limit
from isoload.trace.npz import ARRAY_FILES, read_npz, write_trace
from isoload.trace.record import Ints, Trace, count_batches, trace_errors
from isoload.trace.sglang_dump import read_torch
from isoload.trace.tensorrt_llm_statistics import META as TENSORRT_META
from isoload.trace.tensorrt_llm_statistics import read_tensorrt_llm
from isoload.trace.vllm_statistics import looks_like_json, read_vllm

__all__ = ["Ints", "Trace", "count_batches", "read_trace", "trace_errors", "write_trace"]


def read_trace(path: str | Path | Sequence[str | Path], *, max_bytes: int | None = None) -> Trace:
    """Reads a trace by what the file holds, not by its name.

    Args:
        path: one of

            * an .npz of arrays named as the fields of :class:`Trace`, and ``about``: name, top_k, num_experts,
              layer_ids and provenance as JSON; where it is missing a .json of the same stem may say them;
            * an SGLang recorder dump (:mod:`isoload.trace.sglang_dump`): one .pt, a directory of them, or a list of the
              ranks' files;
            * a directory of TensorRT-LLM's expert statistics (:mod:`isoload.trace.tensorrt_llm_statistics`);
            * vLLM's load statistics, lines of JSON (:mod:`isoload.trace.vllm_statistics`);
            * a .pt of one tensor [L, E], the loads that vllm-ascend's offline script reads.
        max_bytes: most that the files' arrays may take, unfolded: a small archive may hold gigabytes of zeros.
            Default: the environment's ISOLOAD_MAX_TRACE_BYTES, else 2^30 (1 GiB).

    Raises:
        ValueError: naming the file and what is wrong with it.
        OSError: a file that cannot be opened.
        ImportError: TensorRT-LLM's statistics without safetensors.
    """
    limit = byte_limit(max_bytes)
    paths = [Path(path)] if isinstance(path, str | Path) else [Path(p) for p in path]
    if not paths:
        raise ValueError("path must name a file, got an empty list")
    shown = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if len(paths) == 1 and (paths[0] / TENSORRT_META).exists():
        fields = read_tensorrt_llm(paths[0], limit)
    elif len(paths) == 1 and looks_like_json(paths[0]):
        fields = read_vllm(paths[0], limit)
    else:
        fields = _read_archives(shown, paths, limit)
    try:
        return Trace(**fields)
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from None


def _read_archives(shown: str, paths: list[Path], limit: int) -> dict[str, Any]:
    """The fields of the Trace in an npz, or in torch files."""
    if len(paths) == 1 and paths[0].is_dir():
        paths = sorted(paths[0].glob("*.pt"))
        if not paths:
            raise ValueError(f"{shown}: holds no .pt files")
    members = {p: read_members(p) for p in paths}
    npz_paths = [p for p in members if is_npz(p, members[p])]
    if npz_paths and len(paths) > 1:
        raise ValueError(f"{npz_paths[0]}: is a whole trace, it cannot be one of {len(paths)} files")
    if len(members) < len(paths):
        raise ValueError(f"path must name every file once, got {[str(p) for p in paths]}")
    read = [m for inside in members.values() for m in inside if not npz_paths or m.filename in ARRAY_FILES]
    check_bytes(shown, sum(member.file_size for member in read), limit)
    return read_npz(paths[0], limit) if npz_paths else read_torch(paths, limit)
