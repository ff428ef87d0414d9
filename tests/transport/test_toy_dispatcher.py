"""A dispatcher of one's own is one small class over public names: a layer runs with it and is the dense layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import isoload
from isoload.transport import Call, Dispatcher, Group, LocalGroup, Received, Transport
from support.borrowed_layer import LLEP, assert_dense, make_setup


class ToyDispatcher(Dispatcher):
    """Virtual ranks; a row per copy, gate weights applied by combine, autograd alone for the way back."""

    weights_at_source = True

    def __init__(self, group: Group) -> None:
        self.group = group

    def dispatch(
        self, x: Any, slots: Any, weights: Any, slots_per_rank: int, call: Call | None = None
    ) -> list[Received]:
        rows, ids, gates = torch.cat(x), torch.cat(slots), torch.cat(weights)
        received = []
        for rank in self.group.ranks:
            token, k = (ids.div(slots_per_rank, rounding_mode="floor") == rank).nonzero(as_tuple=True)
            gate, local = gates[token, k, None], ids[token, k, None].long() - rank * slots_per_rank
            handle = token, gate, [len(tokens) for tokens in x]
            received.append(Received(rows[token], local, torch.ones_like(gate), handle))
        return received

    def combine(
        self, y: list[Tensor], received: list[Received], own: list[Tensor] | None = None
    ) -> list[Tensor]:
        handles: Any = [got.handle for got in received]
        total: Any = 0 if own is None else torch.cat(own)
        for rows, (token, gate, sizes) in zip(y, handles, strict=True):
            nothing = gate.new_zeros(sum(sizes), rows.shape[1])
            total = total + nothing.index_add(0, token, rows.to(gate.dtype) * gate)
        return list(total.to(y[0].dtype).split(handles[0][2]))

    def carry_failure(self, call: Call) -> None:
        """All ranks are in this process and raise anyway."""


def make_layer(setup: Any, **how: Any) -> isoload.MoE:
    group = LocalGroup(setup.placement.topology)
    return setup.layer(Transport(group, ToyDispatcher(group)), **how)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("how", [{"policy": "exact"}, LLEP, {"policy": "none"}], ids=str)
def test_a_layer_is_the_dense_layer(ranks: int, how: dict[str, Any]) -> None:
    setup = make_setup(ranks, slots=-(-16 // ranks) + (ranks > 1))
    layer = make_layer(setup, **how)
    assert layer.has_replicas == (ranks > 1)
    assert_dense(setup, layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    setup = make_setup(4, slots=5, dtype=dtype, bias=True)
    assert_dense(setup, make_layer(setup, **LLEP))


def test_a_dispatch_that_is_begun_is_there_at_once() -> None:
    setup = make_setup(3)
    toy = ToyDispatcher(LocalGroup(setup.placement.topology))
    slots = [ids.masked_fill(ids >= 15, -1) for ids in setup.ids]
    given = setup.rows, slots, [setup.weights(rows) for rows in setup.rows], 5
    with pytest.raises(ValueError, match="start_dispatch must run under torch.no_grad"):
        toy.start_dispatch(*given)
    with torch.no_grad():
        for a, b in zip(toy.dispatch(*given), toy.start_dispatch(*given)(), strict=True):
            assert torch.equal(a.rows, b.rows) and torch.equal(a.slots, b.slots)


def test_the_error_of_a_gate_is_raised() -> None:
    setup = make_setup(2)
    layer = make_layer(setup, policy="exact")
    layer.gate = lambda rows: 1 / 0
    with pytest.raises(ZeroDivisionError):
        layer(setup.rows)
