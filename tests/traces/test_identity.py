"""What layer_ids are about: joins by layer, conversions through the dense prefix, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isoload
from isoload.placement.files import FORMATS
from isoload.traces import Identity, Trace
from isoload.traces.identity import moe_layers_of

EXPERTS, TOPOLOGY = 6, isoload.Topology(3)
MODELS = {  # the numbers of the MoE layers
    "no dense layer": (0, 1, 2, 3),
    "one dense layer": (1, 2, 3, 4),
    "three dense layers": (3, 4, 5, 6),
    "interleaved": (1, 3, 5, 7),
}
ENGINES = [name for name in FORMATS if name != "isoload"]


def trace_of(layers: tuple[int, ...], identity: Identity | None = None, **fields: Any) -> Trace:
    """Counts that differ in every layer, so that no two layers have the same placement."""
    counts = np.stack([np.random.default_rng(layer).integers(1, 999, EXPERTS) for layer in layers])
    return Trace("t", EXPERTS, counts=counts[None], layer_ids=layers, identity=identity, **fields)


def placed(layers: tuple[int, ...], **fields: Any) -> isoload.Placement:
    return isoload.place(trace_of(layers, **fields), TOPOLOGY, 3, "scenario")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("second", ENGINES)
@pytest.mark.parametrize("first", ENGINES)
def test_every_layer_keeps_its_experts_there_and_back(
    first: str, second: str, model: str, tmp_path: Path
) -> None:
    layers = MODELS[model]
    placement = placed(layers).with_moe_layers(moe_layers=layers)
    isoload.write_placement(placement, tmp_path / "a.json", first)
    read = isoload.read_placement(tmp_path / "a.json", TOPOLOGY).with_moe_layers(moe_layers=layers)
    isoload.write_placement(read, tmp_path / "b.json", second)
    back = isoload.read_placement(tmp_path / "b.json", TOPOLOGY).with_moe_layers(moe_layers=layers)
    assert torch.equal(back.moe_layers_by("model").slot_to_expert, placement.slot_to_expert)
    assert back.moe_layers_by("model").layer_ids == layers
    assert torch.equal(back.for_trace(trace_of(layers)).slot_to_expert, placement.slot_to_expert)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("second", ENGINES)
@pytest.mark.parametrize("first", ENGINES)
def test_a_conversion_without_the_dense_layers_is_right_or_refused(
    first: str, second: str, model: str, tmp_path: Path
) -> None:
    layers = MODELS[model]
    isoload.write_placement(placed(layers).with_moe_layers(moe_layers=layers), tmp_path / "a.json", first)
    read = isoload.read_placement(tmp_path / "a.json", TOPOLOGY)
    try:
        isoload.write_placement(read, tmp_path / "b.json", second)
    except ValueError as error:
        assert "pass --first-moe-layer N (DeepSeek-V3: 3) or --model config.json" in str(error)
        assert FORMATS[first].numbering != FORMATS[second].numbering
        return
    back = isoload.read_placement(tmp_path / "b.json", TOPOLOGY).with_moe_layers(moe_layers=layers)
    want = placed(layers).slot_to_expert
    assert torch.equal(back.moe_layers_by("model").slot_to_expert, want)


def test_an_interleaved_model_is_not_taken_for_one_with_a_dense_prefix(tmp_path: Path) -> None:
    placement = placed((1, 3, 5, 7)).with_moe_layers(1)
    message = "it lacks layer 2: --extra-layers 2 adds it with experts in order; if the layer is dense, pass --model"
    with pytest.raises(ValueError, match=re.escape(message)):
        isoload.write_placement(placement, tmp_path / "p.json", "vllm")


def test_layers_that_are_not_stated_are_not_guessed(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 9, (4, EXPERTS))
    placement = isoload.place(counts, TOPOLOGY, 3)
    for name in ENGINES:
        with pytest.raises(
            ValueError, match="^placement does not state which layers of the model its 4 rows are: pass"
        ):
            isoload.write_placement(placement, tmp_path / "p.json", name)
        isoload.write_placement(placement.with_moe_layers(3), tmp_path / "p.json", name)
    with pytest.raises(ValueError, match="does not state which layers of the model its 4 rows are"):
        placement.for_trace(trace_of((3, 4, 5, 6)))
    assert torch.equal(
        placement.with_moe_layers(3).for_trace(trace_of((3, 4, 5, 6))).slot_to_expert,
        placement.slot_to_expert,
    )


def test_numberings_meet_through_the_dense_layers_that_either_side_states() -> None:
    layers = (3, 4, 5, 6)
    moe = Identity("moe")
    positions = replace(trace_of(layers), layer_ids=(0, 1, 2, 3), identity=moe)
    placement = placed(layers)
    with pytest.raises(
        ValueError, match="numbers layers as the model does .3..6. and does not state which layers"
    ):
        placement.for_trace(positions)
    for one, other in ((placement.with_moe_layers(3), positions), (placement, positions.with_moe_layers(3))):
        found = one.for_trace(other)
        assert found.layer_ids == (0, 1, 2, 3) and torch.equal(found.slot_to_expert, placement.slot_to_expert)
    with pytest.raises(
        ValueError, match=r"is of a model with MoE layers 2\.\.5, but placement states 3\.\.6"
    ):
        placement.with_moe_layers(3).for_trace(positions.with_moe_layers(2))
    before = isoload.place(positions.with_moe_layers(3), TOPOLOGY, 3, "scenario", before=placement, moves=0)
    assert torch.equal(before.slot_to_expert, placement.slot_to_expert) and before.layer_ids == (0, 1, 2, 3)


STATED = {
    "t has layer 1, which is dense in the model (MoE layers 3..6)": (
        (1, 2),
        "model",
        {"moe_layers": (3, 4, 5, 6)},
    ),
    "t has MoE layers up to position 4, but the model has 4 MoE layers": (
        (0, 4),
        "moe",
        {"moe_layers": (3, 4, 5, 6)},
    ),
    "first_moe_layer must be at most 2, the last layer of trace t, got 3": (
        (1, 2),
        "model",
        {"first_moe_layer": 3},
    ),
    "first_moe_layer must be in 0..4095, got -1": ((1, 2), "model", {"first_moe_layer": -1}),
    "first_moe_layer must come without moe_layers, got 1": (
        (1, 2),
        "model",
        {"first_moe_layer": 1, "moe_layers": (1,)},
    ),
    "moe_layers must be ascending layer numbers from 0 on": ((1, 2), "model", {"moe_layers": (2, 1)}),
}


@pytest.mark.parametrize("message", STATED)
def test_statements_that_the_record_contradicts(message: str) -> None:
    layers, numbering, stated = STATED[message]
    with pytest.raises(ValueError, match=re.escape(message)):
        trace_of(layers, Identity(numbering)).with_moe_layers(**stated)


def test_models_that_differ_are_not_joined() -> None:
    one, other = (trace_of((3, 4)).with_moe_layers(3, model=name) for name in ("org/DeepSeek-V3", "Kimi-K2"))
    with pytest.raises(
        ValueError, match="is of the model Kimi-K2, but placement of org/DeepSeek-V3: .* pass --model"
    ):
        isoload.place(one, TOPOLOGY, 3).for_trace(other)
    same = trace_of((3, 4)).with_moe_layers(3, model="deepseek-v3")
    assert isoload.place([one, same], TOPOLOGY, 3).identity.model == "org/DeepSeek-V3"
    with pytest.raises(ValueError, match="is of the model org/DeepSeek-V3, but trace t of Kimi-K2"):
        isoload.place([one, other], TOPOLOGY, 3)


def test_identity_comes_back_from_files(tmp_path: Path) -> None:
    trace = trace_of((0, 1), Identity("moe", (3, 4), "m"))
    isoload.traces.write_trace(trace, tmp_path / "t.npz")
    assert isoload.read_trace(tmp_path / "t.npz").identity == trace.identity
    placement = isoload.place(trace, TOPOLOGY, 3)
    isoload.write_placement(placement, tmp_path / "p.json")
    assert isoload.read_placement(tmp_path / "p.json").identity == trace.identity
    with pytest.raises(ValueError, match="numbering must be one of model, moe, hidden, order, got 'other'"):
        Identity("other")  # type: ignore[arg-type]


def test_extra_layers_hold_experts_in_order(tmp_path: Path) -> None:
    base = isoload.place(trace_of((3, 4)), TOPOLOGY, 5, spare_slots=1, num_shared=1)
    more = base.with_extra_layers([5, 6])
    assert more.layer_ids == (3, 4, 5, 6)
    assert more.slot_to_expert[3].tolist() == [0, 1, 2, 6, -1, 3, 4, 5, 6, -1, 0, 1, 2, 6, -1]
    positions = placed((3, 4), identity=Identity("model")).with_moe_layers(3).moe_layers_by("moe")
    assert positions.with_extra_layers([5]).layer_ids == (0, 1, 2)
    for wrong in ([3], [5, 5], [-1], []):
        with pytest.raises(
            ValueError, match="extra_layers must be distinct layers that the placement lacks, it has 3..4"
        ):
            base.with_extra_layers(wrong)
    with pytest.raises(ValueError, match="does not state which layers"):
        isoload.place(np.ones((2, EXPERTS)), TOPOLOGY, 3).with_extra_layers([5])
    isoload.write_placement(placed((3, 4)).with_moe_layers(3).with_extra_layers([5]), tmp_path / "p", "vllm")
    assert isoload.read_placement(tmp_path / "p", TOPOLOGY).num_layers == 3


def test_a_layer_by_the_models_number() -> None:
    placement = placed((3, 4, 5))
    group = isoload.LocalGroup(TOPOLOGY)
    balancer = isoload.Balancer(placement, layer_id=5, group=group)
    assert balancer.layer == 2
    cases = {
        "layer must be a position in 0..2, of layers 3..5 (the model's own layer numbers), got 5: pass layer_id=5": {
            "layer": 5
        },
        "layer must be 2, the position of layer_id=5, or not be given, got 1": {"layer": 1, "layer_id": 5},
        "placement has layers 3..5 (the model's own layer numbers) and no layer 6": {"layer_id": 6},
    }
    for message, options in cases.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            isoload.Balancer(placement, group=group, **options)
    unknown = isoload.place(np.ones((3, EXPERTS)), TOPOLOGY, 3)
    with pytest.raises(ValueError, match="placement does not state which layers of the model its 3 rows are"):
        isoload.Balancer(unknown, layer_id=1, group=group)
    assert isoload.Balancer(unknown.with_moe_layers(3), layer_id=4, group=group).layer == 1


CONFIGS = {
    "DeepSeek-V3": ({"num_hidden_layers": 6, "first_k_dense_replace": 3, "moe_layer_freq": 1}, (3, 4, 5)),
    "Qwen3": ({"num_hidden_layers": 3, "decoder_sparse_step": 1, "mlp_only_layers": [1]}, (0, 2)),
    "Qwen2, every second": ({"num_hidden_layers": 4, "decoder_sparse_step": 2}, (1, 3)),
    "Llama 4": ({"num_hidden_layers": 4, "interleave_moe_layer_step": 2}, (1, 3)),
    "Llama 4, listed": ({"num_hidden_layers": 4, "moe_layers": [3, 0]}, (0, 3)),
    "Step 3": ({"num_hidden_layers": 5, "moe_layers_enum": "3,4"}, (3, 4)),
    "ERNIE": ({"num_hidden_layers": 6, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 4},
              (1, 2, 3, 4)),
    "Jamba": ({"num_hidden_layers": 6, "expert_layer_period": 2, "expert_layer_offset": 1}, (1, 3, 5)),
    "kinds": ({"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]}, (1, 2)),
    "Nemotron": ({"num_hidden_layers": 4, "hybrid_override_pattern": "MEM*".replace("*", "E")}, (1, 3)),
    "MiMo": ({"num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1]}, (1, 2)),
    "gpt-oss": ({"num_hidden_layers": 2}, (0, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_moe_layers_of_configs(name: str) -> None:
    config, layers = CONFIGS[name]
    assert moe_layers_of(config) == layers


@pytest.mark.parametrize(
    ("message", "config"),
    [
        ("num_hidden_layers must be a whole number, got None", {}),
        ("num_hidden_layers must be in 1..4096, got 0", {"num_hidden_layers": 0}),
        ("moe_layer_freq must describe 2 layers, got 1", {"num_hidden_layers": 2, "moe_layer_freq": [1]}),
        ("moe_layers must be layer numbers below 2, got [2]", {"num_hidden_layers": 2, "moe_layers": [2]}),
        (
            "first_k_dense_replace must be a whole number, got '1'",
            {"num_hidden_layers": 2, "first_k_dense_replace": "1"},
        ),
        ("mlp_only_layers must be a list", {"num_hidden_layers": 2, "mlp_only_layers": 1}),
        (
            "num_hidden_layers must leave at least one MoE layer",
            {"num_hidden_layers": 2, "first_k_dense_replace": 2},
        ),
    ],
)
def test_configs_that_do_not_describe_their_layers(message: str, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        moe_layers_of(config)
