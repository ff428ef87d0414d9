"""Where a checkpoint's tensors are: in safetensors files, or in a mapping. Errors name the file and the key."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isoload.files.reading import open_regular, parse_json, read_text

INDEX = "model.safetensors.index.json"
# safetensors' names of the dtypes that are read; others stay names
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
Found = tuple[Any, list[int], torch.dtype | str]


class Tensors(ABC):
    """Named tensors, of which single rows can be read."""

    @abstractmethod
    def keys(self) -> Iterable[str]:
        """All names."""

    @abstractmethod
    def where(self, key: str) -> str:
        """The place of a tensor, for messages."""

    @abstractmethod
    def _find(self, key: str) -> Found:
        """What slices like the tensor, its shape and dtype; keys that are not there are refused before."""

    def shape(self, key: str) -> list[int]:
        """Of a tensor that must be there."""
        return self._found(key)[1]

    def read(self, key: str, shape: list[int], dtype: torch.dtype, row: int | None = None) -> Tensor:
        """A tensor on the CPU, or one row of it."""
        found, *kind = self._found(key)
        if kind != [shape, dtype]:
            raise ValueError(f"{key} in {self.where(key)} must be {shape} {dtype}, got {kind[0]} {kind[1]}")
        part: Tensor = found[:] if row is None else found[row : row + 1][0]
        return part.cpu()

    def _found(self, key: str) -> Found:
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

    def _find(self, key: str) -> Found:
        tensor = self.state[key].detach()
        return tensor, list(tensor.shape), tensor.dtype


class FileTensors(Tensors):
    """A safetensors file, or a folder of them with Hugging Face's index. Files are opened when they are first read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: dict[Path, Any] = {}

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of every tensor."""
        if self.path.is_file():
            return dict.fromkeys(self._open(self.path).keys(), self.path)
        if (index := self.path / INDEX).is_file():
            try:
                names: dict[str, str] = parse_json(read_text(index))["weight_map"]
                return {key: self.path / name for key, name in names.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} must be an index with a weight_map, got {error!r}") from error
        found = sorted(self.path.glob("*.safetensors"))
        if len(found) != 1:
            raise ValueError(
                f"{self.path} must be a safetensors file, or a folder with {INDEX} or one such file, got {len(found)}"
            )
        return dict.fromkeys(self._open(found[0]).keys(), found[0])

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

    def _find(self, key: str) -> Found:
        opened = self._open(self.files[key])
        if key not in opened.keys():  # noqa: SIM118, no mapping
            raise ValueError(f"{self.where(key)} must have {key}, as {INDEX} says, got none")
        found = opened.get_slice(key)
        name: str = found.get_dtype()
        return found, list(found.get_shape()), DTYPES.get(name, name)
