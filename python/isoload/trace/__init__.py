"""Trace: recorded routing over many batches, and the files it is read from and written to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from isoload.trace.archives import check_bytes, is_npz, read_members
from isoload.trace.archives import max_bytes as byte_limit
from isoload.trace.checks import DIMS, Ints, count_batches, trace_errors
from isoload.trace.npz import ARRAY_FILES, read_npz, write_trace
from isoload.trace.sglang_dump import read_torch
from isoload.trace.tensorrt_llm_statistics import META as TENSORRT_META
from isoload.trace.tensorrt_llm_statistics import read_tensorrt_llm
from isoload.trace.vllm_statistics import looks_like_json, read_vllm

__all__ = ["Ints", "Trace", "count_batches", "read_trace", "trace_errors", "write_trace"]


@dataclass(frozen=True, eq=False)
class Trace:
    """Loads, per-token choices or both, of L layers and E logical experts. A host record, checked when made.

    ``counts`` and ``topk_ids`` may describe different tokens (a long run, and the choices of a part of it).
    Where ``tokens_per_batch`` adds up to the number of tokens they describe the same ones and must be consistent.

    Args:
        name: its name in tables.
        num_experts: E.
        top_k: K, experts per token; 0 = unknown. Default: the width of topk_ids.
        counts: [batches, L, E] int64 copies.
        topk_ids: [tokens, L, K] int32 logical experts, none twice; -1 = absent. In the order of the run.
        tokens_per_batch: [batches] int64: tokens behind each batch of counts, so that the sum over E of
            counts[b, l] is at most tokens_per_batch[b] * top_k; without counts, consecutive cuts of topk_ids.
        seq_id: [tokens] int64, equal for tokens of one sequence (or forward pass): they have one source rank.
        cluster: [batches] label; batches of one label are near-copies or of one domain.
        layer_ids: [L] the model's own layer numbers. Default: 0..L-1.
        provenance: model, source, licence and what else is known: JSON values.

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    name: str
    num_experts: int
    top_k: int = 0
    counts: Ints | None = None
    topk_ids: Ints | None = None
    tokens_per_batch: Ints | None = None
    seq_id: Ints | None = None
    cluster: tuple[str, ...] | None = None
    layer_ids: tuple[int, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts_shape: tuple[int, ...] = getattr(self.counts, "shape", ())
        ids_shape: tuple[int, ...] = getattr(self.topk_ids, "shape", ())
        if not self.layer_ids and len(shape := counts_shape or ids_shape) == 3:
            object.__setattr__(self, "layer_ids", tuple(range(shape[1])))
        if not self.top_k and len(ids_shape) == 3:
            object.__setattr__(self, "top_k", ids_shape[2])
        if errors := trace_errors(self):
            raise ValueError("; ".join(errors))
        for name in DIMS:
            if (array := getattr(self, name)) is not None:
                dtype = np.int32 if name == "topk_ids" else np.int64
                object.__setattr__(self, name, np.ascontiguousarray(array, dtype=dtype))

    @property
    def has_tokens(self) -> bool:
        """Whether per-token choices are known."""
        return self.topk_ids is not None

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def num_batches(self) -> int:
        """Batches of :meth:`batch_counts`; tokens without known batches are one batch."""
        batches = self.tokens_per_batch if self.counts is None else self.counts
        return 1 if batches is None else len(batches)

    def batch_counts(self) -> Ints:
        """[batches, L, E] int64 copies: ``counts`` where recorded, else counted from ``topk_ids``.

        Refused where they would take more memory than a trace may, see :func:`read_trace`.
        """
        if self.counts is not None:
            return self.counts
        assert self.topk_ids is not None
        cuts = [len(self.topk_ids)] if self.tokens_per_batch is None else self.tokens_per_batch
        size = 8 * len(cuts) * self.num_layers * self.num_experts
        check_bytes("counts of topk_ids", size, byte_limit(None))
        return count_batches(self.topk_ids, cuts, self.num_experts)

    def select_layers(self, layers: Sequence[int]) -> Trace:
        """The trace of some layers, by position (not by the model's layer number)."""
        picked = list(layers)
        if not picked or not all(0 <= layer < self.num_layers for layer in picked):
            raise ValueError(f"layers must be some of 0..{self.num_layers - 1}, got {picked}")
        return replace(
            self,
            counts=None if self.counts is None else self.counts[:, picked],
            topk_ids=None if self.topk_ids is None else self.topk_ids[:, picked],
            layer_ids=tuple(self.layer_ids[layer] for layer in picked),
        )


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
