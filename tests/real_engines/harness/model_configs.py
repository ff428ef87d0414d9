"""Configurations of tiny models of published architectures, for the engines' resolution of arguments; no weights."""

from pathlib import Path

from deepseek_config import make_config
from transformers import GptOssConfig, PretrainedConfig, Qwen3MoeConfig


def make_configs(folder: Path) -> dict[str, Path]:
    """Return folders with a config.json each, by a part of the published model's name."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 64, "num_key_value_heads": 8}
    gpt_oss = {"num_local_experts": 32, "head_dim": 64, "architectures": ["GptOssForCausalLM"]}
    more: dict[str, PretrainedConfig] = {
        "Qwen3": Qwen3MoeConfig(num_experts=128, architectures=["Qwen3MoeForCausalLM"], **sizes),
        "gpt-oss": GptOssConfig(**gpt_oss, **sizes),
    }
    for name, config in more.items():
        config.save_pretrained(folder / name)
    return {"DeepSeek-V3": make_config(folder / "DeepSeek-V3")} | {name: folder / name for name in more}
