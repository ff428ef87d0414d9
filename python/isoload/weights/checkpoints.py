"""Checkpoint: the experts of one layer in a published checkpoint, of which every rank reads its own.

Shapes: E experts, H width of a row, I intermediate width. DeepSeek-V3 has a matrix of e4m3 and its scales [ceil(out /
128), ceil(in / 128)] for each projection, ``0.gate_proj.weight`` and ``0.gate_proj.weight_scale_inv`` etc., which
multiply. gpt-oss has MXFP4: ``gate_up_proj_blocks`` [E, 2I, H / 32, 16] uint8 holds two e2m1 values per byte, the lower
four bits first; ``gate_up_proj_scales`` [E, 2I, H / 32] uint8 is a power of two per 32 values, 127 for 1;
``gate_up_proj_bias`` [E, 2I] bfloat16; down_proj has the same three. bfloat16 represents every value.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from isoload.files import open_regular, parse_json, read_text
from isoload.weights.experts import NAMES, Activation, ClampedGLU, ExpertWeights, SwiGLU
from isoload.weights.quantised import FORMATS, FP8, dequantise

INDEX = "model.safetensors.index.json"
# safetensors' names of the supported dtypes; other dtypes keep their names.
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
View = tuple[Any, list[int], torch.dtype | str]


class Tensors(ABC):
    """Named tensors, of which single rows can be read."""

    @abstractmethod
    def keys(self) -> Iterable[str]:
        """Return all names."""

    @abstractmethod
    def where(self, key: str) -> str:
        """Return the location of a tensor, for messages."""

    @abstractmethod
    def _find(self, key: str) -> View:
        """Return an object that slices like the tensor, its shape and dtype; missing keys are rejected earlier."""

    def shape(self, key: str) -> list[int]:
        return self._checked(key)[1]

    def read(self, key: str, shape: list[int], dtype: torch.dtype, row: int | None = None) -> Tensor:
        view, *kind = self._checked(key)
        if kind != [shape, dtype]:
            raise ValueError(f"{key} in {self.where(key)} must be {shape} {dtype}, got {kind[0]} {kind[1]}")
        part: Tensor = view[:] if row is None else view[row : row + 1][0]
        return part.cpu()

    def _checked(self, key: str) -> View:
        if key not in self.keys():
            raise ValueError(f"{self.where(key)} must have {key}, got none")
        return self._find(key)


class StateTensors(Tensors):
    """A state_dict or another mapping."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state

    def keys(self) -> Iterable[str]:
        return self.state.keys()

    def where(self, key: str) -> str:
        return "the state"

    def _find(self, key: str) -> View:
        tensor = self.state[key].detach()
        return tensor, list(tensor.shape), tensor.dtype


