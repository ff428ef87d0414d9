"""Memory that every rank reads in place: virtual ranks share a process, GPUs have symmetric memory (symmetric.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Peers(ABC):
    """What the ranks of a group let each other read. Lists of own tensors run over the owned ranks."""

    @abstractmethod
    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros that every rank can read, of one shape on all of them, made by all together."""

    @abstractmethod
    def reach(self, own: list[Tensor]) -> list[Tensor]:
        """[R] every rank's tensor, given the own ones from :meth:`new`."""

    @abstractmethod
    def meet(self) -> None:
        """A barrier of all ranks on the current stream."""


class SameProcess(Peers):
    """All ranks are virtual ones of this process: any tensor can be read, and a barrier has nothing to wait for."""

    def new(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=device)

    def reach(self, own: list[Tensor]) -> list[Tensor]:
        return own

    def meet(self) -> None:
        """Nothing to wait for."""
