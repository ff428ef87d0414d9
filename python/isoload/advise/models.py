"""Models by name, or by the config.json of a checkpoint: what an expert weighs, how many layers have experts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoload.files.reading import MAX_NOTES, parse_json, read_text
from isoload.trace.moe_layers import moe_layers_of
from isoload.wording import not_one_of

# By the measured kernels' words. Scales: a byte for 32 of mxfp4 and for 16 of nvfp4, two for 128 of int4.
WEIGHT_BYTES = {
    "bfloat16": 2.0,
    "fp8_block": 1.0,
    "fp8": 1.0,
    "w4a16_mxfp4": 0.53125,
    "w4a8_mxfp4_mxfp8": 0.53125,
    "nvfp4": 0.5625,
    "int4_wo": 0.515625,
}
PUBLISHED = {"fp8": "fp8_block", "mxfp4": "w4a16_mxfp4"}  # a checkpoint's quant_method, and the kernels' word


@dataclass(frozen=True)
class Model:
    """What advise takes from a model.

    hidden, intermediate: of a routed expert, which has three matrices (gate, up, down).
    dtype: of its weights. layers: those with experts. kv_bytes: of a token in all layers' KV cache, in bfloat16.
    is_deepseek: of DeepSeek's family, the only one that SGLang gathers loads for (`lp`).
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    dtype: str
    kv_bytes: int
    is_deepseek: bool = False

    @property
    def expert_bytes(self) -> float:
        """Of one expert's weights in one layer."""
        return 3 * self.hidden * self.intermediate * WEIGHT_BYTES[self.dtype]


MODELS = {
    model.name: model
    for model in (
        Model("deepseek-v3", 7168, 2048, 256, 8, 58, "fp8_block", 70_272, is_deepseek=True),
        Model("kimi-k2", 7168, 2048, 384, 8, 60, "fp8_block", 70_272, is_deepseek=True),
        Model("qwen3-235b", 4096, 1536, 128, 8, 94, "bfloat16", 192_512),
        Model("qwen3-30b", 2048, 768, 128, 8, 48, "bfloat16", 98_304),
        Model("glm-4.5", 5120, 1536, 160, 8, 89, "bfloat16", 376_832),
        Model("gpt-oss-120b", 2880, 2880, 128, 4, 36, "w4a16_mxfp4", 73_728),
        Model("gpt-oss-20b", 2880, 2880, 32, 4, 24, "w4a16_mxfp4", 49_152),
    )
}

FIRST_MOE_LAYER = {"deepseek-v3": 3, "kimi-k2": 1, "glm-4.5": 3}  # the others have no dense layers

KEYS = {  # a field of Model, and the keys of config.json that say it, the first that is there
    "hidden": ("hidden_size",),
    "intermediate": ("moe_intermediate_size", "intermediate_size"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token"),
}


def find_model(given: str, dtype: str | None = None) -> Model:
    """A model of MODELS, or one described by a config.json; dtype: of its experts, where another is served.

    Raises:
        ValueError: no such name and no such file; a file that lacks a key, or has weights of a kind that is not known.
    """
    if plain_name(given) in MODELS:
        model = MODELS[plain_name(given)]
    elif Path(given).is_file():
        model = _read(Path(given), dtype)
    else:
        raise ValueError(not_one_of("model", MODELS, given, ", or a config.json"))
    if dtype is not None and dtype not in WEIGHT_BYTES:
        raise ValueError(not_one_of("dtype", WEIGHT_BYTES, dtype))
    return Model(**{**vars(model), "dtype": dtype or model.dtype})


def plain_name(given: str) -> str:
    """Return the name as MODELS has it, of ``deepseek-ai/DeepSeek-V3`` or ``DeepSeek-V3``."""
    return given.rpartition("/")[2].lower()


def find_moe_layers(given: str) -> tuple[str, tuple[int, ...]]:
    """Return a model's name and the numbers of its MoE layers.

    Args:
        given: a model of MODELS, with the organisation or without, in any case; or the path of a config.json.

    Raises:
        ValueError: no such name and no such file; a file that does not describe its layers.
    """
    if Path(given).is_file():
        path = Path(given)
        try:
            return _name(path), moe_layers_of(_config(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    name = plain_name(given)
    if name not in MODELS:
        raise ValueError(not_one_of("model", MODELS, given, ", or a config.json"))
    first = FIRST_MOE_LAYER.get(name, 0)
    return name, tuple(range(first, first + MODELS[name].layers))


def _config(path: Path) -> dict[str, Any]:
    config = parse_json(read_text(path, MAX_NOTES))
    return config.get("text_config", config) if isinstance(config, dict) else {}


def _name(path: Path) -> str:
    return path.stem if path.stem != "config" else path.parent.name or "config"


def _read(path: Path, dtype: str | None) -> Model:
    config = _config(path)

    def number(*keys: str, default: int | None = None) -> int:
        value = next((config[key] for key in keys if config.get(key) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{path}: {keys[0]} must be a whole number, got {value!r:.40}")
        return value

    layers = number("num_hidden_layers")
    kept: dict[str, Any] = {name: number(*keys) for name, keys in KEYS.items()}
    if config.get("kv_lora_rank"):  # multi-head latent attention
        per_layer = number("kv_lora_rank") + number("qk_rope_head_dim", default=0)
    else:
        heads = number("num_attention_heads")
        size = number("head_dim", default=kept["hidden"] // max(heads, 1))
        per_layer = 2 * number("num_key_value_heads", default=heads) * size
    quantised = config.get("quantization_config") or {}
    method = str(quantised.get("quant_method", "bfloat16"))
    if dtype is None and method not in WEIGHT_BYTES | PUBLISHED:
        raise ValueError(f"dtype must be given for {path}, whose quant_method is {method!r:.40}")
    return Model(
        _name(path),
        **kept,
        layers=len(moe_layers_of(config)),
        dtype=dtype or PUBLISHED.get(method, method),
        kv_bytes=2 * layers * per_layer,
        is_deepseek=str(config.get("model_type")).startswith(("deepseek", "kimi")),
    )