class FileTensors(Tensors):
    """A safetensors file, or a folder of them with Hugging Face's index. Files are opened when they are first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: dict[Path, Any] = {}

    @cached_property
    def files(self) -> dict[str, Path]:
        if self.path.is_file():
            return dict.fromkeys(self._open(self.path).keys(), self.path)
        if (index := self.path / INDEX).is_file():
            try:
                names: dict[str, str] = parse_json(read_text(index))["weight_map"]
                return {key: self.path / name for key, name in names.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} must be an index with a weight_map, got {error!r}") from error
        files = sorted(self.path.glob("*.safetensors"))
        if len(files) != 1:
            raise ValueError(
                f"{self.path} must be a safetensors file, or a folder with {INDEX} or one such file, got {len(files)}"
            )
        return dict.fromkeys(self._open(files[0]).keys(), files[0])

    def keys(self) -> Iterable[str]:
        return self.files.keys()

    def where(self, key: str) -> str:
        return str(self.files.get(key, self.path))

    def _open(self, file: Path) -> Any:
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(
                "a checkpoint's files need safetensors: pip install 'isoload[checkpoints]'"
            ) from error
        if file not in self._opened:
            try:
                open_regular(file).close()
                self._opened[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} must be a whole safetensors file, got: {error}") from error
        return self._opened[file]

    def _find(self, key: str) -> View:
        opened = self._open(self.files[key])
        if key not in opened.keys():  # noqa: SIM118, no mapping
            raise ValueError(f"{self.where(key)} must have {key}, which {INDEX} lists, got none")
        view = opened.get_slice(key)
        name: str = view.get_dtype()
        return view, list(view.get_shape()), DTYPES.get(name, name)


PARTS = {
    "gate_up": ("gate_proj.weight", "up_proj.weight"),
    "down": ("down_proj.weight",),
    "gate_up_scale": ("gate_proj.weight_scale_inv", "up_proj.weight_scale_inv"),
    "down_scale": ("down_proj.weight_scale_inv",),
}


class DeepSeekV3Layout:
    """Reads a layer's stacks unchanged, in fp8; prefix: of its experts."""

    activation: ClassVar[Activation] = SwiGLU()
    sample: ClassVar[str] = "down_scale"  # a small stack

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix
        pattern = re.compile(re.escape(prefix) + r"(\d{1,9})\.")
        experts = sorted({int(match[1]) for key in tensors.keys() if (match := pattern.match(key))})  # noqa: SIM118
        if experts != list(range(len(experts))):
            missing = next(i for i, expert in enumerate(experts) if i != expert)
            raise ValueError(
                f"{tensors.where('')} must have all experts under {prefix}, got {experts[-1]} and no {missing}"
            )
        self.num_experts = len(experts)
        shape = tensors.shape(key := f"{prefix}0.gate_proj.weight")
        if len(shape) != 2:
            raise ValueError(f"{key} in {tensors.where(key)} must be [I, H], got {shape}")
        self.intermediate, self.hidden = shape

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        if name not in PARTS:
            return None
        dtype = torch.float32 if name.endswith("_scale") else FP8
        out, columns = self.intermediate, self.hidden
        if name.startswith("down"):
            out, columns = columns, out
        if name.endswith("_scale"):
            out, columns = FORMATS[FP8, dtype].blocks(out, columns)
        parts = PARTS[name]
        stack = torch.empty(len(experts), len(parts), out, columns, dtype=dtype)
        for row, expert in zip(stack, experts, strict=True):
            for place, part in zip(row, parts, strict=True):
                key = f"{self.prefix}{expert}.{part}"
                place.copy_(self.tensors.read(key, [out, columns], dtype))
                if dtype != FP8 and not place.isfinite().all():
                    raise ValueError(f"{key} in {self.tensors.where(key)} must be finite, got nan or inf")
        return stack if name == "gate_up_scale" else stack.flatten(1, 2)


BLOCK = 32  # values that share a scale


