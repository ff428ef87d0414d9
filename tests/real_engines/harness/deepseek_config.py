"""The configuration of a tiny DeepSeek-V3 with a shared expert, for SGLang's ModelConfig; no weights."""

from pathlib import Path

from ranks import EXPERTS, LAYERS, K
from transformers import DeepseekV3Config


def make_config(folder: Path) -> Path:
    DeepseekV3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=EXPERTS,
        num_experts_per_tok=K, n_group=4, topk_group=2, first_k_dense_replace=1, kv_lora_rank=64, q_lora_rank=64,
        qk_rope_head_dim=32, v_head_dim=32, qk_nope_head_dim=32, routed_scaling_factor=2.5, norm_topk_prob=True,
        max_position_embeddings=512, architectures=["DeepseekV3ForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder
