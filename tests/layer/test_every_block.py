"""Every MoE block of transformers through every entry point: taken, and then as it was, or refused with the reason."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isoload
from isoload.engines.huggingface import BalancedExperts, Settings
from isoload.layer.blocks import BlockGate
from isoload.layer.stack import norm_before
from isoload.policies import make_policy
from support.sweeps import slow
from support.transformers_blocks import E, block_classes, blocks_of, folders_of_configurations, make, run

pytest.importorskip("transformers", minversion="5.24", reason="older ones have fewer blocks")
CLASSES = block_classes()
# By class: why no entry point takes it
REFUSED = {
    "DbrxFFN": "fuses, got DbrxExperts in a DbrxFFN",
    "JetMoeAttention": "fuses, got JetMoeMoA in a JetMoeAttention",
    "Llama4TextMoe": "fuses, got Llama4TextExperts in a Llama4TextMoe",
    "LongcatFlashMoE": "fuses, got LongcatFlashExperts in a LongcatFlashMoE",
    "MuseSparkMoE": "experts.has_post_expert_norm must be False, got True in MuseSparkExperts",
    "NemotronHMoE": "experts.has_gate must be True, got False in NemotronHExperts",
    "NllbMoeSparseMLP": "fuses, got NllbMoeExperts in a NllbMoeSparseMLP",
    "Step3p7SparseMoeBlock": "fuses, got Step3p7Experts in a Step3p7SparseMoeBlock",
    "SwitchTransformersSparseMLP": "fuses, got SwitchTransformersExperts in a SwitchTransformersSparseMLP",
    "VitPoseBackboneMoeMLP": "fuses, got VitPoseNaiveMoe in a VitPoseBackboneMoeMLP",
}
NO_NORM = "predict='lookahead' needs a known norm before the block"
# By class: why predict="lookahead" does not take it
NO_LOOKAHEAD = {
    "Cohere2MoeSparseMoeBlock": NO_NORM,
    "DeepseekV4SparseMoeBlock": "got a DeepseekV4HashRouter in DeepseekV4SparseMoeBlock, which needs input_ids",
    "DiffusionGemmaDecoderTextLayer": NO_NORM,
    "DiffusionGemmaEncoderTextLayer": NO_NORM,
    "Dots3NoteVisionMoE": NO_NORM,
    "Ernie4_5_VLMoeSparseMoeBlock": NO_NORM,
    "FlexOlmoSparseMoeBlock": NO_NORM,
    "Gemma4TextDecoderLayer": NO_NORM,
    "Qwen4ExpTextSparseMoeBlock": NO_NORM,
    "ZayaSparseMoeBlock": "got a ZayaRouter in ZayaSparseMoeBlock, which needs router_states",
}
# One of each way in which a router is read or refused; the others are in `make test-all`
TELLING = (
    "AfmoeSparseMoeBlock",
    "DeepseekV3MoE",
    "DeepseekV4SparseMoeBlock",
    "FlexOlmoSparseMoeBlock",
    "Gemma4TextDecoderLayer",
    "GptOssMLP",
    "Llama4TextMoe",
    "MiniMaxM2SparseMoeBlock",
    "Qwen3MoeSparseMoeBlock",
)
# Models whose configuration counts experts and that have no such class
ELSEWHERE = {
    "doge": "its experts are rows of an embedding",
    "sarvam_mla": "it is made of DeepseekV3's classes",
    "sarvam_moe": "it is made of Glm4Moe's classes",
}
TOPOLOGY, SETTINGS = isoload.Topology(4), Settings(make_policy("llep"), spare_slots=2, ranks_per_node=0)


def layers_of(model: nn.Module, block: str) -> list[tuple[nn.Module, Any]]:
    """The decoder's layers that have such blocks, each beside its own."""
    for layers in model.modules():
        children = layers.children() if isinstance(layers, nn.ModuleList) else ()
        if found := [(layer, own) for layer in children for own in blocks_of(layer, block)]:
            return found
    return [(model, own) for own in blocks_of(model, block)]


def balance(model: nn.Module, block: str) -> None:
    loads = torch.arange(E).repeat(len(blocks_of(model, block)), 1) ** 2 + 1
    isoload.balance(model, TOPOLOGY, placement=isoload.place(loads, TOPOLOGY, slots_per_rank=3))


def expert_parallelism(model: nn.Module, block: str) -> None:
    """As far as one process goes: what transformers calls when it loads a model."""
    for own in blocks_of(model, block):
        BalancedExperts(SETTINGS, own.experts, None, None)


