"""How far it is from Balancer.__call__ to slots: few files to read, few Python calls to wait for."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch

import isoload
from isoload import Balancer, LocalGroup

TOPOLOGY = isoload.Topology(16, 8)


class OneRank(LocalGroup):
    """A process that owns one of the ranks."""

    def __init__(self, topology: isoload.Topology) -> None:
        super().__init__(topology)
        self.ranks = (3,)


@pytest.mark.parametrize("how", [{"tokens": "same"}, {"loads": "own", "group": OneRank(TOPOLOGY)}])
def test_few_files_and_few_calls(how: dict[str, Any]) -> None:
    placement = isoload.place(torch.randint(1, 1000, (1, 256)), TOPOLOGY, slots_per_rank=18)
    balancer, ids = Balancer(placement, **how), torch.rand(64, 256).topk(8, 1).indices
    balancer(ids)  # which makes what later batches find
    calls = list[str]()

    def note(frame: FrameType, event: str, _given: object) -> None:
        if event == "call" and "isoload" in frame.f_globals.get("__name__", "").split("."):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        balancer(ids)
    finally:
        sys.setprofile(None)
    assert 0 < len(calls) <= 18 and len(set(calls)) <= 8, calls
