"""Models by config.json: every family of transformers that has routed experts, and options for what a file lacks."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from isoload.analysis.models import MODELS, find_model, find_moe_layers
from isoload.analysis.models import _read as read_file

# Why a family cannot be read, by a part of the message.
REFUSED = {
    "moe_intermediate_size must be a whole number, got [1536, 512]": (
        "ernie4_5_vl_moe",
        "ernie4_5_vl_moe_text",
    ),
    "moe_intermediate_size must be a whole number, got None": (
        *("diffusion_gemma", "diffusion_gemma_text", "gemma4", "gemma4_text", "vitpose_backbone"),
    ),
    # Encoders with decoders, and layers that only properties of the class describe.
    "num_hidden_layers must be a whole number, got None": (
        *("nllb-moe", "nemotron_h", "nemotron_h_omni", "nemo_speechlm"),
    ),
    "hidden_size must be a whole number, got None": ("switch_transformers",),
}
OF_FAMILY = {name: why for why, names in REFUSED.items() for name in names}


def families() -> dict[str, dict[str, Any]]:
    """The default configs of transformers' classes that have experts."""
    transformers = pytest.importorskip("transformers")
    from transformers.utils import logging

    logging.set_verbosity_error()
    configs = {}
    for name in sorted(transformers.CONFIG_MAPPING.keys()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                config = transformers.CONFIG_MAPPING[name]().to_dict()
            except Exception:  # a class without defaults, or whose extra packages are not installed
                continue
        text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
        if any("expert" in key for key in text):
            configs[name] = config
    return configs


def test_every_family_of_transformers_is_read_or_refused_for_a_reason(tmp_path: Path) -> None:
    read = 0
    for name, config in families().items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(config, default=str))
        text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
        lacks = {"experts": 8} if "pass --experts" in _message(path) else {}
        lacks |= {"top_k": 2} if "pass --top-k" in _message(path, **lacks) else {}
        message = _message(path, **lacks)
        assert (OF_FAMILY.get(name, "no reason") in message) if message else name not in OF_FAMILY, (
            name,
            message,
        )
        if not message:
            model = find_model(str(path), **lacks)
            assert model.hidden == text["hidden_size"] and model.top_k <= model.experts and model.layers >= 1
            read += 1
    assert read >= 80


def _message(path: Path, **lacks: int) -> str:
    try:
        find_model(str(path), **lacks)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", MODELS)
def test_a_models_weights_are_as_large_as_its_name_or_card_says(name: str) -> None:
    """Billions of routed weights, of the total that the publishers give."""
    total = {
        **{"deepseek-v3": 671, "deepseek-v3.2": 671, "kimi-k2": 1026, "qwen3-235b": 235, "qwen3-30b": 30.5},
        **{"glm-4.5": 355, "glm-4.6": 357, "glm-5": 744, "minimax-m2": 230, "qwen3-next-80b": 80},
        **{"gpt-oss-120b": 116.8, "gpt-oss-20b": 20.9},
    }[name]
    model = MODELS[name]
    routed = 3e-9 * model.hidden * model.intermediate * model.experts * model.layers
    assert 0.9 * total < routed < total
    numbers = find_moe_layers(name)[1]
    assert len(numbers) == model.layers and numbers[0] in (0, 1, 3)


def test_options_stand_for_what_a_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 3}
    path.write_text(json.dumps(config | {"num_attention_heads": 2}))
    for option, stated in (
        ("--experts", {}),
        ("--top-k", {"experts": 4}),
    ):
        with pytest.raises(ValueError, match=f"got None: pass {option} N$"):
            find_model(str(path), **stated)
    assert find_model(str(path), experts=4, top_k=2).layers == 3
    path.write_text(json.dumps(config | {"num_attention_heads": 2, "decoder_sparse_step": 9}))
    with pytest.raises(ValueError, match="must leave at least one MoE layer, got none: pass --moe-layers N$"):
        find_model(str(path), experts=4, top_k=2)
    assert find_model(str(path), experts=4, top_k=2, layers=2).layers == 2
    assert find_model("gpt-oss-20b", top_k=2).top_k == 2


def test_infinity_in_a_config_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {"hidden_size": 8, "moe_intermediate_size": 4, "num_hidden_layers": 3, "num_experts": 4}
    config |= {"num_experts_per_tok": 2, "num_attention_heads": 2}
    path.write_text(json.dumps(config | {"time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in path.read_text() and read_file(path, None, {}).experts == 4
