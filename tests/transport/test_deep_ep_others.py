"""Buffers with the methods of DeepEP's Buffer: accepted by their arguments, whatever the class is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from isoload import Topology
from isoload.transport import CollectiveGroup
from isoload.transport.deep_ep import DeepEPDispatcher
from isoload.transport.deep_ep.transport import make_buffer
from isoload.transport.deep_ep.wires import LegacyWire, LowLatencyWire, Shape, wire_of
from support.deep_ep_legacy_double import Buffer
from support.deep_ep_signatures import OTHERS
from support.deep_ep_wheels import WHEELS, signatures_in
from support.processes import run_ranks

SHAPE = Shape(num_ranks=8, slots_per_rank=40, top_k=8, hidden=7168, max_tokens_per_rank=4096)
FITTING = {"UCCL-EP": ("Buffer", "Buffer, low latency"), "NIXL-EP": ("Buffer, low latency",)}


def stand_in(signatures: dict[str, str], class_name: str, **attributes: Any) -> Any:
    """A buffer with methods of these arguments, which compute nothing."""
    methods: dict[str, Any] = {}
    for name, arguments in signatures.items():
        exec(f"def {name.partition('.')[2]}({arguments}): ...", {}, methods)
    return type(class_name, (), methods | attributes)()


@pytest.mark.parametrize("class_name", ["Buffer", "ExpertBuffer"])
@pytest.mark.parametrize("other", OTHERS)
def test_others_are_accepted_by_their_arguments(other: str, class_name: str) -> None:
    for low_latency in (False, True):
        kind = "Buffer, low latency" if low_latency else "Buffer"
        buffer = stand_in(OTHERS[other], class_name, low_latency_mode=low_latency)
        if kind in FITTING[other]:
            assert wire_of(buffer, SHAPE, waits=not low_latency).kind == kind
        else:
            with pytest.raises(ValueError, match=f"buffer.dispatch must take handle, .* as the {kind} that"):
                wire_of(buffer, SHAPE, waits=not low_latency)
    buffer = stand_in(OTHERS[other], class_name)  # without the attribute
    if class_name != "Buffer" and other == "NIXL-EP":
        assert wire_of(buffer, SHAPE, waits=False).kind == "Buffer, low latency"


@pytest.mark.parametrize(
    ("wire", "method", "argument"),
    [
        (wire, method, argument)
        for wire in (LegacyWire, LowLatencyWire)
        for method, arguments in wire.needs.items()
        for argument in arguments.split()
    ],
)
def test_a_missing_argument_is_named(wire: Any, method: str, argument: str) -> None:
    low_latency, text = wire is LowLatencyWire, OTHERS["UCCL-EP"][f"Buffer.{method}"]
    given = ", ".join(part for part in text.split(", ") if part.partition("=")[0] != argument)
    signatures = OTHERS["UCCL-EP"] | {f"Buffer.{method}": given}
    for class_name in ("Buffer", "ExpertBuffer"):
        buffer = stand_in(signatures, class_name, low_latency_mode=low_latency)
        with pytest.raises(ValueError, match=f"buffer.{method} must take {argument} as the {wire.kind} that"):
            wire_of(buffer, SHAPE, waits=not low_latency)


def test_a_buffer_that_fits_nothing_is_refused() -> None:
    words = (
        "must be one of EPBuffer, ElasticBuffer, Buffer of DeepEP, or have the methods of Buffer with their"
    )
    with pytest.raises(ValueError, match=f"buffer {words} arguments, got dict"):
        wire_of({}, SHAPE, waits=True)


class Delegating:
    """Another class with the methods of a double."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.buffer, name)


@pytest.mark.parametrize("low_latency", [False, True])
def test_another_class_computes_what_buffer_does(low_latency: bool) -> None:
    def body(rank: int) -> None:
        group, shape = CollectiveGroup(Topology(2)), Shape(2, 2, 2, 2048, 4)
        buffer = make_buffer(Buffer, group.process_group, shape, low_latency, False, 0)
        draw = torch.Generator().manual_seed(rank)
        x = torch.randn(3, 2048, generator=draw).bfloat16()
        weights, sums = torch.rand(3, 2, generator=draw), []
        for given in (buffer, Delegating(buffer)):
            made = DeepEPDispatcher(group, given, shape, waits=not low_latency)
            with torch.no_grad():
                (got,) = made.dispatch([x], [torch.tensor([[0, 3], [1, -1], [2, 0]])], [weights], 2)
                sums += made.combine([got.rows * (1 + rank)], [got])
        assert sums[0].any() and torch.equal(*sums)

    run_ranks(body, 2)


NIXL = WHEELS / "nixl_ep_cu13"


@pytest.mark.skipif(not NIXL.is_dir(), reason=f"{NIXL.name} is not in {WHEELS.name}: make test-deepep")
def test_the_wheel_of_nixl_has_the_recorded_arguments() -> None:
    assert signatures_in(NIXL.name, set(OTHERS["NIXL-EP"])) == OTHERS["NIXL-EP"]
