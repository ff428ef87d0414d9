"""Which layers of a model are MoE layers, by its config.json.

Read are the keys of Hugging Face's configs: DeepSeek, GLM and Kimi (first_k_dense_replace), Qwen (decoder_sparse_step,
mlp_only_layers), Llama 4 (interleave_moe_layer_step), ERNIE (moe_layer_interval), Jamba (expert_layer_period), and
lists of layers or of layer kinds. A model without any of them has experts in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isoload.files.reading import MAX_LAYERS
from isoload.wording import shown

KINDS = ("mlp_layer_types", "moe_layer_freq", "hybrid_override_pattern")  # an entry per layer
LISTS = ("moe_layers", "moe_layers_enum")  # the numbers of the MoE layers
SPARSE = (1, "sparse", "moe", "hash_moe", "E")
# Every step-th layer has experts. The last of each step layers has them, but for Jamba, which names an offset, and for
# DeepSeek's moe_layer_freq, which counts from layer 0.
STEPS = ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
FIRSTS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")


def moe_layers_of(config: dict[str, Any]) -> tuple[int, ...]:
    """Return the numbers of a model's MoE layers, ascending; draft (MTP) layers are not among them.

    Args:
        config: the content of a config.json.

    Raises:
        ValueError: naming the key whose value does not describe the model's layers.
    """
    num_layers = _number(config, "num_hidden_layers", None)
    if not 0 < num_layers <= MAX_LAYERS:
        raise ValueError(f"num_hidden_layers must be in 1..{MAX_LAYERS}, got {num_layers}")
    for key in KINDS:
        if isinstance(kinds := config.get(key), list | str):
            if len(kinds) != num_layers:
                raise ValueError(f"{key} must describe {num_layers} layers, got {len(kinds)}")
            return _some(key, [layer for layer, kind in enumerate(kinds) if kind in SPARSE])
    for key in LISTS:
        if (listed := config.get(key)) is not None:
            return _some(key, _listed(key, listed, num_layers))
    step, offset = _step(config)
    first = max(_number(config, key, 0) for key in FIRSTS)
    last = _number(config, "moe_layer_end_index", -1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers must be a list of layer numbers, got {shown(dense)}")
    layers = range(first, num_layers if last < 0 else min(last + 1, num_layers))
    return _some("num_hidden_layers", [n for n in layers if (n - offset) % step == 0 and n not in dense])


def _step(config: dict[str, Any]) -> tuple[int, int]:
    """Layers ``n`` with ``(n - offset) % step == 0`` have experts."""
    if config.get("expert_layer_period") is not None:
        return max(_number(config, "expert_layer_period", 1), 1), _number(config, "expert_layer_offset", 0)
    for key in STEPS:
        if config.get(key) is not None:
            step = max(_number(config, key, 1), 1)
            return step, step - 1
    return max(_number(config, "moe_layer_freq", 1), 1), 0


def _number(config: dict[str, Any], key: str, default: int | None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or value < -1:
        raise ValueError(f"{key} must be a whole number, got {shown(value)}")
    return value


def _listed(key: str, listed: Any, num_layers: int) -> Sequence[int]:
    if isinstance(listed, str):
        listed = [int(part) if part.strip().isdecimal() else part for part in listed.split(",")]
    if not isinstance(listed, list) or not all(type(n) is int and 0 <= n < num_layers for n in listed):
        raise ValueError(f"{key} must be layer numbers below {num_layers}, got {shown(listed)}")
    return sorted(set(listed))


def _some(key: str, layers: Sequence[int]) -> tuple[int, ...]:
    if not layers:
        raise ValueError(f"{key} must leave at least one MoE layer, got none")
    return tuple(layers)
