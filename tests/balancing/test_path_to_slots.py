"""How far it is from Balancer.__call__ to slots: few files to read, few Python calls to wait for."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload import Balancer, LocalGroup, LocalTransport
from support.small_layer import make_setup

TOPOLOGY, RANK, NODE = isoload.Topology(16, 8), 3, slice(0, 8)


class OneRank(LocalGroup):
    """A process that owns one of the ranks; all ranks send what it sends."""

    def __init__(self) -> None:
        super().__init__(TOPOLOGY)
        self.ranks = (RANK,)

    def _gather(self, stage: str, rows: list[Tensor], in_node: bool = False) -> Tensor:
        gathered = rows[0].new_zeros(16, len(rows[0]))
        gathered[NODE if in_node else slice(None)] = rows[0]
        return gathered

    def gather_objects(self, stage: str, given: object) -> list[Any]:
        return [given] * 16


MODES: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "gathered": ({"group": OneRank()}, (20, 9, 2)),
    "own": ({"group": OneRank(), "loads": "own"}, (10, 5, 0)),
    "same": ({"tokens": "same"}, (9, 5, 1)),
    "node": ({"group": OneRank(), "loads": "node"}, (20, 9, 5)),
}


def path(call: Any) -> list[str]:
    """The file of every Python call into isoload; a dataclass's own __init__ has none."""
    calls = list[str]()

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and "isoload" in frame.f_globals.get("__name__", "").split("."):
            calls.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def returns(files: list[str]) -> int:
    """How often a path comes back to a file that it had left."""
    visits = [file for i, file in enumerate(files) if i == 0 or files[i - 1] != file]
    return len(visits) - len(set(visits))


@pytest.mark.parametrize("mode", MODES)
def test_few_files_few_calls_few_returns(mode: str) -> None:
    how, (calls, files, back) = MODES[mode]
    placement = isoload.place(torch.randint(1, 1000, (1, 256)), TOPOLOGY, slots_per_rank=18)
    balancer, ids = Balancer(placement, **how), torch.rand(64, 256).topk(8, 1).indices
    balancer(ids)  # which makes what later batches find
    taken = path(lambda: balancer(ids))
    written = [file for file in taken if file != "<string>"]
    assert 0 < len(taken) <= calls, taken
    assert len(set(written)) <= files and returns(written) <= back, written


def test_a_layer_takes_few_calls() -> None:
    """MoE.forward of one rank, from rows to outputs, its gate aside."""
    setup = make_setup(1)
    layer = isoload.MoE(setup.gate, setup.dense, LocalTransport(setup.topology), setup.placement)
    with torch.no_grad():
        layer(setup.rows[0])
        taken = path(lambda: layer(setup.rows[0]))
    written = [file for file in taken if file != "<string>"]
    assert 0 < len(taken) <= 320, len(taken)
    assert len(set(written)) <= 32 and returns(written) <= 132, (len(set(written)), returns(written))
