"""A double of the parts of torchtitan that isoload.engines.torchtitan uses, with the signatures of 0.3.0.

``importable`` puts it into sys.modules for an import where torchtitan is not installed. test_torchtitan.py
runs with the real package, too (`make test-torchtitan`).
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

INSTALLED = importlib.util.find_spec("torchtitan") is not None


class BaseEPTokenDispatcher(ABC):
    @dataclass(kw_only=True, slots=True)
    class Config:
        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k, self.ep_mesh = config.num_experts, config.top_k, None

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        self.ep_mesh = ep_mesh

    @abstractmethod
    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, counts_E: Tensor
    ) -> Any: ...

    @abstractmethod
    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor: ...


class AllToAllTokenDispatcher(BaseEPTokenDispatcher):
    def dispatch(self, *batch: Tensor) -> Any:
        raise AssertionError("isoload replaces this dispatcher")

    combine = dispatch


class RoutedExperts(nn.Module):
    def forward(self, x_BLD: Tensor, scores_BLK: Tensor, ids_BLK: Tensor, counts_E: Tensor) -> Tensor:
        tokens, top_k = x_BLD.shape[0] * x_BLD.shape[1], ids_BLK.shape[-1]
        x_TD = x_BLD.view(tokens, x_BLD.shape[-1])
        batch = x_TD, scores_BLK.view(tokens, top_k), ids_BLK.view(tokens, top_k), counts_E
        rows, counts, metadata = self.token_dispatcher.dispatch(*batch)
        return self.token_dispatcher.combine(self.inner_experts(rows, counts), metadata, x_TD).view(
            x_BLD.shape
        )


@contextmanager
def importable() -> Iterator[None]:
    """Make the double importable as torchtitan for a while, unless torchtitan is installed."""
    names = {
        "models.common.moe": (RoutedExperts,),
        "models.common.token_dispatcher": (BaseEPTokenDispatcher, AllToAllTokenDispatcher),
    }
    added = set[str]()
    for path, members in names.items() if not INSTALLED else ():
        for end in range(path.count(".") + 2):
            name = ".".join(["torchtitan", *path.split(".")[:end]])
            sys.modules.setdefault(name, ModuleType(name))
            added.add(name)
        for member in members:
            setattr(sys.modules[f"torchtitan.{path}"], member.__name__, member)
    yield
    for name in added:
        del sys.modules[name]