class GptOssLayout:
    """Reads a layer's stacks, in bfloat16 or as_bytes; prefix: of its experts."""

    activation: ClassVar[Activation] = ClampedGLU()
    sample: ClassVar[str] = "down_bias"  # a small stack

    def __init__(self, tensors: Tensors, prefix: str, as_bytes: bool = False) -> None:
        self.tensors, self.prefix, self.as_bytes = tensors, prefix, as_bytes
        self.sizes: dict[str, tuple[int, int]] = {}  # per projection: out, in
        for name in ("gate_up", "down"):
            key = f"{prefix}{name}_proj_blocks"
            shape = tensors.shape(key)
            if len(shape) != 4 or shape[3] != BLOCK // 2:
                raise ValueError(
                    f"{key} in {tensors.where(key)} must be [E, out, in / {BLOCK}, {BLOCK // 2}], got {shape}"
                )
            self.num_experts, self.sizes[name] = shape[0], (shape[1], shape[2] * BLOCK)

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        is_scale = name.endswith("_scale")
        if name.endswith("_scale_2") or (is_scale and not self.as_bytes):
            return None
        projection = name.removesuffix("_bias").removesuffix("_scale")
        out, columns = self.sizes[projection]
        if name.endswith("_bias"):
            key, shape = f"{self.prefix}{projection}_proj_bias", [self.num_experts, out]
            rows = [self.tensors.read(key, shape, torch.bfloat16, expert) for expert in experts]
            return torch.stack(rows) if rows else torch.empty(0, out, dtype=torch.bfloat16)
        width = columns if not self.as_bytes else columns // (BLOCK if is_scale else 2)
        stack = torch.empty(len(experts), out, width, dtype=torch.uint8 if self.as_bytes else torch.bfloat16)
        for row, expert in zip(stack, experts, strict=True):
            packed, scales, opened = self._read(projection, expert)
            row.copy_((scales if is_scale else packed) if self.as_bytes else opened)
        return stack

    def _read(self, projection: str, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return one expert's bytes [out, in / 2], scales [out, in / 32] and values [out, in] of a projection."""
        (out, columns), key = self.sizes[projection], f"{self.prefix}{projection}_proj"
        shape = [self.num_experts, out, columns // BLOCK]
        packed = self.tensors.read(f"{key}_blocks", [*shape, BLOCK // 2], torch.uint8, expert).flatten(-2)
        scales = self.tensors.read(f"{key}_scales", shape, torch.uint8, expert)
        opened = dequantise(packed, scales, dtype=torch.bfloat16)
        if not opened.isfinite().all():
            where = self.tensors.where(f"{key}_scales")
            raise ValueError(
                f"{key}_scales in {where} must give values of bfloat16, got nan or more for expert {expert}"
            )
        return packed, scales, opened


Layout = DeepSeekV3Layout | GptOssLayout


@dataclass(frozen=True)
class Checkpoint:
    """A layer's experts in a published checkpoint; :class:`isoload.MoE` accepts it in place of all stacks.

    Each rank reads its own experts when the layer is made; errors in a file are raised there, on all ranks.
    DeepSeek-V3's experts stay in fp8. gpt-oss's MXFP4 becomes bfloat16, exactly.

    Args:
        source: a folder of safetensors files with their index, one such file, or a state_dict with the same names.
        prefix: of the layer's experts, "model.layers.3.mlp.experts." for example.
        device: for the weights.
        as_bytes: whether gpt-oss's experts stay in MXFP4, for inference only.
    """

    source: str | PathLike[str] | Mapping[str, Tensor]
    prefix: str
    device: torch.device | str = "cpu"
    as_bytes: bool = False

    @cached_property
    def layout(self) -> Layout:
        """Layout of the experts in the checkpoint; ValueError if it is unknown."""
        source = self.source
        tensors: Tensors = StateTensors(source) if isinstance(source, Mapping) else FileTensors(Path(source))
        names = tensors.keys()
        if f"{self.prefix}0.gate_proj.weight" in names:
            return DeepSeekV3Layout(tensors, self.prefix)
        if f"{self.prefix}gate_up_proj_blocks" in names:
            return GptOssLayout(tensors, self.prefix, self.as_bytes)
        raise ValueError(
            f"{tensors.where('')} must have {self.prefix}0.gate_proj.weight (DeepSeek-V3) or "
            f"{self.prefix}gate_up_proj_blocks (gpt-oss in MXFP4), got neither"
        )

    @property
    def num_slots(self) -> int:
        """E, all experts."""
        return self.layout.num_experts

    @property
    def activation(self) -> Activation:
        """Activation between the two projections of such experts."""
        return self.layout.activation

    @cached_property
    def checksum(self) -> str:
        """Checksum of a small stack of expert 0, which differs between checkpoints of the same shapes."""
        sample = self.layout.rows(self.layout.sample, (0,))
        assert sample is not None
        return hashlib.sha256(sample.view(torch.uint8).numpy().tobytes()).hexdigest()[:14]

    def rows(self, name: str, experts: Sequence[int]) -> Tensor | None:
        """Return the rows of a stack for these experts, see ExpertWeights; None if there is no such stack."""
        stack = self.layout.rows(name, experts)
        return None if stack is None else stack.to(self.device)

    def trains(self, name: str) -> bool:
        """Return whether a stack's rows require gradients; those of quantised stacks cannot."""
        return self.rows("down_scale", ()) is None

    def read(self, experts: Sequence[int]) -> ExpertWeights:
        """Return all stacks of these experts, in this order."""
        return ExpertWeights(**{name: self.rows(name, experts) for name in NAMES})  # type: ignore[arg-type]
