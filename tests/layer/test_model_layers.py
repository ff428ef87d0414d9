"""A placement reaches a model's layers by their numbers; one of other layers is refused before any block changes."""

from __future__ import annotations

import re

import pytest
import torch

import isoload
from isoload.traces import Identity, Trace

transformers = pytest.importorskip("transformers")
EXPERTS, TOPOLOGY = 4, isoload.Topology(2)


def model_with_dense_layers() -> torch.nn.Module:
    """Layers 1 and 3 of 4 have experts."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=16, intermediate_size=16, moe_intermediate_size=8, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=2, vocab_size=32,
        mlp_only_layers=[0, 2],
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(config).eval()


def placed(layers: tuple[int, ...], identity: Identity | None = None) -> isoload.Placement:
    counts = torch.stack(
        [torch.rand(EXPERTS, generator=torch.Generator().manual_seed(n)) for n in range(len(layers))]
    )
    trace = Trace(
        "t", EXPERTS, counts=(1000 * counts).long().numpy()[None], layer_ids=layers, identity=identity
    )
    return isoload.place(trace, TOPOLOGY, 3)


FITTING = {
    "the model's numbers": ((1, 3), Identity("model")),
    "in any order": ((3, 1), Identity("model")),
    "positions among MoE layers": ((0, 1), Identity("moe")),
    "a row for dense layers": ((0, 1, 2, 3), Identity("hidden")),
    "with a draft layer": ((1, 3, 4), Identity("model", (1, 3, 4))),
    "rows in order": ((0, 1), Identity("order")),
}


@pytest.mark.parametrize("name", FITTING)
def test_each_block_gets_its_own_layer(name: str) -> None:
    layers, identity = FITTING[name]
    placement = placed(layers, identity)
    model = model_with_dense_layers()
    ids = torch.arange(12)[None] % 32
    want = model(ids).logits
    first, second = isoload.balance(model, TOPOLOGY, placement=placement)
    rows = {"model": {1: layers.index(1) if 1 in layers else 0, 3: layers.index(3) if 3 in layers else 1}}
    picked = rows["model"] if identity.numbering in ("model", "hidden") else {1: 0, 3: 1}
    for layer, number in ((first, 1), (second, 3)):
        slots = layer.placement.slot_to_expert[layer.layer]
        assert torch.equal(slots, placement.slot_to_expert[picked[number]])
    torch.testing.assert_close(model(ids).logits, want)


OTHER = {
    "placement has layers 0..1 (the model's own layer numbers) and no layer 3": ((0, 1), Identity("model")),
    "placement is of layers 1..3 (the model's own layer numbers), but the model's MoE layers are 1, 3": (
        (1, 2, 3),
        Identity("model"),
    ),
    "placement has layers 0 (positions among the MoE layers": ((0,), Identity("moe")),
    "model is of a model with MoE layers 1, 3, but placement states 2..3": (
        (2, 3),
        Identity("model", (2, 3)),
    ),
    "placement must have a layer for each of the 2 MoE blocks, got 3": ((0, 1, 2), Identity("order")),
}


@pytest.mark.parametrize("message", OTHER)
def test_other_layers_are_refused_before_any_block_changes(message: str) -> None:
    model = model_with_dense_layers()
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        isoload.balance(model, TOPOLOGY, placement=placed(*OTHER[message]))
    assert not any(isinstance(module, isoload.MoE) for module in model.modules())


def test_a_stack_takes_layers_by_their_numbers() -> None:
    model = model_with_dense_layers()
    with pytest.raises(ValueError, match="no layer 3"):
        isoload.LibraStack.from_decoder(model.model.layers, TOPOLOGY, placement=placed((1, 2)))