def from_decoder(model: nn.Module, block: str, predict: str) -> None:
    layers = dict.fromkeys(layer for layer, _ in layers_of(model, block))
    isoload.LibraStack.from_decoder(layers, TOPOLOGY, predict=predict)


ENTRY_POINTS = {
    "balance": balance,
    "ep_implementation": expert_parallelism,
    "lookahead": partial(from_decoder, predict="lookahead"),
    "last": partial(from_decoder, predict="last"),
}


def test_every_model_with_experts_is_known() -> None:
    """Nothing is left out: neither a class that has experts, nor a model whose configuration counts them."""
    assert len(CLASSES) > 60
    assert {*REFUSED, *NO_LOOKAHEAD} <= CLASSES.keys() and not REFUSED.keys() & NO_LOOKAHEAD.keys()
    assert folders_of_configurations() - set(CLASSES.values()) == ELSEWHERE.keys()


def test_the_page_lists_them() -> None:
    """docs/transformers.md, by the folders of the models: every entry point, all but "lookahead", none."""
    page = (Path(__file__).parents[2] / "docs/transformers.md").read_text()
    section = page.partition("## Which models\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    taken = CLASSES.keys() - REFUSED.keys() - NO_LOOKAHEAD.keys()
    folders = [{CLASSES[name] for name in names} for names in (taken, NO_LOOKAHEAD, REFUSED)]
    folders[0] |= {"sarvam_mla", "sarvam_moe"}
    folders[2] |= {"doge"}
    listed = [re.findall(r"`(\w+)`", row) for row in rows]
    assert listed == [sorted(names) for names in folders], "the page lists models of another transformers"


@pytest.mark.parametrize("block", [*TELLING, *slow(*(name for name in CLASSES if name not in TELLING))])
def test_taken_or_refused(block: str) -> None:
    torch.set_num_threads(1)
    stock = make(block, CLASSES[block])
    wanted, refused = None if block in REFUSED else run(stock), {}
    for name, enter in ENTRY_POINTS.items():
        model = copy.deepcopy(stock)
        try:
            enter(model, block)
        except ValueError as error:
            refused[name] = str(error)
            continue
        assert list(model.state_dict()) == list(stock.state_dict())
        # the processes of ep_implementation are its own tests'; "last" adds nothing to "lookahead"
        if name == "balance" or (name == "last" if "lookahead" in refused else name == "lookahead"):
            for _ in range(2):  # in the second a stack has slots for its first layer
                torch.testing.assert_close(run(model), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
    print(block, refused or "taken by every entry point", sep=": ")
    if block in REFUSED:
        assert refused.keys() == ENTRY_POINTS.keys() and REFUSED[block] in refused["balance"]
    elif block in NO_LOOKAHEAD:
        assert refused.keys() == {"lookahead"} and NO_LOOKAHEAD[block] in refused["lookahead"]
    else:
        assert not refused
    if block not in REFUSED:
        check_what_is_read(stock, block)


def check_what_is_read(model: nn.Module, block: str) -> None:
    """A gate gives what its block hands to its experts; a norm is the one whose output its block gets."""
    for layer, own in layers_of(model, block):
        seen: dict[str, Any] = {}
        hooks = [own.experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.update(experts=args))]
        if block not in NO_LOOKAHEAD:
            norm = norm_before(layer, own)
            hooks += [
                norm.register_forward_hook(lambda _, args, result, seen=seen: seen.update(norm=result)),
                own.register_forward_pre_hook(lambda _, args, seen=seen: seen.update(rows=args[0])),
            ]
        try:
            gate = BlockGate(own)
        except ValueError as error:
            assert str(error).endswith(NO_LOOKAHEAD[block])
        else:
            hooks.append(
                gate.router.register_forward_pre_hook(lambda _, args, seen=seen: seen.update(routed=args[0]))
            )
        run(model)
        for hook in hooks:
            hook.remove()
        if "norm" in seen:
            assert torch.equal(seen["norm"], seen["rows"])
        if "routed" in seen:
            ids, weights = gate(seen["routed"].flatten(0, -2))
            _, wanted_ids, wanted = seen["experts"]
            torch.testing.assert_close(dense(ids, weights), dense(wanted_ids, wanted), rtol=0, atol=1e-6)


def dense(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(ids), E).scatter(1, ids, weights.float())
